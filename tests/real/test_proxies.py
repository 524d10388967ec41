"""H7: real proxies, each on the very file that we ship, before a real daemon.

Only addresses and temporary folders are changed. The engine is scripted: a delta
each 100 ms, so that buffering anywhere shows as a lump.
"""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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

DOCS = Path(__file__).parents[2] / "docs"
DELTAS = 10
EVERY_S = 0.1
#: Asks for silence.
PREFILL = "A long prompt."

# The user: its workers must reach a socket in a folder of ours.
NGINX = """
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
CADDY = """{{
	admin off
	auto_https off
}}

import {folder}/fencepost.caddy
"""
HAPROXY = "global\n    maxconn 256\n\n"


def changed(text: str, *changes: tuple[str, str]) -> str:
    """Replace each pattern once; each must be there."""
    for pattern, new in changes:
        text, times = re.subn(f"(?m){pattern}", new, text)
        assert times == 1, pattern
    return text


def run_nginx(folder: Path, upstream: str, port: int) -> Sequence[str]:
    """Write what nginx needs; gives its command line."""
    text = changed(
        (DOCS / "nginx.conf").read_text(),
        (r"^(\s*server) 127\S+;", rf"\1 {upstream};"),
        (r"^(\s*listen) 80;", rf"\1 127.0.0.1:{port};"),
    )
    (folder / "fencepost.conf").write_text(text)
    main = folder / "nginx.conf"
    main.write_text(NGINX.format(folder=folder, user=getpass.getuser()))
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(main)]


def run_caddy(folder: Path, upstream: str, port: int) -> Sequence[str]:
    """Write what Caddy needs; gives its command line."""
    text = changed(
        (DOCS / "Caddyfile").read_text(),
        (r"^:80 \{", rf"http://127.0.0.1:{port} {{"),
        (
            r"^(\s*reverse_proxy) 127\S+ \{",
            rf"\1 {upstream.replace('unix:', 'unix/')} {{",
        ),
    )
    (folder / "fencepost.caddy").write_text(text)
    main = folder / "Caddyfile"
    main.write_text(CADDY.format(folder=folder))
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(main)]


def run_haproxy(folder: Path, upstream: str, port: int) -> Sequence[str]:
    """Write what HAProxy needs; gives its command line."""
    text = changed(
        (DOCS / "haproxy.cfg").read_text(),
        (r"^(\s*bind) :80", rf"\1 127.0.0.1:{port}"),
        (
            r"^(\s*server router) 127\S+",
            rf"\1 {upstream.replace('unix:', 'unix@')}",
        ),
    )
    main = folder / "haproxy.cfg"
    main.write_text(HAPROXY + text)
    return ["haproxy", "-db", "-f", str(main)]


WIRES = ("tcp", "unix")
PROXIES: dict[str, Callable[[Path, str, int], Sequence[str]]] = {
    "nginx": run_nginx,
    "caddy": run_caddy,
    "haproxy": run_haproxy,
}


@contextmanager
def proxy(name: str, folder: Path, upstream: str) -> Iterator[str]:
    """Run a proxy before *upstream*; gives its URL once it accepts."""
    binary = shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert binary is not None, f"apt-get install {name}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, *arguments = PROXIES[name](folder, upstream, port)
    homes = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(folder))
    environ = {**os.environ, **homes}
    with running([binary, *arguments], stdin=subprocess.DEVNULL, env=environ) as (
        process,
        _,
    ):
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
    """Client side of a proxy, and the engine behind it all."""

    url: str
    engine: FakeEngine


async def paced(x: Exchange) -> None:
    if x.body["messages"][0]["content"] == PREFILL:
        await x.wait_closed()
        return
    await x.role()
    for n in range(DELTAS):
        await trio.sleep(EVERY_S)
        await x.text(f"w{n} ")
    await x.finish("stop")
    await x.usage(3, DELTAS)
    await x.done()
    await x.end()


@asynccontextmanager
async def stack_over(name: str, wire: str, folder: Path) -> AsyncIterator[Stack]:
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
            with proxy(name, folder, upstream) as url:
                yield Stack(url, engine)


@pytest.fixture(params=[f"{name}-{wire}" for name in PROXIES for wire in WIRES])
async def stack(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stack]:
    name, wire = request.param.split("-")
    async with stack_over(name, wire, tmp_path) as up:
        yield up


def chat(*, stream: bool, content: str = "Hi.") -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "stream": stream,
    }


async def test_h7_deltas_pass_a_proxy_one_by_one(stack: Stack) -> None:
    arrived: list[float] = []
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as client,
        client.stream(
            "POST", f"{stack.url}/v1/chat/completions", json=chat(stream=True)
        ) as reply,
    ):
        assert reply.status_code == 200
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


async def test_h7_whole_replies_pass_a_proxy_one_after_the_other(stack: Stack) -> None:
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


async def test_h7_a_client_that_leaves_a_proxy_leaves_the_worker(stack: Stack) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
async def test_h7_a_client_that_leaves_before_the_answer_leaves_the_worker(
    stack: Stack, stream: bool
) -> None:
    """Not one byte of an answer is out: only the close can tell."""
    asked = chat(stream=stream, content=PREFILL)
    async with (
        httpx.AsyncClient(timeout=20, trust_env=False) as client,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            await client.post(f"{stack.url}/v1/chat/completions", json=asked)

        nursery.start_soon(ask)
        with trio.fail_after(5):
            exchange = await stack.engine.next_exchange()
        nursery.cancel_scope.cancel()
    with trio.fail_after(2):
        await exchange.closed.wait()

    assert not exchange.ended.is_set()
