"""A worker's life, rule by rule."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.errors import LocalError
from router.lifecycle import SERVING, TRANSITIONS, Event, Lifecycle, State


def living(*events: Event) -> Lifecycle:
    life = Lifecycle(0.0)
    for event in events:
        life.fire(event, 1.0)
    return life


def test_l2_a_loading_worker_is_waited_for_and_then_ready() -> None:
    assert living(Event.LOADS).state is State.LOADING
    assert living(Event.LOADS, Event.ANSWERED).state is State.READY


def test_l2_each_state_has_a_stable_reason_and_a_since() -> None:
    life = living()
    assert life.reason == "WORKER_NOT_READY"

    life.fire(Event.UNFIT, 7.0, reason="unauthorized", detail="set api_key_env")

    assert (life.state, life.reason, life.since) == (State.FAILED, "unauthorized", 7.0)
    assert life.detail == "set api_key_env"


def test_l2_staying_in_a_state_keeps_its_since() -> None:
    life = living(Event.ANSWERED)

    assert not life.fire(Event.ANSWERED, 9.0)
    assert life.since == 1.0


def test_l3_one_success_brings_a_lost_worker_back() -> None:
    lost = (Event.ANSWERED, Event.MISSED)

    assert living(*lost).state is State.LOST
    assert living(*lost, Event.ANSWERED).state is State.READY


def test_l4_a_healthy_probe_does_not_clear_a_suspect() -> None:
    suspect = living(Event.ANSWERED, Event.FAULTED, Event.ANSWERED)
    cleared = living(Event.ANSWERED, Event.FAULTED, Event.SUCCEEDED)

    assert suspect.state is State.SUSPECT
    assert cleared.state is State.READY


def test_l5_an_operators_drain_replaces_the_reason_of_the_workers_own() -> None:
    life = living(Event.ANSWERED)
    life.fire(Event.DRAIN, 2.0, reason="agent_drains")
    life.fire(Event.DRAIN, 3.0)

    assert (life.state, life.reason, life.since) == (State.DRAINING, "draining", 3.0)


@pytest.mark.parametrize("event", [Event.UNFIT, Event.MISSED, Event.LOADS])
def test_l2_what_is_learned_of_a_draining_worker_replaces_no_reason(
    event: Event,
) -> None:
    life = living(Event.ANSWERED)
    life.fire(Event.DRAIN, 2.0, detail="by an operator")

    life.fire(event, 3.0, reason="unauthorized", detail="set api_key_env")

    assert (life.state, life.reason, life.since) == (State.DRAINING, "draining", 2.0)
    assert life.detail == "by an operator"


def test_l5_a_draining_worker_serves_nothing_until_undrained_and_probed() -> None:
    drained = (Event.ANSWERED, Event.DRAIN, Event.ANSWERED, Event.SUCCEEDED)

    assert living(*drained).state is State.DRAINING
    assert State.DRAINING not in SERVING
    assert living(*drained, Event.UNDRAIN).state not in SERVING
    assert living(*drained, Event.UNDRAIN, Event.ANSWERED).state is State.READY


@pytest.mark.parametrize("event", Event)
def test_nothing_leaves_gone(event: Event) -> None:
    life = living(Event.REMOVE)

    with pytest.raises(LocalError):
        life.fire(event, 2.0)

    assert life.state is State.GONE


def test_what_a_probe_can_find_is_legal_in_every_living_state() -> None:
    found = {Event.ANSWERED, Event.LOADS, Event.MISSED, Event.UNFIT}
    ended = {Event.SUCCEEDED, Event.FAULTED}
    for state, row in TRANSITIONS.items():
        if state is not State.GONE:
            assert found | ended <= set(row), state


class LifecycleMachine(RuleBasedStateMachine):
    """Any order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Lifecycle(0.0)
        self.now = 0.0

    @rule(event=st.sampled_from(Event))
    def step(self, event: Event) -> None:
        self.now += 1.0
        before = self.life.state
        try:
            changed = self.life.fire(event, self.now)
        except LocalError:
            assert event not in TRANSITIONS[before]
            assert self.life.state is before
        else:
            assert self.life.state is TRANSITIONS[before][event]
            assert changed == (self.life.state is not before)
            if changed:
                assert self.life.since == self.now

    @invariant()
    def since_is_never_in_the_future(self) -> None:
        assert self.life.since <= self.now


TestLifecycleMachine = LifecycleMachine.TestCase
