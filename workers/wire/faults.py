"""Faults that cross the wire: an agent's word, and what a router makes of it.

Rule: a router believes an agent only what a worker can know. A fault of the
agent's own clients or queue has no meaning abroad and arrives as something that
a worker may say.
"""

from collections.abc import Mapping
from typing import Final

from router.errors import Fault, FaultKind
from router.openai.worker_errors import OWN_STATUS, RETRY_AFTER_MAX
from router.words import Word
from workers.wire.frames import Declined, Failed
from workers.wire.shapes import milliseconds, number_of

#: Bytes of an error body (W7), and of a sentence, that cross.
BODY_MAX: Final = 64 * 1024
WORDS_MAX: Final = 1000

#: What a worker may say of an attempt.
OF_WORKERS: Final = frozenset(
    {
        FaultKind.CONNECT,
        FaultKind.DECLINED,
        FaultKind.LOADING,
        FaultKind.MODEL_GONE,
        FaultKind.CONTEXT_LENGTH,
        FaultKind.REJECTED,
        FaultKind.SERVER_ERROR,
        FaultKind.PROTOCOL,
        FaultKind.WAIT_TIMEOUT,
        FaultKind.LOAD_TIMEOUT,
        FaultKind.STALLED,
        FaultKind.STREAM_CLOSED_EARLY,
        FaultKind.ENGINE_ABORT,
        FaultKind.TOOL_PARSE,
        FaultKind.WORKER_RESTARTED,
        FaultKind.SERVER_DIED,
        FaultKind.DRAINED,
        FaultKind.CANCELLED,
    }
)
#: What an agent's own faults are to a router.
_ABROAD: Final[Mapping[FaultKind, FaultKind]] = {
    # Its engine's key is wrong: the engine is out, and the agent is not.
    FaultKind.UNAUTHORIZED: FaultKind.DECLINED,
    FaultKind.MODEL_NOT_FOUND: FaultKind.MODEL_GONE,
    FaultKind.MODEL_LOADING: FaultKind.LOADING,
    FaultKind.NO_WORKER: FaultKind.DECLINED,
    FaultKind.QUEUE_FULL: FaultKind.DECLINED,
    FaultKind.QUEUE_TIMEOUT: FaultKind.DECLINED,
    FaultKind.SHUTTING_DOWN: FaultKind.DRAINED,
    FaultKind.INTERNAL: FaultKind.SERVER_ERROR,
}


class Decline(Word):
    """Why an agent does not begin a job (P3)."""

    #: The attempt is not newer than one that was offered before.
    STALE = "stale"
    DRAINING = "draining"
    #: The offer is for the agent as it was before a restart.
    WRONG_EPOCH = "wrong_epoch"
    UNKNOWN_MODEL = "unknown_model"
    #: No engine of that model is up, and one is coming.
    LOADING = "loading"
    #: No engine of that model is up, and none is coming.
    NO_ENGINE = "no_engine"
    CONTEXT_TOO_LONG = "context_too_long"
    #: All slots are taken, or kept for a router that has fewer.
    NO_SLOT = "no_slot"
    #: Larger than the agent takes, or than it has room for now.
    TOO_LARGE = "too_large"
    #: The job can't be read.
    BAD_JOB = "bad_job"


#: What a decline is to the router that made the offer.
DECLINES: Final[Mapping[Decline, FaultKind]] = {
    Decline.STALE: FaultKind.PROTOCOL,
    Decline.DRAINING: FaultKind.DRAINED,
    Decline.WRONG_EPOCH: FaultKind.WORKER_RESTARTED,
    Decline.UNKNOWN_MODEL: FaultKind.MODEL_GONE,
    Decline.LOADING: FaultKind.NO_SLOT,
    Decline.NO_ENGINE: FaultKind.DECLINED,
    Decline.CONTEXT_TOO_LONG: FaultKind.CONTEXT_LENGTH,
    Decline.NO_SLOT: FaultKind.NO_SLOT,
    Decline.TOO_LARGE: FaultKind.DECLINED,
    Decline.BAD_JOB: FaultKind.PROTOCOL,
}


def fault_of_decline(declined: Declined) -> Fault:
    """Say what a decline means; one that we don't know is a plain one."""
    try:
        kind = DECLINES[Decline(declined.reason)]
    except ValueError:
        kind = FaultKind.DECLINED
    return Fault(
        kind,
        declined.words[:WORDS_MAX] or "The worker takes no more requests now.",
        retry_after=_seconds(declined.retry_after_ms),
    )


def failed_of(stream: int, fault: Fault) -> Failed:
    """Write *fault* as a router may hear it."""
    return Failed(
        stream,
        _ABROAD.get(fault.kind, fault.kind).value,
        fault.message[:WORDS_MAX],
        number_of(fault.status),
        fault.body[:BODY_MAX],
        _short(fault.error_type),
        milliseconds(fault.retry_after),
        _short(fault.param),
        _short(fault.code),
    )


def fault_of(failed: Failed) -> Fault:
    """Read what an agent says; what no worker may say is Protocol."""
    try:
        kind = FaultKind(failed.kind)
    except ValueError:
        kind = FaultKind.PROTOCOL
    if kind not in OF_WORKERS:
        kind = FaultKind.PROTOCOL
    return Fault(
        kind,
        failed.words[:WORDS_MAX] or "The worker failed.",
        status=_status(kind, failed.status),
        body=failed.body[:BODY_MAX],
        error_type=_short(failed.error_type),
        retry_after=_seconds(failed.retry_after_ms),
        param=_short(failed.param),
        code=_short(failed.code),
    )


def _short(value: str | None) -> str | None:
    return None if value is None else value[:256]


def _seconds(after_ms: int | None) -> float | None:
    return None if after_ms is None else min(after_ms / 1000, RETRY_AFTER_MAX)


def _status(kind: FaultKind, status: int | None) -> int | None:
    """Give what a client may be told of *status*, as of an engine's own answer."""
    if status is None or not 400 <= status <= 599:
        return None
    if kind is FaultKind.REJECTED and status not in OWN_STATUS:
        return 400
    return status
