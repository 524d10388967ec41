"""``fencepost demo``: two real llama.cpp servers, and the router in front of them.

Real parts only: two processes with a small model, a router embedded as any Trio
program would embed it, and one answer streamed over HTTP as proof. Ctrl-C, or the
end of this process however it comes, ends them all.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import attrs
import click
import httpx
import trio

from router.edge.server import serve
from router.engine import Router, open_router
from router.errors import RouterError
from router.settings import WorkerSettings
from workers.llama_cpp import ALIAS, INSTALL, LISTENING, command, missing_parts

#: Exit status when the demo could not start or show its answer.
FAILED: Final = 1
#: Where it listens if nothing else is asked for and nobody else does.
PORT: Final = 8080
#: Seconds for the model to load and for a worker to be found ready.
_LOAD_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.05
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_NAMES: Final = ("left", "right")
_PROMPT: Final = "Name three rivers, and the sea that each one reaches."
_TOKENS: Final = 48

_TRY: Final = """
Try it:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "stream": true,
         "messages": [{{"role": "user", "content": "Tell me a story."}}]}}'

  from openai import OpenAI                                  # pip install openai
  client = OpenAI(base_url="{url}/v1", api_key="none")
  for chunk in client.chat.completions.create(
      model="{model}", stream=True,
      messages=[{{"role": "user", "content": "Tell me a story."}}],
  ):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

