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
        "jobs.py",
        "own_listeners.py",
        "signals.py",
        "threads.py",
        "tools.py",
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


async def run(name: str, *arguments: str) -> list[str]:
    """Run an example; give the lines of its output."""
    with trio.fail_after(20):
        done = await trio.run_process(
            [sys.executable, EXAMPLES / name, *arguments], capture_stdout=True
        )
    return done.stdout.decode().splitlines()


async def test_j1_jobs_are_handed_in_shown_and_taken() -> None:
    shown, answered = ["running", "running", "queued"], "In the mountains."

    assert await run("jobs.py") == [
        *shown,
        *(f"{river}: {answered}" for river in ("Elbe", "Loire", "Po")),
        "refused: rejected",
    ]


async def test_j1_jobs_are_done_by_engines_too() -> None:
    async with open_engine(HELLO, slots=3) as engine:
        lines = await run("jobs.py", engine.url)

    assert lines[3:6] == [f"{river}: Hello world" for river in ("Elbe", "Loire", "Po")]


async def test_j2_threads_stream_complete_and_share_a_router() -> None:
    assert await run("threads.py") == ["The Elbe."] * 2 + ["20 of 20 were answered"]


async def test_j4_tools_are_called_by_a_model_that_knows_none() -> None:
    assert await run("tools.py") == ["weather(Rome)", "It is sunny in Rome."]


async def test_j5_signals_are_told_beside_answers_and_runaways_end() -> None:
    lines = await run("signals.py")

    assert lines[:2] == [
        "completed (stop), 28 characters of text",
        "  0 NEEDS_MANAGER_DECISION: May I delete the old files?",
    ]
    assert lines[2].startswith("failed (loop_detected), 5")
    assert lines[3].startswith("  0 LOOP_DETECTED: ")
    assert lines[4] == "completed (length), 0 characters of text"
    assert lines[5].startswith("  0 MAX_TOKENS_REACHED: ")


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


@pytest.mark.parametrize(
    "argv", [("embed.py",), ("own_listeners.py",), ("own_listeners.py", "http://h")]
)
async def test_e1_an_example_without_its_arguments_says_which(
    argv: tuple[str, ...],
) -> None:
    with trio.fail_after(20):
        done = await trio.run_process(
            [sys.executable, EXAMPLES / argv[0], *argv[1:]],
            capture_stderr=True,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"usage: {argv[0]} ")
