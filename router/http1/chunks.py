"""Where a chunked body ends (RFC 9112 7.1): a scanner that copies nothing.

It reads sizes and line ends, never what is between them, and passes one
spelling only: hex digits, an optional extension, CRLF, that many bytes, CRLF.
Everything else that some parser somewhere lets through is refused (B117).
"""

import re
from typing import Final

from router.http1.gate import HEAD_MAX, Malformed

LINE_MAX: Final = 256
"""Bytes in one size line, its CRLF included. Nobody sends extensions; they
are cheap for the sender and cost the reader, so they stay small."""
EXTENSIONS_MAX: Final = HEAD_MAX
"""Bytes of extensions in one body."""

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(;[\t\x20-\x7e]*+)?\r\n")
#: The beginning of a size line that may still become one.
_SIZE_PART: Final = re.compile(rb"(?:[0-9A-Fa-f]{1,16}+(?:;[\t\x20-\x7e]*+)?+\r?)?")


class ChunkScanner:
    """Reads the framing of one body, from its first size line.

    ``body`` counts the bytes of content that were framed so far; ``last`` is
    set once the size line of the last chunk has passed: trailers follow.
    """

    __slots__ = ("_body_max", "_closing", "_extensions", "_left", "body", "last")

    def __init__(self, body_max: int) -> None:
        """Let through at most *body_max* bytes of content."""
        self._body_max = body_max
        self._left = 0
        """Bytes of content that the current chunk still has."""
        self._closing = False
        """The CRLF behind a chunk's content is due."""
        self._extensions = 0
        self.body = 0
        self.last = False

    def scan(self, buf: bytes, start: int) -> int:
        """Pass as much of *buf* from *start* as is whole and well formed.

        Returns:
            Index of the first byte not passed: the end of *buf*, the start of
            a size line or line end that is not whole, or, once ``last`` is
            set, the first byte of the trailers.

        Raises:
            Malformed: 400 for any other spelling; 413 as soon as a size goes
                beyond the limit.
        """
        at = start
        while not self.last:
            if self._left:
                passed = min(self._left, len(buf) - at)
                at += passed
                self._left -= passed
                self.body += passed
                if self._left:
                    break
                self._closing = True
            if self._closing:
                ending = buf[at : at + 2]
                if ending == b"\r\n":
                    at += 2
                    self._closing = False
                elif ending in (b"", b"\r"):
                    break
                else:
                    raise Malformed("a chunk longer than its size")
            line = _SIZE.match(buf, at)
            if line is None:
                self._check_part(buf, at)
                break
            self._open(line)
            at = line.end()
        return at

    def _open(self, line: re.Match[bytes]) -> None:
        """Begin the chunk whose size line is *line*."""
        if line.end() - line.start() > LINE_MAX:
            raise Malformed("a chunk size line that is too long")
        self._left = int(line[1], 16)
        if self.body + self._left > self._body_max:
            raise Malformed("the body is too large", 413)
        if line[2] is not None:
            self._extensions += len(line[2])
            if self._extensions > EXTENSIONS_MAX:
                raise Malformed("too many chunk extensions")
        self.last = not self._left

    def _check_part(self, buf: bytes, at: int) -> None:
        """Refuse what stands at *at* if no size line can come of it."""
        part = buf[at : at + LINE_MAX]
        if not _SIZE_PART.fullmatch(part) or len(part) == LINE_MAX:
            raise Malformed("a malformed chunk size")
