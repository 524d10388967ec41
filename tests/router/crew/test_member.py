"""One worker's permits and trust."""

import pytest

from router.crew import DEFAULT_SLOTS, Member
from router.crew.member import Member as SameMember
from router.errors import LocalError
from router.ids import AssignmentId, RequestId, WorkerId
from router.lifecycle import Event, Lifecycle

ONE = AssignmentId(RequestId("r1"), 1)
TWO = AssignmentId(RequestId("r2"), 1)
THREE = AssignmentId(RequestId("r3"), 1)


def member(slots: int | None = 2, *, ready: bool = True) -> Member:
    life = Lifecycle(0.0)
    if ready:
        life.fire(Event.ANSWERED, 0.0)
    return SameMember(WorkerId("a"), life, 1.0, slots, (), 0.0)


def test_s5_slots_that_nobody_numbers_are_four() -> None:
    assert member(None).slots == DEFAULT_SLOTS == 4


def test_s1_no_permit_is_handed_out_beyond_the_limit() -> None:
    one_slot = member(1)
    one_slot.take(ONE)

    with pytest.raises(LocalError):
        one_slot.take(TWO)


def test_s2_a_permit_comes_back_once() -> None:
    full = member()
    full.take(ONE)
    full.give_back(ONE)

    with pytest.raises(LocalError):
        full.give_back(ONE)
    with pytest.raises(LocalError):
        full.let_go(ONE, 1.0)


def test_s3_a_settling_permit_is_still_out() -> None:
    full = member(1)
    full.take(ONE)
    full.let_go(ONE, 5.0)

    assert full.busy == 1
    assert not full.has_room(6.0)
    assert full.settled(ONE) == 5.0
    assert full.busy == 0
    with pytest.raises(LocalError):
        full.settled(ONE)


def test_l2_a_worker_that_does_not_serve_has_no_room() -> None:
    assert member(ready=False).limit == 0


def test_s7_each_success_doubles_the_ramp_up_to_the_slots() -> None:
    returns = member(6)
    returns.distrust()
    limits = [returns.limit]
    for _ in range(3):
        returns.trust()
        limits.append(returns.limit)

    assert limits == [1, 2, 4, 6]


def pinning(slots: int) -> Member:
    one = member(slots)
    one.pin_slots = True
    return one


def test_w2_each_permit_names_a_slot_that_is_not_out() -> None:
    both = pinning(2)
    both.take(ONE)
    both.take(TWO)

    assert both.pins == {ONE: 0, TWO: 1}
    both.give_back(ONE)
    both.take(THREE)
    assert both.pins == {TWO: 1, THREE: 0}


def test_w2_a_slot_that_settles_is_still_out() -> None:
    both = pinning(2)
    both.take(ONE)
    both.let_go(ONE, 1.0)
    both.take(TWO)

    assert both.pins == {ONE: 0, TWO: 1}
    both.settled(ONE)
    assert both.pins == {TWO: 1}


def test_w2_without_pins_the_engine_chooses() -> None:
    free = member(2)
    free.take(ONE)

    assert free.pins == {}
