"""The workers together."""

import random

import pytest

from router.crew.crew import Crew
from router.errors import Fault, FaultKind
from router.ids import WorkerId
from router.lifecycle import Event, State
from router.messages import Discovery

A, B = WorkerId("a"), WorkerId("b")


def crew(*workers: WorkerId, context: int | None = None) -> Crew:
    made = Crew(3, random.Random(1))
    for worker in workers:
        made.add(worker, 0.0, slots=None, models=(), settle_s=0.0)
        found = Discovery(("m",), 2, context, started_at=1_000.0)
        made.discover(made.members[worker], found, 0.0)
    return made


def test_l9_what_a_worker_says_of_itself_is_taken_over() -> None:
    member = crew(A, context=4096).members[A]

    assert (member.slots, member.context, list(member.models)) == (2, 4096, ["m"])
    assert member.seen


def test_l9_engines_round_their_start_so_a_second_is_no_restart() -> None:
    made = crew(A)
    member = made.members[A]

    assert not made.restarted(member, Discovery(started_at=1_000.9))
    assert not made.restarted(member, Discovery(started_at=None))
    assert made.restarted(member, Discovery(started_at=1_002.0))


def test_l9_a_probe_without_a_start_time_hides_no_restart() -> None:
    made = crew(A)
    member = made.members[A]

    made.discover(member, Discovery(("m",), 2, started_at=None), 1.0)

    assert made.restarted(member, Discovery(started_at=2_000.0))


def test_s5_configured_models_are_not_replaced_by_discovered_ones() -> None:
    made = Crew(3, random.Random(1))
    made.add(A, 0.0, slots=None, models=("mine",), settle_s=0.0)
    made.discover(made.members[A], Discovery(("theirs",), 2), 0.0)

    assert list(made.serving) == ["mine"]


def test_l5_a_retired_worker_leaves_the_table_before_it_is_forgotten() -> None:
    made = crew(A, B)
    member = made.members[A]
    member.life.fire(Event.REMOVE, 1.0)
    member.held.clear()
    made.retire(member)

    assert [m.id for m in made.serving["m"]] == [B]
    assert A not in made.members


def test_a8_a_rest_that_was_asked_for_is_capped_at_a_minute() -> None:
    made = crew(A)
    fault = Fault(FaultKind.DECLINED, "later", status=503, retry_after=3_600.0)

    assert made.note(made.members[A], fault, 10.0, silent=True)
    assert made.members[A].rest_until == 70.0


def declined(seconds: float | None) -> Fault:
    return Fault(FaultKind.DECLINED, "later", status=503, retry_after=seconds)


@pytest.mark.parametrize("seconds", [None, 0.0, 0.001, 0.2])
def test_a8_a_worker_that_asks_for_next_to_no_rest_gets_ours(
    seconds: float | None,
) -> None:
    member = (made := crew(A)).members[A]
    for turn in range(20):
        now = 10.0 * turn
        assert made.note(member, declined(seconds), now, silent=True)
        assert now + 0.25 <= member.rest_until <= now + 0.75


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_b29_workers_that_decline_together_do_not_come_back_together(
    seconds: float | None,
) -> None:
    made = crew(*(WorkerId(f"w{number}") for number in range(20)))
    for member in made.members.values():
        made.note(member, declined(seconds), 10.0, silent=True)

    rests = sorted(member.rest_until - 10.0 for member in made.members.values())
    assert len(set(rests)) == len(rests)
    assert rests[-1] - rests[0] > 0.25


def test_a8_what_else_fails_cuts_no_rest_that_was_asked_for() -> None:
    member = (made := crew(A)).members[A]
    made.note(member, declined(20.0), 10.0, silent=True)

    made.note(member, declined(None), 11.0, silent=True)
    for _ in range(3):
        made.blame(member, 11.0)

    assert member.life.state is State.SUSPECT
    assert member.rest_until == 30.0


def test_a8_what_succeeds_cuts_no_rest_that_was_asked_for() -> None:
    member = (made := crew(A)).members[A]
    for _ in range(3):
        made.blame(member, 10.0)
    made.note(member, declined(20.0), 10.0, silent=True)

    made.praise(member, 11.0)

    assert member.life.state is State.READY
    assert member.rest_until == 30.0


