"""Bugs that are planted in routers and agents show in the simulation's books."""

from collections.abc import Callable
from typing import Any

import pytest

from router.crew.member import Member
from router.engine.flight import Flight
from router.errors import Fault, LocalError
from router.fence import Fence, Verdict
from router.messages import Finished, FinishReason
from router.ports import Taken
from tests.simulation.far_world import STARVED_S, play
from workers import link
from workers.agent.receiver import WireReceiver
from workers.agent.visit import Visit
from workers.remote import RemoteWorker
from workers.shares import Shares
from workers.wire.attempt import RemoteSource
from workers.wire.frames import Cancel, Credit
from workers.wire.hosting import AgentEnd
from workers.wire.inbound import Inbound
from workers.wire.opening import Opening

#: Seeds in which each has to show, and requests of one.
SEEDS = 6
REQUESTS = 150

Plant = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def agent_works_on_without_its_router(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentEnd, "end", _nothing)


def agent_heeds_no_cancel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Visit, "cancelled", _nothing)


def router_tells_no_cancel(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemoteSource, "close", RemoteSource.let_go)


def router_lets_late_deltas_in(patch: pytest.MonkeyPatch) -> None:
    def close(self: RemoteSource) -> None:
        self._end.put(Cancel(self.number))

    def judge(self: Fence, _: object, index: int, ahead: int = 0) -> Verdict:
        wanted = index - ahead
        return Verdict.NEXT if wanted == self.next_index else Verdict.REPEAT

    patch.setattr(RemoteSource, "close", close)
    patch.setattr(Fence, "judge", judge)


def router_grants_credit_to_who_does_not_read(patch: pytest.MonkeyPatch) -> None:
    hold = RemoteSource._hold

    def grant(self: RemoteSource, what: Any) -> None:
        hold(self, what)
        self._granted = self.spent + self._window
        self._end.put(Credit(self.number, self._granted))

    patch.setattr(RemoteSource, "_hold", grant)


def router_delivers_to_who_does_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RemoteSource, "pause", _nothing)


def router_forgets_what_it_held(patch: pytest.MonkeyPatch) -> None:
    resume = RemoteSource.resume

    def forget(self: RemoteSource) -> None:
        if self._held:
            self._held.popleft()
        resume(self)

    patch.setattr(RemoteSource, "resume", forget)


def router_takes_a_loss_for_an_end(patch: pytest.MonkeyPatch) -> None:
    def lose(self: RemoteSource, _: Fault) -> None:
        self.let_go()
        self.delivery.finished(Finished(self.assignment, FinishReason.STOP))

    patch.setattr(RemoteSource, "lose", lose)


def agent_ignores_credit(patch: pytest.MonkeyPatch) -> None:
    init = Inbound.__init__

    def rich(self: Inbound, *arguments: Any) -> None:
        init(self, *arguments)
        self.credit = 2**53

    patch.setattr(Inbound, "__init__", rich)


def agent_does_not_pause_its_engine(patch: pytest.MonkeyPatch) -> None:
    take = WireReceiver.take

    def more(self: WireReceiver, *arguments: Any) -> Any:
        taken = take(self, *arguments)
        return Taken.MORE if taken is Taken.FULL else taken

    patch.setattr(WireReceiver, "take", more)


def agent_lets_jobs_wait_for_a_slot(patch: pytest.MonkeyPatch) -> None:
    begin = Flight.begin
    patch.setattr(Flight, "begin", lambda self, **_: begin(self))
    patch.setattr(Visit, "_against", _nothing)


def settling_slots_count_as_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "busy", property(lambda self: len(self.held)))


def shares_are_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shares, "gave", _nothing)


def guests_that_left_are_remembered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shares, "leave", _nothing)


def silence_lasts_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(link, "EXPIRY_S", float("inf"))


def an_old_connection_takes_the_new_one_along(patch: pytest.MonkeyPatch) -> None:
    lose = RemoteWorker._lose

    def both(self: RemoteWorker, route: Any, why: Any) -> None:
        lose(self, route, why)
        self.route = None

    patch.setattr(RemoteWorker, "_lose", both)


def a_recorded_proof_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Opening, "_verify", _nothing)


#: Where what befalls hosts and networks matters, that alone.
PLANTED: tuple[tuple[Plant, tuple[str, ...]], ...] = (
    (agent_works_on_without_its_router, ("cut", "half open")),
    (agent_heeds_no_cancel, ()),
    (router_tells_no_cancel, ()),
    (router_lets_late_deltas_in, ()),
    (router_grants_credit_to_who_does_not_read, ()),
    (router_delivers_to_who_does_not_read, ()),
    (router_forgets_what_it_held, ()),
    (router_takes_a_loss_for_an_end, ("cut",)),
    (agent_ignores_credit, ()),
    (agent_does_not_pause_its_engine, ()),
    (agent_lets_jobs_wait_for_a_slot, ()),
    (settling_slots_count_as_free, ()),
    (shares_are_not_given_back, ()),
    (guests_that_left_are_remembered, ("cut",)),
    (silence_lasts_for_ever, ("half open",)),
    (an_old_connection_takes_the_new_one_along, ("cut one end",)),
    (a_recorded_proof_is_believed, ("replay",)),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "troubles"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED]
)
def test_t8_a_planted_bug_shows(
    plant: Plant, troubles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    assert any(shows(seed, troubles) for seed in range(SEEDS))


def shows(seed: int, troubles: tuple[str, ...]) -> bool:
    """Say whether this world breaks a promise, or an invariant of its own."""
    try:
        books = play(seed, requests=REQUESTS, troubles=troubles, hasty=True)
        return bool(books.breaches)
    except ExceptionGroup as broken:
        _, others = broken.split(LocalError)
        if others is not None:
            raise
        return True


@pytest.mark.slow
def test_p3_an_agent_that_asks_no_share_is_seen_to_starve_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shares, "may", lambda *_: True)

    books = play(1, requests=180, faulty=False, flooded=True)

    assert books.waited["r1"] > STARVED_S
