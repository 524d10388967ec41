"""The whole fleet under random events, held to the contract's invariants.

The machine plays the shell: it carries out commands, and it keeps its own
books of who has which permit, in plain sets.
"""

import random

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from router.commands import Command, Grant, Lose, Refuse
from router.errors import FAULTS, Fault, FaultKind
from router.fleet import Fleet
from router.ids import AssignmentId, RequestId, WorkerId
from router.lifecycle import Event, State
from router.messages import Discovery, Probe, ProbeResult
from router.settings import RouterSettings, WaitSettings

WORKERS = [WorkerId(name) for name in ("a", "b", "c")]
SLOTS = {WORKERS[0]: 1, WORKERS[1]: 2, WORKERS[2]: 3}
MODELS = {
    WORKERS[0]: ("m",),
    WORKERS[1]: ("m", "n"),
    WORKERS[2]: ("n",),
}
WORKER_FAULTS = [
    FaultKind.CONNECT,
    FaultKind.DECLINED,
    FaultKind.LOADING,
    FaultKind.UNAUTHORIZED,
    FaultKind.MODEL_GONE,
    FaultKind.CONTEXT_LENGTH,
    FaultKind.REJECTED,
    FaultKind.SERVER_ERROR,
    FaultKind.PROTOCOL,
    FaultKind.WAIT_TIMEOUT,
    FaultKind.STALLED,
    FaultKind.STREAM_CLOSED_EARLY,
    FaultKind.ENGINE_ABORT,
    FaultKind.SERVER_DIED,
    FaultKind.INTERNAL,
]