Kill a worker ({pids}) and ask again: the other one answers.
"""


class DemoFailed(RouterError):
    """The demo could not be shown; the message says why, in one line."""


@attrs.frozen
class _Engine:
    """One llama.cpp server that listens."""

    name: str
    url: str
    pid: int


def run_demo(*, port: int | None = None, slots: int = 2, once: bool = False) -> int:
    """Run the demo until Ctrl-C, or *once*: until the proof has been seen.

    Blocks, and takes the signals of the process: for its main thread. When it
    returns, every process that it started is gone.

    Args:
        port: of 127.0.0.1, 0 for any; None: 8080, or any where that is taken.
        slots: parallel requests of each of the two servers.
        once: stop after the proof instead of waiting for Ctrl-C.

    Returns:
        The exit status: 0, or 1 with one line on stderr.
    """
    missing = missing_parts()
    if missing:
        what = " and ".join(missing)
        click.echo(f"fencepost: the demo needs {what}: {INSTALL}", err=True)
        return FAILED
    status = 0
    try:
        with _listen(port) as listener:
            trio.run(partial(_demo, listener, slots=slots, once=once))
    except* DemoFailed as failures:
        click.echo(f"fencepost: {_first(failures)}", err=True)
        status = FAILED
    return status


def _first(failure: BaseException) -> BaseException:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


def _listen(port: int | None) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port))
    except OSError as error:
        if port is None:
            return socket.create_server(("127.0.0.1", 0))
        raise DemoFailed(
            f"port {port} can't be had ({os.strerror(error.errno or 0)}): "
            "choose another with --port"
        ) from None


async def _demo(listener: socket.socket, *, slots: int, once: bool) -> None:
    with (
        trio.open_signal_receiver(*_SIGNALS) as signals,
        tempfile.TemporaryDirectory(prefix="fencepost-demo-") as folder,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope)
            await _show(listener, Path(folder), slots=slots, once=once)
            nursery.cancel_scope.cancel()
    click.echo("stopped: router and workers are gone")


async def _cancel_on_signal(
    signals: AsyncIterator[int], scope: trio.CancelScope
) -> None:
    await anext(signals)
    click.echo("")
    scope.cancel()


async def _show(listener: socket.socket, logs: Path, *, slots: int, once: bool) -> None:
    """Start everything, prove it, and hold it up; returns only *once*."""
    host, port = listener.getsockname()
    url = f"http://{host}:{port}"
    click.echo(f"starting two llama.cpp servers, {slots} slots each …")
    started = trio.current_time()
    async with trio.open_nursery() as servers:
        engines = [
            await servers.start(_run_engine, name, slots, logs / f"{name}.log")
            for name in _NAMES
        ]
        workers = [WorkerSettings(name=one.name, url=one.url) for one in engines]
        async with open_router(workers=workers) as router:
            await _await_ready(router, len(engines))
            for one in engines:
                click.echo(f"  {one.name:<6} {one.url}  pid {one.pid}")
            async with trio.open_nursery() as front:
                await front.start(partial(serve, router, [listener]))
                took = trio.current_time() - started
                click.echo(f"router   {url}  after {took:.1f} s\n")
                await _prove(url)
                pids = ", ".join(f"kill {one.pid}" for one in engines)
                click.echo(_TRY.format(url=url, model=ALIAS, pids=pids))
                if not once:
                    click.echo("Ctrl-C ends it.")
                    await trio.sleep_forever()
                front.cancel_scope.cancel()
        servers.cancel_scope.cancel()


async def _run_engine(
    name: str, slots: int, log: Path, *, task_status: trio.TaskStatus[_Engine]
) -> None:
    """Run one server until cancelled or until it dies of itself.

    Cancelled, it is gone when this returns: SIGTERM, then SIGKILL.

    Raises:
        DemoFailed: it did not come to listen.
    """
    # llama.cpp's threads wait by spinning: two servers must share the cores.
    threads = max(1, len(os.sched_getaffinity(0)) // len(_NAMES))
    with log.open("wb") as stderr:
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    command(slots=slots, threads=threads),
                    # Held open as long as we live: its end is the server's end.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    check=False,
                    # Ctrl-C is for us; we end it in order.
                    start_new_session=True,
                )
            )
            with trio.move_on_after(_LOAD_S):
                line = await _first_line(process)
                if line.startswith(LISTENING):
                    task_status.started(_Engine(name, line.split()[1], process.pid))
                    await process.wait()
                    click.echo(f"worker {name} ended", err=True)
                    return
            nursery.cancel_scope.cancel()
    why = await trio.Path(log).read_text(encoding="utf-8", errors="replace")
    last = why.strip().rpartition("\n")[2] or f"silent for {_LOAD_S:.0f} s"
    raise DemoFailed(f"llama.cpp did not start: {last}")


async def _first_line(process: trio.Process) -> str:
    """What it says first on stdout, without the end of line; "": it ended."""
    assert process.stdout is not None
    said = b""
    while b"\n" not in said:
        chunk = await process.stdout.receive_some()
        if not chunk:
            return ""
        said += chunk
    return said.partition(b"\n")[0].decode()


async def _await_ready(router: Router, count: int) -> None:
    """Wait until *count* workers are ready.

    Raises:
        DemoFailed: they are not, after `_LOAD_S`.
    """
    states: list[str] = []
    for _ in range(int(_LOAD_S / _LOOK_EVERY_S)):
        states = [worker["state"] for worker in router.status()["workers"]]
        if states.count("ready") == count:
            return
        await trio.sleep(_LOOK_EVERY_S)
    raise DemoFailed(f"the workers are {' and '.join(states)}, not ready")


def _text_of(line: str) -> str:
    """The visible text that one line of a stream carries."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line[len("data: ") :]).get("choices")
    return str(choices[0]["delta"].get("content") or "") if choices else ""


async def _prove(url: str) -> None:
    """Stream one answer through the router, as any client would.

    Raises:
        DemoFailed: it was refused or not whole.
    """
    chat = {
        "model": ALIAS,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": _TOKENS,
        "stream": True,
    }
    click.echo(f"> {_PROMPT}\n")
    asked = trio.current_time()
    first = tokens = 0.0
    whole = False
    async with (
        httpx.AsyncClient(base_url=url, timeout=_LOAD_S, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=chat) as reply,
    ):
        if not reply.is_success:
            await reply.aread()
            raise DemoFailed(f"the router answered {reply.status_code}: {reply.text}")
        async for line in reply.aiter_lines():
            whole = whole or line == "data: [DONE]"
            piece = _text_of(line)
            if piece:
                tokens += 1
                first = first or trio.current_time() - asked
                click.echo(piece, nl=False)
        worker = reply.headers.get("x-fencepost-worker", "?")
    if not whole:
        raise DemoFailed("the answer was cut")
    rate = tokens / max(0.001, trio.current_time() - asked - first)
    click.echo(
        f"\n\n  {tokens:.0f} deltas by worker {worker}, the first after "
        f"{first * 1000:.0f} ms, then {rate:.0f} a second"
    )
