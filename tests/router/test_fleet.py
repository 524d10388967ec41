"""Admission, failover and trust, rule by rule, on the pure machine."""

import random

import attrs
import pytest

from router.assignment import Phase
from router.commands import Check, Command, Grant, Lose, Refuse, Rest, Settle
from router.errors import Fault, FaultKind, LocalError
from router.fleet import Fleet
from router.ids import AssignmentId, RequestId, WorkerId
from router.lifecycle import Event, State
from router.messages import Discovery, Probe, ProbeResult
from router.settings import RouterSettings, WaitSettings

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "Closed.")
REFUSED = Fault(FaultKind.CONNECT, "refused")
FULL = Fault(FaultKind.DECLINED, "full", status=503)
LOADING = Fault(FaultKind.LOADING, "loading", status=503)
MODEL_GONE = Fault(FaultKind.MODEL_GONE, "no such model", status=404)
BAD = Fault(FaultKind.REJECTED, "bad", status=400)
BROKEN = Fault(FaultKind.SERVER_ERROR, "500", status=500, error_type="t")


def asks(seconds: float | None) -> Fault:
    """Of a worker that declines and, where not None, says for how long."""
    return Fault(FaultKind.DECLINED, "later", status=503, retry_after=seconds)


class Play:
    """A fleet, a clock, and short names for what happens to it."""

    def __init__(
        self,
        *workers: WorkerId,
        slots: int = 1,
        settle_s: float = 0.0,
        queue_limit: int = 3,
        queue_ms: int = 0,
        context: int | None = None,
    ) -> None:
        self.now = 100.0
        self.born = 0
        self.fleet = Fleet(
            RouterSettings(queue_limit=queue_limit, queue_ms=queue_ms),
            WaitSettings(load_wait_ms=5_000),
            random.Random(1),
        )
        for worker in workers:
            self.fleet.add_worker(worker, self.now, settle_s=settle_s)
            self.up(worker, slots=slots, context=context)

    def up(
        self,
        worker: WorkerId,
        *,
        slots: int | None = 1,
        models: tuple[str, ...] = ("m",),
        context: int | None = None,
        started_at: float | None = None,
    ) -> list[Command]:
        found = Discovery(models, slots, context, started_at=started_at)
        return self.fleet.answered(worker, found, self.now)

    def ask(self, model: str = "m") -> tuple[RequestId, list[Command]]:
        self.born += 1
        request = RequestId(f"r{self.born}")
        return request, self.fleet.submit(request, model, self.now)

    def placed(self, model: str = "m") -> tuple[AssignmentId, WorkerId]:
        _, commands = self.ask(model)
        return grant(commands)

    def finish(self, assignment: AssignmentId) -> list[Command]:
        self.fleet.accepted(assignment)
        return self.fleet.finished(assignment, self.now)

    def fail(self, assignment: AssignmentId, fault: Fault) -> list[Command]:
        return self.fleet.failed(assignment, fault, self.now)

    def state(self, worker: WorkerId) -> State:
        return self.fleet.members[worker].life.state


def grant(commands: list[Command]) -> tuple[AssignmentId, WorkerId]:
    (found,) = [c for c in commands if isinstance(c, Grant)]
    return found.assignment, found.worker


def refusal(commands: list[Command]) -> Fault:
    (found,) = [c for c in commands if isinstance(c, Refuse)]
    return found.fault


# --- permits ----------------------------------------------------------------


def test_s1_no_more_jobs_than_slots_are_placed() -> None:
    play = Play(A, slots=2)
    play.placed()
    play.placed()

    _, commands = play.ask()

    assert commands == []
    assert len(play.fleet.room) == 1


def test_s2_finishing_gives_the_permit_to_the_next_waiter() -> None:
    play = Play(A)
    first, _ = play.placed()
    waiting, _ = play.ask()

    granted, worker = grant(play.finish(first))

    assert (granted.request, worker) == (waiting, A)


def test_s2_a_permit_cannot_come_back_twice() -> None:
    play = Play(A)
    first, _ = play.placed()
    play.finish(first)

    with pytest.raises(LocalError):
        play.fleet.finished(first, play.now)


def test_s3_a_request_closed_early_keeps_its_permit_until_settled() -> None:
    play = Play(A, settle_s=1.0)
    first, _ = play.placed()
    waiting, _ = play.ask()

    assert play.fleet.leave(first.request, play.now) == [Settle(A)]
    assert play.fleet.members[A].busy == 1

    granted, _ = grant(play.fleet.settled(A, first, play.now))
    assert granted.request == waiting


def test_s3_a_finished_request_needs_no_settling() -> None:
    play = Play(A, settle_s=1.0)
    first, _ = play.placed()
    play.finish(first)

    assert play.fleet.members[A].busy == 0


def test_s3_settled_is_idempotent() -> None:
    play = Play(A, settle_s=1.0)
    first, _ = play.placed()
    play.fleet.leave(first.request, play.now)
    play.fleet.settled(A, first, play.now)

    assert play.fleet.settled(A, first, play.now) == []


# --- the waiting room -------------------------------------------------------


def test_s4_a_full_queue_refuses_with_a_retry_after() -> None:
    play = Play(A, queue_limit=1)
    play.placed()
    play.ask()

    fault = refusal(play.ask()[1])

    assert fault.kind is FaultKind.QUEUE_FULL
    assert fault.retry_after is not None
    assert fault.retry_after >= 1


