"""What a daemon writes while it runs: one line an event, JSON or for people.

Two rules: one line per request, at its end (X2), and nothing of what it said;
nothing here is global (E3), so a program that embeds a router keeps its own
logging. A reader that is gone loses lines, and never stops the router.
"""

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Protocol, TextIO

import msgspec
import structlog

from router.errors import LocalError


class LogForm(Enum):
    """How lines look."""

    JSON = "json"
    CONSOLE = "console"


class Log(Protocol):
    """The part of a structlog logger that we use."""

    def info(self, event: str, /, **fields: Any) -> Any:
        """Say what happened."""

    def warning(self, event: str, /, **fields: Any) -> Any:
        """Say what an operator may want to look at."""

    def error(self, event: str, /, **fields: Any) -> Any:
        """Say what went wrong here."""


class _Lines:
    """A structlog logger over a text stream; what can't be written is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        """Write one line."""
        # ValueError: the stream is closed.
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = critical = msg


_encoder: Final = msgspec.json.Encoder(enc_hook=str)


def open_log(form: LogForm, stream: TextIO) -> Log:
    """Make a logger that writes to *stream*, at level info and above."""
    log: Log = structlog.wrap_logger(
        _Lines(stream),
        processors=[
            _stamp,
            _traced,
            structlog.processors.JSONRenderer(serializer=_to_json)
            if form is LogForm.JSON
            else structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), sort_keys=False, timestamp_key="time"
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        cache_logger_on_first_use=True,
    )
    return log


def request_line(
    form: LogForm, stream: TextIO
) -> Callable[[Mapping[str, object]], None]:
    """Give the call that writes the line of a request that ended (X2).

    It takes the flat record of ``Router.on_request_end``. JSON, the form that
    machines keep, goes round the logger: a line for each request costs half.
    """
    if form is LogForm.CONSOLE:
        log = open_log(form, stream)
        return lambda record: log.info("request", **record)
    lines = _Lines(stream)

    def write(record: Mapping[str, object]) -> None:
        line = {"time": _now(), "level": "info", "event": "request", **record}
        lines.msg(_encoder.encode(line).decode())

    return write


@contextmanager
def bridged(log: Log, name: str) -> Iterator[None]:
    """Bring what the library says through ``logging`` under *name* into *log*.

    For the block only; then that logger is as it was.
    """
    logger = logging.getLogger(name)
    before = logger.level, logger.propagate
    bridge = _Bridge(log)
    logger.addHandler(bridge)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(bridge)
        logger.level, logger.propagate = before


class _Bridge(logging.Handler):
    """The end of ``logging`` that is our log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one record on, with the trace of its exception."""
        fields: dict[str, object] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exc_info"] = record.exc_info[1]
        if record.levelno >= logging.ERROR:
            say = self._log.error
        elif record.levelno >= logging.WARNING:
            say = self._log.warning
        else:
            say = self._log.info
        say(record.getMessage(), **fields)


def trace(error: BaseException) -> str:
    """Show where *error* came from, without what it says.

    Its text and its frames' locals may hold a prompt or a key (X2). The text
    is shown where it can't: our own LocalError, and the system's errors.
    """
    return "\n".join(_trace(error, ""))


def _trace(error: BaseException, margin: str) -> Iterator[str]:
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _trace(cause, margin)
        yield f"{margin}which led to"
    for frame in traceback.extract_tb(error.__traceback__):
        yield f"{margin}{frame.filename}:{frame.lineno} in {frame.name}"
    name = type(error).__name__
    if isinstance(error, LocalError):
        yield f"{margin}{name}: {error}"
    elif isinstance(error, OSError) and error.strerror:
        yield f"{margin}{name}: {error.strerror}"
    else:
        yield f"{margin}{name}"
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _trace(part, margin + "  ")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _stamp(_: object, level: str, record: Any) -> Any:
    # Time, level and event first: that is where eyes look for them.
    return {"time": _now(), "level": level, "event": record.pop("event"), **record}


def _traced(_: object, __: str, record: Any) -> Any:
    error = record.pop("exc_info", None)
    if isinstance(error, BaseException):
        record["trace"] = trace(error)
    return record


def _to_json(record: Mapping[str, Any], **_: object) -> str:
    return _encoder.encode(record).decode()
