"""Tools by convention, signals and limits, as HTTP clients meet them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from router.settings import ModelSettings
from tests.kit.edge import RawReply, chat, events, request
from tests.kit.engine import Script, answers
from tests.kit.exchange import Exchange
from tests.kit.stack import Stack, open_stack

pytestmark = pytest.mark.slow

BIOS = 'Tools:\n{tools}\nCall: {"tool_calls": [{"name": "f", "arguments": {}}]}'
CALL = '{"tool_calls": [{"name": "weather", "arguments": {"city": "Rom"}}]}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def said(text: str) -> Script:
    """Say *text* in pieces of five characters."""
    pieces = [text[at : at + 5] for at in range(0, len(text), 5)]
    return answers(*pieces, usage=(9, 4))


def model(**settings: Any) -> Mapping[str, ModelSettings]:
    return {"m": ModelSettings(**settings)}


async def ask(stack: Stack, octets: bytes) -> RawReply:
    """Ask; give the reply, an event stream's body without its chunking."""
    client = await stack.edge.connect()
    await client.send(octets)
    head = await client.until(b"\r\n\r\n")
    reply = RawReply(head)
    if "content-length" in reply.headers:
        while len(client.got) < int(reply.headers["content-length"]):
            client.got += await client.read()
        reply.body = client.got
        return reply
    while not client.got.endswith(b"0\r\n\r\n"):
        more = await client.read()
        if not more:
            break
        client.got += more
    reply.body = b"".join(events(client.got))
    return reply


def chunks(reply: RawReply) -> list[Any]:
    """Chunks of a stream, ``[DONE]`` as None."""
    frames = [f.removeprefix(b"data: ") for f in reply.body.split(b"\n\n") if f]
    return [None if f == b"[DONE]" else json.loads(f) for f in frames]


async def test_j4_a_streamed_call_by_convention_is_one_of_openai() -> None:
    async with open_stack(said(CALL), models=model(bios=BIOS)) as stack:
        reply = await ask(stack, chat(tools=[TOOL]))
        (exchange,) = stack.engines[0].seen

        assert "tools" not in exchange.body
        assert exchange.body["messages"][0]["role"] == "system"
        assert (
            json.dumps(SCHEMA, separators=(",", ":"))
            in (exchange.body["messages"][0]["content"])
        )
        *parts, done = chunks(reply)
        assert done is None
        assert not any(p["choices"][0]["delta"].get("content") for p in parts)
        (call,) = parts[1]["choices"][0]["delta"]["tool_calls"]
        assert (call["index"], call["type"]) == (0, "function")
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rom"}
        assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"
        await stack.settle()


async def test_j4_a_whole_reply_by_convention_holds_its_call() -> None:
    async with open_stack(said(CALL), models=model(bios=BIOS)) as stack:
        reply = await ask(stack, chat(stream=False, tools=[TOOL]))

    choice = reply.json["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rom"}
    assert call["id"].startswith("call_")
    assert reply.json["usage"]["completion_tokens"] == 4


async def test_j4_the_messages_surface_has_it_too() -> None:
    asked = {
        "model": "m",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }
    async with open_stack(said(CALL), models=model(bios=BIOS)) as stack:
        octets = request("POST", "/v1/messages", json.dumps(asked).encode())
        reply = await ask(stack, octets)

    (block,) = reply.json["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    assert block["input"] == {"city": "Rom"}
    assert reply.json["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [True, False])
async def test_j4_a_call_that_can_not_be_read_is_a_real_status(*, stream: bool) -> None:
    """Its text was held, so no head is out."""
    async with open_stack(said(CALL[:-2]), models=model(bios=BIOS)) as stack:
        reply = await ask(stack, chat(stream=stream, tools=[TOOL]))

        assert reply.status == 502
        assert reply.json["error"]["code"] == "tool_parse_error"
        assert len(stack.engines[0].seen) == 1
        await stack.settle()


async def test_j4_text_of_a_told_model_streams_as_ever() -> None:
    async with open_stack(said("No tool needed."), models=model(bios=BIOS)) as stack:
        reply = await ask(stack, chat(tools=[TOOL]))

    texts = [p["choices"][0]["delta"].get("content") for p in chunks(reply) if p]
    assert "".join(filter(None, texts)) == "No tool needed."
    assert len(list(filter(None, texts))) == 3


async def manager(x: Exchange) -> None:
    await x.role()
    await x.text("I must ask.")
    await x.tool(0, call_id="t0", name="needs_manager_decision")
    await x.tool(0, '{"message": "Which')
    await x.tool(0, ' one?"}')
    await x.wait_closed()


async def test_j5_a_signal_is_in_the_receipt_and_not_in_the_answer() -> None:
    models = model(exit_tools=("NEEDS_MANAGER_DECISION",))
    async with open_stack(manager, models=models) as stack:
        reply = await ask(stack, chat(tools=[TOOL]))
        await stack.engines[0].seen[0].wait_closed()

        tools = stack.engines[0].seen[0].body["tools"]
        assert [t["function"]["name"] for t in tools] == [
            "weather",
            "needs_manager_decision",
        ]
        *parts, done = chunks(reply)
        assert done is None
        assert b"tool_calls" not in reply.body
        assert b"Which" not in reply.body
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        receipt = stack.router.receipt(reply.headers["x-fencepost-request"])
        assert receipt is not None
        assert receipt["signals"] == [
            {"code": "NEEDS_MANAGER_DECISION", "message": "Which one?", "index": 0}
        ]
        await stack.settle()


async def thinks(x: Exchange) -> None:
    await x.role()
    await x.reasoning(*[f"{n} " for n in range(50)])
    await x.wait_closed()


async def test_j6_a_reasoning_that_nobody_can_end_ends_the_answer() -> None:
    models = model(thinking_max_tokens=20)
    async with open_stack(thinks, models=models) as stack:
        reply = await ask(stack, chat())
        await stack.engines[0].seen[0].wait_closed()

        *parts, done = chunks(reply)
        assert done is None
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
        await stack.settle()


async def loops(x: Exchange) -> None:
    await x.role()
    while True:
        await x.text("and on ")


@pytest.mark.parametrize("stream", [True, False])
async def test_j5_a_loop_is_ended_and_told(*, stream: bool) -> None:
    async with open_stack(loops, models=model(loop_repeats_max=20)) as stack:
        reply = await ask(stack, chat(stream=stream))
        await stack.engines[0].seen[0].wait_closed()

        if stream:
            assert chunks(reply)[-1]["error"]["code"] == "loop_detected"
        else:
            assert reply.status == 502
            assert reply.json["error"]["code"] == "loop_detected"
            assert reply.headers["x-should-retry"] == "false"
        await stack.settle()