def test_s4_a_waiter_that_leaves_is_never_dispatched() -> None:
    play = Play(A)
    first, _ = play.placed()
    gone, _ = play.ask()
    stays, _ = play.ask()
    play.fleet.leave(gone, play.now)

    granted, _ = grant(play.finish(first))

    assert granted.request == stays


def test_b129_leaving_in_the_tick_of_the_grant_gives_the_permit_on() -> None:
    play = Play(A)
    first, _ = play.placed()
    second, _ = play.ask()
    third, _ = play.ask()
    granted, _ = grant(play.finish(first))
    assert granted.request == second

    granted, _ = grant(play.fleet.leave(second, play.now))

    assert granted.request == third
    assert play.fleet.members[A].busy == 1


def test_s4_a_waiter_is_refused_when_its_time_in_the_queue_is_over() -> None:
    play = Play(A, queue_ms=2_000)
    play.placed()
    waiting, _ = play.ask()
    assert play.fleet.waits_until(waiting) == play.now + 2.0

    play.now += 2.0

    assert refusal(play.fleet.expire(waiting, play.now)).kind is FaultKind.QUEUE_TIMEOUT


def test_s4_a_job_waits_for_a_loading_worker_and_then_no_longer() -> None:
    play = Play(A)
    play.fleet.learned(A, Event.LOADS, play.now)
    waiting, commands = play.ask()
    assert commands == []
    assert play.fleet.waits_until(waiting) == play.now + 5.0

    play.now += 5.0

    assert refusal(play.fleet.expire(waiting, play.now)).kind is FaultKind.MODEL_LOADING


def test_s4_once_its_worker_has_loaded_a_job_waits_for_a_slot_alone() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now, models=("m",), slots=1)
    play.ask()
    waiter, _ = play.ask()
    play.now += 1

    _, worker = grant(play.up(A))

    assert worker == A
    assert play.fleet.waits_until(waiter) == float("inf")
    play.now += 60
    assert not play.fleet.expire(waiter, play.now)


def test_s4_a_worker_that_loads_again_is_waited_for_anew() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now, models=("m",), slots=1)
    play.ask()
    waiter, _ = play.ask()
    play.now += 4
    play.up(A)

    play.fleet.learned(A, Event.LOADS, play.now)

    assert play.fleet.waits_until(waiter) == play.now + 5.0


def test_a3_a_moved_job_whose_wait_is_over_is_told_its_first_cause() -> None:
    play = Play(A)
    play.fleet.add_worker(B, play.now, models=("m",), slots=1)
    assignment, _ = play.placed()
    play.fail(assignment, LOST)
    play.now += 5.0

    fault = refusal(play.fleet.expire(assignment.request, play.now))

    assert fault.kind is LOST.kind


def test_a3_what_a_job_ran_for_is_no_part_of_its_time_in_the_queue() -> None:
    play = Play(A, B, queue_ms=2_000)
    play.placed()
    play.now += 0.5
    play.placed()
    moves, _ = play.ask()
    play.now += 0.5
    running, _ = grant(play.fleet.cut(A, LOST, play.now))
    assert running.request == moves
    play.now += 5.0

    play.fail(running, LOST)

    # Half a second of its two is spent: only that was in the queue.
    assert play.fleet.waits_until(moves) == play.now + 1.5
    assert play.fleet.expire(moves, play.now) == []
    play.now += 1.5
    assert refusal(play.fleet.expire(moves, play.now)) == LOST


def test_s4_answers_of_loading_lengthen_no_wait_for_a_slot() -> None:
    play = Play(A, queue_ms=2_000)
    first, _ = play.placed()
    play.now += 0.5

    play.fail(first, LOADING)

    assert play.fleet.waits_until(first.request) == play.now + 1.5


def test_a3_a_worker_that_was_loading_is_no_first_cause() -> None:
    play = Play(A, B, slots=4)
    first, _ = play.placed()
    second, worker = grant(play.fail(first, LOADING))
    assert worker == B

    play.fail(second, LOST)
    play.now += 5.0

    fault = refusal(play.fleet.expire(first.request, play.now))
    assert fault.kind is LOST.kind


def test_a8_a_first_move_behind_an_answer_of_loading_is_not_charged() -> None:
    play = Play(A, B, C, slots=4)
    while play.fleet.budget.take(play.now):
        pass
    first, _ = play.placed()
    second, _ = grant(play.fail(first, LOADING))

    third, worker = grant(play.fail(second, REFUSED))

    assert (third.attempt, worker) == (3, C)


def test_w4_answers_of_loading_are_waited_out_no_longer_than_one_load() -> None:
    play = Play(A)
    assignment, _ = play.placed()
    for _ in range(3):
        play.fail(assignment, LOADING)
        play.now += 2.0
        assignment, _ = grant(play.up(A))

    # Six seconds after the first such answer.
    assert refusal(play.fail(assignment, LOADING)).kind is LOADING.kind


def test_s4_nobody_overtakes_the_line_of_a_worker_whose_rest_has_just_ended() -> None:
    play = Play(A)
    first, _ = play.placed()
    waiter, _ = play.ask()
    play.fail(first, asks(2.0))
    play.now += 3.0

    newcomer, commands = play.ask()

    granted, _ = grant(commands)
    assert granted.request == waiter
    assert newcomer in play.fleet.room


