"""Clients that do not read, on a connection that others share (P6, H5)."""

import math
import statistics
from pathlib import Path
from typing import Final

import pytest
import trio

from bench.processes import resident_mib
from tests.kit.daemon import until
from tests.kit.deep import size
from tests.kit.engine import open_engine
from tests.kit.exchange import Exchange
from tests.kit.keeping import free_port
from tests.kit.swarm import (
    Generations,
    Part,
    Swarm,
    agent_config,
    router_config,
)

pytestmark = [pytest.mark.slow, pytest.mark.deep]

HEALTHY: Final = 16
STALLED: Final = size(64, least=16)
EVERY_S: Final = 0.02
WINDOWS: Final = 3
WINDOWS_MAX: Final = 12
#: What stalled clients may add to the time between two deltas of another.
GROWTH_S: Final = 0.005
WINDOW_S: Final = 1.0
#: Of small deltas, which are dear to hold, without an end.
FLOOD: Final = ("a word ",) * 64
#: Seconds in which none of the floods moves, once they are held back; and for how
#: long that may take: megabytes for each are in the kernel's buffers first.
STILL_S: Final = 1.5
HELD_BACK_S: Final = 240.0
#: A small buffer of those who stall: less to fill.
BUFFER: Final = 8192


class Script:
    """A flood for those who stall, a paced stream for the others."""

    def __init__(self) -> None:
        self.flooded: dict[str, int] = {}

    async def __call__(self, x: Exchange) -> None:
        prompt = x.body["messages"][0]["content"]
        await x.role()
        if prompt == "pace":
            while True:
                await x.text(f"{trio.current_time()} ")
                await trio.sleep(EVERY_S)
        while True:
            await x.text(*FLOOD)
            self.flooded[prompt] = self.flooded.get(prompt, 0) + len(FLOOD)


async def connect(url: str, prompt: str) -> trio.SocketStream:
    """Ask, and read nothing yet."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    sock = trio.socket.socket()
    if prompt != "pace":
        sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, BUFFER)
    await sock.connect((host, int(port)))
    stream = trio.SocketStream(sock)
    body = (
        b'{"model":"m","stream":true,"messages":[{"role":"user","content":"%b"}]}'
        % prompt.encode()
    )
    await stream.send_all(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: f\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    return stream


class Gaps:
    """Times between two reads of the healthy clients."""

    def __init__(self) -> None:
        self.window: list[float] = []

    async def read(self, stream: trio.SocketStream) -> None:
        async with stream:
            last = None
            while await stream.receive_some(65536):
                now = trio.current_time()
                if last is not None:
                    self.window.append(now - last)
                last = now

    async def p99(self, wanted: float = 0.0) -> float:
        """Measure some windows and give the best: others use this machine too.

        More of them while even the best is above *wanted*: what others do to a
        window passes, what stalled clients did to it would be in each.
        """
        best = math.inf
        windows = 0
        while windows < WINDOWS or (wanted and best > wanted and windows < WINDOWS_MAX):
            self.window = []
            await trio.sleep(WINDOW_S)
            best = min(best, statistics.quantiles(self.window, n=100)[98])
            windows += 1
        return best


async def test_p6_stalled_clients_slow_nobody_and_hold_little(tmp_path: Path) -> None:
    script = Script()
    slots = HEALTHY + STALLED
    async with (
        open_engine(script, kind="generic", slots=slots) as engine,
        trio.open_nursery() as nursery,
    ):
        swarm = Swarm(nursery, [engine], Generations(slots))
        port = free_port()
        config = agent_config(tmp_path / "h0", port, engine.url, slots)
        swarm.agents.append(Part(swarm, "agent", config))
        config = router_config(tmp_path / "r0", free_port(), [f"127.0.0.1:{port}"])
        swarm.routers.append(Part(swarm, "serve", config))
        for part in (*swarm.agents, *swarm.routers):
            await part.start()
        await swarm.ready()
        url = swarm.routers[0].running.url
        pids = [part.running.process.pid for part in (*swarm.agents, *swarm.routers)]

        gaps = Gaps()
        for _ in range(HEALTHY):
            nursery.start_soon(gaps.read, await connect(url, "pace"))
        await trio.sleep(0.5)
        calm = await gaps.p99()
        before = [resident_mib(pid) for pid in pids]
        stalled = [await connect(url, f"s{n}") for n in range(STALLED)]

        with trio.fail_after(HELD_BACK_S):
            seen: dict[str, int] = {}
            while len(seen) < STALLED or seen != script.flooded:
                seen = dict(script.flooded)
                await trio.sleep(STILL_S)
        after = [resident_mib(pid) for pid in pids]
        beside = await gaps.p99(calm + GROWTH_S)

        assert beside - calm < GROWTH_S
        grown = [b - a for a, b in zip(before, after, strict=True)]
        # KiB for each stalled client, at the agent and at the router.
        assert all(1024 * mib / STALLED < 256 for mib in grown)
        assert engine.live == slots

        # Those who read again get all that was held back, in order.
        stream = stalled[0]
        got = 0
        with trio.fail_after(10):
            while got < 4 * 1024 * 1024:
                got += len(await stream.receive_some(65536))
        for stream in stalled:
            await stream.aclose()

        async def are_gone() -> bool:
            await trio.lowlevel.checkpoint()
            return engine.live == HEALTHY

        await until(are_gone)
        nursery.cancel_scope.cancel()
