"""Workers that are full, and workers that load: who waits, who leaves, who needn't."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import trio

from router.lifecycle import State
from router.settings import RouterSettings
from tests.kit.edge import RawClient, request, until
from tests.kit.engine import Script, answers, in_turn
from tests.kit.exchange import Exchange
from tests.kit.stack import Stack, open_stack
from tests.kit.talk import CHAT, COUNT, MESSAGES, ask, post, read_reply

LIMIT: Final = 5


class Held:
    """A script whose answers all wait for one event."""

    def __init__(self) -> None:
        self.let_go = trio.Event()

    async def __call__(self, x: Exchange) -> None:
        await self.let_go.wait()
        await answers("ok")(x)


def depth(stack: Stack) -> int:
    return stack.router.fleet.room.depth("m")


# ---- what needs no slot ----


@pytest.mark.parametrize(("kind", "counted"), [("llama-server", 7), ("generic", None)])
async def test_b88_with_all_slots_busy_the_rest_answers_at_once(
    kind: str, counted: int | None
) -> None:
    held = Held()
    async with open_stack(held, slots=4, kind=kind) as stack:
        (engine,) = stack.engines
        engine.counts = counted
        clients = [
            await ask(stack, post((CHAT, MESSAGES)[n % 2], stream=n % 3 > 0))
            for n in range(10)
        ]
        await until(lambda: len(engine.seen) == 4 and depth(stack) == 6)

        for path in ("/v1/models", "/v1/models/m", "/healthz", "/readyz"):
            reply = await read_reply(await ask(stack, request("GET", path)))
            assert reply.status == 200
        reply = await read_reply(await ask(stack, post(COUNT)))
        assert reply.status == 200
        if counted is None:
            assert reply.json["input_tokens"] > 0
        else:
            assert reply.json == {"input_tokens": counted}
        assert (len(engine.seen), depth(stack)) == (4, 6)

        held.let_go.set()
        for client in clients:
            reply = await read_reply(client)
            assert (reply.status, reply.whole) == (200, True)
        await stack.settle()


# ---- a full queue ----


@pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset, RawClient.fin])
async def test_b86_who_leaves_a_full_queue_makes_room(
    leave: Callable[[RawClient], None],
) -> None:
    held = Held()
    queue = RouterSettings(queue_limit=LIMIT)
    async with open_stack(held, slots=1, router=queue) as stack:
        served = await ask(stack, post(CHAT))
        await until(lambda: len(stack.engines[0].seen) == 1)
        waiting = [await ask(stack, post(CHAT)) for _ in range(LIMIT)]
        await until(lambda: depth(stack) == LIMIT)
        refused = await read_reply(await ask(stack, post(CHAT)))
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) > 0
        assert (await read_reply(await ask(stack, post(MESSAGES)))).status == 529

        for client in waiting:
            leave(client)
        await until(lambda: depth(stack) == 0)
        after = await ask(stack, post(CHAT))
        await until(lambda: depth(stack) == 1)

        held.let_go.set()
        for client in (served, after):
            reply = await read_reply(client)
            assert (reply.status, reply.whole) == (200, True)
        assert len(stack.engines[0].seen) == 2
        await stack.settle()


@pytest.mark.slow
async def test_b86_whose_time_in_a_full_queue_is_over_makes_room() -> None:
    held = Held()
    queue = RouterSettings(queue_limit=LIMIT, queue_ms=200)
    async with open_stack(held, slots=1, router=queue) as stack:
        served = await ask(stack, post(CHAT))
        await until(lambda: len(stack.engines[0].seen) == 1)
        waiting = [await ask(stack, post(CHAT)) for _ in range(LIMIT)]
        for client in waiting:
            assert await refused_as(client) == (503, "queue_timeout")
        assert depth(stack) == 0

        # It waited as well: a queue that is full would have said 429.
        after = await ask(stack, post(CHAT))
        assert await refused_as(after) == (503, "queue_timeout")
        held.let_go.set()
        assert (await read_reply(served)).whole
        await stack.settle()


async def refused_as(client: RawClient) -> tuple[int, Any]:
    reply = await read_reply(client)
    return reply.status, reply.json["error"]["code"]


# ---- a worker that loads ----

LOADING: Final = {
    "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
}


async def loads(x: Exchange) -> None:
    await x.json(503, LOADING)


async def loads_in_band(x: Exchange) -> None:
    await x.chunk(LOADING)
    await x.end()


@pytest.mark.slow
@pytest.mark.parametrize("loading", [loads, loads_in_band])
async def test_b83_a_loading_worker_that_is_alone_is_waited_for(
    loading: Script,
) -> None:
    script = in_turn(loading, answers("ok"))
    async with open_stack(script, kind="llama-server") as stack:
        reply = await read_reply(await ask(stack, post(CHAT)))

        assert (reply.status, reply.whole) == (200, True)
        assert b'"ok"' in reply.body
        assert len(stack.engines[0].seen) == 2
        (member,) = stack.router.fleet.members.values()
        assert (member.faults, member.life.state) == (0, State.READY)
        await stack.settle()