def test_s4_a_job_that_had_a_slot_meanwhile_waits_for_a_load_anew() -> None:
    play = Play(A)
    play.fleet.add_worker(B, play.now, models=("m",), slots=1)
    play.fleet.learned(A, Event.LOADS, play.now)
    waiter, _ = play.ask()
    assert play.fleet.waits_until(waiter) == play.now + 5.0
    play.now += 4.0
    granted, worker = grant(play.up(A))
    assert (granted.request, worker) == (waiter, A)
    play.now += 6.0

    play.fail(granted, LOST)

    assert play.fleet.waits_until(waiter) == play.now + 5.0


def test_s4_once_a_rest_is_over_a_job_waits_for_a_slot_alone() -> None:
    play = Play(A, B)
    play.fleet.learned(B, Event.LOADS, play.now)
    play.fail(play.placed()[0], asks(20.0))
    play.ask()
    waiter, _ = play.ask()
    play.now += 4.0
    play.fleet.learned(B, Event.LOADS, play.now)
    assert play.fleet.waits_until(waiter) == 105.0

    play.fleet.members[A].rest_until = play.now
    grant(play.fleet.dispatch(A, play.now))
    play.now += 1.0

    assert play.fleet.expire(waiter, play.now) == []
    assert play.fleet.waits_until(waiter) == float("inf")


@pytest.mark.parametrize("seconds", [None, 0.0, 0.2, 1.0, 5.0])
def test_s4_a_short_rest_of_every_worker_is_waited_out(seconds: float | None) -> None:
    play = Play(A, B, queue_limit=20)
    first, second = play.placed()[0], play.placed()[0]
    line = [play.ask()[0] for _ in range(3)]

    commands = [*play.fail(first, asks(seconds)), *play.fail(second, asks(seconds))]

    assert [type(command) for command in commands] == [Rest, Rest]
    assert play.ask()[1] == []
    # Whoever has moved comes first, and each waits for the one that it has not tried.
    expected = {A: second.request, B: first.request}
    for worker in (A, B):
        until = play.fleet.rests_until(worker, play.now)
        assert seconds is None or until >= play.now + seconds
        (granted,) = [
            c for c in play.fleet.dispatch(worker, until) if isinstance(c, Grant)
        ]
        assert granted.assignment.request == expected[worker]
    assert line[0] in play.fleet.room


def test_s4_a_line_is_refused_when_every_worker_rests_for_long() -> None:
    play = Play(A, B, queue_limit=20)
    first, second = play.placed()[0], play.placed()[0]
    line = {play.ask()[0] for _ in range(3)}
    assert play.fail(first, asks(5.1)) == [Rest(A, play.now + 5.1)]

    told = {
        c.request: c.fault
        for c in play.fail(second, asks(20.0))
        if isinstance(c, Refuse)
    }

    assert told.keys() == line | {first.request, second.request}
    for request in line:
        assert told[request].retry_after == pytest.approx(5.1)


def test_s4_a_rest_is_waited_out_that_ends_within_queue_ms() -> None:
    play = Play(A, queue_ms=10_000)
    first, _ = play.placed()
    waiter, _ = play.ask()
    play.now += 2.0

    # The one in line may wait for 8 s more; who comes now, for 10 s.
    commands = play.fail(first, asks(9.0))

    assert [c.request for c in commands if isinstance(c, Refuse)] == [
        first.request,
        waiter,
    ]
    late, commands = play.ask()
    assert commands == []
    play.now += 9.0
    assert grant(play.fleet.dispatch(A, play.now))[0].request == late


def worn_out(trials: int) -> Play:
    """A fleet of one worker, a suspect of which *trials* have just failed."""
    play = Play(A, queue_limit=20)
    for fault in range(3 + trials):
        if fault >= 3:
            play.now = play.fleet.rests_until(A, play.now)
        play.fail(play.placed()[0], LOST)
    assert play.state(A) is State.SUSPECT
    return play


def test_s4_suspects_that_all_rest_for_long_can_not_come() -> None:
    play = worn_out(4)
    left = play.fleet.rests_until(A, play.now) - play.now
    assert left > 5.0

    fault = refusal(play.ask()[1])

    assert fault.kind is FaultKind.NO_WORKER
    assert fault.retry_after == pytest.approx(left)


def test_s4_a_suspect_that_soon_has_its_trial_is_waited_for() -> None:
    play = worn_out(4)
    play.now = play.fleet.rests_until(A, play.now) - 5.0
    waiter, commands = play.ask()
    assert commands == []

    play.now += 5.0

    assert grant(play.fleet.dispatch(A, play.now))[0].request == waiter


def test_s4_the_trial_of_a_suspect_is_waited_for_and_its_end_tells() -> None:
    fails, succeeds = worn_out(4), worn_out(4)
    lines: list[list[RequestId]] = []
    for play in (fails, succeeds):
        play.now = play.fleet.rests_until(A, play.now)
        lines.append([play.ask()[0] for _ in range(3)])
        assert [*play.fleet.room.waiting("m")] == lines[-1][1:]

    told = [
        (c.request, c.fault)
        for c in fails.fail(AssignmentId(lines[0][0], 1), LOST)
        if isinstance(c, Refuse)
    ]
    granted, _ = grant(succeeds.finish(AssignmentId(lines[1][0], 1)))

    assert [request for request, _ in told] == lines[0]
    left = fails.fleet.rests_until(A, fails.now) - fails.now
    for _, fault in told[1:]:
        assert fault.kind is FaultKind.NO_WORKER
        assert fault.retry_after == pytest.approx(left)
    assert granted.request == lines[1][1]


