"""Whole routers before whole agents (S1, S4, P5, F8)."""

import socket
from typing import Any

import pytest
import trio

from router.engine import Router
from router.engine.announced import Greeter
from router.errors import FaultKind, RequestFailed
from tests.kit.agents import (
    listen,
    open_agent,
    open_far_router,
    port_of,
)
from tests.kit.delivery import JOB
from tests.kit.edge import until
from tests.kit.engine import silent
from tests.kit.exchange import Exchange
from tests.kit.visits import slow
from workers import access


async def test_two_routers_share_two_agents_to_the_last_slot() -> None:
    """S1 as the engines see it, with more wishes than slots."""
    most = [0, 0]

    def counting(place: int) -> Any:
        async def script(x: Exchange) -> None:
            engine = engines[place]
            most[place] = max(most[place], engine.live)
            await x.role()
            for n in range(5):
                await x.text(str(n))
                await trio.sleep(0.002)
            most[place] = max(most[place], engine.live)
            await x.finish()
            await x.done()
            await x.end()

        return script

    async with (
        open_agent(counting(0), slots=3, name="h0") as a0,
        open_agent(counting(1), slots=2, name="h1") as a1,
        open_far_router(a0, a1) as r0,
        open_far_router(a0, a1) as r1,
    ):
        engines = [a0.engines[0], a1.engines[0]]
        texts: list[str] = []

        async def ask(router: Any) -> None:
            texts.append((await router.complete(JOB)).text)

        async with trio.open_nursery() as nursery:
            for n in range(60):
                nursery.start_soon(ask, (r0, r1)[n % 2])
        assert texts == ["01234"] * 60
        assert most == [3, 2]
        await until(lambda: a0.idle and a1.idle)
        for router in (r0, r1):
            assert not router.flights
            assert all(not m.busy for m in router.fleet.members.values())


async def test_s1_two_ways_to_one_agent_are_two_guests_and_stay() -> None:
    live = most = 0

    async def counting(x: Exchange) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await x.role()
        await x.text("a")
        live -= 1
        await x.finish()
        await x.done()
        await x.end()

    sock = listen()
    async with (
        open_agent(counting, slots=2, routers=[port_of(sock)]) as agent,
        open_far_router(agent, agent) as router,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Greeter(router).serve, [sock])
        await until(lambda: len(agent.agent.visits) == 3)
        await until(lambda: all(m.serving for m in router.fleet.members.values()))
        async with trio.open_nursery() as asking:
            for _ in range(30):
                asking.start_soon(router.complete, JOB)
        assert most == 2
        await until(lambda: agent.idle)
        assert len(agent.agent.visits) == 3
        assert agent.router.tally.wire.total() == router.tally.wire.total() == 0
        nursery.cancel_scope.cancel()


async def test_s4_a_router_with_a_deep_queue_leaves_another_its_part() -> None:
    async def brief(x: Exchange) -> None:
        await x.role()
        await trio.sleep(0.005)
        await x.text("a")
        await x.finish()
        await x.done()
        await x.end()

    async with (
        open_agent(brief, slots=2) as agent,
        open_far_router(agent) as greedy,
        open_far_router(agent) as modest,
    ):
        done: list[str] = []

        async def ask(router: Any, name: str) -> None:
            await router.complete(JOB)
            done.append(name)

        async with trio.open_nursery() as nursery:
            for _ in range(80):
                nursery.start_soon(ask, greedy, "greedy")
            await until(lambda: len(done) >= 4)
            for _ in range(10):
                nursery.start_soon(ask, modest, "modest")
        # The modest one's ten are long done when the greedy one's eighty are.
        assert done[-25:].count("modest") == 0


async def test_p5_a_killed_agent_fails_over_before_the_first_delta() -> None:
    texts: list[str] = []
    async with (
        open_agent(silent, name="h0") as a0,
        open_agent(None, name="h1") as a1,
        open_far_router(a0, a1) as router,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            texts.append((await router.complete(JOB)).text)

        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await until(lambda: bool(a0.engines[0].seen))
        a0.kill()
        await until(lambda: len(texts) == 2)
    assert texts == ["Hello world"] * 2


async def test_f8_an_agent_that_restarts_is_another_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sock = listen()
    port = port_of(sock)
    faults: list[FaultKind] = []
    async with open_agent(slow, sock=sock) as first, open_far_router(port) as router:

        async def ask() -> None:
            with pytest.raises(RequestFailed) as raised:
                await read_all(router)
            faults.append(raised.value.fault.kind)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: any(f.delta_count for f in router.flights.values()))
            first.kill()
        # It had lived for longer than a moment.
        epoch = access.new_epoch() + 5_000
        monkeypatch.setattr(access, "new_epoch", lambda: epoch)
        again = socket.create_server(("127.0.0.1", port))
        again.setblocking(False)
        async with open_agent(None, sock=again):
            await until(lambda: router.ready)
            assert (await router.complete(JOB)).text == "Hello world"

    assert faults == [FaultKind.STREAM_CLOSED_EARLY]
    assert router.tally.restarts["a0"] == 1


async def read_all(router: Router) -> None:
    async with router.stream(JOB) as deltas:
        async for _ in deltas:
            pass
