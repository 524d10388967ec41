"""Two routers and two agents in front of real llama.cpp servers (P3, P5, S1).

What the engines say of their queues is their own word: an engine that was sent
more than it has slots for defers it, and counts that.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx
import pytest
import trio

from tests.kit.daemon import until
from tests.kit.deep import size
from tests.kit.keeping import free_port
from tests.kit.processes import Llama, await_idle, llama_servers
from tests.kit.swarm import (
    Asked,
    Generations,
    Part,
    Swarm,
    agent_config,
    ask,
    router_config,
)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.deep]

REQUESTS: Final = size(500, least=60)
SLOTS: Final = 2
TOKENS: Final = 16
CHAT: Final = {
    "model": "smollm2",
    "stream": True,
    "messages": [{"role": "user", "content": "Count from one to ten."}],
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
_DEFERRED: Final = re.compile(r"^llamacpp:requests_deferred (\d+)", re.MULTILINE)


class Watch:
    """Looks at the engines all the time: who has more to do than slots."""

    def __init__(self, llamas: Sequence[Llama]) -> None:
        self.llamas = list(llamas)
        self.looks = 0
        self.busiest = 0
        self.deferred = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            while True:
                for llama in list(self.llamas):
                    try:
                        metrics = (await client.get(f"{llama.url}/metrics")).text
                        slots = (await client.get(f"{llama.url}/slots")).json()
                    except httpx.HTTPError:
                        continue
                    found = _DEFERRED.search(metrics)
                    assert found is not None
                    self.looks += 1
                    self.deferred = max(self.deferred, int(found[1]))
                    busy = sum(slot["is_processing"] for slot in slots)
                    self.busiest = max(self.busiest, busy)
                await trio.sleep(0.02)


@asynccontextmanager
async def open_real_swarm(
    folder: Path, llamas: Sequence[Llama]
) -> AsyncIterator[Swarm]:
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, [], Generations(SLOTS))
        ports = [free_port() for _ in llamas]
        for n, (port, llama) in enumerate(zip(ports, llamas, strict=True)):
            config = agent_config(
                folder / f"h{n}", port, llama.url, SLOTS, engine="auto", settle_ms=1000
            )
            swarm.agents.append(Part(swarm, "agent", config))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for n in range(2):
            config = router_config(folder / f"r{n}", free_port(), addresses)
            swarm.routers.append(Part(swarm, "serve", config))
        for part in (*swarm.agents, *swarm.routers):
            await part.start()
        await swarm.ready()
        yield swarm
        nursery.cancel_scope.cancel()


async def ask_many(swarm: Swarm, count: int, asked: list[Asked]) -> None:
    places = trio.CapacityLimiter(12)

    async def one(url: str) -> None:
        async with places:
            asked.append(await ask(url, CHAT))

    urls = [part.running.url for part in swarm.routers]
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, urls[number % len(urls)])


async def test_s1_real_engines_are_shared_and_no_token_is_doubled_by_a_kill(
    tmp_path: Path,
) -> None:
    with llama_servers(2, SLOTS) as llamas:
        async with open_real_swarm(tmp_path, llamas) as swarm:
            watch = Watch(llamas)
            swarm.nursery.start_soon(watch.run)
            calm: list[Asked] = []
            await ask_many(swarm, REQUESTS, calm)
            # Of one prompt at temperature 0 there is one answer.
            (answer,) = {one.text for one in calm}
            assert {(one.whole, one.tokens) for one in calm} == {(True, TOKENS)}

            for victim in (swarm.routers[0], swarm.agents[0]):
                asked = await under_kill(swarm, victim.kill)
                check(asked, answer)
                await victim.start()
                await swarm.ready()
                # Nothing works for those that are gone.
                await trio.to_thread.run_sync(await_idle, llamas, 2.0)

            async def kill_engine() -> None:
                watch.llamas.remove(llamas[1])
                await trio.to_thread.run_sync(llamas[1].kill)

            check(await under_kill(swarm, kill_engine), answer)
            late: list[Asked] = []
            await ask_many(swarm, 8, late)
            assert {one.text for one in late} == {answer}
            await trio.to_thread.run_sync(await_idle, llamas[:1], 2.0)

        assert watch.looks > 20
        assert watch.busiest == SLOTS
        assert watch.deferred == 0


async def under_kill(
    swarm: Swarm, kill: Callable[[], Awaitable[None]], count: int = 24
) -> list[Asked]:
    """Ask so often, and kill when some have their answer."""
    asked: list[Asked] = []

    async def some() -> bool:
        await trio.lowlevel.checkpoint()
        return len(asked) >= 4

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_many, swarm, count, asked)
        await until(some)
        await kill()
    assert len(asked) == count
    return asked


def check(asked: Sequence[Asked], answer: str) -> None:
    """F1: each got a beginning of the one answer, and all of it if it says so."""
    for one in asked:
        assert answer.startswith(one.text), one
        if one.whole:
            assert (one.text, one.tokens) == (answer, TOKENS)
        else:
            assert one.error
    assert sum(one.whole for one in asked) >= len(asked) // 3
