"""One request and its reply, on one connection.

The bytes of every head are made here: status line, ``x-request-id`` on
everything (O5), the route receipt (X3), and how the connection goes on.
"""

from typing import Final, Protocol

import attrs

from router.checks import RequestInvalid
from router.edge.dialect import OPENAI, Dialect
from router.edge.sink import Sink
from router.edge.site import Site
from router.errors import ErrorReply, Fault, FaultKind
from router.http1 import Head
from router.ids import WorkerId
from router.openai.errors import error_body, reply_of
from router.ports import Taken

JSON: Final = b"application/json"

REASONS: Final = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    417: b"Expectation Failed",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    499: b"Client Closed Request",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    529: b"Overloaded",
}
_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\n"
    # nginx would gather the deltas of a stream otherwise (H7).
    b"x-accel-buffering: no\r\n"
)
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_CLOSE: Final = b"connection: close\r\n"
_KEEP: Final = b"connection: keep-alive\r\n"

#: What a client may put into an ``x-request-id`` that we send back (H3).
_SAFE: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
_ID_MAX: Final = 128


@attrs.frozen
class Answer:
    """A whole reply, before it has a connection."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    message: str | None = None
    """The words of a failure that was made for no dialect in particular: a
    request of another dialect than OpenAI's has them said anew (M6)."""


class Ended(Protocol):
    """Who is told that a request is over before its reply is."""

    def gone(self) -> None:
        """Learn that the client left: end the request's work, now."""

    def fail(self, fault: Fault) -> None:
        """Tell the client of *fault*."""


INTERNAL_FAULT: Final = Fault(FaultKind.INTERNAL, "The router failed here.")


def said(reply: ErrorReply) -> Answer:
    """Give an error of the dialect as a whole reply."""
    return Answer(reply.status, reply.body, headers=reply.headers)


def failure(fault: Fault) -> Answer:
    """Give the whole reply that *fault* is for a client, before any head (O5)."""
    return attrs.evolve(said(reply_of(fault)), message=fault.message)


#: Refusals of the edge that the same request may outlive (O5).
_WORTH_RETRYING: Final = frozenset({408, 429, 503})


def refusal(
    status: int,
    message: str,
    *,
    code: str | None = None,
    error_type: str = "invalid_request_error",
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> Answer:
    """Make an error reply of the edge itself, in the OpenAI shape (O5)."""
    body = error_body(message, error_type, code=code)
    if status not in _WORTH_RETRYING:
        headers = (*headers, (b"x-should-retry", b"false"))
    return Answer(status, body, headers=headers, message=message)


def compose(
    answer: Answer, fields: bytes, *, keep: bool, minor: int = 1, bare: bool = False
) -> bytes:
    """Give the bytes of a whole reply.

    Args:
        answer: what to say.
        fields: more head lines, each ended by CRLF.
        keep: the connection goes on after it.
        minor: HTTP/1.x of the request.
        bare: a reply to HEAD, which has no body.
    """
    more = b"".join(b"%b: %b\r\n" % pair for pair in answer.headers)
    if not keep:
        more += _CLOSE
    elif minor == 0:
        more += _KEEP
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
        answer.status,
        REASONS.get(answer.status, b"Unknown"),
        answer.content_type,
        len(answer.body),
        fields,
        more,
        b"" if bare else answer.body,
    )


def in_dialect(answer: Answer, dialect: Dialect, request: str) -> Answer:
    """Say a failure that was made for no dialect in particular in *dialect*."""
    if answer.message is None or dialect.refusal is None:
        return answer
    status, body = dialect.refusal(answer.status, answer.message, request)
    return attrs.evolve(answer, status=status, body=body)


def id_fields(
    site: Site, dialect: Dialect, request: str, client_id: bytes | None = None
) -> bytes:
    """Give the head lines that every reply has: its date and its ids."""
    own = request.encode()
    fields = b"%bx-request-id: %b\r\n" % (site.date, client_id or own)
    name = dialect.id_header
    return fields if name is None else b"%b%b: %b\r\n" % (fields, name, own)


def safe_id(given: bytes | None) -> bytes | None:
    """Give a client's own request id back if it is short and safe, else None."""
    if given and len(given) <= _ID_MAX and not given.translate(None, _SAFE):
        return given
    return None


