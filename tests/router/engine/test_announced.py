"""Agents that come by themselves, as their router sees them (P1, O6)."""

import pytest
import trio
from trio.testing import MockClock

from router.engine import open_router
from router.engine.announced import ARRIVE_S, Greeter
from router.errors import FaultKind, RequestFailed
from tests.kit.agents import listen
from workers.agent.agent import BACKOFF_S


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