def test_s4_a_suspect_that_rests_by_the_word_of_another_worker_is_not_waited_for() -> (
    None
):
    play = worn_out(3)
    play.now = play.fleet.rests_until(A, play.now)
    play.fleet.add_worker(B, play.now)
    play.up(B, slots=2)
    placed = [play.placed() for _ in range(3)]
    assert [worker for _, worker in placed] == [B, A, B]
    moves, broken, ends = (assignment for assignment, _ in placed)
    play.fail(broken, BROKEN)
    assert play.placed()[1] == A
    second, _ = grant(play.finish(ends))
    assert second.request == broken.request
    play.fail(moves, LOST)
    assert moves.request in play.fleet.room

    # B answers what A could not: now it is a fault of A, and A rests.
    told = [c.request for c in play.finish(second) if isinstance(c, Refuse)]

    assert told == [moves.request]


def test_s4_the_end_of_one_waiter_may_be_the_end_of_the_next() -> None:
    play = worn_out(3)
    play.now = play.fleet.rests_until(A, play.now)
    play.fleet.add_worker(B, play.now)
    play.up(B)
    placed = [play.placed() for _ in range(2)]
    assert [worker for _, worker in placed] == [B, A]
    broken = placed[1][0]
    play.fail(broken, BROKEN)
    assert play.placed()[1] == A
    fresh, _ = play.ask()

    # Nobody is left to say that it was the request's own fault: it was A's.
    commands = play.fleet.learned(B, Event.MISSED, play.now)

    told = [(c.request, c.fault.kind) for c in commands if isinstance(c, Refuse)]
    assert told == [(broken.request, BROKEN.kind), (fresh, FaultKind.NO_WORKER)]


def test_s4_a_worker_whose_rest_is_over_may_be_waited_for() -> None:
    play = Play(A, B, queue_ms=10_000)
    asked, moves = play.placed()[0], play.placed()[0]
    play.fail(asked, asks(60.0))
    play.fleet.leave(asked.request, play.now)
    play.now += 60.0
    play.placed()

    # Its own time in the queue was over before that rest was.
    commands = play.fail(moves, LOST)

    assert commands == [Check(B)]
    assert moves.request in play.fleet.room


def test_s4_with_no_worker_that_can_come_a_job_is_refused_at_once() -> None:
    play = Play(A)
    play.fleet.learned(A, Event.MISSED, play.now)

    assert refusal(play.ask()[1]).kind is FaultKind.NO_WORKER


def test_s4_waiters_are_refused_when_their_last_worker_goes() -> None:
    play = Play(A)
    play.placed()
    play.ask()

    commands = play.fleet.learned(A, Event.MISSED, play.now)

    assert refusal(commands).kind is FaultKind.NO_WORKER


def test_s4_waiters_stay_while_another_worker_serves_their_model() -> None:
    play = Play(A, B)
    play.placed()
    play.placed()
    play.ask()

    assert play.fleet.learned(A, Event.MISSED, play.now) == []


# --- placement --------------------------------------------------------------


def test_b07_equal_workers_take_turns() -> None:
    play = Play(A, B, slots=4)

    assert [play.placed()[1] for _ in range(4)] == [A, B, A, B]


def test_s5_slots_above_the_engines_own_keep_the_worker_out() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now, slots=8)
    play.up(A, slots=4)

    life = play.fleet.members[A].life
    assert (life.state, life.reason) == (State.FAILED, "slots_exceed_engine")
    assert "8" in life.detail
    assert "4" in life.detail


def test_s5_slots_left_out_are_the_discovered_number_else_four() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now)
    play.fleet.add_worker(B, play.now)
    play.up(A, slots=2)
    play.up(B, slots=None)

    assert play.fleet.members[A].slots == 2
    assert play.fleet.members[B].slots == 4


# --- failover ---------------------------------------------------------------


def test_a2_a_job_moves_before_commit() -> None:
    play = Play(A, B)
    first, worker = play.placed()

    second, other = grant(play.fail(first, LOST))

    assert {worker, other} == {A, B}
    assert second == AssignmentId(first.request, 2)


def test_a2_a_committed_job_ends_in_the_fault() -> None:
    play = Play(A, B)
    first, _ = play.placed()
    play.fleet.accepted(first)
    entry = play.fleet.requests[first.request]
    entry.fence.sent()
    play.fleet.committed(first)

    assert refusal(play.fail(first, LOST)) is LOST
    assert entry.attempts.phase is Phase.FAILED


def test_f4_a_late_fault_of_a_moved_job_changes_nothing() -> None:
    play = Play(A, B)
    first, _ = play.placed()
    play.fail(first, LOST)

    assert play.fail(first, LOST) == []
    assert play.fleet.requests[first.request].fence.owner == AssignmentId(
        first.request, 2
    )


def test_b31_the_failed_workers_permit_is_back_before_the_next_pick() -> None:
    play = Play(A, B)
    first, worker = play.placed()
    play.placed()
    waiting, _ = play.ask()

    commands = play.fail(first, REFUSED)

    # A's slot goes to the fresh waiter; the moved job has tried A and waits.
    granted, where = grant(commands)
    assert (granted.request, where) == (waiting, worker)
    assert first.request in play.fleet.room


