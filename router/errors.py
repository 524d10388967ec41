"""Every failure the router names on purpose, by whose fault it is.

* ``LocalError``: our bug. Never caught below ``__main__``, except where one
  request's bug is kept to that request (L1).
* ``Fault``: a value, not an exception: what went wrong for one request. Its
  ``kind`` says whose fault it is, and ``FAULTS`` says all that follows from it.
* ``WorkerFailed``: carries a ``Fault`` out of a call that could not start.
* ``RequestFailed``: what the library raises to its caller.

``FAULTS`` is the one table of W7: J7 reason, O5 status and code, M6 type,
whether the job moves on, whether it counts against the worker.
"""

import errno
from collections.abc import Mapping
from typing import Final

import attrs

from router.words import Word

#: Errors of a system that has no descriptor or no memory left: this machine's, no
#: worker's and no client's, and they pass (H6).
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class RouterError(Exception):
    """Anything this package raises on purpose."""


class LocalError(RouterError):
    """A broken invariant of ours; nothing has changed."""


class FaultKind(Word):
    """What went wrong, in the fewest kinds that are treated differently."""

    #: No connection to the worker could be made (refused, reset, ``connect_ms``).
    CONNECT = "connect"
    #: The worker is full or asked us to come back: 429, 503, 529, other 5xx.
    DECLINED = "declined"
    #: Others have the slots of an agent that several routers share; it was not
    #: tried (P3, A3).
    NO_SLOT = "no_slot"
    #: The worker is loading its model; it was not tried (A3).
    LOADING = "loading"
    #: 401 or 403: our key for that worker is wrong (A4).
    UNAUTHORIZED = "unauthorized"
    #: 404 for a model that our table gives to that worker (A4).
    MODEL_GONE = "model_gone"
    #: The prompt does not fit that worker's context (A4).
    CONTEXT_LENGTH = "context_length"
    #: The worker says that the request is wrong: 400, 404, 413, 422 (A4).
    REJECTED = "rejected"
    #: 500, which may be the worker's fault or the request's (A4).
    SERVER_ERROR = "server_error"
    #: Bytes that break HTTP, SSE, JSON or the order of deltas.
    PROTOCOL = "protocol"
    #: Busy beyond ``busy_wait_ms`` (W4).
    WAIT_TIMEOUT = "wait_timeout"
    #: Unavailable beyond ``load_wait_ms`` (W4).
    LOAD_TIMEOUT = "load_timeout"
    #: Silent beyond ``idle_grace_ms``, ``liveness_ms`` or ``first_delta_ms``.
    STALLED = "stalled"
    #: The answer ended before its explicit end (F7, A6).
    STREAM_CLOSED_EARLY = "stream_closed_early"
    #: The engine ended the generation itself: finish reason abort or error (A6).
    ENGINE_ABORT = "engine_abort"
    #: A tool call's arguments that no reply of the client's dialect can hold.
    TOOL_PARSE = "tool_parse"
    #: The process that we keep for it ended (L8).
    SERVER_DIED = "server_died"
    #: The answer said the same over and over, and was ended (J5).
    LOOP = "loop"
    #: The engine was restarted under us (L9).
    WORKER_RESTARTED = "worker_restarted"
    #: The worker was drained and its time is over (L5).
    DRAINED = "drained"

    #: The waiting room of this model is full (S4).
    QUEUE_FULL = "queue_full"
    #: Waited longer than ``queue_ms`` (S4).
    QUEUE_TIMEOUT = "queue_timeout"
    #: A worker for this model was coming up, and did not in ``load_wait_ms``.
    MODEL_LOADING = "model_loading"
    #: No worker can serve this model now.
    NO_WORKER = "no_worker"
    #: No such model in the table (O6).
    MODEL_NOT_FOUND = "model_not_found"
    #: The router is stopping (D3).
    SHUTTING_DOWN = "shutting_down"

    #: The client went away, or an operator cancelled the request (A7).
    CANCELLED = "cancelled"
    #: The client stopped reading (H5).
    CLIENT_STALLED = "client_stalled"
    #: Our own bug, kept to this request (L1).
    INTERNAL = "internal"


