"""Every example of the documents, run as it is."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
import trio

from tests.kit.engine import answers, open_engine

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
HELLO = answers("Hello", " world", usage=(3, 2))


def test_e1_every_example_has_its_test() -> None:
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == [
        "embed.py",
        "own_listeners.py",
    ]


async def test_e1_embed_streams_one_answer_and_takes_another_whole() -> None:
    async with open_engine(HELLO) as one, open_engine(HELLO) as other:
        with trio.fail_after(20):
            done = await trio.run_process(
                [sys.executable, EXAMPLES / "embed.py", one.url, other.url],
                capture_stdout=True,
            )

        # Leaving the library leaves no socket.
        assert {*one.connections, *other.connections} == set()
    streamed, reason, whole = done.stdout.decode().splitlines()
    assert (streamed, reason) == ("Hello world", "(stop)")
    assert whole.startswith("Hello world Usage(prompt_tokens=3, completion_tokens=2,")


async def test_e2_own_listeners_serve_over_http() -> None:
    argv = [sys.executable, EXAMPLES / "own_listeners.py", "0"]
    async with open_engine(HELLO) as engine, trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(
                trio.run_process,
                [*argv, engine.url],
                stdout=subprocess.PIPE,
                check=False,
            )
        )
        assert process.stdout is not None
        with trio.fail_after(20):
            url = (await process.stdout.receive_some()).decode().strip()
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                reply = await first_answer(client)
        nursery.cancel_scope.cancel()

    assert reply.json()["choices"][0]["message"]["content"] == "Hello world"


async def first_answer(client: httpx.AsyncClient) -> httpx.Response:
    """Ask until the worker was met; the caller bounds it."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
    while True:
        reply = await client.post("/chat/completions", json=chat)
        if reply.is_success:
            return reply
        await trio.sleep(0.02)
