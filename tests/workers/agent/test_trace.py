"""A trace context over the wire (X4)."""

import attrs

from router.messages import Trace
from tests.kit.agents import open_agent, open_far_router
from tests.kit.delivery import JOB


async def test_x4_an_agents_engine_is_sent_the_trace_context_of_the_client() -> None:
    traced = attrs.evolve(JOB, trace=Trace("00-a-b-01", "k=v"))
    async with open_agent(None) as agent, open_far_router(agent) as router:
        await router.complete(traced)
        await router.complete(JOB)
        first, second = agent.engines[0].seen

    assert first.headers["traceparent"] == "00-a-b-01"
    assert first.headers["tracestate"] == "k=v"
    assert "traceparent" not in second.headers
