"""The worker's half of HTTP/1.1: one answer after another, or a fault.

A worker is not trusted to frame its answers: what a hostile one could bend
is refused here as it would be from a client (B117, mirrored). The body is on
the hot path: httptools alone reads it, and its pieces go straight to a list.
"""

import re
from typing import Final, NamedTuple

import httptools

from router.errors import LocalError, RouterError
from router.http1.gate import (
    HEAD_MAX,
    Fields,
    Malformed,
    Seen,
    by_name,
    fields,
    first,
    framing,
    head_end,
    keeps_alive,
)

#: RFC 9112 4; the space before an empty reason is often left out.
_STATUS_LINE: Final = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*+)?\r\n"
)
_SWITCHING: Final = 101
_BODILESS: Final = frozenset({204, 304})
_LF: Final = 0x0A


class ResponseHead(NamedTuple):
    """The head of one final answer."""

    status: int
    headers: Fields
    minor: int
    """HTTP/1.0 or HTTP/1.1."""
    content_length: int | None
    chunked: bool

    def get(self, name: bytes) -> bytes | None:
        """Give the value of the first field *name* (lower case), or None."""
        return first(self.headers, name)


class ProtocolError(RouterError):
    """The worker broke HTTP; its connection is of no further use.

    ``truncated``: it only broke off, and what came before was right (W7).
    """

    def __init__(self, message: str, *, truncated: bool = False) -> None:
        """Say what is wrong."""
        super().__init__(message)
        self.truncated = truncated


