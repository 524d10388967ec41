"""The fence, rule by rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.errors import LocalError
from router.fence import TRANSITIONS, Event, Fence, State, Verdict
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Kind

REQUEST = RequestId("r")
FIRST = AssignmentId(REQUEST, 1)
SECOND = AssignmentId(REQUEST, 2)


def opened() -> Fence:
    fence = Fence()
    fence.assign(FIRST)
    return fence


def test_f2_an_attempt_that_is_not_newer_cannot_open_the_fence() -> None:
    fence = opened()
    fence.revoke()

    with pytest.raises(LocalError):
        fence.assign(FIRST)

    assert fence.state is State.IDLE
    assert fence.owner is None


def test_f3_only_the_owners_next_index_is_next() -> None:
    fence = opened()
    fence.sent()

    assert fence.judge(FIRST, 1) is Verdict.NEXT
    assert fence.judge(FIRST, 0) is Verdict.REPEAT
    assert fence.judge(SECOND, 1) is Verdict.STALE


def test_f3_an_equal_assignment_need_not_be_the_same_object() -> None:
    assert opened().judge(AssignmentId(RequestId("r"), 1), 0) is Verdict.NEXT


_STAMPS = st.lists(st.tuples(st.sampled_from([FIRST, SECOND]), st.integers(0, 4)))


@given(state=st.sampled_from(["idle", "open", "sent", "revoked"]), stamps=_STAMPS)
def test_f3_a_batch_is_all_next_exactly_where_each_delta_is(
    state: str, stamps: list[tuple[AssignmentId, int]]
) -> None:
    fence = Fence()
    if state != "idle":
        fence.assign(FIRST)
    if state == "sent":
        fence.sent(2)
    if state == "revoked":
        fence.revoke()
    deltas = [Delta(owner, index, Kind.TEXT, "x") for owner, index in stamps]

    one_by_one = [
        fence.judge(delta.assignment, delta.index, ahead)
        for ahead, delta in enumerate(deltas)
    ]

    wanted = bool(deltas) and all(verdict is Verdict.NEXT for verdict in one_by_one)
    assert fence.all_next(deltas) is wanted


def test_f3_an_equal_assignment_in_a_batch_need_not_be_the_same_object() -> None:
    other = AssignmentId(RequestId("r"), 1)
    assert opened().all_next([Delta(other, 0, Kind.TEXT, "x")])


def test_f4_deltas_of_a_revoked_assignment_are_late_and_then_stale() -> None:
    fence = opened()
    fence.revoke()
    assert fence.judge(FIRST, 0) is Verdict.LATE

    fence.assign(SECOND)

    assert fence.judge(FIRST, 0) is Verdict.STALE
    assert fence.judge(SECOND, 0) is Verdict.NEXT


def test_f5_an_index_beyond_the_next_is_a_gap() -> None:
    assert opened().judge(FIRST, 1) is Verdict.GAP


def test_f6_judging_changes_nothing() -> None:
    fence = opened()

    assert fence.judge(FIRST, 0) is Verdict.NEXT
    assert fence.judge(FIRST, 0) is Verdict.NEXT
    assert fence.next_index == 0


def test_f6_deltas_of_one_batch_are_judged_ahead_of_their_count() -> None:
    fence = opened()

    assert [fence.judge(FIRST, i, i) for i in range(3)] == [Verdict.NEXT] * 3
    assert fence.judge(FIRST, 1, 2) is Verdict.REPEAT

    fence.sent(3)
    assert fence.next_index == 3


def test_a2_after_commit_no_other_assignment_can_open_the_fence() -> None:
    fence = opened()
    fence.sent()
    fence.revoke()

    assert fence.state is State.CLOSED
    with pytest.raises(LocalError):
        fence.assign(SECOND)


def test_a5_what_only_an_aggregate_took_may_start_over() -> None:
    fence = opened()
    fence.kept(5)
    fence.revoke()
    fence.assign(SECOND)

    assert fence.next_index == 0
    assert fence.judge(SECOND, 0) is Verdict.NEXT


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_an_event_that_is_not_in_the_table_changes_nothing(
    state: State, event: Event
) -> None:
    if event in TRANSITIONS[state]:
        return
    fence = Fence()
    fence.state = state
    before = (fence.state, fence.owner, fence.next_index, fence.newest)

    with pytest.raises(LocalError):
        _apply(fence, event)

    assert (fence.state, fence.owner, fence.next_index, fence.newest) == before


def _apply(fence: Fence, event: Event) -> None:
    match event:
        case Event.ASSIGN:
            fence.assign(SECOND)
        case Event.KEPT:
            fence.kept()
        case Event.SENT:
            fence.sent()
        case Event.REVOKE:
            fence.revoke()
        case Event.CLOSE:
            fence.close()


class FenceMachine(RuleBasedStateMachine):
    """Random attempts, deliveries in any order, revokes; the client's view."""

    def __init__(self) -> None:
        super().__init__()
        self.fence = Fence()
        self.attempt = 0
        self.client: list[tuple[AssignmentId, int]] = []

    @rule()
    def assign(self) -> None:
        self.attempt += 1
        allowed = self.fence.state is State.IDLE
        try:
            self.fence.assign(AssignmentId(REQUEST, self.attempt))
        except LocalError:
            assert not allowed
        else:
            assert allowed

    @rule(attempt=st.integers(0, 4), indices=st.lists(st.integers(0, 6), max_size=5))
    def deliver(self, attempt: int, indices: list[int]) -> None:
        assignment = AssignmentId(REQUEST, attempt)
        taken: list[tuple[AssignmentId, int]] = []
        for index in indices:
            if self.fence.judge(assignment, index, len(taken)) is Verdict.NEXT:
                taken.append((assignment, index))
        if taken:
            self.client += taken
            self.fence.sent(len(taken))

    @rule()
    def revoke(self) -> None:
        if self.fence.owner is not None:
            self.fence.revoke()

    @rule()
    def close(self) -> None:
        if self.fence.state is not State.CLOSED:
            self.fence.close()

    @invariant()
    def f1_the_client_has_a_gapless_prefix_of_one_assignment(self) -> None:
        assert [index for _, index in self.client] == list(range(len(self.client)))
        assert len({assignment for assignment, _ in self.client}) <= 1

    @invariant()
    def the_owner_is_set_exactly_while_somebody_may_send(self) -> None:
        sending = self.fence.state in {State.OPEN, State.COMMITTED}
        assert (self.fence.owner is not None) == sending


TestFenceMachine = FenceMachine.TestCase
