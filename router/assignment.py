"""One request's life over its attempts.

Rule 1: every change of phase is a row of ``TRANSITIONS``. Rule 2: this file
knows no HTTP, no JSON, no clock and no Trio. Rules A1, A3 of the contract.
"""

from collections.abc import Mapping
from typing import Final

import attrs

from router.errors import Fault, FaultKind, LocalError
from router.ids import AssignmentId, RequestId, WorkerId
from router.words import Word


class Phase(Word):
    """Where a request is (A1)."""

    #: Read from its client, not placed yet.
    RECEIVED = "received"
    #: Waiting for a permit: the first one, or the next after a move.
    QUEUED = "queued"
    #: Sent to a worker that has not answered.
    OFFERED = "offered"
    #: The worker answered with a 200 head.
    ASSIGNED = "assigned"
    #: The client has the first delta.
    COMMITTED = "committed"
    #: The client has the whole answer.
    COMPLETED = "completed"
    #: The client was told that there is no whole answer.
    FAILED = "failed"
    #: The client left, or an operator ended the request.
    CANCELLED = "cancelled"


class Event(Word):
    """What moves a request."""

    QUEUE = "queue"
    OFFER = "offer"
    ACCEPT = "accept"
    COMMIT = "commit"
    #: The attempt failed and the job goes back to the queue.
    MOVE = "move"
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"


TRANSITIONS: Final[Mapping[Phase, Mapping[Event, Phase]]] = {
    Phase.RECEIVED: {
        Event.QUEUE: Phase.QUEUED,
        Event.FAIL: Phase.FAILED,
        Event.CANCEL: Phase.CANCELLED,
    },
    Phase.QUEUED: {
        Event.OFFER: Phase.OFFERED,
        Event.FAIL: Phase.FAILED,
        Event.CANCEL: Phase.CANCELLED,
    },
    Phase.OFFERED: {
        Event.ACCEPT: Phase.ASSIGNED,
        Event.MOVE: Phase.QUEUED,
        Event.FAIL: Phase.FAILED,
        Event.CANCEL: Phase.CANCELLED,
    },
    # An answer may be whole without one delta, and a non-stream reply is
    # committed by being whole: hence COMPLETE from here (A5).
    Phase.ASSIGNED: {
        Event.COMMIT: Phase.COMMITTED,
        Event.MOVE: Phase.QUEUED,
        Event.COMPLETE: Phase.COMPLETED,
        Event.FAIL: Phase.FAILED,
        Event.CANCEL: Phase.CANCELLED,
    },
    Phase.COMMITTED: {
        Event.COMPLETE: Phase.COMPLETED,
        Event.FAIL: Phase.FAILED,
        Event.CANCEL: Phase.CANCELLED,
    },
    Phase.COMPLETED: {},
    Phase.FAILED: {},
    Phase.CANCELLED: {},
}

#: A worker that answers so has looked at nothing: it was not tried (A3).
UNTRIED: Final = frozenset({FaultKind.LOADING, FaultKind.NO_SLOT})

ENDED: Final = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED})


@attrs.define(eq=False)
class Attempt:
    """One entry of a request's trail: where it went, and how that ended."""

    assignment: AssignmentId
    worker: WorkerId
    granted_at: float
    was_ready: bool
    """The worker was in full trust when it got the job (A8)."""
    candidates: tuple[WorkerId, ...] = ()
    """Who else could have got it, at most a few of them (X3)."""
    fault: Fault | None = None


@attrs.define(eq=False)
class Attempts:
    """The attempts of one request, oldest first, and its phase.

    Invariants: ``current`` is set exactly in OFFERED, ASSIGNED and COMMITTED;
    no worker is in ``tried`` and current at once, ever again (A3).
    """

    request: RequestId
    phase: Phase = attrs.field(default=Phase.RECEIVED, init=False)
    trail: list[Attempt] = attrs.field(factory=list, init=False)
    tried: set[WorkerId] = attrs.field(factory=set, init=False)
    begun: int = attrs.field(default=0, init=False)
    """Attempts so far, also those that the trail no longer holds."""
    charged: int = attrs.field(default=0, init=False)
    """Attempts that count against ``attempts``; *loading* does not (A3)."""
    current: Attempt | None = attrs.field(default=None, init=False)

    def queue(self) -> None:
        """The job waits for its first permit."""
        self._fire(Event.QUEUE)

    def offer(
        self,
        worker: WorkerId,
        now: float,
        *,
        was_ready: bool,
        candidates: tuple[WorkerId, ...] = (),
    ) -> AssignmentId:
        """Start the next attempt, on *worker*, chosen among *candidates*.

        Raises:
            LocalError: not QUEUED, or *worker* was tried before.
        """
        if worker in self.tried:
            raise LocalError(f"{self.request} goes back to {worker}")
        self._fire(Event.OFFER)
        self.begun += 1
        assignment = AssignmentId(self.request, self.begun)
        self.current = Attempt(assignment, worker, now, was_ready, candidates)
        self.trail.append(self.current)
        self.charged += 1
        return assignment

    def accept(self) -> None:
        """The worker answered with a 200 head."""
        self._fire(Event.ACCEPT)

    def commit(self) -> None:
        """The client has the first delta: no failover from here (A2)."""
        self._fire(Event.COMMIT)

    def move(self, fault: Fault, *, tried: bool) -> None:
        """The attempt failed before commit, and the job waits for another.

        Args:
            fault: why.
            tried: the worker is out for this request and the attempt counts. Of
                those that do not count the trail keeps the first one of each
                worker and kind: there is no limit on how often they happen.
        """
        self._fire(Event.MOVE)
        attempt = self._end(fault)
        if tried:
            self.tried.add(attempt.worker)
        else:
            self.charged -= 1
            if any(
                (a.worker, a.fault and a.fault.kind) == (attempt.worker, fault.kind)
                for a in self.trail[:-1]
            ):
                self.trail.pop()

    def complete(self) -> None:
        """The whole answer was handed over."""
        self._fire(Event.COMPLETE)
        self.current = None

    def fail(self, fault: Fault) -> None:
        """The request is over without a whole answer."""
        self._fire(Event.FAIL)
        if self.current is not None:
            self._end(fault)

    def cancel(self) -> None:
        """The client is gone, or an operator ended the request (A7)."""
        self._fire(Event.CANCEL)
        self.current = None

    def first_cause(self) -> Fault | None:
        """The fault to show: the first one (A3) of a worker that was tried."""
        return next(
            (
                a.fault
                for a in self.trail
                if a.fault is not None and a.fault.kind not in UNTRIED
            ),
            None,
        )

    def _end(self, fault: Fault) -> Attempt:
        attempt = self.current
        if attempt is None:
            raise LocalError(f"{self.request}: no attempt to end")
        attempt.fault = fault
        self.current = None
        return attempt

    def _fire(self, event: Event) -> None:
        try:
            self.phase = TRANSITIONS[self.phase][event]
        except KeyError:
            raise LocalError(
                f"request {self.request}: {event.name} while {self.phase.name}"
            ) from None
