"""The gate: what every message head must pass before a parser may see it.

Rule 1: it only refuses; what it passes is RFC 9112 with one reading. Rule 2:
a head is judged the same whether it comes whole or byte by byte.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from router.errors import RouterError

HEAD_MAX: Final = 32 * 1024
"""Bytes in one head, up to and with its empty line (H1)."""
FIELDS_MAX: Final = 100
"""Field lines in one head; nginx and Apache draw the line there too."""

Fields: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Field lines in order: lower-case name, value without the space around it."""

#: More digits than any length that could be meant; llhttp counts to 2**64.
_LENGTH_DIGITS: Final = 18

#: One field line (RFC 9112 5): no space before the colon, no folding, no
#: control but TAB. It must follow a whole CRLF, so that a line which does not
#: match can't be skipped over. Possessive, so that nothing is tried twice.
_FIELD: Final = re.compile(
    rb"(?<=\r\n)([!#$%&'*+\-.^_`|~0-9A-Za-z]++):([\t\x20-\x7e\x80-\xff]*+)\r\n"
)

#: What no head may hold, wherever it stands: controls, CR or LF alone.
_STRAY: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n|\Z)|(?<!\r)\n")

#: Fields that frame or address a message: a second one gives it two readings.
_ONCE: Final = frozenset({b"content-length", b"host", b"transfer-encoding"})


class Malformed(RouterError):
    """A message that the gate does not let through."""

    def __init__(self, message: str, status: int = 400, path: str = "") -> None:
        """Say why, and which status a server answers; *path*: where known."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.path = path


class Seen:
    """What httptools made of one message: it fills *body*, and says the end.

    httptools calls it while it reads, so it does nothing but take notes.
    """

    __slots__ = ("_body", "complete", "on_body", "pieces")

    def __init__(self, body: list[bytes]) -> None:
        """Add the pieces of the body to *body*."""
        self._body = body
        self.on_body: Callable[[bytes], None] = body.append
        self.complete = False
        self.pieces = 0
        """How many pieces *body* held when the message was complete."""

    def on_message_complete(self) -> None:
        """Note the end of the message, and only of the first one."""
        if not self.complete:
            self.complete = True
            self.pieces = len(self._body)


def head_end(buf: bytes, start: int, seen: int, limit: int) -> int:
    """Find where the head that begins at *start* ends: behind its empty line.

    Args:
        buf: what has come.
        start: index of the head's first byte.
        seen: bytes of this head that an earlier call has looked at.
        limit: bytes that the head may have, its empty line included.

    Returns:
        Index of the first byte behind the head; -1: it is not whole yet.

    Raises:
        Malformed: 400 for a byte that no head may hold; 431 beyond *limit*.
    """
    end = buf.find(b"\r\n\r\n", start + max(0, seen - 3))
    if 0 <= end <= start + limit - 4:
        return end + 4
    # An LF alone never ends a head, so who waits for the end waits for ever.
    # (A leading LF is asked for by itself: before it may stand another
    # message's CR.)
    if buf.startswith(b"\n", start) or _STRAY.search(
        buf, start + max(0, seen - 1), start + limit
    ):
        raise Malformed("a control character, or a bare CR or LF, in the head")
    if end >= 0 or len(buf) - start > limit:
        raise Malformed(f"the head is larger than {limit} bytes", 431)
    return -1


def fields(block: bytes, start: int) -> Fields:
    """Read the field lines from *start* to the empty line that ends *block*.

    Args:
        block: a head, or a trailer section behind some CRLF.
        start: index of the first field line, right behind a CRLF.

    Raises:
        Malformed: 400 for a line that is no field line (RFC 9112 5); 431 for
            more than `FIELDS_MAX` of them.
    """
    found = _FIELD.findall(block, start)
    if len(found) != block.count(b"\r\n", start) - 1:
        raise Malformed("a malformed header field")
    if len(found) > FIELDS_MAX:
        raise Malformed(f"more than {FIELDS_MAX} header fields", 431)
    return tuple([(name.lower(), value.strip()) for name, value in found])


def first(headers: Fields, name: bytes) -> bytes | None:
    """Give the value of the first field *name* (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def by_name(headers: Fields) -> Mapping[bytes, bytes]:
    """Index *headers*; values of a repeated name are joined with a comma.

    Raises:
        Malformed: a field that may come once came twice, equal or not.
    """
    index = dict(headers)
    if len(index) == len(headers):
        return index
    index.clear()
    for name, value in headers:
        if name not in index:
            index[name] = value
        elif name in _ONCE:
            raise Malformed(f"two {name.decode()} fields")
        else:
            index[name] += b"," + value
    return index


def framing(index: Mapping[bytes, bytes], minor: int) -> tuple[int | None, bool]:
    """Read how the body is framed (RFC 9112 6.3).

    Returns:
        Content-Length or None, and whether the body is chunked; never both.

    Raises:
        Malformed: Content-Length is not a plain number; Transfer-Encoding is
            not ``chunked`` alone, stands beside a Content-Length, or came
            with HTTP/1.0.
    """
    length = index.get(b"content-length")
    coding = index.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            raise Malformed("both Content-Length and Transfer-Encoding")
        if minor == 0:
            raise Malformed("Transfer-Encoding in HTTP/1.0")
        if coding.lower() != b"chunked":
            raise Malformed("a Transfer-Encoding other than chunked")
        return None, True
    if length is None:
        return None, False
    # isdigit of bytes is ASCII only, and so knows no sign, space or underscore.
    if not length.isdigit() or len(length) > _LENGTH_DIGITS:
        raise Malformed("Content-Length is not a number")
    return int(length), False


def keeps_alive(index: Mapping[bytes, bytes], minor: int) -> bool:
    """Tell whether the connection may outlive the message (RFC 9112 9.3)."""
    connection = index.get(b"connection")
    if connection is None:
        return minor == 1
    options = [option.strip() for option in connection.lower().split(b",")]
    if b"close" in options:
        return False
    return minor == 1 or b"keep-alive" in options


def check_trailers(block: bytes) -> None:
    """Check a trailer section, *block*; nothing of it is kept.

    Raises:
        Malformed: as `fields`; or a field that would reframe or readdress the
            message (RFC 9110 6.5.1).
    """
    for name, _ in fields(b"\r\n" + block, 2):
        if name in _ONCE:
            raise Malformed(f"{name.decode()} in a trailer")