def printable(name: str) -> bytes:
    """Give *name* as a header value: what is not visible ASCII becomes ``?``."""
    if name.isascii() and name.isprintable():
        return name.encode()
    return bytes(ord(c) if "!" <= c <= "~" else ord("?") for c in name)


class Exchange:
    """One request, from its head to the end of its reply."""

    __slots__ = (
        "arrived",
        "body",
        "client_id",
        "dialect",
        "head",
        "hung_up",
        "keep",
        "prompt_field",
        "receiver",
        "request",
        "sink",
        "site",
        "started",
        "tail",
        "whole",
    )

    def __init__(self, site: Site, sink: Sink, head: Head) -> None:
        """Begin with the request's *head*; its body comes later."""
        self.site = site
        self.sink = sink
        self.head = head
        self.request = site.new_request_id()
        self.client_id = safe_id(head.get(b"x-request-id"))
        #: In which words failures are told.
        self.dialect: Dialect = OPENAI
        #: What its prompt is called, in failures that name it (O5).
        self.prompt_field = "messages"
        #: The whole body, once it is here, where the route wants it.
        self.body = b""
        #: When the request was whole, on Trio's clock.
        self.arrived = 0.0
        #: What follows the path of a route that takes a tail.
        self.tail = ""
        #: Told when the client leaves while the request is served.
        self.receiver: Ended | None = None
        self.hung_up = False
        #: May the connection serve another request after this one?
        self.keep = head.keep_alive
        #: Bytes of the reply are out, or with the sink.
        self.started = False
        #: All of them are. Started but not whole is an unclean end (A5).
        self.whole = False

    def failure(self, fault: Fault) -> Answer:
        """Give the whole reply that *fault* is in this request's dialect."""
        return said(self.dialect.reply_of(self.named(fault), self.request))

    def named(self, fault: Fault) -> Fault:
        """Give *fault* with the client's own name for a prompt that is too long."""
        if fault.kind is not FaultKind.CONTEXT_LENGTH:
            return fault
        return attrs.evolve(fault, param=self.prompt_field)

    def invalid(self, wrong: RequestInvalid) -> Answer:
        """Give the whole reply to a request that is *wrong*."""
        return said(self.dialect.reply_of_invalid(wrong, self.request))

    def reply(self, answer: Answer) -> Taken:
        """Give a whole reply. Not a checkpoint; never raises."""
        return self._send(answer, b"")

    def reply_routed(
        self, answer: Answer, worker: WorkerId | None, attempts: int
    ) -> Taken:
        """Give a whole reply with its route receipt (X3)."""
        return self._send(answer, self._receipt(worker, attempts))

    def stream_head(self, worker: WorkerId | None, attempts: int) -> bytes:
        """Give the head of a streamed reply; the caller writes it."""
        self.started = True
        if self.head.minor == 0:
            # No chunks in HTTP/1.0: the end of the connection is the end.
            self.keep = False
            how = _CLOSE
        elif self._keeps():
            how = _CHUNKED
        else:
            how = _CHUNKED + _CLOSE
        return b"%b%b%b%b\r\n" % (
            _STREAM,
            how,
            self._fields(),
            self._receipt(worker, attempts),
        )

    def release_body(self) -> None:
        """Let go of the body's bytes, once they are parsed (H1)."""
        self.site.bodies_held -= len(self.body)
        self.body = b""

    def _send(self, answer: Answer, receipt: bytes) -> Taken:
        self.started = self.whole = True
        answer = in_dialect(answer, self.dialect, self.request)
        head = self.head
        return self.sink.write(
            compose(
                answer,
                self._fields() + receipt,
                keep=self._keeps(),
                minor=head.minor,
                bare=head.method == "HEAD",
            )
        )

    def _keeps(self) -> bool:
        if self.site.draining:
            self.keep = False
        return self.keep

    def _fields(self) -> bytes:
        return id_fields(self.site, self.dialect, self.request, self.client_id)

    def _receipt(self, worker: WorkerId | None, attempts: int) -> bytes:
        if worker is None:
            return b"x-fencepost-request: %b\r\n" % self.request.encode()
        return (
            b"x-fencepost-request: %b\r\n"
            b"x-fencepost-worker: %b\r\n"
            b"x-fencepost-attempts: %d\r\n"
            % (self.request.encode(), printable(worker), attempts)
        )
