"""Router and agent over a bad network: late, slow, sliced, cut, half-open (P4, P5).

A network cannot reorder the bytes of a TCP connection; see ``tests.kit.toxic``.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from router.engine import Router
from router.errors import FaultKind, RequestFailed
from tests.kit.agents import QUICK, RunningAgent, open_agent, open_far_router
from tests.kit.delivery import JOB
from tests.kit.edge import until
from tests.kit.engine import answers, silent
from tests.kit.exchange import Exchange
from tests.kit.toxic import Toxic, toxic
from workers.wire.frames import EXPIRY_S

WORDS = tuple(f"w{n} " for n in range(40))
#: An offer may take its time on a network as bad as these, on a busy machine.
PATIENT = attrs.evolve(QUICK, connect_ms=20_000)


@attrs.frozen
class Scene:
    agent: RunningAgent
    proxy: Toxic
    router: Router


@asynccontextmanager
async def scene(script: object = None, slots: int = 8) -> AsyncIterator[Scene]:
    async with (
        open_agent(script or answers(*WORDS), slots=slots) as agent,  # type: ignore[arg-type]
        toxic(agent.port) as proxy,
        open_far_router(proxy.port, waits=PATIENT) as router,
    ):
        yield Scene(agent, proxy, router)


async def ask(router: Router, texts: list[str]) -> None:
    texts.append((await router.complete(JOB)).text)


@pytest.mark.parametrize(
    "how",
    [
        {"latency_s": 0.02, "jitter_s": 0.03},
        {"bytes_per_s": 200_000.0},
        {"slice_bytes": 1},
        {"slice_bytes": 7, "latency_s": 0.005, "jitter_s": 0.01},
    ],
    ids=["late", "slow", "bytes", "slices"],
)
async def test_f1_a_bad_network_changes_no_answer(how: dict[str, float]) -> None:
    async with scene() as s:
        for way in (s.proxy.there, s.proxy.back):
            for name, value in how.items():
                setattr(way, name, value)
        texts: list[str] = []
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask, s.router, texts)
        assert texts == ["".join(WORDS)] * 8
        await until(lambda: s.agent.idle)


async def test_p5_a_reset_is_noticed_at_once_at_both_ends() -> None:
    async with scene(silent) as s:
        fault: list[FaultKind] = []

        async def fail() -> None:
            with pytest.raises(RequestFailed) as raised:
                await s.router.complete(JOB)
            fault.append(raised.value.fault.kind)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            await until(lambda: s.agent.engines[0].live == 1)
            began = trio.current_time()
            s.proxy.reset()
        assert fault == [FaultKind.STREAM_CLOSED_EARLY]
        await until(lambda: s.agent.engines[0].live == 0)
        assert trio.current_time() - began < 2
        await until(lambda: s.router.ready)


async def test_f1_answers_survive_a_network_that_cuts_all_the_time() -> None:
    """Each is whole, or a prefix and an error: never twice, never short."""
    async with scene(script=paced) as s:
        found: list[tuple[str, bool]] = []

        async def read() -> None:
            text = ""
            try:
                async with s.router.stream(JOB) as deltas:
                    async for delta in deltas:
                        text += delta.text
                found.append((text, True))
            except RequestFailed:
                found.append((text, False))

        async with trio.open_nursery() as nursery:
            for n in range(30):
                nursery.start_soon(read)
                await trio.sleep(0.01)
                if n % 6 == 5:
                    s.proxy.reset()
        whole = "".join(WORDS)
        for text, ended in found:
            assert whole.startswith(text)
            assert not ended or text == whole
        assert len(found) == 30
        await until(lambda: s.agent.idle)
        assert await answered(s.router) == whole


async def answered(router: Router) -> str:
    """Ask until there is an answer: the last reset may not have been noticed yet."""
    with trio.fail_after(10):
        while True:
            try:
                return (await router.complete(JOB)).text
            except RequestFailed:
                await trio.lowlevel.checkpoint()


async def paced(x: Exchange) -> None:
    await x.role()
    for word in WORDS:
        await x.text(word)
        await trio.sleep(0.002)
    await x.finish()
    await x.done()
    await x.end()


@pytest.mark.slow
async def test_p4_a_half_open_network_is_noticed_in_time_at_both_ends() -> None:
    async with scene(silent) as s:
        ended: list[float] = []

        async def fail() -> None:
            with pytest.raises(RequestFailed):
                await s.router.complete(JOB)
            ended.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            await until(lambda: s.agent.engines[0].live == 1)
            began = trio.current_time()
            s.proxy.half_open()
        assert EXPIRY_S - 1.1 < ended[0] - began < EXPIRY_S + 1.0
        await until(lambda: s.agent.engines[0].live == 0)
        assert trio.current_time() - began < EXPIRY_S + 1.0
        s.proxy.heal()
        await until(lambda: s.router.ready)


@pytest.mark.slow
async def test_p4_latency_below_the_expiry_loses_nobody() -> None:
    async with scene() as s:
        s.proxy.there.latency_s = s.proxy.back.latency_s = 0.4
        s.proxy.back.jitter_s = 0.4
        await trio.sleep(EXPIRY_S + 1.5)

        assert s.router.ready
        assert s.proxy.accepted == 1
        s.proxy.there.latency_s = s.proxy.back.latency_s = s.proxy.back.jitter_s = 0
        assert (await s.router.complete(JOB)).text == "".join(WORDS)