class FleetMachine(RuleBasedStateMachine):
    """Random arrivals, answers, losses, probes, drains and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.models = dict(MODELS)
        self.fleet = Fleet(
            RouterSettings(queue_limit=4, queue_ms=8_000),
            WaitSettings(load_wait_ms=6_000),
            random.Random(0),
        )
        self.running: dict[AssignmentId, WorkerId] = {}
        self.committed: set[RequestId] = set()
        self.past: list[AssignmentId] = []
        self.places: dict[RequestId, list[WorkerId]] = {}
        self.not_tried: dict[RequestId, set[WorkerId]] = {}
        self.live: set[RequestId] = set()
        self.granted_at: dict[AssignmentId, float] = {}
        self.asked: dict[RequestId, tuple[str, float]] = {}
        self.born = 0
        for worker in WORKERS:
            pins = worker == WORKERS[0]
            self.fleet.add_worker(worker, self.now, settle_s=1.0, pin_slots=pins)
            self.answer(worker)

    def play(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Grant(assignment=assignment, worker=worker, slot=slot):
                    request = assignment.request
                    assert (slot is None) is (worker != WORKERS[0])
                    tried = self.places.setdefault(request, [])
                    assert worker not in tried, "A3: goes back"
                    assert request not in self.committed, "A2: moved after commit"
                    assert assignment not in self.running
                    self.running[assignment] = worker
                    self.granted_at[assignment] = self.now
                    tried.append(worker)
                case Refuse(request=request, fault=fault):
                    assert request in self.live, "refused twice"
                    if fault.kind is FaultKind.NO_WORKER:
                        self.nobody_comes_in_time(request)
                    self.live.discard(request)
                    assert fault.kind in FAULTS
                case Lose(assignment=assignment):
                    self.running.pop(assignment)
                    self.past.append(assignment)
                    self.ran(assignment)
                case _:
                    pass

    def nobody_comes_in_time(self, request: RequestId) -> None:
        """S4: no worker rests so shortly that *request* could have waited for it."""
        model, queue_by = self.asked[request]
        for member in self.fleet.models.get(model, ()):
            if member.serving and member.id not in self.places.get(request, ()):
                assert member.rests_from(model) > max(self.now, queue_by)

    def answer(self, worker: WorkerId, *, started_at: float = 1_000.0) -> None:
        found = Discovery(
            self.models[worker],
            SLOTS[worker],
            1024 * SLOTS[worker],
            started_at=started_at,
        )
        self.play(self.fleet.answered(worker, found, self.now))

    def ran(self, assignment: AssignmentId) -> None:
        """S4: what a job ran for on a worker is no part of its time in the queue."""
        model, queue_by = self.asked[assignment.request]
        ran_for = self.now - self.granted_at[assignment]
        self.asked[assignment.request] = model, queue_by + ran_for

    def pick(self, seed: int) -> AssignmentId:
        return sorted(self.running)[seed % len(self.running)]

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for request in sorted(self.live):
            if self.fleet.waits_until(request) <= self.now:
                self.play(self.fleet.expire(request, self.now))
        for worker in WORKERS:
            self.play(self.fleet.dispatch(worker, self.now))

    @rule(model=st.sampled_from(["m", "n", "nobody's"]))
    def submit(self, model: str) -> None:
        self.born += 1
        request = RequestId(f"r{self.born:04}")
        self.live.add(request)
        self.asked[request] = (model, self.now + 8.0)
        self.play(self.fleet.submit(request, model, self.now))

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 50))
    def accept(self, seed: int) -> None:
        self.fleet.accepted(self.pick(seed))

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 50))
    def commit(self, seed: int) -> None:
        assignment = self.pick(seed)
        if assignment.request not in self.committed:
            self.fleet.accepted(assignment)
            self.fleet.requests[assignment.request].fence.sent()
            self.fleet.committed(assignment)
            self.committed.add(assignment.request)

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 50))
    def finish(self, seed: int) -> None:
        assignment = self.pick(seed)
        del self.running[assignment]
        self.past.append(assignment)
        self.live.discard(assignment.request)
        self.fleet.accepted(assignment)
        self.play(self.fleet.finished(assignment, self.now))

    @precondition(lambda self: self.running)
    @rule(
        seed=st.integers(0, 50),
        kind=st.sampled_from(WORKER_FAULTS),
        status=st.sampled_from([None, 400, 500, 503]),
        retry_after=st.sampled_from([None, 2.0, 90.0]),
    )
    def fail(
        self, seed: int, kind: FaultKind, status: int | None, retry_after: float | None
    ) -> None:
        assignment = self.pick(seed)
        worker = self.running.pop(assignment)
        self.past.append(assignment)
        if kind is FaultKind.LOADING:
            self.places[assignment.request].remove(worker)
        else:
            self.ran(assignment)
        fault = Fault(kind, "x", status=status, retry_after=retry_after)
        self.play(self.fleet.failed(assignment, fault, self.now))

    @precondition(lambda self: self.running)
    @rule(retry_after=st.sampled_from([None, 0.0, 2.0, 7.0, 90.0]))
    def everybody_declines(self, retry_after: float | None) -> None:
        fault = Fault(FaultKind.DECLINED, "x", status=503, retry_after=retry_after)
        for assignment in sorted(self.running):
            del self.running[assignment]
            self.past.append(assignment)
            self.ran(assignment)
            self.play(self.fleet.failed(assignment, fault, self.now))

    @rule(trials=st.integers(1, 8))
    def every_trial_fails(self, trials: int) -> None:
        fault = Fault(FaultKind.STALLED, "x")
        for _ in range(trials):
            for model in ("m", "n"):
                self.submit(model)
            for assignment in sorted(self.running):
                del self.running[assignment]
                self.past.append(assignment)
                self.ran(assignment)
                self.play(self.fleet.failed(assignment, fault, self.now))
            self.time_passes(3.0)

    @precondition(lambda self: self.past)
    @rule(seed=st.integers(0, 50))
    def a_late_event_changes_nothing(self, seed: int) -> None:
        assignment = self.past[seed % len(self.past)]
        fault = Fault(FaultKind.STREAM_CLOSED_EARLY, "late")

        self.fleet.accepted(assignment)
        assert self.fleet.failed(assignment, fault, self.now) == []

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 50))
    def leave(self, seed: int) -> None:
        request = sorted(self.live)[seed % len(self.live)]
        self.live.discard(request)
        for assignment in [a for a in self.running if a.request == request]:
            del self.running[assignment]
            self.past.append(assignment)
        self.play(self.fleet.leave(request, self.now))

    @rule(worker=st.sampled_from(WORKERS))
    def settle(self, worker: WorkerId) -> None:
        for assignment in list(self.fleet.members[worker].settling):
            self.play(self.fleet.settled(worker, assignment, self.now))
            break

    @rule(worker=st.sampled_from(WORKERS), restarted=st.booleans())
    def probe_answers(self, worker: WorkerId, restarted: bool) -> None:
        self.answer(worker, started_at=1_000.0 + (self.born * 10 if restarted else 0))

    @rule(
        worker=st.sampled_from(WORKERS),
        models=st.sampled_from([("m",), ("m", "n"), ("n",), ("other",)]),
    )
    def its_models_change(self, worker: WorkerId, models: tuple[str, ...]) -> None:
        self.models[worker] = models
        self.answer(worker)

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 50))
    def a_model_that_is_named_is_not_there(self, seed: int) -> None:
        assignment = self.pick(seed)
        worker = self.running.pop(assignment)
        self.past.append(assignment)
        self.ran(assignment)
        fault = Fault(FaultKind.MODEL_GONE, "x", status=404)
        self.play(self.fleet.failed(assignment, fault, self.now))
        self.answer(worker)

    @rule(
        worker=st.sampled_from(WORKERS),
        event=st.sampled_from(
            [Event.MISSED, Event.LOADS, Event.UNFIT, Event.DRAIN, Event.UNDRAIN]
        ),
    )
    def probe_says_otherwise(self, worker: WorkerId, event: Event) -> None:
        state = self.fleet.members[worker].life.state
        if event is Event.UNDRAIN and state is not State.DRAINING:
            return
        self.play(self.fleet.learned(worker, event, self.now))

    @rule(
        worker=st.sampled_from(WORKERS),
        event=st.sampled_from([Event.RESTARTS, Event.UNFIT]),
    )
    def its_process_ends(self, worker: WorkerId, event: Event) -> None:
        self.play(self.fleet.down(worker, Probe(ProbeResult.STARTING), event, self.now))

        assert self.fleet.members[worker].busy == 0
        assert worker not in self.running.values()

    @invariant()
    def w2_each_permit_that_is_out_has_a_slot_of_its_own(self) -> None:
        for member in self.fleet.members.values():
            out = {*member.held, *member.settling} if member.pin_slots else set()
            assert set(member.pins) == out
            assert len(set(member.pins.values())) == len(out)
            assert all(0 <= slot < SLOTS[member.id] for slot in member.pins.values())

    @invariant()
    def s1_permits_never_exceed_the_slots(self) -> None:
        for member in self.fleet.members.values():
            out = len(member.held) + len(member.settling)
            assert out <= SLOTS[member.id]

    @invariant()
    def s2_every_permit_held_is_a_running_attempt(self) -> None:
        held = {
            (assignment, member.id)
            for member in self.fleet.members.values()
            for assignment in member.held
        }
        assert held == set(self.running.items())

    @invariant()
    def every_live_request_waits_or_runs_and_nothing_else_does(self) -> None:
        running = {a.request for a in self.running}
        waiting = set(self.fleet.room.everybody())
        assert running | waiting == self.live == set(self.fleet.requests)
        assert not running & waiting

    @invariant()
    def f3_the_fence_is_open_exactly_to_the_running_attempt(self) -> None:
        owners = {
            entry.fence.owner
            for entry in self.fleet.requests.values()
            if entry.fence.owner is not None
        }
        assert owners == set(self.running)

    @invariant()
    def s4_nobody_waits_while_a_permit_they_could_use_is_free(self) -> None:
        for member in self.fleet.members.values():
            if not member.has_room(self.now):
                continue
            for model in filter(lambda m: member.takes(m, self.now), member.models):
                for request in self.fleet.room.waiting(model):
                    tried = self.fleet.requests[request].attempts.tried
                    assert member.id in tried

    @invariant()
    def s4_nobody_waits_for_nothing(self) -> None:
        for request in self.fleet.room.everybody():
            entry = self.fleet.requests[request]
            hopes = [
                m
                for m in self.fleet.models.get(entry.target, ())
                if m.id not in entry.attempts.tried
                and (m.serving or m.life.state in {State.STARTING, State.LOADING})
            ]
            assert hopes or self.fleet.waits_until(request) < float("inf")

    @invariant()
    def s4_nobody_waits_for_long_rests_alone(self) -> None:
        for request in self.fleet.room.everybody():
            entry = self.fleet.requests[request]
            assert any(
                m.life.state in {State.STARTING, State.LOADING}
                or (
                    m.serving
                    and m.rests_from(entry.target) <= max(self.now, entry.queue_by)
                )
                for m in self.fleet.models.get(entry.target, ())
                if m.id not in entry.attempts.tried
            )

    def teardown(self) -> None:
        """S2: when all have left and settled, everything is at its baseline."""
        for request in sorted(self.live):
            self.fleet.leave(request, self.now)
        for member in self.fleet.members.values():
            for assignment in list(member.settling):
                self.fleet.settled(member.id, assignment, self.now)
            assert member.busy == 0
            assert not member.ghosts
        assert not self.fleet.requests
        assert len(self.fleet.room) == 0


TestFleetMachine = FleetMachine.TestCase