def test_a3_a_moved_job_with_no_free_permit_waits_at_the_front_beyond_the_limit() -> (
    None
):
    play = Play(A, B, queue_limit=1)
    first, worker = play.placed()
    other, _ = play.placed()
    fresh, _ = play.ask()
    play.fleet.learned(worker, Event.MISSED, play.now)

    play.fail(first, LOST)
    assert play.fleet.room.waiting("m") == [first.request, fresh]

    granted, _ = grant(play.finish(other))
    assert granted.request == first.request


def test_a3_with_every_worker_tried_the_first_cause_is_shown() -> None:
    play = Play(A, B)
    first, _ = play.placed()
    second, _ = grant(play.fail(first, LOST))

    fault = refusal(play.fail(second, FULL))

    assert fault.kind is LOST.kind
    assert fault.message == ("Closed. Tried: a (stream_closed_early), b (declined).")


def test_a3_at_most_three_attempts() -> None:
    play = Play(A, B, C, WorkerId("d"))
    assignment, _ = play.placed()
    for _ in range(2):
        assignment, _ = grant(play.fail(assignment, LOST))

    fault = refusal(play.fail(assignment, LOST))

    assert fault.kind is LOST.kind
    assert fault.message.count("stream_closed_early") == 3


def test_b83_a_worker_that_says_loading_was_not_tried() -> None:
    play = Play(A)
    loading = Fault(FaultKind.LOADING, "Loading model", status=503)
    first, _ = play.placed()

    assert not [c for c in play.fail(first, loading) if isinstance(c, Refuse)]
    assert play.state(A) is State.LOADING

    again, worker = grant(play.up(A))
    assert (again.request, again.attempt, worker) == (first.request, 2, A)
    assert play.fleet.members[A].faults == 0


def test_b23_a_rejected_request_is_not_retried_nor_counted() -> None:
    play = Play(A, B)
    for _ in range(20):
        assignment, _ = play.placed()
        assert refusal(play.fail(assignment, BAD)) is BAD

    assert play.state(A) is State.READY
    assert play.fleet.members[A].faults == 0


def test_a4_the_same_500_twice_punishes_nobody() -> None:
    play = Play(A, B)
    first, _ = play.placed()
    second, _ = grant(play.fail(first, BROKEN))

    fault = refusal(play.fail(second, BROKEN))

    assert (fault.kind, fault.status) == (FaultKind.REJECTED, 500)
    assert play.fleet.members[A].faults == play.fleet.members[B].faults == 0


def test_a4_a_500_that_another_worker_does_not_repeat_counts() -> None:
    play = Play(A, B)
    first, worker = play.placed()
    second, _ = grant(play.fail(first, BROKEN))
    play.finish(second)

    assert play.fleet.members[worker].faults == 1


def test_a4_unauthorized_takes_the_worker_out_and_moves_the_job() -> None:
    play = Play(A, B)
    first, worker = play.placed()

    _, other = grant(play.fail(first, Fault(FaultKind.UNAUTHORIZED, "no", status=401)))

    assert other != worker
    life = play.fleet.members[worker].life
    assert (life.state, life.reason) == (State.FAILED, "unauthorized")


def test_a4_a_model_the_worker_does_not_know_leaves_the_table() -> None:
    play = Play(A, B)
    first, worker = play.placed()

    commands = play.fail(first, Fault(FaultKind.MODEL_GONE, "no", status=404))

    assert Check(worker) in commands
    assert worker not in [m.id for m in play.fleet.models["m"]]


def lacking(play: Play, worker: WorkerId) -> float:
    """Have *worker* take a job and not know its model; say for how long it rests."""
    assignment, taken_by = play.placed()
    assert taken_by == worker
    play.fail(assignment, MODEL_GONE)
    play.up(worker, slots=4)
    return play.fleet.rests_until(worker, play.now) - play.now


@pytest.mark.parametrize("models", [(), ("m",)], ids=["discovered", "configured"])
def test_a4_a_worker_that_names_a_model_it_lacks_gets_no_more_jobs_than_trials(
    models: tuple[str, ...],
) -> None:
    play = Play(B, slots=4)
    play.fleet.add_worker(A, play.now, models=models)
    play.up(A, slots=4)
    asked = failed = 0
    for _ in range(150):
        assignment, worker = play.placed()
        while worker == A:
            asked += 1
            commands = play.fail(assignment, MODEL_GONE)
            play.up(A, slots=4)
            if not any(isinstance(c, Grant) for c in commands):
                failed += 1
                break
            assignment, worker = grant(commands)
        else:
            play.finish(assignment)
        play.now += 0.01
        play.fleet.dispatch(A, play.now)

    # It rests for half a second, one and two, a quarter less or more.
    assert failed == 0
    assert 1 < asked <= 3
    assert play.state(A) is State.READY


def test_a4_rests_from_a_model_that_a_worker_lacks_grow_until_one_job_is_taken() -> (
    None
):
    play = Play(A, slots=4)
    rests = []
    for _ in range(10):
        rests.append(lacking(play, A))
        play.now += rests[-1]
    for rest, least in zip(rests, [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30], strict=True):
        assert 0.75 * least <= rest <= 1.25 * least

    assignment, _ = play.placed()
    play.finish(assignment)
    assert lacking(play, A) < 0.7


