"""Agents that come by themselves, as their router sees them (P1, O6)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from router.engine import Router, announced, open_router
from router.engine.announced import ARRIVE_S, Greeter
from router.errors import FaultKind, RequestFailed
from router.settings import Settings
from tests.kit.agents import QUICK, listen, open_agent, port_of
from tests.kit.delivery import JOB
from tests.kit.edge import until
from workers.agent.agent import BACKOFF_S
from workers.scripted import ScriptedWorker, answers


async def test_o6_no_model_is_unknown_while_agents_may_come_again(
    autojump_clock: MockClock,
) -> None:
    # An agent's longest pause, and time to meet.
    assert 1.5 * BACKOFF_S[1] <= ARRIVE_S
    async with open_router() as router, trio.open_nursery() as nursery:
        assert router.resolve("m") is None
        await nursery.start(Greeter(router).serve, [listen()])
        await trio.sleep(ARRIVE_S - 0.1)
        with pytest.raises(RequestFailed) as raised:
            router.resolve("m")
        assert raised.value.fault.kind is FaultKind.MODEL_LOADING

        await trio.sleep(0.2)
        assert router.resolve("m") is None
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def greeting() -> AsyncIterator[tuple[Router, Greeter, int]]:
    """A router that lets agents come, who does it, and the port where they do."""
    sock = listen()
    async with (
        open_router(Settings(waits=QUICK)) as router,
        trio.open_nursery() as nursery,
    ):
        greeter = Greeter(router)
        await nursery.start(greeter.serve, [sock])
        yield router, greeter, port_of(sock)
        nursery.cancel_scope.cancel()


async def test_l5_a_removed_agent_is_taken_in_anew_when_it_connects_again() -> None:
    async with greeting() as (router, _, port):
        async with open_agent(None, name="h", routers=[port]):
            await until(lambda: router.ready)
            assert router.remove_worker("h")
            await until(lambda: not router.workers)

        async with open_agent(None, name="h", routers=[port]):
            await until(lambda: router.ready)
            with trio.fail_after(5):
                assert (await router.complete(JOB)).text == "Hello world"


async def test_l5_a_removed_agent_is_forgotten_and_no_other_of_its_name_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announced, "LOOK_S", 0.01)
    async with greeting() as (router, greeter, port):
        async with open_agent(None, name="h", routers=[port]):
            await until(lambda: router.ready)
            assert router.remove_worker("h")
            await until(lambda: not router.workers)
            other = ScriptedWorker("h", answers("x"))
            await router.add_worker(other)
        await until(lambda: not greeter._hired)

        assert list(router.workers.values()) == [other]
