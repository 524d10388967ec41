"""All requests, all workers, one machine: events in, commands out.

Every call is one event; it changes the state at once and returns what the
shell must do about it. Rule 1: a permit leaves and comes back only here (S2).
Rule 2: this file knows no HTTP, no JSON, no Trio and no clock of its own:
``now`` is seconds on the caller's. Rules A, S and L of the contract.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

import attrs

from router.assignment import UNTRIED, Attempt, Attempts, Phase
from router.budget import RetryBudget
from router.commands import (
    Check,
    Command,
    Empty,
    Grant,
    Lose,
    Refuse,
    Rest,
    Settle,
)
from router.crew import REST_MAX_S, Crew, Member
from router.errors import Fault, FaultKind, LocalError
from router.failover import over_at_once, verdict
from router.fence import Fence
from router.fence import State as FenceState
from router.ids import AssignmentId, RequestId, WorkerId
from router.lifecycle import COMING, Event, State
from router.messages import Discovery, Probe
from router.placement import choose
from router.settings import RouterSettings, WaitSettings
from router.waitingroom import WaitingRoom

INF: Final = float("inf")
#: Seconds to offer as Retry-After while nothing is known of when.
COME_BACK_S: Final = 1.0
#: Longest rest of a worker that is waited out, in seconds, where ``queue_ms`` doesn't
#: say how long a request may wait. Of a rest this short the client is better not
#: told: it would come back in whole seconds, at the end of the line, and gives up
#: after a few times. Of a longer one it may make use elsewhere.
REST_WAIT_S: Final = 5.0
#: Candidates of a grant that are remembered for the request's receipt (X3).
CANDIDATES_MAX: Final = 8


#: What the client did wrong is the same wherever it was tried.
_CLIENTS_OWN: Final = frozenset({FaultKind.REJECTED, FaultKind.CONTEXT_LENGTH})
#: The status whose client is told when to come back.
_UNAVAILABLE: Final = 503
#: These make the worker's keeper look at once, not at its next round.
_SUSPICIOUS: Final = frozenset(
    {FaultKind.CONNECT, FaultKind.STREAM_CLOSED_EARLY, FaultKind.MODEL_GONE}
)


@attrs.define(eq=False)
class Entry:
    """One live request in the fleet."""

    target: str
    attempts: Attempts
    fence: Fence
    received_at: float
    queue_by: float
    """When waiting ends with ``queue_timeout``; inf: never. Later by what the job has
    run for on workers that failed it."""
    once: bool = False
    """It is given to a worker that has room now, or to none."""
    load_by: float = attrs.field(default=INF, init=False)
    """When waiting for a worker that is coming up ends."""
    loading_by: float = attrs.field(default=INF, init=False)
    """When answers of *loading* stop being waited out (W4)."""
    owed: list[WorkerId] = attrs.field(factory=list, init=False)
    """Who answered 500; the blame waits for a second opinion (A4)."""


class Fleet:
    """The machine. See the module's docstring for its manner."""

    def __init__(
        self, settings: RouterSettings, waits: WaitSettings, rng: random.Random
    ) -> None:
        """Start without workers. *rng* spreads the rests of workers."""
        self._attempts_max = settings.attempts
        self._queue_s = settings.queue_ms / 1000 or INF
        self._load_wait_s = waits.load_wait_ms / 1000
        self._crew = Crew(settings.suspect_after, rng)
        self.requests: dict[RequestId, Entry] = {}
        self.room = WaitingRoom(settings.queue_limit)
        self.budget = RetryBudget()
        self._strangers_until = -INF
        self._grants = 0
        self._spell_s = 1.0
        """Smoothed seconds that a request holds its permit (Retry-After)."""

    # --- workers -----------------------------------------------------------

    @property
    def members(self) -> Mapping[WorkerId, Member]:
        """All workers by name, those that are leaving included."""
        return self._crew.members

    @property
    def models(self) -> Mapping[str, list[Member]]:
        """Every model in the table, and the workers that name it (O6)."""
        return self._crew.serving

    def add_worker(
        self,
        worker: WorkerId,
        now: float,
        *,
        slots: int | None = None,
        models: tuple[str, ...] = (),
        settle_s: float = 0.0,
        pin_slots: bool = False,
    ) -> None:
        """Take *worker* in; it serves once a probe answers.

        Raises:
            LocalError: the name is taken.
        """
        self._crew.add(
            worker,
            now,
            slots=slots,
            models=models,
            settle_s=settle_s,
            pin_slots=pin_slots,
        )

    def answered(self, worker: WorkerId, found: Discovery, now: float) -> list[Command]:
        """A probe found *worker* ready and learned what it is (L9)."""
        member = self.members[worker]
        out: list[Command] = []
        if self._crew.restarted(member, found):
            # First of all: who waits comes after those that end here, and one
            # at a time (S7).
            member.renew()
            member.distrust()
            fault = Fault(FaultKind.WORKER_RESTARTED, "The worker was restarted.")
            out += self.cut(worker, fault, now)
            for assignment in list(member.settling):
                member.settled(assignment)
        named = dict(member.models)
        served = member.serving
        self._crew.discover(member, found, now)
        self._after(member, now, out, named)
        if member.serving and not (served and named == member.models):
            # It came up: who waits for it from here on waits for a slot alone (S4).
            self._refuse_hopeless(member.models, now, out)
        return out

    def learned(
        self,
        worker: WorkerId,
        event: Event,
        now: float,
        *,
        reason: str | None = None,
        detail: str = "",
    ) -> list[Command]:
        """Something else was learned of *worker*; see ``lifecycle.Event``."""
        member = self.members[worker]
        named = dict(member.models)
        member.life.fire(event, now, reason=reason, detail=detail)
        member.barred_until = 0.0
        if event is Event.REMOVE:
            self._crew.retire(member)
        out: list[Command] = []
        self._after(member, now, out, named)
        return out

    def down(
        self, worker: WorkerId, probe: Probe, event: Event, now: float
    ) -> list[Command]:
        """The process of *worker* is not up: it comes up again, or can't (L8).

        Its slots went with it: what runs on them ends, what settles has settled.
        """
        member = self.members[worker]
        named = dict(member.models)
        # First of all, so that no waiter is sent after those that end here.
        member.life.fire(event, now, reason=probe.reason, detail=probe.detail)
        member.started_at = None
        member.barred_until = 0.0
        member.renew()
        fault = Fault(
            FaultKind.SERVER_DIED, probe.died or "The worker's process ended."
        )
        out = self.cut(worker, fault, now)
        for assignment in list(member.settling):
            member.settled(assignment)
        self._after(member, now, out, named)
        return out

    def dispatch(self, worker: WorkerId, now: float) -> list[Command]:
        """Give *worker* the jobs it has room for; call when a rest is over."""
        out: list[Command] = []
        member = self.members.get(worker)
        if member is not None:
            self._dispatch(member, now, out)
        return out

    def rests_until(self, worker: WorkerId, now: float) -> float:
        """Say when ``dispatch`` must be called next for *worker*; inf: never."""
        member = self.members.get(worker)
        return INF if member is None else member.wakes_at(now)

    def settled(
        self, worker: WorkerId, assignment: AssignmentId, now: float
    ) -> list[Command]:
        """The slot of *assignment* is free again (S3). Idempotent."""
        member = self.members.get(worker)
        out: list[Command] = []
        if member is not None and assignment in member.settling:
            member.settled(assignment)
            self._after(member, now, out)
        return out

    def cut(self, worker: WorkerId, fault: Fault, now: float) -> list[Command]:
        """End every attempt on *worker* with *fault* (L5, L9)."""
        out: list[Command] = []
        for assignment in list(self.members[worker].held):
            out.append(Lose(assignment, fault))
            out += self.failed(assignment, fault, now)
        return out

    # --- requests ----------------------------------------------------------

    def submit(
        self, request: RequestId, target: str, now: float, *, once: bool = False
    ) -> list[Command]:
        """A request was received: grant it, let it wait, or refuse it.

        *once*: another router's (P3): it never waits here.

        Raises:
            LocalError: the id is in use.
        """
        if request in self.requests:
            raise LocalError(f"request {request} submitted twice")
        entry = Entry(
            target,
            Attempts(request),
            Fence(),
            now,
            queue_by=now + self._queue_s,
            once=once,
        )
        self.requests[request] = entry
        self.budget.request(now)
        entry.attempts.queue()
        out: list[Command] = []
        if self.room.depth(target):
            # A rest may have run out since: nobody overtakes the line.
            for member in self.models.get(target, ()):
                self._dispatch(member, now, out)
        self._place(entry, now, out, moved=False)
        return out

    def accepted(self, assignment: AssignmentId) -> None:
        """The worker answered with a 200 head. Too late: changes nothing."""
        entry = self._live(assignment)
        if entry is not None and entry.attempts.phase is Phase.OFFERED:
            member = self.members[_current(entry).worker]
            member.turned.pop(entry.target, None)
            member.lacking.pop(entry.target, None)
            entry.attempts.accept()

    def committed(self, assignment: AssignmentId) -> None:
        """The client has the first delta of *assignment*.

        Raises:
            LocalError: the assignment is not live: its fence let it through.
        """
        self._must_live(assignment).attempts.commit()

    def finished(
        self, assignment: AssignmentId, now: float, *, cut: bool = False
    ) -> list[Command]:
        """The whole answer of *assignment* was handed over.

        *cut*: the router ended it, and the engine has to settle (S3). The
        caller closes the upstream itself.

        Raises:
            LocalError: the assignment is not live: its fence let it through.
        """
        entry = self._must_live(assignment)
        attempt = _current(entry)
        member = self.members[attempt.worker]
        entry.attempts.complete()
        self._forget(entry)
        out: list[Command] = []
        self._release(member, assignment, now, out, over=not cut)
        self._spell_s += 0.1 * (now - attempt.granted_at - self._spell_s)
        self._crew.praise(member, now)
        if member.rest_until > now:
            # A suspect's rest is over with this; what it asked for itself is not.
            out.append(Rest(member.id, member.wakes_at(now)))
        self._blame_owed(entry, now, out)
        self._after(member, now, out)
        return out

    def failed(
        self, assignment: AssignmentId, fault: Fault, now: float
    ) -> list[Command]:
        """The attempt is over without its end: move the job or refuse it.

        A fault of an assignment that is not live any more changes nothing (F4).
        """
        entry = self._live(assignment)
        if entry is None:
            return []
        out: list[Command] = []
        attempt = _current(entry)
        member = self.members[attempt.worker]
        named = dict(member.models)
        silent = entry.fence.next_index == 0
        entry.fence.revoke()
        self._release(member, assignment, now, out, over=over_at_once(fault))
        if fault.kind is FaultKind.SERVER_ERROR:
            entry.owed.append(member.id)
        elif fault.kind is FaultKind.NO_SLOT:
            if self._crew.no_slot(member, entry.target, attempt.granted_at, now):
                out.append(Rest(member.id, member.wakes_at(now)))
        elif fault.kind is FaultKind.MODEL_GONE:
            if self._crew.model_gone(member, entry.target, attempt.granted_at, now):
                out.append(Rest(member.id, member.wakes_at(now)))
        elif self._crew.note(member, fault, now, silent=silent):
            out.append(Rest(member.id, member.rest_until))
        if fault.kind in _SUSPICIOUS:
            out.append(Check(member.id))
        self._move_or_end(entry, attempt, fault, now, out)
        self._after(member, now, out, named)
        return out

    def leave(self, request: RequestId, now: float) -> list[Command]:
        """The client is gone, or an operator ended *request* (A7).

        Nothing happens to a request that is over. The caller closes the
        upstream itself.
        """
        entry = self.requests.get(request)
        if entry is None:
            return []
        out: list[Command] = []
        attempt = entry.attempts.current
        if request in self.room:
            self.room.leave(request)
        entry.attempts.cancel()
        self._forget(entry)
        if attempt is not None:
            member = self.members[attempt.worker]
            self._release(member, attempt.assignment, now, out, over=False)
            self._after(member, now, out)
        return out

    def waits_until(self, request: RequestId) -> float:
        """Say when ``expire`` must be called for a waiting request; inf: never."""
        entry = self.requests.get(request)
        if entry is None or request not in self.room:
            return INF
        return min(entry.queue_by, entry.load_by)

    def expire(self, request: RequestId, now: float) -> list[Command]:
        """Refuse a waiter whose time is over; nothing happens to others."""
        out: list[Command] = []
        if now < self.waits_until(request):
            return out
        entry = self.requests[request]
        self._hopeless(entry, now)  # sets load_by anew
        if now < self.waits_until(request):
            # A rest has ended meanwhile: now it waits for a slot alone.
            return out
        if now >= entry.queue_by:
            kind, words = FaultKind.QUEUE_TIMEOUT, "No slot was free in time."
        else:
            kind, words = FaultKind.MODEL_LOADING, "The model is still loading."
        wait = self.retry_after(entry.target)
        # A job that was moved is told why it had to wait at all (A3).
        first = entry.attempts.first_cause()
        self._refuse(entry, first or Fault(kind, words, retry_after=wait), now, out)
        return out

    def refuse_waiting(self, fault: Fault, now: float) -> list[Command]:
        """Refuse every waiter with *fault*: the router is stopping (D3)."""
        out: list[Command] = []
        for request in self.room.everybody():
            self._refuse(self.requests[request], fault, now, out)
        return out

    # --- questions ---------------------------------------------------------

    def await_strangers(self, until: float) -> None:
        """Workers that nobody has listed may come until *until* (O6, P1)."""
        self._strangers_until = until

    def still_unknown(self, now: float) -> bool:
        """Say whether a worker that was never seen may yet name models (O6)."""
        return now < self._strangers_until or any(
            not member.wanted_models
            and not member.seen
            and member.life.state in COMING
            and now - member.added_at < self._load_wait_s
            for member in self.members.values()
        )

    def ready_for(self, target: str) -> bool:
        """Say whether a worker of *target* is being offered work."""
        return any(m.serves(target) for m in self.models.get(target, ()))

    def could_move(self, request: RequestId, now: float) -> bool:
        """Say whether another worker than its present one had room for *request*."""
        entry = self.requests.get(request)
        attempt = None if entry is None else entry.attempts.current
        if entry is None or attempt is None:
            return False
        return any(
            m.id != attempt.worker and m.has_room(now) and m.takes(entry.target, now)
            for m in self._untried(entry)
        )

    def free(self, target: str, now: float) -> int:
        """Count the permits that a job for *target* could have at once."""
        return sum(
            max(0, m.limit - m.busy)
            for m in self.models.get(target, ())
            if m.rests_from(target) <= now
        )

    def retry_after(self, target: str) -> float:
        """Estimate seconds until a newcomer for *target* would find a slot."""
        slots = sum(m.slots for m in self.models.get(target, ()) if m.serving)
        ahead = self.room.depth(target) + 1
        return min(REST_MAX_S, max(COME_BACK_S, ahead * self._spell_s / max(1, slots)))

    # --- placing -----------------------------------------------------------

    def _place(
        self, entry: Entry, now: float, out: list[Command], *, moved: bool
    ) -> None:
        """Grant, let wait or refuse a QUEUED entry that is in no line."""
        attempts = entry.attempts
        members = self.models.get(entry.target, ())
        best = choose(
            (m for m in members if m.takes(entry.target, now)), attempts.tried, now
        )
        if best is not None:
            self._grant(entry, best, now, out)
            return
        refusal = self._hopeless(entry, now)
        if entry.once and refusal is None:
            refusal = Fault(FaultKind.NO_SLOT, "All slots of the worker are taken.")
        if refusal is None and not moved and self.room.full(entry.target):
            refusal = Fault(
                FaultKind.QUEUE_FULL,
                "All slots are busy and the queue is full.",
                retry_after=self.retry_after(entry.target),
            )
        if refusal is None:
            self.room.enter(attempts.request, entry.target, moved=moved)
        else:
            self._end(entry, attempts.first_cause() or refusal, now, out)

    def _hopeless(self, entry: Entry, now: float) -> Fault | None:
        """Say why no worker will take *entry*; None: one may. Sets ``load_by``.

        A suspect whose trial is under way may: its end tells (S6).
        """
        # How long a worker may rest for it to be waited for.
        rested_by = now + REST_WAIT_S if entry.queue_by == INF else entry.queue_by
        rested_by = max(now, rested_by)
        shortest = INF
        coming = False
        for member in self._untried(entry):
            if member.serves(entry.target):
                rests = member.rests_from(entry.target)
                if rests <= rested_by:
                    entry.load_by = INF
                    return None
                shortest = min(shortest, rests - now)
            coming = coming or member.comes(entry.target)
        if coming:
            entry.load_by = min(entry.load_by, now + self._load_wait_s)
            return None
        return Fault(
            FaultKind.NO_WORKER,
            "No worker for this model is available.",
            retry_after=COME_BACK_S if shortest == INF else shortest,
        )

    def _untried(self, entry: Entry) -> Iterator[Member]:
        tried = entry.attempts.tried
        return (m for m in self.models.get(entry.target, ()) if m.id not in tried)

    def _grant(
        self, entry: Entry, member: Member, now: float, out: list[Command]
    ) -> None:
        trusted = member.life.state is State.READY and member.ramp is None
        could = (m.id for m in self._untried(entry) if m.serving)
        assignment = entry.attempts.offer(
            member.id,
            now,
            was_ready=trusted,
            candidates=tuple(islice(could, CANDIDATES_MAX)),
        )
        member.take(assignment, entry.target)
        entry.fence.assign(assignment)
        entry.load_by = INF
        self._grants += 1
        member.last_grant = self._grants
        out.append(Grant(assignment, member.id, member.pins.get(assignment)))

    def _dispatch(self, member: Member, now: float, out: list[Command]) -> None:
        """Hand *member*'s free permits to whoever is next."""

        def fits(request: RequestId) -> bool:
            return member.id not in self.requests[request].attempts.tried

        while self.room and member.has_room(now):
            # Where others use it too, our part of each model has a room of its own.
            open_for = [m for m in member.models if member.takes(m, now)]
            request = self.room.first(open_for, fits)
            if request is None:
                return
            self.room.leave(request)
            self._grant(self.requests[request], member, now, out)

    def _after(
        self,
        member: Member,
        now: float,
        out: list[Command],
        named: Iterable[str] = (),
    ) -> None:
        """Draw the consequences of a change in *member*, which named *named*."""
        self._dispatch(member, now, out)
        if self.room:
            # Who waits for a model that it no longer names may wait for nobody.
            looked_at = dict.fromkeys(m for m in named if m not in member.models)
            whole = member.shares is None and member.serving
            if not whole or member.wakes_at(now) < INF:
                looked_at |= member.models
            self._refuse_hopeless(looked_at, now, out)
        if member.life.state is State.GONE and not member.busy:
            self._crew.retire(member)
        elif member.life.state is State.DRAINING and not member.busy:
            out.append(Empty(member.id))

    def _refuse_hopeless(
        self, targets: Iterable[str], now: float, out: list[Command]
    ) -> None:
        """Refuse who waits for one of *targets* and can get no worker."""
        for target in targets:
            for request in self.room.waiting(target):
                if request not in self.room:
                    # The end of one before it made a suspect, and so came here.
                    continue
                entry = self.requests[request]
                refusal = self._hopeless(entry, now)
                if refusal is not None:
                    first = entry.attempts.first_cause()
                    self._refuse(entry, first or refusal, now, out)

    # --- ending ------------------------------------------------------------

    def _release(
        self,
        member: Member,
        assignment: AssignmentId,
        now: float,
        out: list[Command],
        *,
        over: bool,
    ) -> None:
        """Give a permit back, or let it settle (S3)."""
        if over or member.settle_s == 0:
            member.give_back(assignment)
        else:
            member.let_go(assignment, now)
            out.append(Settle(member.id))

    def _move_or_end(
        self,
        entry: Entry,
        attempt: Attempt,
        fault: Fault,
        now: float,
        out: list[Command],
    ) -> None:
        attempts = entry.attempts
        untried = fault.kind in UNTRIED
        if fault.kind is FaultKind.LOADING:
            entry.loading_by = min(entry.loading_by, now + self._load_wait_s)
        ends = verdict(
            attempts,
            attempt,
            fault,
            attempts_max=self._attempts_max,
            may_wait_for_loading=now < entry.loading_by,
            has_wider=self._crew.has_wider(attempt.worker, entry.target),
            spend=lambda: self.budget.take(now),
        )
        if ends is not None:
            if ends.kind is FaultKind.REJECTED:
                entry.owed.clear()
            self._end(entry, ends, now, out, cause=fault)
            return
        attempts.move(fault, tried=not untried)
        if not untried:
            # The limit is for waiting: what it ran for elsewhere is no part of it.
            entry.queue_by += now - attempt.granted_at
        if fault.kind is FaultKind.CONTEXT_LENGTH:
            attempts.tried |= self._crew.narrower(attempt.worker, entry.target)
        self._place(entry, now, out, moved=True)

    def _end(
        self,
        entry: Entry,
        fault: Fault,
        now: float,
        out: list[Command],
        *,
        cause: Fault | None = None,
    ) -> None:
        """End a request that is in no line; *fault* is for its client."""
        entry.attempts.fail(cause or fault)
        self._forget(entry)
        out.append(Refuse(entry.attempts.request, _told(fault, entry.attempts)))
        self._blame_owed(entry, now, out)

    def _refuse(
        self, entry: Entry, fault: Fault, now: float, out: list[Command]
    ) -> None:
        """End a request that waits."""
        self.room.leave(entry.attempts.request)
        self._end(entry, fault, now, out)

    def _blame_owed(self, entry: Entry, now: float, out: list[Command]) -> None:
        """No second worker gave the same 500: it was the workers' (A4)."""
        for worker in entry.owed:
            member = self.members.get(worker)
            if member is not None and self._crew.blame(member, now):
                out.append(Rest(worker, member.rest_until))
                self._refuse_hopeless(member.models, now, out)
        entry.owed.clear()

    def _forget(self, entry: Entry) -> None:
        if entry.fence.state is not FenceState.CLOSED:
            entry.fence.close()
        del self.requests[entry.attempts.request]

    def _live(self, assignment: AssignmentId) -> Entry | None:
        entry = self.requests.get(assignment.request)
        if entry is None or entry.attempts.current is None:
            return None
        live = entry.attempts.current.assignment == assignment
        return entry if live else None

    def _must_live(self, assignment: AssignmentId) -> Entry:
        entry = self._live(assignment)
        if entry is None:
            raise LocalError(f"{assignment} is not live")
        return entry


def _current(entry: Entry) -> Attempt:
    attempt = entry.attempts.current
    if attempt is None:
        raise LocalError(f"{entry.attempts.request} has no attempt")
    return attempt


def _told(fault: Fault, attempts: Attempts) -> Fault:
    """Give *fault* as its client is told it: with the list of attempts, where
    there were several (A3), and when to come back, where that is of use (O5)."""
    if len(attempts.trail) > 1 and fault.kind not in _CLIENTS_OWN:
        tried = ", ".join(
            f"{a.worker} ({a.fault.kind.value})" for a in attempts.trail if a.fault
        )
        fault = attrs.evolve(fault, message=f"{fault.message} Tried: {tried}.")
    if fault.retry_after is None and fault.row.status == _UNAVAILABLE:
        fault = attrs.evolve(fault, retry_after=COME_BACK_S)
    return fault