def test_a4_a_worker_is_asked_at_once_for_its_other_models() -> None:
    play = Play(A, slots=4)
    play.up(A, slots=4, models=("m", "n"))
    play.fail(play.placed("m")[0], MODEL_GONE)
    play.up(A, slots=4, models=("m", "n"))

    assert play.placed("n")[1] == A
    waiter, commands = play.ask("m")
    assert commands == []
    play.now = play.fleet.rests_until(A, play.now)
    granted, _ = grant(play.fleet.dispatch(A, play.now))
    assert granted.request == waiter


def test_a4_a_long_rest_from_a_model_is_not_waited_for() -> None:
    play = Play(A, slots=4)
    for _ in range(5):
        play.now += lacking(play, A)
    left = lacking(play, A)

    _, commands = play.ask()

    assert refusal(commands).kind is FaultKind.NO_WORKER
    assert refusal(commands).retry_after == pytest.approx(left)


def test_a4_who_waits_for_a_model_that_now_rests_for_long_is_refused() -> None:
    play = Play(A)
    play.fleet.members[A].wanted_models = ("m",)
    for _ in range(5):
        play.fail(play.placed()[0], MODEL_GONE)
        play.now = play.fleet.rests_until(A, play.now)
    first, _ = play.placed()
    waiter, _ = play.ask()

    commands = play.fail(first, MODEL_GONE)

    assert [c.request for c in commands if isinstance(c, Refuse)] == [
        first.request,
        waiter,
    ]


def test_a4_a_server_that_was_restarted_is_asked_at_once_for_what_it_lacked() -> None:
    play = Play(A)
    play.up(A, started_at=1_000.0)
    play.fail(play.placed()[0], MODEL_GONE)

    play.up(A, started_at=2_000.0)

    assert play.placed()[1] == A


def test_s4_who_waits_for_a_model_that_a_worker_stops_naming_is_refused() -> None:
    play = Play(A)
    play.placed()
    waiter, _ = play.ask()

    commands = play.up(A, models=("other",))

    assert refusal(commands).kind is FaultKind.NO_WORKER
    assert waiter not in play.fleet.requests


def test_s4_who_waits_for_a_model_that_a_request_found_gone_is_refused() -> None:
    play = Play(A)
    first, _ = play.placed()
    waiter, _ = play.ask()

    play.fail(first, MODEL_GONE)

    assert waiter not in play.fleet.requests


def test_s4_of_two_workers_the_last_to_stop_naming_a_model_ends_its_line() -> None:
    play = Play(A, B)
    play.placed()
    play.placed()
    waiter, _ = play.ask()

    assert play.up(A, models=("other",)) == []
    commands = play.up(B, models=("other",))

    assert [c.request for c in commands if isinstance(c, Refuse)] == [waiter]


def test_a4_a_prompt_too_long_moves_only_to_a_wider_worker() -> None:
    play = Play(A, B, C)
    play.up(A, context=2048)
    play.up(B, context=2048)
    play.up(C, context=8192)
    long = Fault(FaultKind.CONTEXT_LENGTH, "too long", status=400)
    first, worker = play.placed()
    assert worker == A

    second, other = grant(play.fail(first, long))

    assert other == C
    assert refusal(play.fail(second, long)) is long


def test_a8_the_end_of_a_rest_that_a_success_leaves_is_told() -> None:
    play = Play(A, slots=8)
    held = [play.placed()[0] for _ in range(8)]
    for assignment in held[:3]:
        play.fail(assignment, attrs.evolve(LOST, kind=FaultKind.STALLED))
    play.fail(held[3], asks(0.1))
    member = play.fleet.members[A]
    member.asked_until = play.now + 0.1

    commands = play.finish(held[4])

    assert Rest(A, play.now + 0.1) in commands
    assert play.fleet.rests_until(A, play.now) == play.now + 0.1


def test_a8_a_process_that_is_no_more_has_asked_for_no_rest() -> None:
    play = Play(A)
    play.fail(play.placed()[0], asks(20.0))
    starting = Probe(ProbeResult.STARTING)

    play.fleet.down(A, starting, Event.RESTARTS, play.now)
    play.up(A)

    assert play.placed()[1] == A


def test_a4_a_prompt_that_only_a_busy_worker_could_take_may_be_sent_again() -> None:
    play = Play(A, B)
    play.up(A, context=8192)
    play.up(B, context=2048)
    first, worker = play.placed()
    assert worker == A
    second, _ = grant(play.fail(first, asks(2.0)))

    fault = refusal(play.fail(second, Fault(FaultKind.CONTEXT_LENGTH, "x", status=400)))

    assert (fault.kind, fault.retry_after) == (FaultKind.DECLINED, 2.0)


def test_a8_retries_are_bounded_when_every_worker_declines() -> None:
    play = Play(A, B, C, slots=100)
    sent = 0
    for _ in range(100):
        assignment, _ = play.placed()
        sent += 1
        while True:
            for member in play.fleet.members.values():
                member.rest_until = 0.0
            commands = play.fail(assignment, FULL)
            grants = [c for c in commands if isinstance(c, Grant)]
            if not grants:
                break
            assignment = grants[0].assignment
            sent += 1

    assert sent <= 120


# --- trust ------------------------------------------------------------------


def test_s6_three_faults_in_a_row_make_a_suspect() -> None:
    play = Play(A)
    for _ in range(3):
        assignment, _ = play.placed()
        play.fail(assignment, LOST)

    assert play.state(A) is State.SUSPECT


