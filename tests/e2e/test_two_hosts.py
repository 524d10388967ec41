"""A router here and an agent on another host, and the link between them (P4, P5).

The other host is a network namespace with an engine of its own. Where none can
be made, the test asserts why, by having tried.
"""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.kit.daemon import ROOT, until
from tests.kit.hosts import REFUSALS, NoNamespace, OtherHost, other_host
from tests.kit.keeping import free_port
from tests.kit.swarm import (
    Asked,
    Generations,
    Part,
    Swarm,
    agent_config,
    ask,
    router_config,
)
from workers.wire.frames import EXPIRY_S

pytestmark = pytest.mark.slow

#: A stream that outlasts the loss of a link.
LONG = {
    "model": "mock",
    "stream": True,
    "max_tokens": 2_000,
    "messages": [{"role": "user", "content": "go"}],
}
SHORT = {**LONG, "max_tokens": 3}
#: Port of the agent over there, where nobody else is.
PORT = 7700


@attrs.frozen
class Scene:
    host: OtherHost
    agent: Part
    router: Part

    async def streaming(self, asked: list[Asked], nursery: trio.Nursery) -> None:
        """Begin a long stream, and wait until deltas come."""

        async def stream() -> None:
            asked.append(await ask(self.router.running.url, LONG))

        nursery.start_soon(stream)

        async def flows() -> bool:
            requests = (await self.router.status())["requests"]
            return bool(requests) and requests[0]["deltas"] > 3

        await until(flows)

    async def busy(self) -> int:
        """Count what the agent has at work; its admin socket is a file."""
        (worker,) = (await self.agent.status())["workers"]
        busy: int = worker["in_flight"] + worker["settling"] + worker["ghosts"]
        return busy

    async def ready(self) -> bool:
        (worker,) = (await self.router.status())["workers"]
        return bool(worker["state"] == "ready")


@asynccontextmanager
async def scene(folder: Path, host: OtherHost) -> AsyncIterator[Scene]:
    engine = await trio.lowlevel.open_process(
        [*host.prefix, sys.executable, "-m", "bench.engine", "--rate", "50"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert engine.stdout is not None
    port = int((await engine.stdout.receive_some(100)).split()[1])
    try:
        async with trio.open_nursery() as nursery:
            swarm = Swarm(nursery, [], Generations(8))
            there = agent_config(
                folder / "h0", PORT, f"http://127.0.0.1:{port}", 8, host=host.there
            )
            agent = Part(swarm, "agent", there, prefix=host.prefix)
            here = router_config(folder / "r0", free_port(), [f"{host.there}:{PORT}"])
            router = Part(swarm, "serve", here)
            swarm.agents.append(agent)
            swarm.routers.append(router)
            await agent.start()
            await router.start()
            await swarm.ready()
            yield Scene(host, agent, router)
            nursery.cancel_scope.cancel()
    finally:
        engine.kill()
        with trio.CancelScope(shield=True):
            await engine.wait()
            await engine.stdout.aclose()
            assert engine.stdin is not None
            await engine.stdin.aclose()


@pytest.mark.parametrize("how", ["pulled", "half-open"])
async def test_p5_a_link_that_is_lost_is_noticed_at_both_hosts_and_comes_back(
    how: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        host = made(stack)
        if isinstance(host, OtherHost):
            await lose_and_find(how, host, tmp_path)
        else:
            # Not a skip: this machine was asked, and this is what it said.
            assert any(refusal in host for refusal in REFUSALS)


def made(stack: ExitStack) -> OtherHost | str:
    """Make the other host, or say why there is none."""
    try:
        return stack.enter_context(other_host())
    except NoNamespace as why:
        return str(why)


async def lose_and_find(how: str, host: OtherHost, folder: Path) -> None:
    async with scene(folder, host) as s:
        assert (await ask(s.router.running.url, SHORT)).whole
        asked: list[Asked] = []
        async with trio.open_nursery() as nursery:
            await s.streaming(asked, nursery)
            assert await s.busy() == 1
            (host.pull if how == "pulled" else host.mute)()
            began = trio.current_time()
            await until(lambda: _is_zero(s))
            assert trio.current_time() - began < EXPIRY_S + 2.0
        # The client was told, in the stream, about when the router knew.
        assert trio.current_time() - began < EXPIRY_S + 2.0
        (one,) = asked
        assert not one.whole
        assert one.error == "worker_lost"
        assert one.pieces > 3
        assert not await s.ready()

        (host.plug if how == "pulled" else host.unmute)()
        await until(s.ready)
        assert (await ask(s.router.running.url, SHORT)).whole


async def _is_zero(s: Scene) -> bool:
    return await s.busy() == 0


def test_a_machine_that_makes_no_namespaces_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "mount: Operation not permitted")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(NoNamespace) as raised, other_host():
        pass
    assert any(refusal in str(raised.value) for refusal in REFUSALS)
