"""Clients hear from us while there is nothing to hear of the worker (O4, M3).

Workers go on, and clients let them: each stage lasts until some keepalives have
come, however slow the machine is.
"""

from typing import Final

import pytest
import trio

from router.settings import ModelSettings, RouterSettings
from tests.kit.anthropic_events import check_grammar, events_of
from tests.kit.edge import RawClient, until
from tests.kit.engine import answers, in_turn
from tests.kit.exchange import Exchange
from tests.kit.stack import open_stack
from tests.kit.talk import CHAT, MESSAGES, Reply, ask, post, read_reply

pytestmark = pytest.mark.slow

OFTEN: Final = RouterSettings(commit_after_ms=50, keepalive_ms=50)
MARKS: Final = {CHAT: b": ka\n", MESSAGES: b"event: ping"}
BIOS: Final = 'Call with {"tool_calls": [{"name": "f", "arguments": {}}]}.\n{tools}\n'
TOOLS: Final = {
    CHAT: [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    MESSAGES: [{"name": "f", "input_schema": {"type": "object"}}],
}


async def hear(client: RawClient, mark: bytes, times: int) -> bytes:
    """Read on until so many more of *mark* are here; gives all, and keeps it."""
    wanted = client.got.count(mark) + times
    while client.got.count(mark) < wanted:
        more = await client.read()
        assert more, client.got
        client.got += more
    return client.got


async def whole(client: RawClient) -> bytes:
    """Read a stream to its end, which has to be a good one."""
    reply: Reply = await read_reply(client)
    assert (reply.status, reply.whole) == (200, True)
    return reply.body


class Stage:
    """What a worker does again and again, until the test lets it go on."""

    def __init__(self) -> None:
        self.over = trio.Event()

    async def again(self) -> bool:
        """Wait a moment. A checkpoint."""
        with trio.move_on_after(0.01):
            await self.over.wait()
        return not self.over.is_set()


# ---- output that is held back ----


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_b82_keepalives_go_out_while_a_convention_is_held(path: str) -> None:
    stage = Stage()

    async def calls_in_text(x: Exchange) -> None:
        await x.role()
        await x.text('{"tool_calls": [{"name": "f", "arguments": {"held"')
        while await stage.again():
            await x.text(" ")
        await answers(": 1}}]}")(x)

    models = {"m": ModelSettings(bios=BIOS)}
    async with open_stack(calls_in_text, models=models, router=OFTEN) as stack:
        client = await ask(stack, post(path, stream=True, tools=TOOLS[path]))
        assert b"held" not in await hear(client, MARKS[path], 4)
        stage.over.set()
        body = await whole(client)

    assert b"held" in body
    if path == MESSAGES:
        assert check_grammar(events_of(body))


async def test_b82_keepalives_go_out_while_a_later_call_is_held() -> None:
    stage = Stage()

    async def calls_in_turns(x: Exchange) -> None:
        await x.role()
        await x.tool(0, "{", call_id="a", name="f")
        await x.tool(1, '{"held"', call_id="b", name="f")
        while await stage.again():
            await x.tool(1, " ")
        await x.tool(1, ": 1}")
        await x.tool(0, "}")
        await x.finish("tool_calls")
        await x.done()
        await x.end()

    async with open_stack(calls_in_turns, router=OFTEN) as stack:
        asked = post(MESSAGES, stream=True, tools=TOOLS[MESSAGES])
        client = await ask(stack, asked)
        await hear(client, b"input_json_delta", 1)
        assert b"held" not in await hear(client, MARKS[MESSAGES], 4)
        stage.over.set()
        body = await whole(client)

    assert b"held" in body
    assert check_grammar(events_of(body))


# ---- a queue, and then a long prefill ----


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_b82_keepalives_go_on_from_the_queue_through_a_prefill(path: str) -> None:
    first, prefill = Stage(), Stage()

    async def holds_its_slot(x: Exchange) -> None:
        await x.role()
        await first.over.wait()
        await answers("first")(x)

    async def says_that_it_is_there(x: Exchange) -> None:
        await x.role()
        while await prefill.again():
            await x.data(b": prefill\n\n")
        await answers("second")(x)

    script = in_turn(holds_its_slot, says_that_it_is_there)
    async with open_stack(script, slots=1, router=OFTEN) as stack:
        (engine,) = stack.engines
        holder = await ask(stack, post(path, stream=True))
        await until(lambda: len(engine.seen) == 1)
        client = await ask(stack, post(path, stream=True))
        await hear(client, MARKS[path], 3)
        assert len(engine.seen) == 1

        first.over.set()
        await until(lambda: len(engine.seen) == 2)
        assert b"second" not in await hear(client, MARKS[path], 4)
        prefill.over.set()
        body = await whole(client)
        assert b"first" in await whole(holder)
        await stack.settle()

    assert b"second" in body
    assert b": prefill" not in body