def test_b24_client_faults_between_count_neither_way() -> None:
    play = Play(A)
    for fault in (LOST, BAD, LOST, BAD, LOST):
        assignment, _ = play.placed()
        play.fail(assignment, fault)

    assert play.state(A) is State.SUSPECT


@pytest.mark.parametrize("fault", [BAD, FULL], ids=["b24_a_400", "b25_a_503"])
def test_s6_what_is_no_fault_and_no_success_leaves_a_suspect_as_it_is(
    fault: Fault,
) -> None:
    play = worn_out(2)
    member = play.fleet.members[A]
    faults = member.faults
    play.now = play.fleet.rests_until(A, play.now)

    trial, _ = play.placed()
    play.fleet.accepted(trial)
    play.fail(trial, fault)

    assert play.state(A) is State.SUSPECT
    assert (member.faults, member.limit) == (faults, 1)
    # The next fault rests as long as if there had been nothing between.
    play.now = max(play.now, member.rest_until)
    play.fail(play.placed()[0], LOST)
    assert 4.0 * 0.75 <= member.rest_until - play.now <= 4.0 * 1.25


def test_s6_a_success_between_starts_the_count_anew() -> None:
    play = Play(A)
    for fault in (LOST, LOST, None, LOST):
        assignment, _ = play.placed()
        if fault is None:
            play.finish(assignment)
        else:
            play.fail(assignment, fault)

    assert play.state(A) is State.READY


def test_s6_a_suspect_that_fails_fast_rests_longer_each_time() -> None:
    play = Play(A, B, slots=4)
    rests: list[float] = []
    while len(rests) < 4:
        assignment, worker = play.placed()
        if worker == B:
            play.finish(assignment)
            continue
        commands = play.fail(assignment, LOST)
        found = [c for c in commands if isinstance(c, Rest)]
        if found:
            rests.append(found[0].until - play.now)
            play.now = found[0].until
        for command in commands:
            if isinstance(command, Grant):
                play.finish(command.assignment)

    assert rests == sorted(rests)
    assert rests[-1] > 2 * rests[0]


def test_s6_streams_that_are_lost_together_are_one_trial_of_a_suspect() -> None:
    few, many = Play(A, slots=16), Play(A, slots=16)
    for play, streams in ((few, 3), (many, 16)):
        running = [play.placed()[0] for _ in range(streams)]
        for assignment in running:
            play.fail(assignment, LOST)
        assert play.state(A) is State.SUSPECT

    assert few.fleet.rests_until(A, few.now) == many.fleet.rests_until(A, many.now)


def test_l4_a_suspect_gets_one_request_at_a_time_until_one_succeeds() -> None:
    play = Play(A, slots=4)
    for _ in range(3):
        assignment, _ = play.placed()
        play.fail(assignment, LOST)
    play.now += 60.0
    trial, _ = play.placed()
    assert play.ask()[1] == []

    play.finish(trial)

    assert play.state(A) is State.READY
    assert play.fleet.members[A].limit == 2


def test_s7_a_worker_that_returns_is_ramped() -> None:
    play = Play(A, slots=8)
    play.fleet.learned(A, Event.MISSED, play.now)
    play.up(A, slots=8)
    limits = []
    for _ in range(4):
        limits.append(play.fleet.members[A].limit)
        play.finish(play.placed()[0])

    assert limits == [1, 2, 4, 8]


@pytest.mark.parametrize("between", [Event.LOADS, Event.MISSED, Event.UNFIT])
def test_s7_a_worker_is_ramped_whatever_it_comes_back_from(between: Event) -> None:
    play = Play(A, slots=8)
    play.fleet.learned(A, Event.MISSED, play.now)
    play.fleet.learned(A, between, play.now)
    play.up(A, slots=8)

    assert play.fleet.members[A].limit == 1


def test_s7_a_restarted_engine_is_ramped() -> None:
    play = Play(A, slots=8)
    play.up(A, slots=8, started_at=1_000.0)
    play.up(A, slots=8, started_at=2_000.0)

    assert play.fleet.members[A].limit == 1


def test_s7_a_restarted_engine_is_ramped_for_those_who_wait_too() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now)
    play.up(A, slots=3, started_at=1.0)
    for _ in range(3):
        play.placed()
    for _ in range(2):
        play.ask()

    commands = play.up(A, slots=3, started_at=50.0)

    assert sum(isinstance(c, Lose) for c in commands) == 3
    grant(commands)
    assert play.fleet.members[A].busy == 1


def test_s7_a_worker_that_was_never_ready_before_is_not_ramped() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now)
    play.fleet.learned(A, Event.LOADS, play.now)
    play.up(A, slots=8)

    assert play.fleet.members[A].limit == 8


@pytest.mark.parametrize(
    "kind", [FaultKind.STALLED, FaultKind.WAIT_TIMEOUT, FaultKind.LOAD_TIMEOUT]
)
def test_l4_one_wait_that_was_spent_without_a_delta_makes_a_suspect(
    kind: FaultKind,
) -> None:
    play = Play(A)
    assignment, _ = play.placed()
    play.fail(assignment, Fault(kind, "Silent."))

    assert play.state(A) is State.SUSPECT


