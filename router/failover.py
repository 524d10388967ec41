"""Does a job whose attempt failed move on, or end, and with which fault?

A policy of plain functions, fed by the fleet. Rules A2-A4 and A8.
"""

from collections.abc import Callable
from typing import Final

import attrs

from router.assignment import Attempt, Attempts, Phase
from router.errors import FAULTS, Fault, FaultKind

#: A first move off these is not charged to the retry budget (A8), if the
#: worker had our full trust when it got the job: a killed worker's streams
#: all move, and a worker that keeps failing multiplies nothing.
UNCHARGED: Final = frozenset(
    {
        FaultKind.CONNECT,
        FaultKind.STREAM_CLOSED_EARLY,
        FaultKind.SERVER_DIED,
        FaultKind.WORKER_RESTARTED,
        FaultKind.DRAINED,
    }
)

#: The engine was told nothing, ended the work by its own word, or is no more: its
#: slot is free at once (S3). So is one whose engine answered with a status.
_OVER_AT_ONCE: Final = frozenset(
    {FaultKind.CONNECT, FaultKind.ENGINE_ABORT, FaultKind.SERVER_DIED}
)


def over_at_once(fault: Fault) -> bool:
    """Say whether the engine is known to be done with a failed attempt."""
    return fault.kind in _OVER_AT_ONCE or fault.status is not None


def verdict(  # noqa: PLR0911 - one return per rule reads best
    attempts: Attempts,
    attempt: Attempt,
    fault: Fault,
    *,
    attempts_max: int,
    may_wait_for_loading: bool,
    has_wider: bool,
    spend: Callable[[], bool],
) -> Fault | None:
    """Say with which fault the request ends; None: the job moves.

    Args:
        attempts: the request's trail; *attempt*, its last, has no fault yet.
        attempt: the attempt that *fault* ended.
        fault: why.
        attempts_max: workers a job may fail on (A3).
        may_wait_for_loading: the time for loading workers is not over.
        has_wider: a worker with a larger context serves (A4). If it was tried, the
            first cause is told, not that the prompt is too long: it is not, there.
        spend: take one retry out of the budget, if there is one (A8).
    """
    if attempts.phase is Phase.COMMITTED:
        return fault
    kind = fault.kind
    if kind is FaultKind.NO_SLOT:
        # Nothing was tried, and the worker says when there is a slot again.
        return None
    first = attempts.first_cause()
    if kind is FaultKind.LOADING:
        return None if may_wait_for_loading else first or fault
    if not fault.row.moves:
        return fault
    if kind is FaultKind.CONTEXT_LENGTH and not (
        has_wider and _first_of(attempts, kind) is None
    ):
        return fault
    if kind is FaultKind.SERVER_ERROR:
        earlier = _first_of(attempts, kind)
        if earlier is not None:
            return _twice(earlier, fault)
    if attempts.charged >= attempts_max:
        return first or fault
    if first is None and kind in UNCHARGED and attempt.was_ready:
        return None
    return None if spend() else first or fault


def _first_of(attempts: Attempts, kind: FaultKind) -> Fault | None:
    return next(
        (
            a.fault
            for a in attempts.trail
            if a.fault is not None and a.fault.kind is kind
        ),
        None,
    )


def _twice(earlier: Fault, later: Fault) -> Fault:
    """Two workers answered 500: the same one is the request's own fault (A4)."""
    if (earlier.status, earlier.error_type) == (later.status, later.error_type):
        return attrs.evolve(
            earlier,
            kind=FaultKind.REJECTED,
            error_type=earlier.error_type or FAULTS[FaultKind.SERVER_ERROR].error_type,
        )
    return earlier
