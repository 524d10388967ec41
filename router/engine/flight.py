"""One request's life in this process: the shell around its fleet entry.

Deltas come in as calls from its source and leave as calls to its receiver:
judge, hand over, count, with no ``await`` between (F6). Everything else wakes
the request's own task, which looks at its clocks and waits again.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, Protocol

import attrs
import trio

from router.assignment import Attempts, Phase
from router.commands import Command, Grant
from router.engine.bell import Bell
from router.engine.sieving import SievedReceiver
from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.fence import Fence, Verdict
from router.fence import State as FenceState
from router.fleet import Fleet
from router.ids import AssignmentId, RequestId, WorkerId
from router.messages import (
    Delta,
    Finished,
    FinishReason,
    Job,
    Signal,
    SignalCode,
)
from router.ports import (
    EndsReasoning,
    Receiver,
    Source,
    SourcePhase,
    Taken,
    Worker,
)
from router.tally import Tally
from router.waiting import Budgets, Wait, WaitState

_NEXT: Final = Verdict.NEXT
#: Faults that no worker had a part in, or by which the router ended an answer
#: that went on: it closed the request (X3).
_OURS: Final = frozenset(
    {
        FaultKind.DRAINED,
        FaultKind.LOOP,
        FaultKind.TOOL_PARSE,
        FaultKind.QUEUE_FULL,
        FaultKind.QUEUE_TIMEOUT,
        FaultKind.MODEL_LOADING,
        FaultKind.NO_WORKER,
        FaultKind.MODEL_NOT_FOUND,
        FaultKind.SHUTTING_DOWN,
        FaultKind.INTERNAL,
    }
)
_MORE: Final = Taken.MORE
_COMMITTED: Final = FenceState.COMMITTED
#: Phases whose time may run out before that of the phase before them.
_SHORT: Final = frozenset({SourcePhase.OFFERED, SourcePhase.FINISHING})


@attrs.frozen
class Limits:
    """The waits of one router, in seconds; inf: off."""

    connect_s: float
    liveness_s: float
    first_delta_s: float
    usage_wait_s: float
    budgets: Budgets
    offer_s: float = 0.1

    @property
    def shortest_s(self) -> float:
        """The shortest wait that a phase of a source can have."""
        return min(self.connect_s, self.liveness_s, self.first_delta_s)


class Shell(Protocol):
    """What a flight needs of the router around it."""

    fleet: Fleet
    tally: Tally
    limits: Limits

    @property
    def workers(self) -> Mapping[WorkerId, Worker]:
        """The adapters by name."""

    @property
    def flights(self) -> "dict[RequestId, Flight]":
        """Requests under way; a flight enters and leaves by itself."""

    def apply(self, commands: Sequence[Command]) -> None:
        """Carry out what the fleet asks for."""

    def record(self, flight: "Flight") -> None:
        """Keep what is known of a request that has ended."""

    def report_bug(self, where: str, bug: Exception) -> None:
        """Log and count an exception that is kept to one request (L1)."""


class Flight:
    """A request under way. Implements ``ports.Delivery``.

    Whatever ends it goes through ``_end``, once; ``run`` then returns.
    """

    __slots__ = (
        "_bell",
        "_between_deltas",
        "_grant",
        "_receiver",
        "_router",
        "_sieved",
        "_signals",
        "_wait",
        "attempts",
        "client_ref",
        "closed_by",
        "delta_count",
        "departed_at",
        "ended_at",
        "fault",
        "fence",
        "first_delta_at",
        "granted_at",
        "job",
        "last_delta_at",
        "outcome",
        "phase_at_end",
        "received_at",
        "request",
        "source",
        "verdicts",
        "wait_state",
    )

    def __init__(
        self,
        router: Shell,
        request: RequestId,
        job: Job,
        receiver: Receiver,
        client_ref: str | None,
        now: float,
    ) -> None:
        """Take note; nothing is submitted before ``run``."""
        self.request = request
        self.job = job
        self.client_ref = client_ref
        self.received_at = now
        self.first_delta_at: float | None = None
        self.last_delta_at = now
        self.granted_at: float | None = None
        self.departed_at = now
        self.ended_at: float | None = None
        self.delta_count = 0
        self.outcome: str | None = None
        self.closed_by = ""
        self.phase_at_end = ""
        self.fault: Fault | None = None
        self.verdicts: dict[str, int] = {}
        self.wait_state: WaitState | None = None
        self.source: Source | None = None
        self.attempts = Attempts(request)
        self._router = router
        self._between_deltas = router.tally.between_deltas
        self._receiver = receiver
        self._sieved = receiver if isinstance(receiver, SievedReceiver) else None
        self._signals: tuple[Signal, ...] = ()
        self._bell = Bell()
        self._grant: Grant | None = None
        self._wait: Wait | None = None
        self.fence = Fence()
        receiver.attach(self._has_room, self.gone)

    def begin(self, *, once: bool = False) -> None:
        """Submit the request: it is live from here. Not a checkpoint.

        *once*: it never waits for a permit (P3).

        ``run`` must follow, or ``retire`` where it was refused at once.
        """
        router = self._router
        router.flights[self.request] = self
        commands = router.fleet.submit(
            self.request, self.job.target, self.received_at, once=once
        )
        entry = router.fleet.requests.get(self.request)
        if entry is not None:
            self.fence = entry.fence
            self.attempts = entry.attempts
        router.apply(commands)

    def retire(self) -> None:
        """Leave the router's books; what has not ended ends here. Once."""
        if self.outcome is None:
            self.gone()
        del self._router.flights[self.request]
        self._router.record(self)

    # --- the request's own task --------------------------------------------

    async def run(self) -> None:
        """See the request to its end, from its beginning where that is to come.

        A checkpoint, unless it is refused at once. Cancelled: the client
        counts as gone; fence, upstream and permit are let go at once.
        """
        try:
            if self.request not in self._router.flights:
                self.begin()
            while self.outcome is None:
                if self._grant is not None:
                    self._depart()
                    continue
                # If looking ended it, or got it a grant, the bell has rung.
                await self._bell.wait_until(self._look(trio.current_time()))
        finally:
            self.retire()

    def _depart(self) -> None:
        """Start the attempt that was granted."""
        grant, self._grant = self._grant, None
        if grant is None:
            raise LocalError(f"{self.request} departs without a grant")
        assignment = grant.assignment
        now = trio.current_time()
        if self.granted_at is None:
            self.granted_at = now
            self._router.tally.queue_wait.observe(now - self.received_at)
        self.departed_at = now
        self._wait = None
        self.wait_state = None
        if assignment.attempt > 1:
            self._receiver.restart()
        self._receiver.routed(grant.worker, assignment.attempt)
        try:
            self.source = self._router.workers[grant.worker].open(
                assignment, self.job, self, slot=grant.slot
            )
        except WorkerFailed as failed:
            self.failed(assignment, failed.fault)
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: it ends this request only
            self._router.report_bug("open", bug)
            self.failed(assignment, _internal())

    def _look(self, now: float) -> float:
        """Do what is due at *now*; say when to look again."""
        due = self._receiver.due(now)
        if due <= now:
            if self._receiver.tick(now) is Taken.GONE:
                self.fault = self.fault or Fault(
                    FaultKind.CLIENT_STALLED, "The client stopped reading."
                )
                self.gone()
                return now
            due = self._receiver.due(now)
        source = self.source
        if source is None:
            until = self._router.fleet.waits_until(self.request)
            if until <= now:
                self._router.apply(self._router.fleet.expire(self.request, now))
                return now
            return min(due, until)
        at, kind, words = self._limit(source)
        if at <= now and source.phase is SourcePhase.OFFERED:
            # A loop that was late is not an agent that is silent (P4).
            source.catch_up()
            if source is not self.source or source.phase is not SourcePhase.OFFERED:
                return now
            limits = self._router.limits
            # With nobody else to go to, a late answer is better than none.
            if (
                now < source.since + limits.connect_s
                and not self._router.fleet.could_move(self.request, now)
            ):
                return min(due, now + limits.offer_s)
        if at > now:
            if source.phase is SourcePhase.STREAMING:
                return min(due, at)
            # The phases that follow begin without waking this task; none of
            # them ends sooner than the shortest wait after it has begun.
            return min(due, at, now + self._router.limits.shortest_s)
        if kind is None:
            source.finish_now()
        else:
            self._give_up(Fault(kind, f"The worker {words}."))
        return now

    def _limit(self, source: Source) -> tuple[float, FaultKind | None, str]:
        """Say until when *source* may go on so, and the fault it then is; None:
        no fault, it need not be waited for any longer (M3)."""
        limits = self._router.limits
        phase = source.phase
        if phase is SourcePhase.FINISHING:
            return source.since + limits.usage_wait_s, None, ""
        if source.paused:
            # Our client does not read: not the worker's fault (W6).
            return inf, None, ""
        kind = FaultKind.STALLED
        if phase is SourcePhase.CONNECTING:
            kind = FaultKind.CONNECT
            at, words = source.since + limits.connect_s, "took no connection in time"
        elif phase is SourcePhase.OFFERED:
            kind = FaultKind.CONNECT
            at, words = source.since + limits.offer_s, "did not answer an offer in time"
        elif phase is SourcePhase.SENDING:
            at, words = source.last_byte_at, "stopped reading the request"
            at += limits.liveness_s
        elif phase is SourcePhase.STREAMING:
            at, words = source.last_byte_at, "stopped answering"
            at += limits.liveness_s
        else:
            # The silence before the head is the keeper's to judge (W2).
            at, words = inf, ""
        first = self.departed_at + limits.first_delta_s
        if first < at and self.fence.next_index == 0:
            at, words, kind = first, "gave no first delta in time", FaultKind.STALLED
        return at, kind, words

    # --- ports.Delivery: calls from the source -----------------------------

    def accepted(self, assignment: AssignmentId) -> None:
        """See ``ports.Delivery``."""
        self._router.fleet.accepted(assignment)
        if assignment == self.fence.owner:
            self.wait_state = None

    def progress(self, assignment: AssignmentId) -> None:
        """See ``ports.Delivery``."""
        source = self.source
        if source is None or assignment != self.fence.owner:
            return
        if source.phase is SourcePhase.STREAMING:
            # The silence before a head is over: another one, which an agent may fall
            # back to, is waited for from its own beginning (W3).
            self._wait = self.wait_state = None
        if source.phase in _SHORT:
            self._bell.ring()

    def deltas(self, assignment: AssignmentId, deltas: Sequence[Delta]) -> None:
        """See ``ports.Delivery``. Judge, hand over, count (F6). The hot path."""
        fence = self.fence
        if not fence.all_next(deltas):
            self._some_refused(assignment, deltas)
            return
        taken = self._receiver.take(deltas)
        source = self.source
        if taken is _MORE and source is not None and fence.state is _COMMITTED:
            count = len(deltas)
            fence.sent(count)
            # The worker's loop reads the clock once a wake, for all its sources.
            now = source.last_byte_at
            self._between_deltas.observe(now - self.last_delta_at)
            self.last_delta_at = now
            self.delta_count += count
            return
        self._took(taken, len(deltas))

    def _some_refused(self, assignment: AssignmentId, deltas: Sequence[Delta]) -> None:
        """Go through a batch that is not all NEXT; a gap ends the attempt (F5)."""
        taken: list[Delta] = []
        gap = False
        for delta in deltas:
            verdict = self.fence.judge(delta.assignment, delta.index, len(taken))
            if verdict is _NEXT:
                taken.append(delta)
                continue
            self._count(verdict)
            if verdict is Verdict.GAP:
                gap = True
                break
        if taken:
            self._took(self._receiver.take(taken), len(taken))
        if gap and self.fence.owner == assignment:
            self._give_up(Fault(FaultKind.PROTOCOL, "The worker left out a delta."))

    def _took(self, taken: Taken | Fault, count: int) -> None:
        """Count *count* deltas that were handed over, if the receiver took them."""
        if taken is Taken.GONE:
            self.gone()
            return
        if isinstance(taken, Fault):
            self._give_up(taken)
            return
        fence = self.fence
        receiver = self._receiver
        source = self.source
        now = source.last_byte_at if source is not None else trio.current_time()
        if receiver.buffered:
            fence.kept(count)
            first = self.first_delta_at is None
        else:
            first = fence.state is FenceState.OPEN
            fence.sent(count)
            if first and fence.owner is not None:
                self._router.fleet.committed(fence.owner)
        if first:
            self.first_delta_at = now
            self._router.tally.first_delta.observe(now - self.received_at)
            if not receiver.buffered:
                # From commit on the receiver keeps alive: a nearer deadline.
                self._bell.ring()
        else:
            self._between_deltas.observe(now - self.last_delta_at)
        self.last_delta_at = now
        self.delta_count += count
        if taken is not _MORE:
            self._heed()

    def _heed(self) -> None:
        """Do what the receiver's answer asks for: FULL, or STEER (J4-J6)."""
        sieved = self._sieved
        owner = self.fence.owner
        if sieved is not None and owner is not None:
            ending = sieved.ending(owner, self._end_reasoning)
            if isinstance(ending, Fault):
                self._give_up(ending)
                return
            if ending is not None:
                self._conclude(sieved, ending)
                return
            if not sieved.full:
                return
        if self.source is not None:
            self.source.pause()
            self._bell.ring()

    def _end_reasoning(self) -> int:
        source: object = self.source
        return source.end_reasoning() if isinstance(source, EndsReasoning) else 0

    def _conclude(self, sieved: SievedReceiver, finished: Finished) -> None:
        """End the answer by the router's own word, as a success."""
        source, self.source = self.source, None
        taken = sieved.conclude(finished)
        router = self._router
        now = trio.current_time()
        commands = router.fleet.finished(finished.assignment, now, cut=True)
        if source is not None:
            source.close()
        router.apply(commands)
        self._end_with(taken, "router")

    def finished(self, finished: Finished) -> None:
        """See ``ports.Delivery``."""
        assignment = finished.assignment
        if assignment != self.fence.owner:
            self._count_late()
            return
        self.source = None
        if finished.reason is FinishReason.LENGTH and self._sieved is None:
            words = "The answer ended at its limit of tokens."
            self._signals = (Signal(SignalCode.MAX_TOKENS_REACHED, words, 0),)
            finished = attrs.evolve(finished, signals=self._signals)
        taken = self._receiver.finish(finished)
        now = trio.current_time()
        self._router.apply(self._router.fleet.finished(assignment, now))
        self._end_with(taken, "worker")

    def _end_with(self, taken: Taken | Fault, closed_by: str) -> None:
        """Say how an answer ended whose end the receiver was told."""
        if isinstance(taken, Fault):
            self.fault = taken
            self._tell(taken)
            self._end("failed", _closer(taken))
            return
        gone = taken is Taken.GONE
        self._end("cancelled" if gone else "completed", "client" if gone else closed_by)

    def failed(self, assignment: AssignmentId, fault: Fault) -> None:
        """See ``ports.Delivery``."""
        if assignment != self.fence.owner:
            self._count_late()
            return
        self.source = None
        router = self._router
        router.apply(router.fleet.failed(assignment, fault, trio.current_time()))
        if self.outcome is None:
            router.tally.failovers[fault.kind.value] += 1
            self._bell.ring()

    # --- calls from the router ---------------------------------------------

    def granted(self, grant: Grant) -> None:
        """The fleet handed out a permit for this request."""
        self._grant = grant
        self._bell.ring()

    def lost(self, assignment: AssignmentId, fault: Fault) -> None:
        """The fleet has ended *assignment* with *fault*: close its upstream."""
        if self._grant is not None and self._grant.assignment == assignment:
            self._grant = None
        self._close_source()
        if self.request in self._router.fleet.requests:
            self._router.tally.failovers[fault.kind.value] += 1

    def refused(self, fault: Fault) -> None:
        """The fleet has ended the request; tell the client (A3)."""
        self.fault = fault
        self._close_source()
        self._tell(fault)
        self._end("failed", _closer(fault))

    def cancel(self, fault: Fault) -> None:
        """End the request from outside its client and its worker."""
        if self.outcome is not None:
            return
        self.fault = fault
        self._leave()
        self._tell(fault)
        cancelled = fault.kind is FaultKind.CANCELLED
        self._end("cancelled" if cancelled else "failed", "router")

    def gone(self) -> None:
        """The client is gone: nothing more is admitted from here on (A7, F6).

        Synchronous and first: fence, permit, upstream. Idempotent.
        """
        if self.outcome is not None:
            return
        tally = self._router.tally
        before = trio.current_time()
        self._leave()
        tally.disconnects[self.phase_at_end] += 1
        tally.cancel_latency.observe(trio.current_time() - before)
        self._end("cancelled", "client")

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What was said out of band, so far (J5)."""
        return self._signals if self._sieved is None else self._sieved.signals

    @property
    def silent_since(self) -> float:
        """When this request's silence before its head began (W2)."""
        return inf if self.source is None else self.source.last_byte_at

    @property
    def assignment(self) -> AssignmentId:
        """Its present attempt.

        Raises:
            LocalError: it has none.
        """
        owner = self.fence.owner
        if owner is None:
            raise LocalError(f"{self.request} is nowhere")
        return owner

    @property
    def said(self) -> WaitState | None:
        """What an agent says of this silence."""
        return None if self.source is None else self.source.said

    @property
    def partial_head(self) -> bool:
        """Part of a head has come."""
        return self.source is not None and self.source.partial_head

    @property
    def waited(self) -> float:
        """Seconds that ``wait_state`` has lasted without a break (W3)."""
        return 0.0 if self._wait is None else self._wait.lasted

    def polled(self, state: WaitState, polls: int) -> None:
        """Take *polls* of the silence before the head, mostly one (W3-W5)."""
        if self._wait is None:
            self._wait = Wait(self._router.limits.budgets)
        verdict = self._wait.poll(state, polls)
        self.wait_state = state
        self._router.tally.waits[state.value] += 1
        if isinstance(verdict, Fault):
            self._give_up(verdict)

    # --- endings -----------------------------------------------------------

    def _give_up(self, fault: Fault) -> None:
        """End the attempt from our side."""
        owner = self.fence.owner
        if owner is None:
            return
        source, self.source = self.source, None
        self.failed(owner, fault)
        if source is not None:
            source.close()

    def _leave(self) -> None:
        """Revoke, take the permit back, close the upstream: in this order."""
        router = self._router
        self.phase_at_end = self.phase_name()
        if self.request in router.fleet.requests:
            commands = router.fleet.leave(self.request, trio.current_time())
            self._close_source()
            router.apply(commands)
        self._grant = None

    def phase_name(self) -> str:
        """Say where the request is: an A1 phase, finer while it is offered."""
        if self.outcome is not None:
            # What it came to, though the fleet cancels all that the router ends.
            return self.outcome
        phase = self.attempts.phase
        source = self.source
        if phase is Phase.OFFERED and source is not None:
            return str(source.phase.value)
        return phase.value

    def _close_source(self) -> None:
        source, self.source = self.source, None
        if source is not None:
            source.close()

    def _tell(self, fault: Fault) -> None:
        try:
            self._receiver.fail(fault)
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: it ends this request only
            self._router.report_bug("fail", bug)

    def _end(self, outcome: str, closed_by: str) -> None:
        self.outcome = outcome
        self.closed_by = closed_by
        self.ended_at = trio.current_time()
        self._bell.ring()

    def _has_room(self) -> None:
        source = self.source
        if source is not None and source.paused:
            source.resume()
            self._bell.ring()

    def _count_late(self) -> None:
        """Count an end of an assignment that owns the fence no more (F4)."""
        self._count(Verdict.LATE if self.fence.owner is None else Verdict.STALE)

    def _count(self, verdict: Verdict) -> None:
        name = verdict.value
        self.verdicts[name] = self.verdicts.get(name, 0) + 1
        self._router.tally.verdicts[name] += 1


def _closer(fault: Fault) -> str:
    """Say who closed a request that failed with *fault* first."""
    return "router" if fault.kind in _OURS else "worker"


def _internal() -> Fault:
    return Fault(FaultKind.INTERNAL, "The router failed on this request.")
