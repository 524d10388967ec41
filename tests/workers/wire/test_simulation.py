"""Both ends on a lossy network: F1 and F8 hold for every seed.

TCP loses, doubles and swaps nothing within a connection; the machines do not
lean on that. The planted bugs show that this would find one.
"""

from collections.abc import Callable

import attrs
import pytest

from router.ids import RequestId
from router.messages import FinishReason
from tests.kit.deep import size
from tests.kit.wire_world import NONE, WILD, Agent, Faults, World
from workers.wire import attempt
from workers.wire.attempt import RemoteSource
from workers.wire.frames import Deltas, Offer, Part
from workers.wire.hosting import AgentEnd, Refusal
from workers.wire.inbound import Inbound, State
from workers.wire.routing import RouterEnd

#: Where the planted bugs have to show.
NASTY = attrs.evolve(WILD, double=0.3, swap=0.5, delay=12)
#: A hundred thousand requests at a release, twelve a seed (T8).
SEEDS = range(size(8_500, least=100))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a job of some parts of a small one."""
    monkeypatch.setattr(attempt, "PART_MAX", 100)


def outcomes(world: World) -> list[str]:
    return [f.outcome for r in world.routers for f in r.flights.values()]


@pytest.mark.deep
def test_f1_holds_for_every_seed_of_a_wild_network() -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        world = World(seed, WILD)
        try:
            world.run()
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}: {broken}") from broken
        seen.update(outcomes(world))

    assert {"completed", "failed", "left"} <= seen


@pytest.mark.deep
@pytest.mark.parametrize(
    "faults",
    [
        Faults(lose=0.2, delay=3),
        Faults(double=0.5, delay=3),
        Faults(swap=0.6, delay=12),
        Faults(cut=0.05, delay=2),
        Faults(crash_agent=0.02, delay=2),
        Faults(crash_router=0.02, delay=2),
        Faults(stall=0.2, leave=0.02),
    ],
    ids=["loss", "duplicates", "reordering", "cuts", "agents", "routers", "clients"],
)
def test_f1_holds_for_each_kind_of_fault_alone(faults: Faults) -> None:
    for seed in range(size(1_000, least=20)):
        World(seed, faults).run()


def test_without_faults_everything_finishes() -> None:
    for seed in range(20):
        world = World(seed, NONE, requests=4, slots=8)
        world.run()

        assert set(outcomes(world)) == {"completed"}


def test_s1_routers_that_contend_never_get_a_slot_too_many() -> None:
    for seed in range(20):
        world = World(seed, attrs.evolve(NONE, stall=0.0), requests=8, slots=2)
        world.run()

        assert set(outcomes(world)) == {"completed"}
        assert {agent.most for agent in world.agents} == {2}


def test_t2_the_same_seed_gives_the_same_trace() -> None:
    one, other = World(11, WILD), World(11, WILD)
    one.run()
    other.run()

    assert one.trace == other.trace
    assert one.trace != []


# ---- bugs, planted ----


def take_any_part(self: AgentEnd, part: Part) -> None:
    inbound = self._find(part.stream)
    if inbound is None or inbound.state is not State.GATHERING:
        return
    inbound.octets += part.octets
    inbound.got += len(part.octets)
    if inbound.got >= inbound.offer.size:
        self._begin(inbound)


def begin_again(self: AgentEnd, offer: Offer) -> None:
    inbound = Inbound(self, offer)
    self.inbounds[offer.stream] = inbound
    refusal = self._gate.look(inbound)
    assert refusal is None
    self._gathering.add(inbound)


def trust_any_count(self: RemoteSource, count: int, reason: str) -> bool:
    del count
    self.reason = FinishReason(reason)
    return True


def stamp_anew(self: RouterEnd, steps: list[Deltas], now: float) -> None:
    """The router counts by itself and believes no index."""
    real = [
        (number, self.sources[number].count, kind, text)
        for step in steps
        for number, _, kind, text in step.entries
        if number in self.sources
    ]
    for entry in real:
        number, _, kind, text = entry
        source = self.sources.get(number)
        if source is not None:
            self._step([(number, source.count, kind, text)], now)


def mix_up_streams(self: RouterEnd, steps: list[Deltas], now: float) -> None:
    """A late delta goes to whoever is there."""
    for step in steps:
        for number, index, kind, text in step.entries:
            there = number if number in self.sources else next(iter(self.sources), 0)
            if there:
                self._step([(there, index, kind, text)], now)


def cancel_nothing(self: AgentEnd, inbound: Inbound) -> None:
    del self, inbound


def count_nothing(self: Agent, inbound: Inbound, job: object) -> Refusal | None:
    del job
    self.world.begun[
        self.name, self.epoch, inbound.offer.request, -len(self.running)
    ] = 1
    self.running[inbound] = self.world.length
    self.most = max(self.most, len(self.running))
    return None


def repeat_the_first(self: Inbound, deltas: list[object]) -> None:
    number = self.offer.stream
    for delta in deltas:
        entry = (number, 0, 0, delta.text)  # type: ignore[attr-defined]
        self._put_delta(entry, 1)
        self.next_index += 1


PLANTED: dict[str, tuple[type, str, Callable[..., object]]] = {
    "parts are taken as they come": (AgentEnd, "_part", take_any_part),
    "a duplicate offer is begun": (AgentEnd, "_offer", begin_again),
    "an end's count is believed": (RemoteSource, "_is_whole", trust_any_count),
    "indices are made up": (RouterEnd, "_fan_out", stamp_anew),
    "late deltas go to others": (RouterEnd, "_fan_out", mix_up_streams),
    "a cancel does nothing": (AgentEnd, "_drop", cancel_nothing),
    "slots are not counted": (Agent, "begin", count_nothing),
    "indices do not grow": (Inbound, "deltas", repeat_the_first),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_t8_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, name, planted = PLANTED[bug]
    monkeypatch.setattr(cls, name, planted)

    assert any(breaks(seed) for seed in range(200)), f"{bug}: not found in 200 seeds"


def breaks(seed: int) -> bool:
    """Say whether some rule is broken in this world."""
    try:
        World(seed, NASTY).run(ticks=2_500)
    except Exception:  # noqa: BLE001  whatever it broke
        return True
    return False


def test_a_request_has_a_name_of_its_own() -> None:
    world = World(1, NONE)
    names = [name for r in world.routers for name in r.flights]

    assert len(set(names)) == len(names)
    assert names[0] == RequestId("r0.1")
