"""SIGTERM under load: nothing that could finish is truncated (D3, T8.8)."""

import signal
from pathlib import Path
from typing import Final

import httpx
import pytest
import trio

from tests.kit.daemon import PATIENCE_S, Daemon, open_daemon, write_config
from tests.kit.deep import size
from tests.kit.engine import open_engine
from tests.kit.exchange import Exchange

STREAMS: Final = size(200, least=20)
STALLED: Final = STREAMS // 10
DRAIN_S: Final = 3.0
#: Far more than sockets and sink hold for a client that reads nothing.
FLOOD: Final = ("x" * 65_536,) * 128


class Load:
    """The engine's script: a flood for those who stall, a held stream for others."""

    def __init__(self) -> None:
        self.let_go = trio.Event()

    async def __call__(self, x: Exchange) -> None:
        await x.role()
        await x.text("one")
        if x.body["messages"][0]["content"] == "stall":
            await x.text(*FLOOD)
        else:
            await self.let_go.wait()
            await x.text(" two")
        await x.finish()
        await x.done()
        await x.end()


class Reader:
    """A client on a bare socket; ``begun`` is set by its first bytes."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self.begun = trio.Event()
        self.got = b""

    async def run(self, daemon: Daemon) -> None:
        host, _, port = daemon.url.removeprefix("http://").partition(":")
        body = (
            b'{"model":"m","stream":true,"messages":'
            b'[{"role":"user","content":"%b"}]}' % self.prompt.encode()
        )
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: f\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            try:
                await self.read(stream)
            except trio.BrokenResourceError:
                return

    async def read(self, stream: trio.SocketStream) -> None:
        while octets := await stream.receive_some(4096):
            self.got += octets
            self.begun.set()
            if self.prompt == "stall":
                # Reads no more until the daemon has gone.
                await trio.sleep_forever()


@pytest.mark.slow
@pytest.mark.deep
async def test_d3_streams_that_can_finish_do_and_stalled_ones_hold_nothing_up(
    tmp_path: Path,
) -> None:
    load = Load()
    readers = [Reader("tell me") for _ in range(STREAMS - STALLED)]
    stalled = [Reader("stall") for _ in range(STALLED)]
    async with open_engine(load, slots=STREAMS) as engine:
        config = write_config(
            tmp_path,
            [engine.url],
            server=f"drain_ms = {DRAIN_S * 1000:.0f}\n[admin]\nlisten='127.0.0.1:0'",
        )
        async with (
            open_daemon(["--config", str(config)]) as daemon,
            trio.open_nursery() as nursery,
        ):
            await daemon.ready()
            for reader in [*readers, *stalled]:
                nursery.start_soon(reader.run, daemon)
            for reader in [*readers, *stalled]:
                await reader.begun.wait()

            begun = trio.current_time()
            daemon.signal(signal.SIGTERM)
            unready = await until_unready(daemon)
            load.let_go.set()
            code = await daemon.exit_code()
            took = trio.current_time() - begun
            nursery.cancel_scope.cancel()

    assert code == 0
    assert unready - begun <= 0.1
    assert took <= DRAIN_S + 1
    assert [reader.got.count(b"data: [DONE]") for reader in readers] == [1] * len(
        readers
    )
    (line,) = daemon.events("drain is over")
    assert line["cut"] == STALLED
    assert daemon.noise == []


async def until_unready(daemon: Daemon) -> float:
    """Ask ``/readyz`` of the admin listener until it says no; gives when."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            asked = trio.current_time()
            reply = await client.get(f"http://{daemon.admin}/readyz")
            if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                return asked


@pytest.mark.slow
async def test_d3_what_outlives_the_drain_of_an_agent_is_told_who_stopped(
    tmp_path: Path,
) -> None:
    hosts, routes = tmp_path / "agent", tmp_path / "router"
    hosts.mkdir()
    routes.mkdir()
    reader = Reader("tell me")
    async with open_engine(Load()) as engine:
        own = "drain_ms = 100\n[agent]\nlisten = '127.0.0.1:0'"
        host = write_config(hosts, [engine.url], server=own)
        async with open_daemon(["--config", str(host)], command="agent") as agent:
            (address,) = agent.events("listening")[0]["routers"]
            far = f"[[worker]]\nname = 'far'\nagent = '{address}'"
            config = write_config(routes, [], server=far)
            async with open_daemon(["--config", str(config)]) as daemon:
                await daemon.ready()
                with trio.fail_after(PATIENCE_S):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(reader.run, daemon)
                        await reader.begun.wait()
                        agent.signal(signal.SIGTERM)
                assert await agent.exit_code() == 0

    assert b"the agent stopped before the answer was whole" in reader.got
    assert b"[DONE]" not in reader.got
