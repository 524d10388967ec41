"""Clients that do not read, and workers that do not stop."""

import socket
from pathlib import Path
from typing import Final

import httpx
import pytest
import trio

from tests.kit.daemon import Daemon, open_daemon, write_config
from tests.kit.edge import RawClient, chat
from tests.kit.engine import answers, open_engine
from tests.kit.exchange import Exchange

MIB: Final = 1024 * 1024
#: What the worker has to say, in bytes.
FLOOD: Final = 240 * MIB
PIECE: Final = "x" * 65_536


def resident(daemon: Daemon) -> int:
    """Bytes of the daemon's memory."""
    pages = Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


async def connect(daemon: Daemon) -> RawClient:
    sock = socket.socket()
    sock.connect(("127.0.0.1", httpx.URL(daemon.url).port))
    sock.setblocking(False)
    await trio.lowlevel.checkpoint()
    return RawClient(sock)


@pytest.mark.slow
async def test_h5_a_client_that_stops_reading_costs_a_bounded_buffer(
    tmp_path: Path,
) -> None:
    sent = 0
    blocked = trio.Event()

    async def floods(x: Exchange) -> None:
        nonlocal sent
        while sent < FLOOD:
            with trio.move_on_after(2) as scope:
                await x.text(PIECE)
            if scope.cancelled_caught:
                blocked.set()
                await x.wait_closed()
            sent += len(PIECE)

    async with open_engine(script=floods, kind="generic") as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            before = resident(daemon)
            client = await connect(daemon)
            await client.send(chat())
            await client.until(b"xxx")
            with trio.fail_after(20):
                await blocked.wait()
            grown = resident(daemon) - before

            # TCP pushed back to the worker: it could not say it all.
            assert sent < FLOOD / 4
            assert grown < 8 * MIB

            engine.script = answers("ok")
            async with daemon.client() as others:
                reply = await others.post(
                    "/v1/chat/completions",
                    json={
                        "model": "m",
                        "messages": [{"role": "user", "content": "hi"}],
                    },
                )
            assert reply.status_code == 200
            client.close()
            with trio.fail_after(1):
                await engine.seen[0].closed.wait()
