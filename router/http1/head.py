"""The head of a request: what its bytes say, and what of that is refused.

Absolute-form targets are taken by their path, and ``*`` with OPTIONS. CONNECT
is refused with 400: a tunnel has no framing to check. Other methods that RFC
9110 does not know get 501 (H1, H2).
"""

import re
from typing import Final, NamedTuple

from router.http1.gate import (
    Fields,
    Malformed,
    by_name,
    fields,
    first,
    framing,
    keeps_alive,
)

#: RFC 9110 9.3 and PATCH. CONNECT is not among them.
_METHODS: Final = frozenset(
    {b"DELETE", b"GET", b"HEAD", b"OPTIONS", b"PATCH", b"POST", b"PUT", b"TRACE"}
)
#: RFC 9112 3, without its lenience: single spaces, and no fragment.
_REQUEST_LINE: Final = re.compile(rb"([A-Z]{1,24}) ([!\"$-~]++) HTTP/1\.([01])\r\n")
#: Authority and the rest of an absolute-form target; no user, no fragment.
_ABSOLUTE: Final = re.compile(
    rb"(?i:https?)://[0-9A-Za-z.\-_~%!$&'()*+,;=:\[\]]+(/[^?]*)?(?:\?(.*))?"
)
#: uri-host and port (RFC 9110 7.2), or nothing.
_HOST: Final = re.compile(rb"[0-9A-Za-z.\-_~%!$&'()*+,;=:\[\]]*")


class Head(NamedTuple):
    """The head of one request, judged."""

    method: str
    path: str
    """Without the query; ASCII, percent-encoding left as it is; ``*`` only
    with OPTIONS."""
    query: bytes
    """What stands behind the first ``?``; empty: nothing."""
    headers: Fields
    minor: int
    """HTTP/1.0 or HTTP/1.1."""
    keep_alive: bool
    """The client will take another reply on this connection. With HTTP/1.0
    that holds only for a reply that carries its Content-Length."""
    expect_continue: bool
    """It waits for ``100 Continue`` before it sends its body."""
    content_length: int | None
    chunked: bool

    def get(self, name: bytes) -> bytes | None:
        """Give the value of the first field *name* (lower case), or None."""
        return first(self.headers, name)


def judge(raw: bytes, body_max: int) -> tuple[Head, bool]:
    """Read one whole head; say also whether it asks for an upgrade.

    Raises:
        Malformed: with the status to answer. What is wrong with the bytes
            comes before what is wrong with their meaning.
    """
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise Malformed("a malformed request line")
    headers = fields(raw, line.end())
    index = by_name(headers)
    method, target, version = line.groups()
    minor = 1 if version == b"1" else 0
    length, chunked = framing(index, minor)
    _check_host(index.get(b"host"), minor)
    path, query = _split_target(method, target)
    if method not in _METHODS:
        raise Malformed("an unknown method", 501, path.decode())
    expect = index.get(b"expect")
    if expect is not None and expect.lower() != b"100-continue":
        raise Malformed("an unknown expectation", 417, path.decode())
    if length is not None and length > body_max:
        words = f"the body is larger than {body_max} bytes"
        raise Malformed(words, 413, path.decode())
    head = Head(
        method.decode(),
        path.decode(),
        query,
        headers,
        minor,
        keeps_alive(index, minor),
        # RFC 9110 10.1.1: not from HTTP/1.0, and not without a body.
        expect is not None and minor == 1 and (chunked or bool(length)),
        length,
        chunked,
    )
    return head, b"upgrade" in index


def _check_host(host: bytes | None, minor: int) -> None:
    """RFC 9112 3.2: HTTP/1.1 has one Host, and it names a host.

    Raises:
        Malformed: it has none, or its value is none.
    """
    if host is None:
        if minor:
            raise Malformed("no Host field")
    elif not _HOST.fullmatch(host):
        raise Malformed("a malformed Host field")


def _split_target(method: bytes, target: bytes) -> tuple[bytes, bytes]:
    """Split a request target into path and query (RFC 9112 3.2).

    Raises:
        Malformed: a form that *method* may not have.
    """
    if method == b"CONNECT":
        raise Malformed("CONNECT is not served here")
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
        return path, query
    if target == b"*" and method == b"OPTIONS":
        return target, b""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise Malformed("a malformed request target")
    return absolute[1] or b"/", absolute[2] or b""