class ResponseParser:
    """Reads the answers on one connection, one exchange at a time.

    Attributes:
        head: the final head, once it is whole; 1xx heads before it are
            skipped.
        body: pieces of the body in order. The caller takes them out with
            ``body.clear()`` and never puts another list in its place.
        complete: the message has ended as its framing says. A body that ends
            with the connection is complete only after `eof`.
        keep_alive: the worker will take another request on this connection;
            False until ``complete``.
        excess: bytes came behind the message, so the connection is not to be
            used again; they are not kept.
    """

    __slots__ = (
        "_barren",
        "_buf",
        "_head_max",
        "_interim",
        "_left",
        "_looked_at",
        "_may_stay",
        "_parser",
        "_seen",
        "body",
        "complete",
        "excess",
        "head",
        "keep_alive",
    )

    def __init__(self, head_max: int = HEAD_MAX) -> None:
        """Refuse heads beyond *head_max* bytes.

        The same bound holds for all 1xx heads together, and for the bytes of
        chunk framing, extensions and trailers that come in a row, read after
        read, without bringing a byte of the body.
        """
        self._head_max = head_max
        self.body: list[bytes] = []
        self._begin()

    def _begin(self) -> None:
        self.head: ResponseHead | None = None
        self.complete = False
        self.keep_alive = False
        self.excess = False
        self._buf = b""
        self._looked_at = 0
        self._interim = 0
        """Bytes of 1xx heads."""
        self._left = 0
        """Bytes of the body still to come, where Content-Length frames it."""
        self._barren = 0
        """Bytes since the last read that brought some of the body."""
        self._may_stay = False
        """The head allows another exchange on this connection."""
        self._seen = Seen(self.body)
        self._parser = httptools.HttpResponseParser(self._seen)

    @property
    def partial_head(self) -> bool:
        """True while some of a head has come, but not all of it (W2)."""
        return self.head is None and bool(self._buf)

    def reset(self) -> None:
        """Get ready for the next exchange on the same connection.

        Raises:
            LocalError: the connection cannot be used again. Nothing changed.
        """
        if not self.keep_alive or self.excess:
            raise LocalError("this connection has no next exchange")
        self.body.clear()
        self._begin()

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes from the worker; the attributes tell the rest.

        Raises:
            ProtocolError: they are no answer. What was read before it stands
                in the attributes; nothing more may be fed.
        """
        if self.complete:
            self.excess = self.excess or bool(chunk)
            return
        try:
            if self.head is None:
                chunk = self._read_head(chunk)
            if chunk and self.head is not None:
                self._read_body(self.head, chunk)
        except Malformed as malformed:
            raise ProtocolError(malformed.message) from malformed

    def eof(self) -> None:
        """Take note that the worker has closed the connection.

        Raises:
            ProtocolError: truncated; the answer was not whole.
        """
        head = self.head
        self.keep_alive = False
        if self.complete:
            return
        if head is None:
            raise ProtocolError("closed before the head was whole", truncated=True)
        if head.chunked or head.content_length is not None:
            raise ProtocolError("closed inside the body", truncated=True)
        self.complete = True

    def _read_head(self, chunk: bytes) -> bytes:
        """Read heads until the final one; return the bytes behind it."""
        buf = self._buf + chunk if self._buf else chunk
        start = 0
        while True:
            end = head_end(buf, start, self._looked_at, self._head_max - self._interim)
            if end < 0:
                self._looked_at = len(buf) - start
                self._buf = buf[start:]
                return b""
            self._looked_at = 0
            raw = buf[start:end]
            head, may_stay = judge(raw)
            if head.status >= 200:
                break
            self._interim += end - start
            start = end
        self._buf = b""
        self._ask(raw)
        bodiless = head.status in _BODILESS or head.content_length == 0
        if self._seen.complete is not bodiless:
            raise Malformed("an answer that can be read in two ways")
        self._left = head.content_length or 0
        self._may_stay = may_stay
        self.head = head
        if bodiless:
            self._complete()
            self.excess = end < len(buf)
            return b""
        return buf[end:]

    def _read_body(self, head: ResponseHead, chunk: bytes) -> None:
        if head.chunked:
            self._read_chunks(chunk)
        elif head.content_length is None:
            self._ask(chunk)
        else:
            passed = chunk[: self._left]
            self._left -= len(passed)
            self._ask(passed)
            if self._seen.complete is not (self._left == 0):
                raise Malformed("an answer that can be read in two ways")
            self.excess = len(passed) < len(chunk)
        if self._seen.complete:
            self._complete()

    def _read_chunks(self, chunk: bytes) -> None:
        """Read on in a chunked body.

        httptools does not say at which byte a message ended. Its last byte is
        an LF, so that one is fed by itself: if the message was complete before
        it, or does not end here at all, there are bytes too many.
        """
        pieces = len(self.body)
        try:
            if chunk[-1] == _LF:
                self._ask(chunk[:-1])
                if not self._seen.complete:
                    self._ask(chunk[-1:])
                else:
                    self.excess = True
            else:
                self._ask(chunk)
                self.excess = self._seen.complete
        except Malformed:
            # Bytes behind the end are no answer, and need not be one.
            if not self._seen.complete:
                raise
            self.excess = True
        if len(self.body) > pieces:
            self._barren = 0
            return
        self._barren += len(chunk)
        if self._barren > self._head_max:
            raise Malformed("too many bytes without a body")

    def _complete(self) -> None:
        # Pieces that httptools read behind the end belong to nothing.
        del self.body[self._seen.pieces :]
        self.complete = True
        self.keep_alive = self._may_stay

    def _ask(self, passed: bytes) -> None:
        """Let httptools read on.

        Raises:
            Malformed: it does not like it.
        """
        try:
            self._parser.feed_data(passed)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise Malformed(f"a malformed answer: {error}") from error


def judge(raw: bytes) -> tuple[ResponseHead, bool]:
    """Read one whole head; say also whether the connection may outlive it.

    Raises:
        Malformed: it is no head, or its framing has two readings.
    """
    line = _STATUS_LINE.match(raw)
    if line is None:
        raise Malformed("a malformed status line")
    headers = fields(raw, line.end())
    status = int(line[2])
    if status == _SWITCHING:
        raise Malformed("an upgrade that nobody asked for")
    minor = 1 if line[1] == b"1" else 0
    index = by_name(headers)
    length, chunked = framing(index, minor)
    framed = chunked or length is not None or status in _BODILESS
    head = ResponseHead(status, headers, minor, length, chunked)
    return head, framed and keeps_alive(index, minor)
