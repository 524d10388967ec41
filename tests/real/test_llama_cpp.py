"""Real llama.cpp servers under load, left clients and a kill.

What the engines say of their slots is their own word (``/slots``), and a killed
server is killed.
"""

import json
import random
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.kit.daemon import until
from tests.kit.processes import (
    Daemon,
    Llama,
    await_idle,
    daemon,
    llama_servers,
    worker_table,
)

pytestmark = [
    pytest.mark.real,
    # httpx leaves its own generators to the garbage collector, and Trio says so;
    # what is under test here runs in other processes.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "smollm2"
STREAMS = 100
#: Seconds of a real server: 150 tokens a second, 400 tokens of prompt a second.
PATIENCE_S = 45.0


def chat(content: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }


@attrs.define
class Got:
    """What one streaming client has got so far."""

    status: int = 0
    worker: str = ""
    attempts: str = ""
    text: str = ""
    error: Any = None
    done: bool = False
    clean: bool = False
    begun: trio.Event = attrs.field(factory=trio.Event)
    """Set at the first text."""
    ended: trio.Event = attrs.field(factory=trio.Event)
    """Set when the reply is over, whole or not."""


async def stream(router: Daemon, body: dict[str, Any], got: Got) -> None:
    """One streaming client on a connection of its own."""
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client,
        client.stream(
            "POST", f"{router.url}/v1/chat/completions", json={**body, "stream": True}
        ) as reply,
    ):
        got.status = reply.status_code
        got.worker = reply.headers.get("x-fencepost-worker", "")
        got.attempts = reply.headers.get("x-fencepost-attempts", "")
        try:
            async for line in reply.aiter_lines():
                read(line, got)
            got.clean = True
        except httpx.RemoteProtocolError:
            got.clean = False
        got.ended.set()


def read(line: str, got: Got) -> None:
    if line == "data: [DONE]":
        got.done = True
    elif line.startswith("data: "):
        event = json.loads(line.removeprefix("data: "))
        got.error = got.error or event.get("error")
        for choice in event.get("choices", ()):
            got.text += choice["delta"].get("content") or ""
        if got.text:
            got.begun.set()


async def test_s2_hundred_left_streams_leave_no_slot_at_work(
    router: Daemon, llamas: list[Llama]
) -> None:
    """Queued, in prefill or mid-stream: a client that leaves frees all it had."""
    rng = random.Random(20261129)
    seen: list[Got] = [Got() for _ in range(STREAMS)]

    async def leave(got: Got, after: float) -> None:
        with trio.move_on_after(after):
            await stream(router, chat("Tell me of a river.", 200), got)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for got in seen:
                nursery.start_soon(leave, got, rng.uniform(0.01, 4.0))
        await trio.to_thread.run_sync(await_idle, llamas, 1.0)

    begun = sum(got.begun.is_set() for got in seen)
    assert 0 < begun < STREAMS

    async def at_rest() -> bool:
        status = await trio.to_thread.run_sync(router.status)
        held = [(w["in_flight"], w["settling"], w["ghosts"]) for w in status["workers"]]
        return status["requests"] == [] and held == [(0, 0, 0), (0, 0, 0)]

    # The router's own looks at settling slots are up to two seconds apart.
    await until(at_rest)


async def test_s2_the_hundred_after_them_are_all_answered(router: Daemon) -> None:
    """Runs after the test above, on the same servers and the same router."""
    seen: list[Got] = [Got() for _ in range(STREAMS)]

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for n, got in enumerate(seen):
                nursery.start_soon(stream, router, chat(f"Name {n} rivers.", 3), got)

    assert [(g.status, g.done, g.clean, g.error) for g in seen] == [
        (200, True, True, None)
    ] * STREAMS


async def test_a5_a_killed_worker_ends_its_streams_and_moves_the_others(
    tmp_path: Path,
) -> None:
    """Streams with text end in an error frame; those in prefill move and finish."""
    long_prompt = "The river is long and wide. " * 80
    with llama_servers(2, 2) as servers:
        # A head that leaves early would name the worker that was lost.
        tables = ["[router]\ncommit_after_ms = 60000\n"]
        tables += [worker_table(f"w{n}", one.url) for n, one in enumerate(servers)]
        with daemon(tmp_path, "\n".join(tables)) as router:
            await trio.to_thread.run_sync(router.await_ready, 2)
            with trio.fail_after(PATIENCE_S):
                await kill_one(router, servers, long_prompt)


async def kill_one(router: Daemon, servers: list[Llama], long_prompt: str) -> None:
    # One stream with text on each server, then one in prefill on each: they are
    # spread, since the emptier server gets the next.
    told = [Got(), Got()]
    waiting = [Got(), Got()]
    async with trio.open_nursery() as nursery:
        for got in told:
            nursery.start_soon(stream, router, chat("Tell a story.", 1500), got)
        for got in told:
            await got.begun.wait()
        for n, got in enumerate(waiting):
            body = chat(f"{n} {long_prompt}", 3)
            nursery.start_soon(stream, router, body, got)
        await await_busy(servers, 4)
        assert not any(got.begun.is_set() for got in waiting)
        servers[0].kill()
        killed_at = trio.current_time()
        [cut] = [got for got in told if got.worker == "w0"]
        [kept] = [got for got in told if got.worker == "w1"]
        await cut.ended.wait()
        took = trio.current_time() - killed_at
        for got in waiting:
            await got.begun.wait()
        assert kept.error is None
        assert not kept.done
        nursery.cancel_scope.cancel()

    assert took < 0.25
    assert cut.text
    assert cut.error["code"] == "worker_lost"
    assert not cut.done
    assert not cut.clean
    assert [got.error for got in waiting] == [None, None]
    routes = sorted((got.worker, got.attempts) for got in waiting)
    assert routes == [("w1", "1"), ("w1", "2")]
    status = await trio.to_thread.run_sync(router.status)
    assert {w["name"]: w["state"] for w in status["workers"]}["w0"] == "lost"


async def await_busy(servers: list[Llama], slots: int) -> None:
    """Wait until so many slots are at work, as the servers say."""
    busy: list[int] = []
    for _ in range(500):
        busy = [await trio.to_thread.run_sync(one.busy_slots) for one in servers]
        if sum(busy) == slots:
            return
        await trio.sleep(0.01)
    raise TimeoutError(f"busy slots: {busy}")


async def test_a3_a_worker_that_is_gone_before_the_request_costs_nothing(
    tmp_path: Path,
) -> None:
    """The connect is refused, and the answer comes from the other."""
    with llama_servers(2, 2) as servers:
        tables = [worker_table(f"w{n}", one.url) for n, one in enumerate(servers)]
        with daemon(tmp_path, "\n".join(tables)) as router:
            await trio.to_thread.run_sync(router.await_ready, 2)
            servers[1].kill()
            seen = [Got() for _ in range(8)]
            with trio.fail_after(PATIENCE_S):
                async with trio.open_nursery() as nursery:
                    for got in seen:
                        nursery.start_soon(stream, router, chat("Hi.", 2), got)

    assert [(g.status, g.done, g.worker) for g in seen] == [(200, True, "w0")] * 8
