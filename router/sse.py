"""Server-sent events: the bytes of a worker's stream, cut into events.

Rule 1: lines are cut on bytes, at CR, LF and CRLF alone; what a line means as
text is the reader's business, so no cut ever falls inside a character (B34,
B39). Rule 2: what is held is bounded, whatever comes and however it is cut
(W7, B42). Follows WHATWG HTML 9.2.5 and 9.2.6, with one field more: ``error``.
"""

from typing import Final, NamedTuple

from router.errors import RouterError

LINE_MAX: Final = 1024 * 1024
"""Bytes in one line, and in the held lines of one event (W7)."""

_BOM: Final = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event, whole."""

    name: bytes
    """Value of the last ``event`` line; empty: none came."""
    data: bytes
    """Values of the data lines, joined with LF."""
    legacy_error: bool
    """It came as an ``error:`` line, as llama-server wrote errors until
    September 2025; ``data`` is then the value of that line."""


class SseError(RouterError):
    """The worker's stream has a line or an event beyond the limit (W7)."""


class Parser:
    """Reads one stream, from its first byte.

    An event without its blank line at the end of the stream is not an event
    (WHATWG HTML 9.2.6): nothing needs to be called there.

    Invariant: what is held between two feeds is one unfinished line of at most
    ``line_max`` bytes, and the lines of one unfinished event, ``line_max``
    bytes together with a separator between each two.
    """

    __slots__ = (
        "_after_cr",
        "_data",
        "_error",
        "_held",
        "_idle",
        "_line",
        "_line_max",
        "_line_size",
        "_name",
        "_start",
    )

    def __init__(self, line_max: int = LINE_MAX) -> None:
        """Bound lines and events to *line_max* bytes each."""
        self._line_max = line_max
        self._start: bytes | None = b""
        """Bytes that may be a byte order mark; None: the stream has begun."""
        self._after_cr = False
        """The last byte was CR, so an LF that follows ends no second line."""
        self._line: list[bytes] = []
        self._line_size = 0
        self._data: list[bytes] = []
        self._error: list[bytes] = []
        self._name = b""
        self._held = 0
        self._idle = True
        """The last byte ended an event, or nothing came since."""

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes of the stream; return the events they finish.

        The same events come out wherever the stream is cut.

        Raises:
            SseError: a line, or the lines of one event, are too long. Events
                that the same *chunk* finished before that are dropped with
                it, and the parser is of no further use.
        """
        if self._start is not None:
            chunk = self._begin(chunk)
        if self._after_cr or b"\r" in chunk:
            chunk = self._only_lf(chunk)
        if (
            self._idle
            and chunk[-2:] == b"\n\n"
            and chunk[:6] == b"data: "
            and len(chunk) <= self._line_max
        ):
            # What nearly every read holds: whole events of one data line.
            body = chunk[6:-2]
            if b"\n" not in body:
                return [Event(b"", body, False)]
            frames = body.split(b"\n\ndata: ")
            if body.count(b"\n") == 2 * (len(frames) - 1):
                return [Event(b"", frame, False) for frame in frames]
        return self._lines(chunk)

    def _begin(self, chunk: bytes) -> bytes:
        """Drop one byte order mark, which may come in pieces."""
        start = (self._start or b"") + chunk
        if len(start) < len(_BOM) and _BOM.startswith(start):
            self._start = start
            return b""
        self._start = None
        return start.removeprefix(_BOM)

    def _only_lf(self, chunk: bytes) -> bytes:
        """Turn each CRLF and CR into LF, also a CRLF cut in the middle."""
        if not chunk:
            return chunk
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._after_cr = chunk[-1:] == b"\r"
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _lines(self, chunk: bytes) -> list[Event]:
        events: list[Event] = []
        first, *lines = chunk.split(b"\n")
        if lines:
            if self._line:
                self._line.append(first)
                first = b"".join(self._line)
                self._line.clear()
                self._line_size = 0
            self._field(first, events)
            rest = lines.pop()
            for line in lines:
                self._field(line, events)
        else:
            rest = first
        if rest:
            self._line_size += len(rest)
            if self._line_size > self._line_max:
                raise SseError(f"a line of more than {self._line_max} bytes")
            self._line.append(rest)
        self._idle = not (self._line or self._held or self._name)
        return events

    def _field(self, line: bytes, events: list[Event]) -> None:
        """Take one whole line, without its end."""
        if not line:
            self._dispatch(events)
            return
        if len(line) > self._line_max:
            raise SseError(f"a line of more than {self._line_max} bytes")
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"error":
            self._error.append(value)
        elif name == b"event":
            # Only the last one counts, so only that one is held.
            self._name = value
            return
        else:
            # A comment (no name), ``id``, ``retry``, or an unknown field.
            return
        self._held += len(line) + 1
        if self._held > self._line_max + 1:
            raise SseError(f"an event of more than {self._line_max} bytes")

    def _dispatch(self, events: list[Event]) -> None:
        """End the event; without a data or error line there is none."""
        if self._error:
            # The failure is what counts, whatever else the event holds.
            events.append(Event(self._name, b"\n".join(self._error), True))
        elif self._data:
            events.append(Event(self._name, b"\n".join(self._data), False))
        self._data.clear()
        self._error.clear()
        self._name = b""
        self._held = 0
