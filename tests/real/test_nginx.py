"""H7: a real nginx, on the very file that we ship, before a real daemon.

Only addresses and temporary folders are changed. The engine is scripted: a delta
each 100 ms, so that buffering anywhere shows as a lump.
"""

import getpass
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.kit.engine import FakeEngine, open_engine
from tests.kit.exchange import Exchange
from tests.kit.processes import START_S, daemon, running, worker_table

pytestmark = [
    pytest.mark.real,
    # httpx leaves its own generators to the garbage collector, and Trio says so.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SHIPPED = Path(__file__).parents[2] / "docs" / "nginx.conf"
DELTAS = 20
EVERY_S = 0.1

# The user: its workers must reach a socket in a folder of ours.
MAIN = """
user {user};
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  include {folder}/fencepost.conf;
}}
"""


def shipped_for(upstream: str, port: int) -> str:
    """What we ship, with the two addresses changed."""
    text = SHIPPED.read_text()
    text, servers = re.subn(r"(?m)^(\s*server) 127\S+;", rf"\1 {upstream};", text)
    text, listens = re.subn(r"(?m)^(\s*listen) 80;", rf"\1 127.0.0.1:{port};", text)
    assert (servers, listens) == (1, 1)
    return text


@contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[str]:
    """Run nginx before *upstream*; gives its URL once it accepts."""
    binary = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert binary is not None, "apt-get install nginx-light"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "fencepost.conf").write_text(shipped_for(upstream, port))
    (folder / "nginx.conf").write_text(
        MAIN.format(folder=folder, user=getpass.getuser())
    )
    argv = [binary, "-p", str(folder), "-e", "stderr"]
    argv += ["-c", str(folder / "nginx.conf")]
    with running(argv, stdin=subprocess.DEVNULL) as (process, _):
        end = time.perf_counter() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.perf_counter() < end
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"


@attrs.frozen
class Stack:
    """Client side of nginx, and the engine behind it all."""

    url: str
    engine: FakeEngine


async def paced(x: Exchange) -> None:
    await x.role()
    for n in range(DELTAS):
        await trio.sleep(EVERY_S)
        await x.text(f"w{n} ")
    await x.finish("stop")
    await x.usage(3, DELTAS)
    await x.done()
    await x.end()


@asynccontextmanager
async def stack_over(wire: str, folder: Path) -> AsyncIterator[Stack]:
    async with open_engine(paced, slots=4) as engine:
        api = folder / "api.sock"
        config = (
            "[server]\n"
            f'listen = ["127.0.0.1:0", "unix:{api}"]\n'
            f'state_dir = "{folder}/state"\n' + worker_table("fake", engine.url)
        )
        with daemon(folder, config) as router:
            tcp = router.url.removeprefix("http://")
            upstream = tcp if wire == "tcp" else f"unix:{api}"
            await trio.to_thread.run_sync(router.await_ready)
            with nginx(folder, upstream) as url:
                yield Stack(url, engine)


@pytest.fixture(params=["tcp", "unix"])
async def stack(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack_over(request.param, tmp_path) as up:
        yield up


def chat(*, stream: bool) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi."}],
        "stream": stream,
    }


async def test_h7_deltas_pass_nginx_one_by_one(stack: Stack) -> None:
    arrived: list[float] = []
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as client,
        client.stream(
            "POST", f"{stack.url}/v1/chat/completions", json=chat(stream=True)
        ) as reply,
    ):
        assert reply.status_code == 200
        assert reply.headers["server"].startswith("nginx")
        assert reply.headers["content-type"].startswith("text/event-stream")
        text = ""
        lines = []
        async for line in reply.aiter_lines():
            lines.append(line)
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if choice["delta"].get("content"):
                        arrived.append(trio.current_time())
                        text += choice["delta"]["content"]

    gaps = [late - early for early, late in pairwise(arrived)]
    assert text == "".join(f"w{n} " for n in range(DELTAS))
    assert [line for line in lines if line][-1] == "data: [DONE]"
    # None is held back for the next: a lump would show as gaps of 0 and of 200 ms.
    assert sorted(gaps)[1] > EVERY_S / 2
    assert arrived[-1] - arrived[0] > EVERY_S * (DELTAS - 1) * 0.8


async def test_h7_whole_replies_pass_nginx_one_after_the_other(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        for _ in range(2):
            reply = await client.post(
                f"{stack.url}/v1/chat/completions", json=chat(stream=False)
            )

            assert reply.status_code == 200
            [choice] = reply.json()["choices"]
            assert choice["message"]["content"].split() == [
                f"w{n}" for n in range(DELTAS)
            ]


async def test_h7_a_client_that_leaves_nginx_leaves_the_worker(stack: Stack) -> None:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
        request = client.build_request(
            "POST", f"{stack.url}/v1/chat/completions", json=chat(stream=True)
        )
        reply = await client.send(request, stream=True)
        lines = reply.aiter_lines()
        while '"content":"w1 "' not in await anext(lines):
            pass
        exchange = stack.engine.seen[-1]
        assert not exchange.closed.is_set()
        await reply.aclose()

        with trio.fail_after(1):
            await exchange.closed.wait()
    assert not exchange.ended.is_set()


async def test_h7_a_client_that_leaves_a_whole_reply_leaves_the_worker(
    stack: Stack,
) -> None:
    """Not one byte of an answer is out: only the close can tell."""
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as client,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            await client.post(
                f"{stack.url}/v1/chat/completions", json=chat(stream=False)
            )

        nursery.start_soon(ask)
        with trio.fail_after(5):
            exchange = await stack.engine.next_exchange()
        nursery.cancel_scope.cancel()
    with trio.fail_after(1):
        await exchange.closed.wait()

    assert not exchange.ended.is_set()
