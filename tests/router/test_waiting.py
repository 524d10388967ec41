"""The silence machine, row by row (W2 to W4, W8, W9)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.errors import Fault, FaultKind, LocalError
from router.ids import AssignmentId, RequestId
from router.messages import SlotView
from router.waiting import (
    TIMEOUTS,
    Budgets,
    Grid,
    Stretch,
    Wait,
    WaitState,
    advance,
    classify,
)

BUSY, IDLE, UNAVAILABLE = WaitState
BUDGETS = Budgets(poll=0.5, busy=600.0, idle=10.0, unavailable=300.0)


def llama(processing: int, *, ours: int = 1, total: int | None = 4) -> WaitState:
    return classify(False, SlotView(total, processing), None, ours, None)


# ---- W2: what one probe shows ----


def test_w2_part_of_a_head_is_idle_without_a_probe() -> None:
    assert classify(True, None, None, 1, None) is IDLE


def test_w2_part_of_a_head_outweighs_what_a_probe_says() -> None:
    assert classify(True, SlotView(4, 4), None, 1, None) is IDLE


def test_w2_no_free_slot_is_busy() -> None:
    assert llama(4, ours=5) is BUSY


def test_w2_as_many_at_work_as_we_have_there_is_busy() -> None:
    assert llama(2, ours=2) is BUSY


def test_w2_more_at_work_than_we_have_there_is_busy() -> None:
    assert llama(3, ours=2) is BUSY


def test_w2_fewer_at_work_than_we_have_there_is_idle() -> None:
    assert llama(1, ours=2) is IDLE


def test_w2_nothing_at_work_is_idle() -> None:
    assert llama(0) is IDLE


def test_w2_a_failed_probe_is_unavailable() -> None:
    assert classify(False, None, None, 1, 4) is UNAVAILABLE


def test_w2_the_engines_own_number_of_slots_outweighs_ours() -> None:
    assert classify(False, SlotView(2, 2), None, 3, 4) is BUSY


def test_w2_our_number_of_slots_serves_where_the_engine_gives_none() -> None:
    assert classify(False, SlotView(None, 2), None, 3, 2) is BUSY


def test_w2_an_unknown_number_of_slots_leaves_the_comparison() -> None:
    assert classify(False, SlotView(None, 1), None, 2, None) is IDLE
    assert classify(False, SlotView(None, 2), None, 2, None) is BUSY


# ---- W2: a request that is pinned to one slot ----


def pinned(*busy: int, slot: int, ours: int = 1, total: int | None = 4) -> WaitState:
    view = SlotView(total, len(busy), frozenset(busy))
    return classify(False, view, None, ours, None, pinned=slot)


def test_w2_a_pinned_request_is_busy_while_its_own_slot_is_at_work() -> None:
    assert pinned(1, slot=1, ours=3) is BUSY


def test_w2_a_pinned_request_is_idle_while_its_own_slot_is_not() -> None:
    assert pinned(0, 2, 3, slot=1, ours=1) is IDLE


def test_w2_a_pinned_request_whose_slot_is_missing_is_idle() -> None:
    assert pinned(0, 1, slot=7, total=2) is IDLE


def test_w2_a_view_without_numbers_judges_a_pinned_request_as_any() -> None:
    assert classify(False, SlotView(4, 4), None, 5, None, pinned=1) is BUSY


def test_w2_a_failed_probe_leaves_a_pinned_request_unavailable() -> None:
    assert classify(False, None, None, 1, 4, pinned=1) is UNAVAILABLE


# ---- W10: what its processes do ----


@pytest.mark.parametrize("works", [True, None])
def test_w10_busy_stays_busy_while_its_processes_work_or_nobody_can_tell(
    works: bool | None,
) -> None:
    full = SlotView(4, 4)

    assert classify(False, full, None, 1, None, works=works) is BUSY
    assert classify(False, None, True, 1, 4, works=works) is BUSY


def test_w10_busy_without_cpu_time_is_idle_whatever_the_probe() -> None:
    full = SlotView(4, 4, frozenset(range(4)))

    assert classify(False, full, None, 1, None, works=False) is IDLE
    assert classify(False, full, None, 1, None, pinned=2, works=False) is IDLE
    assert classify(False, None, True, 1, 4, works=False) is IDLE


@pytest.mark.parametrize("works", [True, False, None])
def test_w10_cpu_time_makes_nothing_else_of_idle_and_unavailable(
    works: bool | None,
) -> None:
    assert classify(False, SlotView(4, 0), None, 1, None, works=works) is IDLE
    assert classify(False, None, None, 1, 4, works=works) is UNAVAILABLE
    assert classify(True, None, None, 1, 4, works=works) is IDLE


# ---- W8: engines without a slot probe ----


def test_w8_a_generic_server_that_answers_is_busy() -> None:
    assert classify(False, None, True, 1, 4) is BUSY


def test_w8_a_generic_server_is_never_idle() -> None:
    assert classify(False, SlotView(4, 0), True, 1, 4) is BUSY


def test_w8_a_generic_server_that_does_not_answer_is_unavailable() -> None:
    assert classify(False, None, False, 1, 4) is UNAVAILABLE


# ---- W3: the time in one state ----


@pytest.mark.parametrize("seen", WaitState)
def test_w3_the_first_poll_counts_one_step(seen: WaitState) -> None:
    assert advance(None, seen) == Stretch(seen, 1)


@pytest.mark.parametrize("seen", WaitState)
def test_w3_a_state_that_repeats_adds_a_step(seen: WaitState) -> None:
    assert advance(Stretch(seen, 7), seen) == Stretch(seen, 8)


@pytest.mark.parametrize("previous", WaitState)
@pytest.mark.parametrize("seen", WaitState)
def test_w3_a_change_starts_again_at_one_step(
    previous: WaitState, seen: WaitState
) -> None:
    if previous is not seen:
        assert advance(Stretch(previous, 7), seen) == Stretch(seen, 1)


def test_w3_time_is_told_in_seconds() -> None:
    wait = Wait(BUDGETS)
    assert (wait.state, wait.lasted) == (None, 0.0)

    wait.poll(BUSY)
    wait.poll(BUSY)
    assert (wait.state, wait.lasted) == (BUSY, 1.0)
    wait.poll(IDLE)
    assert (wait.state, wait.lasted) == (IDLE, 0.5)


# ---- W4: budgets ----

ROWS = [
    (BUSY, 1200, FaultKind.WAIT_TIMEOUT),
    (UNAVAILABLE, 600, FaultKind.LOAD_TIMEOUT),
    (IDLE, 20, FaultKind.STALLED),
]


@pytest.mark.parametrize(("state", "polls", "kind"), ROWS)
def test_w4_each_state_ends_at_its_budget_and_not_before(
    state: WaitState, polls: int, kind: FaultKind
) -> None:
    wait = Wait(BUDGETS)

    assert [wait.poll(state) for _ in range(polls - 1)] == [state] * (polls - 1)
    fault = wait.poll(state)
    assert isinstance(fault, Fault)
    assert fault.kind is kind
    assert fault.row.moves


def test_w4_the_fault_says_how_long() -> None:
    wait = Wait(Budgets(poll=0.5, busy=1.0, idle=1.0, unavailable=1.0))
    wait.poll(IDLE)

    fault = wait.poll(IDLE)

    assert isinstance(fault, Fault)
    assert fault.message == "The worker had room and did not answer for 1 s."


def test_w4_a_break_saves_the_wait() -> None:
    wait = Wait(BUDGETS)
    for _ in range(19):
        wait.poll(IDLE)

    assert wait.poll(BUSY) is BUSY
    assert [wait.poll(IDLE) for _ in range(19)] == [IDLE] * 19


def test_w4_a_budget_below_one_poll_ends_at_the_first() -> None:
    wait = Wait(Budgets(poll=0.5, busy=1.0, idle=0.0, unavailable=1.0))

    assert isinstance(wait.poll(IDLE), Fault)


def test_w4_budgets_that_binary_fractions_miss_are_exact() -> None:
    assert Budgets(poll=0.7, busy=2.1, idle=1.0, unavailable=1.0).polls(BUSY) == 3


def test_w4_every_state_has_its_timeout() -> None:
    assert set(TIMEOUTS) == set(WaitState)
    assert len({kind for kind, _ in TIMEOUTS.values()}) == len(WaitState)


ONE = AssignmentId(RequestId("r1"), 1)
TWO = AssignmentId(RequestId("r2"), 1)


def test_w2_an_attempt_owes_the_ticks_from_half_a_poll_of_silence_on() -> None:
    grid = Grid(start=100.0, poll=0.5)

    assert grid.owed({ONE: 100.2, TWO: 100.3}, 100.5) == {ONE: 1}
    assert grid.owed({ONE: 100.2, TWO: 100.3}, 101.0) == {ONE: 1, TWO: 1}


def test_w2_a_tick_is_owed_once() -> None:
    grid = Grid(start=100.0, poll=0.5)
    grid.owed({ONE: 100.0}, 100.5)

    assert grid.owed({ONE: 100.0}, 100.9) == {}


def test_w2_a_probe_that_hung_until_the_next_tick_settles_both() -> None:
    grid = Grid(start=100.0, poll=0.5)

    assert grid.owed({ONE: 100.0}, 101.0) == {ONE: 2}
    assert grid.owed({ONE: 100.0}, 101.5) == {ONE: 1}


def test_w2_a_byte_begins_the_silence_anew() -> None:
    grid = Grid(start=100.0, poll=0.5)
    grid.owed({ONE: 100.0}, 101.0)

    assert grid.owed({ONE: 101.4}, 101.5) == {}
    assert grid.owed({ONE: 101.4}, 102.0) == {ONE: 1}


def test_w2_the_grid_asks_at_each_tick_and_at_one_that_is_just_over() -> None:
    grid = Grid(start=100.0, poll=0.5)

    assert grid.next(100.0) == 100.5
    assert grid.next(100.6) == 101.0
    # The probe hung until 101.5: ask at once.
    assert grid.next(101.5) == 101.5
    # The loop was late: those in between are settled by one answer.
    assert grid.next(103.3) == 103.0


def test_w9_a_grid_without_width_is_our_bug() -> None:
    with pytest.raises(LocalError):
        Wait(Budgets(poll=0.0, busy=1.0, idle=1.0, unavailable=1.0))


class Silence(RuleBasedStateMachine):
    """W9: whatever came before, only the last run of one state counts."""

    @initialize(
        busy=st.integers(1, 6), idle=st.integers(1, 6), unavailable=st.integers(1, 6)
    )
    def begin(self, busy: int, idle: int, unavailable: int) -> None:
        self.limits = {BUSY: busy, IDLE: idle, UNAVAILABLE: unavailable}
        self.wait = Wait(
            Budgets(poll=0.5, busy=busy / 2, idle=idle / 2, unavailable=unavailable / 2)
        )
        self.seen: list[WaitState] = []

    def run(self) -> int:
        last = self.seen[-1]
        return next(
            (n for n, state in enumerate(reversed(self.seen)) if state is not last),
            len(self.seen),
        )

    @rule(
        partial=st.booleans(),
        probe=st.none()
        | st.builds(
            SlotView,
            st.none() | st.integers(1, 4),
            st.integers(0, 4),
            st.none() | st.frozensets(st.integers(0, 3)),
        ),
        alive=st.none() | st.booleans(),
        ours=st.integers(1, 4),
        pinned=st.none() | st.integers(0, 3),
        works=st.none() | st.booleans(),
    )
    def tick(
        self,
        partial: bool,
        probe: SlotView | None,
        alive: bool | None,
        ours: int,
        pinned: int | None,
        works: bool | None,
    ) -> None:
        state = classify(partial, probe, alive, ours, None, pinned=pinned, works=works)
        self.seen.append(state)

        got = self.wait.poll(state)

        if self.run() >= self.limits[state]:
            assert isinstance(got, Fault)
            assert got.kind is TIMEOUTS[state][0]
        else:
            assert got is state

    @invariant()
    def w3_the_time_is_that_of_the_last_run(self) -> None:
        if getattr(self, "seen", None):
            assert self.wait.lasted == self.run() * 0.5


TestSilence = Silence.TestCase