def test_a8_a_success_ends_the_rest_of_a_suspect_that_asked_for_none() -> None:
    member = (made := crew(A)).members[A]
    for _ in range(3):
        made.blame(member, 10.0)
    made.note(member, declined(0.0), 10.0, silent=True)

    made.praise(member, 10.1)

    assert member.rest_until == 0.0


def test_a8_a_rest_that_was_asked_for_outlasts_a_load() -> None:
    member = (made := crew(A)).members[A]
    made.note(member, declined(20.0), 10.0, silent=True)

    member.life.fire(Event.LOADS, 11.0)
    made.discover(member, Discovery(("m",), 2), 12.0)

    assert member.serving
    assert member.rest_until == 30.0


def test_a8_a_restart_ends_the_rest_that_the_old_process_asked_for() -> None:
    member = (made := crew(A)).members[A]
    made.note(member, declined(20.0), 10.0, silent=True)

    made.discover(member, Discovery(("m",), 2, started_at=2_000.0), 12.0)

    assert member.rest_until == 0.0


REFUSED = Fault(FaultKind.UNAUTHORIZED, "No.", status=401)


def refuse_key(made: Crew, now: float, found: Discovery) -> float:
    """Have a request refused, and probes answered till it serves; say how long."""
    member = made.members[A]
    made.note(member, REFUSED, now, silent=True)
    assert (member.life.state, member.life.reason) == (State.FAILED, "unauthorized")
    began = now
    while not member.serving:
        now += 0.5
        made.discover(member, found, now)
    return now - began


def test_a4_a_worker_whose_probes_need_no_key_is_tried_at_gaps_that_grow() -> None:
    made = crew(A)
    found = Discovery(("m",), 2, started_at=1_000.0)
    gaps = [refuse_key(made, 1_000.0 * n, found) for n in range(12)]

    assert gaps[:5] == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert gaps[-2:] == [300.0, 300.0]
    assert made.members[A].limit == 1

    made.praise(made.members[A], 20_000.0)
    assert refuse_key(made, 20_000.0, found) == 0.5


def test_a4_a_refused_key_is_tried_at_once_on_a_server_that_was_restarted() -> None:
    made = crew(A)
    for n in range(5):
        refuse_key(made, 1_000.0 * n, Discovery(("m",), 2, started_at=1_000.0))

    assert refuse_key(made, 9_000.0, Discovery(("m",), 2, started_at=2_000.0)) == 0.5


def test_a4_many_requests_that_are_refused_together_count_once() -> None:
    made = crew(A)
    for _ in range(5):
        made.note(made.members[A], REFUSED, 1.0, silent=True)

    assert made.members[A].key_refusals == 1


def test_s6_a_suspects_rests_are_capped() -> None:
    made = crew(A)
    member = made.members[A]
    rests: list[float] = []
    now = 100.0
    while len(rests) < 20:
        if made.blame(member, now):
            rests.append(member.rest_until - now)
            now = member.rest_until

    assert member.life.state is State.SUSPECT
    assert 30.0 * 0.75 <= rests[-1] <= max(rests) <= 30.0 * 1.25


def test_s6_what_fails_while_a_suspect_rests_is_no_trial_of_it() -> None:
    made = crew(A)
    member = made.members[A]
    for _ in range(3):
        made.blame(member, 100.0)
    rest_until = member.rest_until

    assert not made.blame(member, 100.1)
    assert (member.faults, member.rest_until) == (3, rest_until)


def test_s7_a_fault_on_the_ramp_starts_it_anew() -> None:
    made = crew(A)
    member = made.members[A]
    member.slots = 8
    member.distrust()
    member.trust()
    assert member.limit == 2

    made.blame(member, 1.0)

    assert member.limit == 1


def test_nothing_is_held_against_a_worker_that_is_gone() -> None:
    made = crew(A)
    member = made.members[A]
    member.life.fire(Event.REMOVE, 1.0)

    assert not made.blame(member, 2.0)
    assert not made.note(member, Fault(FaultKind.LOADING, "x"), 2.0, silent=True)
    made.praise(member, 2.0)
    assert member.life.state is State.GONE