def test_l4_a_stall_after_deltas_is_one_fault_among_others() -> None:
    play = Play(A)
    assignment, _ = play.placed()
    play.fleet.accepted(assignment)
    play.fleet.requests[assignment.request].fence.sent()
    play.fleet.committed(assignment)
    play.fail(assignment, Fault(FaultKind.STALLED, "Silent."))

    assert play.state(A) is State.READY
    assert play.fleet.members[A].faults == 1


def test_o5_a_503_always_says_when_to_come_back() -> None:
    play = Play(A)
    first, _ = play.placed()

    fault = refusal(play.fail(first, Fault(FaultKind.UNAUTHORIZED, "No.", status=401)))

    assert fault.row.status == 503
    assert fault.retry_after == 1.0


@pytest.mark.parametrize("event", [Event.MISSED, Event.LOADS, Event.UNFIT, Event.DRAIN])
def test_a4_a_refused_key_is_tried_at_once_when_anything_has_changed(
    event: Event,
) -> None:
    refused = Fault(FaultKind.UNAUTHORIZED, "No.", status=401)
    play = Play(A)
    for _ in range(5):
        play.now += 400.0
        play.up(A)
        play.fail(play.placed()[0], refused)
    play.up(A)
    assert not play.fleet.members[A].serving

    play.fleet.learned(A, event, play.now)
    if event is Event.DRAIN:
        play.fleet.learned(A, Event.UNDRAIN, play.now)
    play.up(A)

    assert play.fleet.members[A].serving


def test_x3_an_attempt_remembers_who_else_could_have_got_it() -> None:
    play = Play(A, B, C)
    play.fleet.learned(C, Event.MISSED, play.now)
    first, _ = play.placed()
    play.fail(first, LOST)

    trail = play.fleet.requests[first.request].attempts.trail
    assert [attempt.candidates for attempt in trail] == [(A, B), (B,)]


def test_a8_retry_after_is_honoured_and_passed_on() -> None:
    play = Play(A)
    first, _ = play.placed()
    play.fail(first, asks(20.0))

    fault = refusal(play.ask()[1])

    assert fault.kind is FaultKind.NO_WORKER
    assert fault.retry_after == pytest.approx(20.0)


def test_b29_a_burst_of_overload_empties_no_fleet() -> None:
    play = Play(A, B)
    first, _ = play.placed()
    second, _ = grant(play.fail(first, FULL))
    play.fail(second, FULL)

    waiting, commands = play.ask()
    assert commands == []

    play.now += 1.0
    assert grant(play.fleet.dispatch(A, play.now))[0].request == waiting


def test_l3_a_lost_workers_running_streams_are_not_cut_by_the_probe() -> None:
    play = Play(A)
    first, _ = play.placed()
    play.fleet.learned(A, Event.MISSED, play.now)

    assert first.request in play.fleet.requests
    assert play.finish(first) == []


def test_l5_a_drained_worker_takes_nothing_and_finishes_what_it_has() -> None:
    play = Play(A, slots=2)
    first, _ = play.placed()
    play.fleet.learned(A, Event.DRAIN, play.now)

    assert refusal(play.ask()[1]).kind is FaultKind.NO_WORKER
    play.finish(first)
    assert play.fleet.members[A].busy == 0


def test_l5_a_removed_worker_is_forgotten_when_its_last_permit_is_back() -> None:
    play = Play(A, settle_s=1.0)
    first, _ = play.placed()
    play.fleet.learned(A, Event.REMOVE, play.now)
    assert "m" not in play.fleet.models

    play.fleet.leave(first.request, play.now)
    assert A in play.fleet.members
    play.fleet.settled(A, first, play.now)

    assert A not in play.fleet.members


def test_l9_a_restart_fences_the_old_assignments() -> None:
    play = Play(A, B, settle_s=1.0)
    play.up(A, started_at=1_000.0)
    first, worker = play.placed()
    assert worker == A

    commands = play.up(A, started_at=2_000.0)

    assert any(isinstance(c, Lose) and c.assignment == first for c in commands)
    moved, other = grant(commands)
    assert (moved.request, other) == (first.request, B)
    assert play.fleet.members[A].busy == 0


def test_o6_a_lost_workers_models_stay_in_the_table() -> None:
    play = Play(A)
    play.fleet.learned(A, Event.MISSED, play.now)

    assert "m" in play.fleet.models


def test_o6_models_are_unknown_until_each_worker_was_seen_or_its_time_is_over() -> None:
    play = Play()
    play.fleet.add_worker(A, play.now)
    assert play.fleet.still_unknown(play.now)
    assert not play.fleet.still_unknown(play.now + 5.0)

    play.up(A)

    assert not play.fleet.still_unknown(play.now)


def test_o6_models_are_unknown_while_workers_that_nobody_lists_may_come() -> None:
    play = Play(A)
    assert not play.fleet.still_unknown(play.now)
    play.fleet.await_strangers(play.now + 10.0)

    assert play.fleet.still_unknown(play.now + 9.9)
    assert not play.fleet.still_unknown(play.now + 10.0)


def test_d3_a_stopping_router_refuses_all_that_waits() -> None:
    play = Play(A)
    play.placed()
    play.ask()
    stopping = Fault(FaultKind.SHUTTING_DOWN, "stopping")

    fault = refusal(play.fleet.refuse_waiting(stopping, play.now))

    assert fault.kind is stopping.kind
    assert fault.retry_after is not None
    assert len(play.fleet.room) == 0
