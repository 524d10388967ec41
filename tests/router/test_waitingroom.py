"""The queue in front of the slots, rule by rule."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.errors import LocalError
from router.ids import RequestId
from router.waitingroom import WaitingRoom

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def everyone(_: RequestId) -> bool:
    return True


def room(*requests: RequestId, limit: int = 5) -> WaitingRoom:
    waiting = WaitingRoom(limit)
    for request in requests:
        waiting.enter(request, "m", moved=False)
    return waiting


def test_s4_waiters_of_a_model_are_served_in_order() -> None:
    assert room(A, B, C).waiting("m") == [A, B, C]
    assert room(A, B, C).first(["m"], everyone) == A


def test_a3_a_moved_job_waits_before_all_fresh_ones() -> None:
    waiting = room(A, B)
    waiting.enter(C, "m", moved=True)

    assert waiting.waiting("m") == [C, A, B]


def test_a3_moved_jobs_among_themselves_are_first_come_first_served() -> None:
    waiting = room(A)
    waiting.enter(B, "m", moved=True)
    waiting.enter(C, "m", moved=True)

    assert waiting.waiting("m") == [B, C, A]


def test_s4_a_leaver_frees_its_place_at_once() -> None:
    waiting = room(A, B, limit=2)
    assert waiting.full("m")

    waiting.leave(A)

    assert not waiting.full("m")
    assert waiting.waiting("m") == [B]


def test_s4_the_limit_is_per_model() -> None:
    assert not room(A, B, limit=2).full("other")


def test_s4_a_limit_of_nought_lets_nobody_wait() -> None:
    assert room(limit=0).full("m")


def test_a3_a_waiter_that_tried_the_worker_does_not_hold_up_the_others() -> None:
    assert room(A, B).first(["m"], lambda request: request != A) == B


def test_among_models_the_one_who_came_first_is_next() -> None:
    waiting = WaitingRoom(5)
    waiting.enter(A, "x", moved=False)
    waiting.enter(B, "y", moved=False)

    assert waiting.first(["y", "x"], everyone) == A


def test_among_models_moved_jobs_come_before_older_fresh_ones() -> None:
    waiting = WaitingRoom(5)
    waiting.enter(A, "x", moved=False)
    waiting.enter(B, "y", moved=True)

    assert waiting.first(["x", "y"], everyone) == B


def test_nobody_waits_twice_and_nobody_leaves_who_does_not_wait() -> None:
    waiting = room(A)

    with pytest.raises(LocalError):
        waiting.enter(A, "other", moved=False)
    with pytest.raises(LocalError):
        waiting.leave(B)

    assert waiting.depths() == {"m": 1}


class RoomMachine(RuleBasedStateMachine):
    """Against the plainest model: two lists a model."""

    def __init__(self) -> None:
        super().__init__()
        self.room = WaitingRoom(3)
        self.lines: dict[str, tuple[list[RequestId], list[RequestId]]] = {}
        self.born = 0

    @rule(model=st.sampled_from(["x", "y"]), moved=st.booleans())
    def enter(self, model: str, moved: bool) -> None:
        self.born += 1
        request = RequestId(f"r{self.born}")
        self.room.enter(request, model, moved=moved)
        self.lines.setdefault(model, ([], []))[0 if moved else 1].append(request)

    @precondition(lambda self: len(self.room) > 0)
    @rule(choice=st.randoms(use_true_random=False))
    def leave(self, choice) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        request = choice.choice(sorted(self.room.everybody()))
        self.room.leave(request)
        for line in self.lines.values():
            for half in line:
                if request in half:
                    half.remove(request)

    @invariant()
    def b86_the_depth_is_who_waits_now(self) -> None:
        for model in ("x", "y"):
            moved, fresh = self.lines.get(model, ([], []))
            assert self.room.waiting(model) == [*moved, *fresh]
            assert self.room.depth(model) == len(moved) + len(fresh)
            assert self.room.full(model) == (len(moved) + len(fresh) >= 3)


TestRoomMachine = RoomMachine.TestCase
