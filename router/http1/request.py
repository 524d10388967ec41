"""The client's half of HTTP/1.1: requests, one after another, or a refusal.

An ``Upgrade`` is ignored, and the body of its request read as any other (H1).
"""

from enum import Enum
from typing import Final, Literal, TypeAlias

import httptools

from router.errors import RouterError
from router.http1.chunks import ChunkScanner
from router.http1.gate import HEAD_MAX, Malformed, Seen, check_trailers, head_end
from router.http1.head import Head, judge

BODY_MAX: Final = 32 * 1024 * 1024
"""Bytes in one request body (H1)."""


class End(Enum):
    """The only thing that says a request is whole."""

    END = "end"


END: Final = End.END

RequestEvent: TypeAlias = Head | bytes | Literal[End.END]


class BadRequest(RouterError):
    """A request to refuse: answer *status* and close; read no further.

    ``events`` came before it in the same chunk: whole requests that deserve
    their replies, and perhaps the beginning of the refused one, without END.
    """

    def __init__(
        self,
        status: int,
        message: str,
        events: tuple[RequestEvent, ...] = (),
        path: str = "",
    ) -> None:
        """Carry the status and a message fit for the client; *path*: of a
        request whose head is well-formed, and was not handed out."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.events = events
        self.path = path


class RequestParser:
    """Reads the requests of one connection, pipelined ones too.

    Out comes, for each: one `Head`, its body in pieces, `END`. A request that
    ends the connection is the last: what follows it is dropped unread.

    Invariant: what is held between two feeds is one unfinished head, chunk
    size line or trailer section, each within ``head_max``.
    """

    __slots__ = (
        "_body_max",
        "_buf",
        "_closed",
        "_current",
        "_head_max",
        "_left",
        "_looked_at",
        "_parser",
        "_pieces",
        "_refusal",
        "_scanner",
        "_seen",
        "_skipped",
    )

    def __init__(self, head_max: int = HEAD_MAX, body_max: int = BODY_MAX) -> None:
        """Refuse heads beyond *head_max* (431), bodies beyond *body_max* (413)."""
        self._head_max = head_max
        self._body_max = body_max
        self._buf = b""
        self._looked_at = 0
        """Bytes at the front of the buffer that are known not to be whole."""
        self._skipped = False
        """The one CRLF that may stand before a request was there."""
        self._current: Head | None = None
        """The request whose body is being read; None: between requests."""
        self._left = 0
        """Bytes of its body still to come, where Content-Length frames it."""
        self._scanner = ChunkScanner(body_max)
        self._pieces: list[bytes] = []
        self._seen = Seen(self._pieces)
        self._parser = httptools.HttpRequestParser(self._seen)
        self._closed = False
        self._refusal: tuple[int, str] | None = None

    @property
    def has_partial(self) -> bool:
        """True while a request has begun and is not whole."""
        return bool(self._buf) or self._current is not None

    def feed(self, chunk: bytes) -> list[RequestEvent]:
        """Take the next bytes from the client; return what they complete.

        The events are the same wherever the stream is cut, but for the cuts
        between pieces of a body; one feed gives at most one piece per body.

        Raises:
            BadRequest: now and at every later call.
        """
        if self._refusal is not None:
            raise BadRequest(*self._refusal)
        buf = self._buf + chunk if self._buf else chunk
        events: list[RequestEvent] = []
        at, start = -1, 0
        try:
            while at != start and not self._closed:
                at = start
                if self._current is None:
                    start = self._read_head(buf, at, events)
                elif self._current.chunked:
                    start = self._read_chunks(self._current, buf, at, events)
                else:
                    start = self._read_length(self._current, buf, at, events)
        except Malformed as malformed:
            self._refusal = malformed.status, malformed.message
            self._buf = b""
            raise BadRequest(
                *self._refusal, tuple(events), malformed.path
            ) from malformed
        self._buf = b"" if self._closed else buf[start:]
        return events

    def _read_head(self, buf: bytes, start: int, events: list[RequestEvent]) -> int:
        """Read one head if it is whole; return the index behind what was read."""
        if not self._skipped and buf.startswith(b"\r\n", start):
            # RFC 9112 2.2: old clients end a body with a CRLF too many.
            self._skipped = True
            return start + 2
        end = head_end(buf, start, self._looked_at, self._head_max)
        if end < 0:
            self._looked_at = len(buf) - start
            return start
        self._looked_at = 0
        self._skipped = False
        raw = buf[start:end]
        head, upgrade = judge(raw, self._body_max)
        # A parser of its own for each request: nothing of one leaks into the
        # next (0.5 us).
        self._seen = Seen(self._pieces)
        self._parser = httptools.HttpRequestParser(self._seen)
        self._ask(_without_upgrade(raw) if upgrade else raw)
        if head.chunked:
            self._scanner = ChunkScanner(self._body_max)
        self._left = head.content_length or 0
        events.append(head)
        self._settle(head, events, ended=not (self._left or head.chunked))
        return end

    def _read_length(
        self, head: Head, buf: bytes, start: int, events: list[RequestEvent]
    ) -> int:
        """Read on in a body of known length."""
        end = min(len(buf), start + self._left)
        if end > start:
            self._left -= end - start
            self._ask(buf[start:end])
            self._settle(head, events, ended=not self._left)
        return end

    def _read_chunks(
        self, head: Head, buf: bytes, start: int, events: list[RequestEvent]
    ) -> int:
        """Read on in a chunked body, or in the trailers behind it."""
        scanner = self._scanner
        if scanner.last:
            return self._read_trailers(head, buf, start, events)
        end = scanner.scan(buf, start)
        if end > start:
            self._ask(buf[start:end])
            self._settle(head, events, ended=False)
        return end

    def _read_trailers(
        self, head: Head, buf: bytes, start: int, events: list[RequestEvent]
    ) -> int:
        if buf.startswith(b"\r\n", start):
            end = start + 2
        else:
            end = head_end(buf, start, self._looked_at, self._head_max)
            if end < 0:
                self._looked_at = len(buf) - start
                return start
            check_trailers(buf[start:end])
        self._looked_at = 0
        # httptools need not know that there were trailers: they are ignored.
        self._ask(b"\r\n")
        self._settle(head, events, ended=True)
        return end

    def _ask(self, passed: bytes) -> None:
        """Let httptools read what the gate has passed.

        Raises:
            Malformed: httptools does not like it.
        """
        try:
            self._parser.feed_data(passed)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise Malformed("a malformed request") from error

    def _settle(self, head: Head, events: list[RequestEvent], *, ended: bool) -> None:
        """Hand out what httptools has read, if it too finds that it *ended*.

        Raises:
            Malformed: it does not, so the message has two readings.
        """
        if self._seen.complete is not ended:
            raise Malformed("a request that can be read in two ways")
        if self._pieces:
            events.append(b"".join(self._pieces))
            self._pieces.clear()
        self._current = None if ended else head
        if ended:
            events.append(END)
            self._closed = not head.keep_alive


def _without_upgrade(raw: bytes) -> bytes:
    """Hide Upgrade from httptools, which would drop the body that follows."""
    return b"\r\n".join(
        [line for line in raw.split(b"\r\n") if line[:8].lower() != b"upgrade:"]
    )
