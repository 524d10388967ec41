"""A bug of ours on one connection of the wire ends that one, and no other (L1)."""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from router.engine import Router, open_router
from router.engine.announced import Greeter
from router.engine.flight import Flight
from router.errors import FaultKind, LocalError, RequestFailed
from tests.kit.agents import listen, open_agent, open_far_router, port_of
from tests.kit.delivery import JOB
from tests.kit.edge import until
from tests.kit.peer import agent_passport, calling, router_passport
from tests.kit.visits import offer_of, slow, visiting
from workers.agent.visit import Visit
from workers.wire import frames
from workers.wire.frames import Deltas, Reason
from workers.wire.hosting import AgentEnd
from workers.wire.opening import Opening
from workers.wire.routing import RouterEnd


def breaks_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, place: str, bug: type[Exception]
) -> None:
    """Have the next call of one method raise."""
    right: Callable[..., Any] = getattr(owner, place)
    left = [bug]

    def broken(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()("planted")
        return right(*args, **named)

    monkeypatch.setattr(owner, place, broken)


@pytest.mark.parametrize(
    ("owner", "place"),
    [(AgentEnd, "received"), (Visit, "tick"), (Visit, "observe")],
)
async def test_l1_a_bug_on_one_routers_connection_ends_no_others(
    owner: type, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_agent(slow) as agent, visiting(agent, "good") as good:
        await good.send(*offer_of(good))
        await good.expect(Deltas)
        (kept,) = agent.agent.visits.values()
        with monkeypatch.context() as planted:
            right = getattr(owner, place)

            def broken(self: Any, *args: Any, **named: Any) -> Any:
                if self is kept or self is kept.end:
                    return right(self, *args, **named)
                raise ValueError("planted")

            planted.setattr(owner, place, broken)
            async with calling(agent.port, router_passport("bad")) as bad:
                await bad.open()
                await bad.send(*offer_of(bad))
                await bad.ended()
            assert bad.heard[-1].reason == Reason.INTERNAL.value

        assert agent.router.tally.bugs["workers.link"] >= 1
        await until(lambda: list(agent.agent.visits.values()) == [kept])
        assert agent.engines[0].live == 1
        async with visiting(agent, "next"):
            pass


async def test_l1_a_bug_in_an_assignments_task_is_told_as_its_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_agent(None) as agent, visiting(agent) as peer:
        breaks_once(monkeypatch, Flight, "_look", ValueError)
        await peer.send(*offer_of(peer, 1))
        failed = await peer.expect(frames.Failed)
        assert (failed.stream, failed.kind) == (1, FaultKind.SERVER_ERROR.value)

        await peer.send(*offer_of(peer, 2))
        assert (await peer.expect(frames.Finished)).stream == 2
        assert agent.router.tally.bugs["workers.agent"] == 1
        await until(lambda: agent.idle)


async def test_l1_a_bug_on_one_agents_connection_ends_what_is_on_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        open_agent(slow) as one,
        open_agent(slow) as other,
        open_far_router(one, other) as router,
    ):
        reasons: list[FaultKind] = []

        async def ask() -> None:
            try:
                async with router.stream(JOB) as deltas:
                    async for _ in deltas:
                        pass
            except RequestFailed as failed:
                reasons.append(failed.fault.kind)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            await until(lambda: one.engines[0].live == other.engines[0].live == 1)
            await until(lambda: all(f.delta_count for f in router.flights.values()))
            breaks_once(monkeypatch, RouterEnd, "received", ValueError)
            await until(lambda: len(reasons) == 1)
            assert router.tally.bugs["workers.link"] == 1
            # The agent is taken up again, and what the other does goes on.
            await until(lambda: sum(m.serving for m in members(router)) == 2)
            assert len(router.flights) == 1
            nursery.cancel_scope.cancel()
    assert reasons == [FaultKind.STREAM_CLOSED_EARLY]


def members(router: Router) -> list[Any]:
    return list(router.fleet.members.values())


async def test_l1_a_bug_in_a_strangers_handshake_ends_no_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_router() as router, trio.open_nursery() as nursery:
        listener = listen()
        port = port_of(listener)
        await nursery.start(Greeter(router).serve, [listener])
        async with calling(port, agent_passport()) as good:
            await good.open()
            await good.observe()
            await until(lambda: len(router.workers) == 1)
            breaks_once(monkeypatch, Opening, "receive", ValueError)
            async with calling(port, agent_passport()) as bad:
                await bad.stream.send_all(bad.opening.out.pop(0))
                await bad.ended()

            assert router.tally.bugs["workers.link"] == 1
            await good.observe(2)
            assert (await good.expect(frames.Seen)).sequence == 1
            assert (await good.expect(frames.Seen)).sequence == 2
        nursery.cancel_scope.cancel()


async def test_l1_a_broken_invariant_on_the_wire_leaves_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012
        async with open_agent(None) as agent, visiting(agent) as peer:
            breaks_once(monkeypatch, AgentEnd, "received", LocalError)
            await peer.send(*offer_of(peer))
            await peer.ended()
            await trio.sleep_forever()
    assert raised.group_contains(LocalError)
