"""Who gets a slot of an agent that several routers use (P3)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.shares import CLAIM_S, HUNGER_S, Guest, Shares

A, B, C = Guest(1), Guest(2), Guest(3)
GUESTS = st.sampled_from([A, B, C])


class Host:
    """Four slots, and the ledger in front of them."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.shares = Shares()
        self.now = 0.0

    @property
    def free(self) -> int:
        return self.slots - sum(self.shares.held(g, "m") for g in (A, B, C))

    def view(self, guest: Guest) -> int:
        return self.shares.view(guest, "m", self.free, self.now)

    def offer(self, guest: Guest, waiting: int = 0) -> bool:
        self.now += 0.001
        if not self.shares.may(guest, "m", self.free):
            self.shares.missed(guest, "m", self.now)
            return False
        self.shares.took(guest, "m", self.now, waiting=waiting)
        return True

    def fill(self, guest: Guest, count: int) -> None:
        for _ in range(count):
            assert self.offer(guest, waiting=9)


def test_a_router_alone_may_have_every_slot() -> None:
    host = Host()
    assert host.view(A) == 4
    host.fill(A, 4)

    assert host.view(A) == 4
    assert not host.offer(A)


def test_what_others_have_is_not_ours_to_have() -> None:
    host = Host()
    for _ in range(3):
        host.offer(A)

    assert host.view(B) == 1
    assert host.view(A) == 4


def test_a_router_that_is_content_may_try_one_though_others_have_all() -> None:
    host = Host()
    for _ in range(4):
        host.offer(A)
    assert host.view(B) == 1
    assert not host.offer(B)

    assert host.view(B) == 0


def test_s4_a_router_that_was_turned_away_comes_before_one_that_has_more() -> None:
    host = Host()
    host.fill(A, 4)
    assert not host.offer(B)
    host.shares.gave(A, "m")

    assert not host.offer(A, waiting=8)
    assert host.view(A) == 3
    assert host.view(B) == 1
    assert host.offer(B)


def test_routers_that_want_more_share_evenly() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(B, waiting=9)
    for _ in range(20):
        # A's requests end one by one, and both ask for what comes free.
        most = max((A, B), key=lambda g: host.shares.held(g, "m"))
        host.shares.gave(most, "m")
        for guest in (A, B):
            host.offer(guest, waiting=9)

    assert (host.shares.held(A, "m"), host.shares.held(B, "m")) == (2, 2)


def test_a_claim_that_is_not_used_in_time_lapses() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(B)
    host.shares.gave(A, "m")
    assert host.view(B) == 1
    host.now += CLAIM_S / 2
    assert not host.shares.lapse(host.now)
    assert not host.offer(A, waiting=1)
    host.now += CLAIM_S

    assert host.shares.lapse(host.now)
    assert host.offer(A)


def test_a_claim_runs_only_from_when_it_could_be_used() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(B)
    assert host.view(B) == 0
    host.now += 10 * CLAIM_S

    assert not host.shares.lapse(host.now)
    assert host.shares.contested


def test_who_was_turned_away_and_asks_no_more_waits_no_more() -> None:
    """Its client has left, and nothing of the agent is ever free for it."""
    host = Host()
    host.fill(A, 4)
    host.offer(B)
    host.now += HUNGER_S - 0.1
    assert not host.shares.lapse(host.now)
    assert host.view(B) == 0
    host.now += 0.1

    assert host.shares.lapse(host.now)
    # It is shown a slot to try, in case that it waits after all; A still waits.
    assert host.view(B) == 1
    assert not host.offer(B)
    host.shares.gave(A, "m")
    assert not host.offer(A)
    assert host.offer(B)


def test_a_slot_is_claimed_only_while_somebody_knows_of_it() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(B)
    host.view(B)
    assert (host.shares.contested, host.shares.claimed) == (True, False)
    host.shares.gave(A, "m")
    host.view(B)
    assert host.shares.claimed
    host.now += CLAIM_S
    host.shares.lapse(host.now)

    assert not host.shares.claimed


def test_who_was_turned_away_first_is_first() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(C)
    host.offer(B)
    host.shares.gave(A, "m")

    assert not host.offer(B)
    assert host.offer(C)


def test_a_router_that_is_gone_claims_nothing() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(B)
    host.shares.leave(B)
    host.shares.gave(A, "m")

    assert host.offer(A)
    assert host.shares.held(B, "m") == 0


def test_models_have_their_slots_apart() -> None:
    host = Host()
    host.fill(A, 4)
    host.offer(B)

    assert host.shares.may(A, "n", 1)
    assert host.shares.view(B, "n", 2, host.now) == 2


class Contention(RuleBasedStateMachine):
    """Any order of offers, ends, looks and departures."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host()
        self.hungry: set[Guest] = set()

    @rule(guest=GUESTS, waiting=st.integers(0, 2))
    def offer(self, guest: Guest, waiting: int) -> None:
        self.host.offer(guest, waiting)

    @rule(guest=GUESTS)
    def give(self, guest: Guest) -> None:
        self.host.shares.gave(guest, "m")

    @rule(guest=GUESTS)
    def leave(self, guest: Guest) -> None:
        self.host.shares.leave(guest)

    @rule(guest=GUESTS)
    def look(self, guest: Guest) -> None:
        held = self.host.shares.held(guest, "m")
        assert held <= self.host.view(guest) <= self.host.slots + 1

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds: float) -> None:
        self.host.now += seconds
        self.host.shares.lapse(self.host.now)

    @invariant()
    def s1_no_slot_is_given_twice(self) -> None:
        assert 0 <= self.host.free <= self.host.slots

    @invariant()
    def a_free_slot_is_somebodys_to_take(self) -> None:
        """Claims keep a slot for somebody who may have it, never for nobody."""
        free = self.host.free
        if free:
            assert any(self.host.shares.may(g, "m", free) for g in (A, B, C))

    @invariant()
    def nobody_may_take_what_is_not_there(self) -> None:
        if not self.host.free:
            assert not any(self.host.shares.may(g, "m", 0) for g in (A, B, C))


TestContention = Contention.TestCase
TestContention.settings = settings(settings.default, stateful_step_count=40)