@attrs.frozen
class FaultRow:
    """All that follows from one kind of fault."""

    reason: str
    """Stable fail reason for programs (J7)."""
    status: int
    """HTTP status for the client, before any byte of the reply (O5)."""
    code: str | None
    """OpenAI error code."""
    error_type: str
    """OpenAI error type."""
    anthropic_type: str
    """Anthropic error type (M6)."""
    moves: bool
    """Before commit, may another worker be tried (A2)?"""
    counts: bool
    """Does it count against the worker (S6)?"""
    retry: bool
    """May the client usefully send the same request again (O5)?"""


_SERVER: Final = "server_error"
_INVALID: Final = "invalid_request_error"


def _row(
    reason: str,
    status: int,
    code: str | None,
    *,
    moves: bool = False,
    counts: bool = False,
    retry: bool = True,
    error_type: str = _SERVER,
    anthropic_type: str = "api_error",
) -> FaultRow:
    return FaultRow(
        reason=reason,
        status=status,
        code=code,
        error_type=error_type,
        anthropic_type=anthropic_type,
        moves=moves,
        counts=counts,
        retry=retry,
    )


_OVERLOADED: Final = "overloaded_error"

FAULTS: Final[Mapping[FaultKind, FaultRow]] = {
    FaultKind.CONNECT: _row(
        "connect_failed", 502, "worker_lost", moves=True, counts=True
    ),
    FaultKind.DECLINED: _row(
        "no_worker", 503, "no_worker_available", moves=True, anthropic_type=_OVERLOADED
    ),
    FaultKind.NO_SLOT: _row(
        "no_worker", 503, "no_worker_available", moves=True, anthropic_type=_OVERLOADED
    ),
    FaultKind.LOADING: _row(
        "load_timeout", 503, "model_loading", moves=True, anthropic_type=_OVERLOADED
    ),
    FaultKind.UNAUTHORIZED: _row(
        "no_worker", 503, "no_worker_available", moves=True, anthropic_type=_OVERLOADED
    ),
    FaultKind.MODEL_GONE: _row(
        "no_worker", 503, "no_worker_available", moves=True, anthropic_type=_OVERLOADED
    ),
    FaultKind.CONTEXT_LENGTH: _row(
        "rejected",
        400,
        "context_length_exceeded",
        moves=True,
        retry=False,
        error_type=_INVALID,
        anthropic_type=_INVALID,
    ),
    FaultKind.REJECTED: _row(
        "rejected",
        400,
        None,
        retry=False,
        error_type=_INVALID,
        anthropic_type=_INVALID,
    ),
    FaultKind.SERVER_ERROR: _row("unknown_error", 500, None, moves=True, counts=True),
    FaultKind.PROTOCOL: _row(
        "protocol_error", 502, "worker_lost", moves=True, counts=True
    ),
    FaultKind.WAIT_TIMEOUT: _row(
        "wait_timeout",
        504,
        "upstream_stalled",
        moves=True,
        anthropic_type="timeout_error",
    ),
    FaultKind.LOAD_TIMEOUT: _row(
        "load_timeout",
        503,
        "model_loading",
        moves=True,
        counts=True,
        anthropic_type=_OVERLOADED,
    ),
    FaultKind.STALLED: _row(
        "stalled",
        504,
        "upstream_stalled",
        moves=True,
        counts=True,
        anthropic_type="timeout_error",
    ),
    FaultKind.STREAM_CLOSED_EARLY: _row(
        "stream_closed_early", 502, "worker_lost", moves=True, counts=True
    ),
    FaultKind.ENGINE_ABORT: _row(
        "stream_closed_early", 502, "worker_lost", moves=True, counts=True
    ),
    # The model's doing: neither the worker's fault nor another worker's to mend.
    FaultKind.TOOL_PARSE: _row("tool_parse_error", 502, "tool_parse_error"),
    # Its restarts are counted already, and it comes back on a ramp.
    FaultKind.SERVER_DIED: _row("server_died", 502, "worker_lost", moves=True),
    FaultKind.LOOP: _row("loop_detected", 502, "loop_detected", retry=False),
    FaultKind.WORKER_RESTARTED: _row(
        "worker_restarted", 502, "worker_lost", moves=True
    ),
    FaultKind.DRAINED: _row(
        "no_worker", 503, "no_worker_available", moves=True, anthropic_type=_OVERLOADED
    ),
    FaultKind.QUEUE_FULL: _row(
        "queue_full",
        429,
        "queue_full",
        error_type="rate_limit_exceeded",
        anthropic_type=_OVERLOADED,
    ),
    FaultKind.QUEUE_TIMEOUT: _row(
        "wait_timeout", 503, "queue_timeout", anthropic_type=_OVERLOADED
    ),
    FaultKind.MODEL_LOADING: _row(
        "load_timeout", 503, "model_loading", anthropic_type=_OVERLOADED
    ),
    FaultKind.NO_WORKER: _row(
        "no_worker", 503, "no_worker_available", anthropic_type=_OVERLOADED
    ),
    FaultKind.MODEL_NOT_FOUND: _row(
        "rejected",
        404,
        "model_not_found",
        retry=False,
        error_type=_INVALID,
        anthropic_type="not_found_error",
    ),
    FaultKind.SHUTTING_DOWN: _row(
        "no_worker", 503, "no_worker_available", anthropic_type=_OVERLOADED
    ),
    FaultKind.CANCELLED: _row("cancelled", 499, "cancelled", retry=False),
    FaultKind.CLIENT_STALLED: _row("cancelled", 499, "cancelled", retry=False),
    FaultKind.INTERNAL: _row("unknown_error", 500, None),
}


