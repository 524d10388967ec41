"""What is in flight when the router is told to stop (B97), or a worker to go (B112)."""

import itertools
import signal
from pathlib import Path
from typing import Final

import httpx
import pytest
import trio

from router.errors import LocalError
from router.ids import WorkerId
from router.lifecycle import State
from router.settings import WorkerSettings
from tests.kit.daemon import Daemon, open_daemon, write_config
from tests.kit.edge import until
from tests.kit.engine import answers, open_engine
from tests.kit.exchange import Exchange
from tests.kit.stack import Stack, open_stack
from tests.kit.talk import CHAT, MESSAGES, ask, asking, post, read_reply


class Halves:
    """A script of two halves; a prompt that says so has no first one.

    ``begun`` counts the answers that wait for their second half.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.let_go = trio.Event()

    async def __call__(self, x: Exchange) -> None:
        if "prefill" not in x.content.decode():
            await x.text("one ")
        self.begun += 1
        await self.let_go.wait()
        await answers("two")(x)


# ---- the whole router ----


@pytest.mark.slow
async def test_b97_every_kind_of_answer_in_flight_at_sigterm_is_finished(
    tmp_path: Path,
) -> None:
    halves = Halves()
    kinds = list(itertools.product((CHAT, MESSAGES), (True, False), ("hi", "prefill")))
    replies: list[httpx.Response] = []

    async def fetch(daemon: Daemon, path: str, stream: bool, prompt: str) -> None:
        said = [{"role": "user", "content": prompt}]
        body = asking(path, stream=stream, messages=said)
        async with daemon.client() as client:
            replies.append(await client.post(path, json=body))

    async with open_engine(halves, kind="generic", slots=len(kinds)) as engine:
        config = write_config(
            tmp_path, [engine.url], worker=f"slots = {len(kinds)}\nsettle_ms = 0"
        )
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with trio.open_nursery() as nursery:
                for kind in kinds:
                    nursery.start_soon(fetch, daemon, *kind)
                await until(lambda: halves.begun == len(kinds))
                daemon.signal(signal.SIGTERM)
                stopping = await daemon.event("stopping")
                halves.let_go.set()
            code = await daemon.exit_code()

    assert stopping["live"] == len(kinds)
    assert code == 0
    # httpx raises for an answer that does not come to its end.
    assert [reply.status_code for reply in replies] == [200] * len(kinds)
    assert all("two" in reply.text for reply in replies)
    assert sum("[DONE]" in reply.text for reply in replies) == 2
    assert sum("message_stop" in reply.text for reply in replies) == 2
    assert daemon.events("drain is over") == []
    assert daemon.noise == []


# ---- one worker ----

W0: Final = WorkerId("w0")


def held(stack: Stack) -> dict[str, int]:
    """By worker: how many requests run there."""
    return {name: len(m.held) for name, m in stack.router.fleet.members.items()}


async def test_b112_a_worker_removed_and_added_anew_loses_nothing() -> None:
    halves = Halves()
    async with open_stack(halves, halves, slots=4) as stack:
        router, fleet = stack.router, stack.router.fleet
        again = WorkerSettings("w0", stack.engines[0].url, slots=4, settle_ms=0)
        clients = [await ask(stack, post(CHAT, stream=True)) for _ in range(6)]
        await until(lambda: halves.begun == 6)
        assert held(stack) == {"w0": 3, "w1": 3}

        assert router.remove_worker("w0")
        with pytest.raises(LocalError, match="w0"):
            await router.add_worker(again)  # its name is its own until it has gone
        assert fleet.members[W0].life.state is State.DRAINING
        clients.append(await ask(stack, post(CHAT, stream=True)))
        await until(lambda: halves.begun == 7)
        assert held(stack) == {"w0": 3, "w1": 4}
        clients.append(await ask(stack, post(CHAT, stream=True)))
        await until(lambda: fleet.room.depth("m") == 1)

        halves.let_go.set()
        for client in clients:
            reply = await read_reply(client)
            assert (reply.status, reply.whole) == (200, True)
            assert b"[DONE]" in reply.body
        await until(lambda: W0 not in fleet.members)
        assert len(stack.engines[0].seen) == 3

        halves.let_go, halves.begun = trio.Event(), 0
        await router.add_worker(again)
        await until(lambda: fleet.members[W0].serving)
        clients = [await ask(stack, post(CHAT, stream=True)) for _ in range(8)]
        await until(lambda: halves.begun == 8)
        assert held(stack) == {"w0": 4, "w1": 4}
        halves.let_go.set()
        for client in clients:
            assert (await read_reply(client)).whole
        await stack.settle()
