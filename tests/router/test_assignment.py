"""One request's life over its attempts, rule by rule."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.assignment import ENDED, TRANSITIONS, Attempts, Event, Phase
from router.errors import Fault, FaultKind, LocalError
from router.ids import RequestId, WorkerId

A, B = WorkerId("a"), WorkerId("b")
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "gone")
LOADING = Fault(FaultKind.LOADING, "loading")


def offered(worker: WorkerId = A) -> Attempts:
    attempts = Attempts(RequestId("r"))
    attempts.queue()
    attempts.offer(worker, 0.0, was_ready=True)
    return attempts


def test_a1_the_table_is_the_contract() -> None:
    arrows = {
        (phase, event, to)
        for phase, row in TRANSITIONS.items()
        for event, to in row.items()
    }
    back = {(p, to) for p, event, to in arrows if event is Event.MOVE}

    assert back == {(Phase.OFFERED, Phase.QUEUED), (Phase.ASSIGNED, Phase.QUEUED)}
    assert all(not TRANSITIONS[phase] for phase in ENDED)


def test_a1_attempts_are_numbered_from_one_and_rise() -> None:
    attempts = offered()
    attempts.move(LOST, tried=True)
    second = attempts.offer(B, 1.0, was_ready=True)

    assert second.attempt == 2


def test_a2_a_committed_request_cannot_move() -> None:
    attempts = offered()
    attempts.accept()
    attempts.commit()

    with pytest.raises(LocalError):
        attempts.move(LOST, tried=True)

    assert attempts.phase is Phase.COMMITTED


def test_a3_a_job_never_returns_to_a_worker_it_has_tried() -> None:
    attempts = offered()
    attempts.move(LOST, tried=True)

    with pytest.raises(LocalError):
        attempts.offer(A, 1.0, was_ready=True)

    assert attempts.phase is Phase.QUEUED


def test_a3_a_worker_that_was_loading_was_not_tried_nor_charged() -> None:
    attempts = offered()
    attempts.move(LOADING, tried=False)

    assert attempts.charged == 0
    assert attempts.offer(A, 1.0, was_ready=True).attempt == 2


def test_a3_the_first_cause_is_the_first_fault() -> None:
    attempts = offered()
    attempts.move(LOST, tried=True)
    attempts.offer(B, 1.0, was_ready=True)
    attempts.fail(Fault(FaultKind.DECLINED, "full"))

    assert attempts.first_cause() is LOST
    assert [a.fault and a.fault.kind for a in attempts.trail] == [
        FaultKind.STREAM_CLOSED_EARLY,
        FaultKind.DECLINED,
    ]


def test_a3_a_worker_that_was_loading_is_no_first_cause() -> None:
    attempts = offered()
    attempts.move(LOADING, tried=False)
    assert attempts.first_cause() is None

    attempts.offer(B, 1.0, was_ready=True)
    attempts.fail(LOST)

    assert attempts.first_cause() is LOST


class AttemptsMachine(RuleBasedStateMachine):
    """Any order of events: the table alone decides."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = Attempts(RequestId("r"))
        self.workers = 0

    @rule(event=st.sampled_from(Event), again=st.booleans())
    def step(self, event: Event, again: bool) -> None:
        before = self.attempts.phase
        legal = TRANSITIONS[before].get(event)
        if event is Event.OFFER:
            self.workers += 1
        try:
            self.apply(event, again)
        except LocalError:
            assert legal is None
            assert self.attempts.phase is before
        else:
            assert self.attempts.phase is legal

    def apply(self, event: Event, again: bool) -> None:
        attempts = self.attempts
        match event:
            case Event.QUEUE:
                attempts.queue()
            case Event.OFFER:
                attempts.offer(WorkerId(f"w{self.workers}"), 0.0, was_ready=True)
            case Event.ACCEPT:
                attempts.accept()
            case Event.COMMIT:
                attempts.commit()
            case Event.MOVE:
                attempts.move(LOADING if again else LOST, tried=not again)
            case Event.COMPLETE:
                attempts.complete()
            case Event.FAIL:
                attempts.fail(LOST)
            case Event.CANCEL:
                attempts.cancel()

    @invariant()
    def an_attempt_is_current_exactly_while_a_worker_has_the_job(self) -> None:
        with_worker = {Phase.OFFERED, Phase.ASSIGNED, Phase.COMMITTED}
        has = self.attempts.current is not None
        assert has == (self.attempts.phase in with_worker)

    @invariant()
    def f2_attempt_numbers_strictly_increase(self) -> None:
        numbers = [a.assignment.attempt for a in self.attempts.trail]
        assert numbers == sorted(set(numbers))
        assert all(number <= self.attempts.begun for number in numbers)


TestAttemptsMachine = AttemptsMachine.TestCase