@attrs.frozen
class Fault:
    """What went wrong for one request, once.

    ``message`` is fit for the client: it holds no worker address, no key and
    no content of the request.
    """

    kind: FaultKind
    message: str
    status: int | None = None
    """The worker's own HTTP status, where it gave one."""
    body: bytes = b""
    """The worker's error body, at most 64 KiB (W7)."""
    error_type: str | None = None
    """The worker's own error type, where its body named one (A4)."""
    retry_after: float | None = None
    """Seconds, as the worker asked or as we computed."""
    param: str | None = None
    """The request field at fault, where the worker named one."""
    code: str | None = None
    """The worker's own error code as a string, where it gave one (O5)."""

    @property
    def row(self) -> FaultRow:
        """What follows from the kind."""
        return FAULTS[self.kind]


@attrs.frozen
class ErrorReply:
    """A failure before any byte of the reply: status, JSON body, headers."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """What the failure adds; the content type is the edge's."""


class AnswerUnfit(RouterError):
    """An answer that the client's dialect can't say; *fault* is the reason."""

    def __init__(self, fault: Fault) -> None:
        """Carry *fault* out of an encoder."""
        super().__init__(fault.message)
        self.fault = fault


class WorkerFailed(RouterError):
    """An attempt that could not start; *fault* says why."""

    def __init__(self, fault: Fault) -> None:
        """Carry *fault* to the caller of ``Worker.open``."""
        super().__init__(fault.message)
        self.fault = fault


class RequestFailed(RouterError):
    """The library's answer to its caller when a request did not succeed.

    ``fault`` is the first cause; ``committed`` says whether deltas had
    already been handed over, which then are a prefix of nothing whole (F7).
    """

    def __init__(self, fault: Fault, *, committed: bool = False) -> None:
        """Name the fault and whether any delta had been handed over."""
        super().__init__(f"{fault.row.reason}: {fault.message}")
        self.fault = fault
        self.committed = committed

    @property
    def reason(self) -> str:
        """Stable fail reason (J7)."""
        return self.fault.row.reason
