"""A worker that other routers use too, and jobs of other routers (P3, A3, S1)."""

import random

import pytest

from router.assignment import Phase
from router.commands import Command, Grant, Refuse, Rest
from router.errors import Fault, FaultKind
from router.fleet import Fleet
from router.ids import RequestId, WorkerId
from router.messages import Discovery, Share
from router.settings import RouterSettings, WaitSettings
from workers.shares import CLAIM_S

W = WorkerId("w")
V = WorkerId("v")
FULL = Fault(FaultKind.NO_SLOT, "others have them")


def fleet(**shares: Share) -> Fleet:
    """One ready worker of four slots, of which we may have *shares*."""
    made = Fleet(RouterSettings(queue_limit=2), WaitSettings(), random.Random(1))
    made.add_worker(W, 0.0)
    say(made, 0.0, **shares)
    return made


def say(made: Fleet, now: float = 0.0, **shares: Share) -> list[Command]:
    found = Discovery(tuple(shares), 4, shares=shares)
    return made.answered(W, found, now)


def submit(made: Fleet, name: str, target: str = "m", **how: bool) -> list[Command]:
    return made.submit(RequestId(name), target, 1.0, **how)


def granted(commands: list[Command]) -> list[str]:
    return [c.assignment.request for c in commands if isinstance(c, Grant)]


def refused(commands: list[Command]) -> list[FaultKind]:
    return [c.fault.kind for c in commands if isinstance(c, Refuse)]


def test_s1_no_more_is_granted_than_our_share() -> None:
    made = fleet(m=Share(2))
    found = [granted(submit(made, name)) for name in ("a", "b", "c")]

    assert found == [["a"], ["b"], []]
    assert made.room.depth("m") == 1


def test_s1_the_share_of_one_model_is_not_anothers() -> None:
    made = fleet(m=Share(0), n=Share(1))
    assert granted(submit(made, "a", "m")) == []
    assert granted(submit(made, "b", "n")) == ["b"]


def test_a_larger_share_is_used_at_once() -> None:
    made = fleet(m=Share(1))
    for name in ("a", "b", "c"):
        submit(made, name)

    assert granted(say(made, m=Share(3))) == ["b", "c"]


def test_a3_a_job_that_found_no_slot_was_not_tried() -> None:
    made = fleet(m=Share(2))
    (grant,) = submit(made, "a")
    assert isinstance(grant, Grant)
    submit(made, "b")
    commands = made.failed(grant.assignment, FULL, 2.0)
    entry = made.requests[RequestId("a")]

    assert granted(commands) == []
    assert refused(commands) == []
    assert entry.attempts.phase is Phase.QUEUED
    assert entry.attempts.tried == set()
    assert entry.attempts.charged == 0
    assert made.members[W].faults == 0
    # It waits before what came later, and comes back here.
    submit(made, "c")
    assert granted(say(made, m=Share(3))) == ["a", "c"]
    assert entry.attempts.current is not None
    assert entry.attempts.current.assignment.attempt == 2


def test_a3_a_decline_is_no_first_cause() -> None:
    made = fleet(m=Share(1))
    (grant,) = submit(made, "a")
    assert isinstance(grant, Grant)
    made.failed(grant.assignment, FULL, 2.0)
    (again,) = say(made, m=Share(1))
    assert isinstance(again, Grant)
    lost = Fault(FaultKind.STREAM_CLOSED_EARLY, "lost")
    commands = made.failed(again.assignment, lost, 3.0)

    assert refused(commands) == [FaultKind.STREAM_CLOSED_EARLY]


def test_p3_a_decline_shuts_the_model_until_the_worker_says_more() -> None:
    made = fleet(m=Share(2))
    (grant,) = submit(made, "a")
    assert isinstance(grant, Grant)
    made.failed(grant.assignment, FULL, 2.0)

    assert not made.members[W].takes("m", 3.0)
    assert granted(made.dispatch(W, 3.0)) == []


def turned_away(made: Fleet, times: int, now: float) -> list[Command]:
    """Have W show room and refuse the next offer, that many times in a row."""
    commands: list[Command] = []
    for _ in range(times):
        (grant,) = [c for c in say(made, now, m=Share(4)) if isinstance(c, Grant)]
        commands = made.failed(grant.assignment, FULL, now)
    return commands


def test_p3_a_worker_that_shows_room_and_has_none_rests_from_that_model() -> None:
    made = fleet(m=Share(0), n=Share(4))
    submit(made, "a")
    assert turned_away(made, 2, 2.0) == []
    (rest,) = turned_away(made, 1, 2.0)
    assert isinstance(rest, Rest)
    assert 2.0 < rest.until <= 2.05

    # Whatever it says meanwhile; its other models are asked for as before.
    assert granted(say(made, 2.01, m=Share(4), n=Share(4))) == []
    assert granted(submit(made, "b", "n")) == ["b"]
    assert made.rests_until(W, 2.01) == rest.until
    assert granted(made.dispatch(W, rest.until)) == ["a"]
    assert made.rests_until(W, rest.until) == float("inf")


