import io
import json
import logging
import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from router.errors import LocalError
from router.logs import LogForm, bridged, open_log, request_line, trace

RECORD: dict[str, object] = {
    "request": "r1",
    "worker": "w0",
    "attempts": [{"worker": "w1", "cause": "connect_failed"}],
    "duration_ms": 12.5,
    "outcome": "completed",
}


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_x2_a_request_is_one_line_of_json(stream: io.StringIO) -> None:
    request_line(LogForm.JSON, stream)(RECORD)

    (line,) = lines(stream)
    when = datetime.fromisoformat(line.pop("time"))
    assert when.tzinfo is not None
    assert line == {"level": "info", "event": "request", **RECORD}


def test_x2_a_request_is_one_line_on_a_console(stream: io.StringIO) -> None:
    request_line(LogForm.CONSOLE, stream)(RECORD)

    assert stream.getvalue().count("\n") == 1
    assert "request=r1" in stream.getvalue()
    assert "outcome=completed" in stream.getvalue()


@pytest.mark.parametrize("form", list(LogForm))
def test_x2_a_line_break_in_a_value_makes_no_second_line(
    form: LogForm, stream: io.StringIO
) -> None:
    request_line(form, stream)({"client_ref": "a\nb"})

    assert stream.getvalue().count("\n") == 1


def test_events_are_lines_with_their_fields(stream: io.StringIO) -> None:
    log = open_log(LogForm.JSON, stream)

    log.info("listening", address="127.0.0.1:1")
    log.warning("worker lost", worker="w0")

    assert [(e["level"], e["event"]) for e in lines(stream)] == [
        ("info", "listening"),
        ("warning", "worker lost"),
    ]
    assert list(lines(stream)[0]) == ["time", "level", "event", "address"]


@pytest.mark.parametrize("form", list(LogForm))
def test_x2_the_trace_of_a_bug_holds_no_content(
    form: LogForm, stream: io.StringIO
) -> None:
    prompt = "my secret prompt"
    try:
        int(prompt)
    except ValueError as error:
        open_log(form, stream).error("bug", place="chat", exc_info=error)

    shown = stream.getvalue()
    assert "secret" not in shown
    assert "ValueError" in shown
    assert "test_logs.py" in shown


def test_what_the_library_logs_comes_out_as_our_lines(stream: io.StringIO) -> None:
    logger = logging.getLogger("fencepost.workers")
    bug = raised(KeyError("secret"))

    with bridged(open_log(LogForm.JSON, stream), "fencepost"):
        logger.info("worker %s: %s", "w0", "lost")
        logger.warning("a slot still works")
        logger.error("a bug", exc_info=bug)
        logger.debug("not told")

    first, second, third = lines(stream)
    assert first["event"] == "worker w0: lost"
    assert first["logger"] == "fencepost.workers"
    assert (first["level"], second["level"], third["level"]) == (
        *("info", "warning", "error"),
    )
    assert "KeyError" in third["trace"]
    assert "secret" not in third["trace"]


def test_e3_logging_is_as_it_was_behind_the_bridge(stream: io.StringIO) -> None:
    logger = logging.getLogger("fencepost")
    before = logger.level, logger.propagate, list(logger.handlers)

    with bridged(open_log(LogForm.JSON, stream), "fencepost"):
        assert not logger.propagate

    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)):
        raise error
    return error


def test_a_trace_shows_our_own_words_and_the_system_s() -> None:
    assert "LocalError: no such phase" in trace(raised(LocalError("no such phase")))
    assert "FileNotFoundError: No such file" in trace(
        raised(FileNotFoundError(2, "No such file", "/home/me/key"))
    )
    assert "/home/me" not in trace(raised(FileNotFoundError(2, "No", "/home/me/key")))


def test_a_trace_shows_groups_and_causes() -> None:
    inner = raised(KeyError("x"))
    outer = raised(RuntimeError("y"))
    outer.__cause__ = inner

    shown = trace(raised(ExceptionGroup("z", [outer, TypeError()])))

    found = [line.strip() for line in shown.splitlines()]
    assert [line for line in found if " in " not in line] == [
        "ExceptionGroup",
        "KeyError",
        "which led to",
        "RuntimeError",
        "TypeError",
    ]


@pytest.fixture
def broken_pipe() -> Iterator[io.TextIOWrapper]:
    reader, writer = os.pipe()
    os.close(reader)
    yield (stream := io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True))
    stream.close()


def test_a_reader_that_left_never_stops_the_router(
    broken_pipe: io.TextIOWrapper,
) -> None:
    request_line(LogForm.JSON, broken_pipe)(RECORD)
    open_log(LogForm.CONSOLE, broken_pipe).info("listening")
    broken_pipe.close()
    request_line(LogForm.JSON, broken_pipe)(RECORD)