def test_p3_rests_from_a_model_grow_to_less_than_a_claim_and_one_job_ends_them() -> (
    None
):
    made = fleet(m=Share(0))
    submit(made, "a")
    now = 2.0
    for _ in range(20):
        turned_away(made, 1, now)
        now = min(made.rests_until(W, now), now + CLAIM_S)
    assert now < 2.0 + 20 * CLAIM_S
    assert made.members[W].turned["m"].times == 20

    (grant,) = [c for c in say(made, now, m=Share(4)) if isinstance(c, Grant)]
    made.accepted(grant.assignment)
    made.finished(grant.assignment, now)
    submit(made, "b")
    assert made.members[W].turned == {}


def test_p3_offers_of_one_moment_that_find_no_slot_are_one_refusal() -> None:
    made = fleet(m=Share(4))
    found = [submit(made, name)[0] for name in ("a", "b", "c", "d")]
    for n, grant in enumerate(found):
        assert isinstance(grant, Grant)
        made.failed(grant.assignment, FULL, 2.0 + n / 1_000)

    assert made.members[W].turned["m"].times == 1


def test_a3_what_found_no_slot_again_and_again_stands_in_the_trail_once() -> None:
    made = fleet(m=Share(0))
    submit(made, "a")
    for now in range(2, 50):
        turned_away(made, 1, float(now))
    (grant,) = [c for c in say(made, 50.0, m=Share(4)) if isinstance(c, Grant)]

    assert grant.assignment.attempt == 49
    trail = made.requests[RequestId("a")].attempts.trail
    assert [a.assignment.attempt for a in trail] == [1, 49]


def test_s4_a_model_that_no_engine_serves_is_refused_and_one_that_comes_waits() -> None:
    out, comes = Share(0, serves=False), Share(0, serves=False, coming=True)
    made = fleet(m=out, n=comes)
    assert refused(submit(made, "a", "m")) == [FaultKind.NO_WORKER]
    assert refused(submit(made, "b", "n")) == []
    assert made.waits_until(RequestId("b")) < float("inf")

    assert not made.ready_for("m")
    assert not made.ready_for("n")


def test_s4_who_waits_for_a_model_that_goes_out_is_refused() -> None:
    made = fleet(m=Share(0))
    submit(made, "a")
    commands = say(made, m=Share(0, serves=False), n=Share(1))

    assert refused(commands) == [FaultKind.NO_WORKER]


@pytest.mark.parametrize("free", [0, 2])
def test_p3_another_routers_job_is_begun_at_once_or_not_at_all(free: int) -> None:
    made = fleet(m=Share(free))
    commands = submit(made, "a", once=True)

    assert granted(commands) == (["a"] if free else [])
    assert refused(commands) == ([] if free else [FaultKind.NO_SLOT])
    assert len(made.room) == 0


def test_p3_another_routers_job_moves_to_who_has_room_or_ends() -> None:
    made = fleet(m=Share(1))
    made.add_worker(V, 0.0)
    made.answered(V, Discovery(("m",), 1), 0.0)
    lost = Fault(FaultKind.STREAM_CLOSED_EARLY, "lost")
    (first,) = submit(made, "a", once=True)
    assert isinstance(first, Grant)
    (second,) = [
        c for c in made.failed(first.assignment, lost, 2.0) if isinstance(c, Grant)
    ]
    assert second.worker != first.worker
    commands = made.failed(second.assignment, lost, 3.0)

    assert refused(commands) == [FaultKind.STREAM_CLOSED_EARLY]
    assert len(made.room) == 0


def test_s5_slots_bound_what_is_taken_of_an_agent_and_never_keep_it_out() -> None:
    made = Fleet(RouterSettings(), WaitSettings(), random.Random(1))
    made.add_worker(W, 0.0, slots=6)
    found = []
    # One of its two engines goes, both go, and both come back.
    for slots in (8, 4, 0, 8):
        made.answered(W, Discovery(("m",), slots, shares={"m": Share(slots)}), 0.0)
        found.append((made.members[W].serving, made.members[W].slots))

    assert found == [(True, 6), (True, 4), (True, 1), (True, 6)]


def test_what_is_free_is_counted_over_all_that_serve() -> None:
    made = fleet(m=Share(4))
    made.add_worker(V, 0.0)
    made.answered(V, Discovery(("m",), 3), 0.0)
    submit(made, "a")

    assert made.free("m", 1.0) == 6
    assert made.free("n", 1.0) == 0


def test_a2_another_worker_is_looked_for_before_a_job_is_moved() -> None:
    made = fleet(m=Share(4))
    submit(made, "a")
    assert not made.could_move(RequestId("a"), 1.0)
    assert not made.could_move(RequestId("nobody"), 1.0)
    made.add_worker(V, 0.0)
    made.answered(V, Discovery(("m",), 1), 0.0)

    assert made.could_move(RequestId("a"), 1.0)
    submit(made, "b")
    assert not made.could_move(RequestId("a"), 1.0)
