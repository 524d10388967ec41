"""The Messages surface over the whole router: fake engines behind, bytes before."""

import json
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from router.settings import ModelSettings, RouterSettings, WaitSettings
from tests.kit.anthropic_events import (
    Event,
    accumulate,
    check_grammar,
    events_of,
)
from tests.kit.deep import size
from tests.kit.edge import RawClient, RawReply, events, request
from tests.kit.engine import answers, in_turn, refuses, silent
from tests.kit.exchange import Exchange
from tests.kit.stack import Stack, open_stack

pytestmark = pytest.mark.slow

BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]


def messages(
    *, stream: bool = True, path: str = "/v1/messages", **fields: Any
) -> bytes:
    asked = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": stream,
        **fields,
    }
    return request("POST", path, json.dumps(asked).encode())


async def ask(stack: Stack, octets: bytes | None = None) -> RawClient:
    client = await stack.edge.connect()
    await client.send(octets or messages())
    return client


async def streamed(client: RawClient) -> tuple[RawReply, bytes, bool]:
    """Read a stream to its end: head, events, and whether it ended cleanly."""
    head = RawReply(await client.until(b"\r\n\r\n"))
    rest = client.got
    while not rest.endswith(b"0\r\n\r\n"):
        more = await client.read()
        if not more:
            break
        rest += more
    chunks = events(rest)
    clean = bool(chunks) and chunks[-1] == b""
    return head, b"".join(chunks), clean


async def await_pings(client: RawClient, times: int) -> None:
    """Read on until so many pings are here; a machine that pauses skips some."""
    while client.got.count(b"event: ping") < times:
        more = await client.read()
        assert more
        client.got += more


def names(found: list[Event]) -> list[str]:
    """Names of events, a run of deltas once."""
    runs: list[str] = []
    for event in found:
        if event.name != "content_block_delta" or runs[-1] != event.name:
            runs.append(event.name)
    return runs


async def reasons(x: Exchange) -> None:
    await x.role()
    await x.data(b": still here\n\n")
    await x.reasoning("Let", " me")
    await x.role()
    await x.text("Hi", " there")
    await x.finish()
    await x.usage(9, 4)
    await x.done()
    await x.end()


async def test_m3_reasoning_then_text_has_exactly_its_events() -> None:
    async with open_stack(reasons) as stack:
        head, octets, clean = await streamed(await ask(stack))

    assert head.status == 200
    assert clean
    found = events_of(octets)
    assert check_grammar(found)
    assert names(found) == ["message_start", *BLOCK, *BLOCK, *END]
    assert found[-2].body["usage"]["input_tokens"] == 9
    assert b"[DONE]" not in octets


async def all_in_one(x: Exchange) -> None:
    """B18: the last text and the finish in one chunk, then a long usage."""
    choice = {"index": 0, "delta": {"content": "end"}, "finish_reason": "length"}
    await x.chunk({"choices": [choice]})
    await x.usage(3, 1)
    await x.done()
    await x.end()


async def no_usage(x: Exchange) -> None:
    """B45: a finish, and then nothing more."""
    await x.role()
    await x.text("end")
    await x.finish("length")
    await x.wait_closed()


@pytest.mark.parametrize("script", [all_in_one, no_usage])
async def test_b46_a_message_is_closed_whatever_comes_behind_its_finish(
    script: Callable[[Exchange], Awaitable[None]],
) -> None:
    waits = WaitSettings(connect_ms=1_000, poll_ms=100, usage_wait_ms=100)
    async with open_stack(script, waits=waits) as stack:
        _, octets, clean = await streamed(await ask(stack))

    found = events_of(octets)
    assert clean
    assert names(found) == ["message_start", *BLOCK, *END]
    assert found[-2].body["delta"]["stop_reason"] == "max_tokens"


async def preamble_then_error(x: Exchange) -> None:
    await x.role()
    await x.chunk({"error": {"message": "no", "code": 503}})
    await x.done()
    await x.end()


async def test_b11_a_failover_before_the_first_delta_is_not_seen() -> None:
    script = in_turn(preamble_then_error, reasons)
    async with open_stack(script, script) as stack:
        head, octets, clean = await streamed(await ask(stack))

    found = events_of(octets)
    assert clean
    assert check_grammar(found)
    assert [e.name for e in found].count("message_start") == 1
    assert head.headers["x-fencepost-attempts"] == "2"
    assert accumulate(found).message.content[-1].text == "Hi there"


async def cut(x: Exchange) -> None:
    await x.role()
    await x.text("Once")
    await x.reset()


async def in_band(x: Exchange) -> None:
    await x.role()
    await x.text("Once")
    await x.chunk({"error": {"message": "overloaded", "code": 503}})
    await x.wait_closed()


async def without_finish(x: Exchange) -> None:
    await x.role()
    await x.text("Once")
    await x.end()


@pytest.mark.parametrize(
    ("script", "error_type"),
    [(cut, "api_error"), (in_band, "overloaded_error"), (without_finish, "api_error")],
)
async def test_m6_a_failure_after_the_first_delta_is_told_and_is_unclean(
    script: Callable[[Exchange], Awaitable[None]], error_type: str
) -> None:
    async with open_stack(script) as stack:
        _, octets, clean = await streamed(await ask(stack))
        await stack.settle()

    found = events_of(octets)
    assert not clean
    assert not check_grammar(found)
    assert found[-1].name == "error"
    assert found[-1].body["error"]["type"] == error_type
    assert "message_stop" not in [e.name for e in found]


async def test_h4_a_client_that_leaves_frees_its_slot_within_a_second() -> None:
    async def endless(x: Exchange) -> None:
        await x.role()
        await x.text("Once")
        await x.wait_closed()

    async with open_stack(endless, slots=1) as stack:
        client = await ask(stack)
        await client.until(b'"Once"')
        client.close()
        with trio.fail_after(1):
            await stack.engines[0].seen[0].closed.wait()
            await stack.settle()


@pytest.mark.parametrize("stream", [True, False])
async def test_h4_so_does_one_that_leaves_before_a_byte_came(stream: bool) -> None:
    async with open_stack(silent, slots=1) as stack:
        client = await ask(stack, messages(stream=stream))
        exchange = await stack.engines[0].next_exchange()
        client.reset()
        with trio.fail_after(1):
            await exchange.closed.wait()
            await stack.settle()


async def test_m8_a_loss_before_a_whole_reply_starts_it_over() -> None:
    script = in_turn(cut, answers("whole"))
    async with open_stack(script, script) as stack:
        client = await ask(stack, messages(stream=False))
        reply = await client.reply()

    assert reply.status == 200
    assert reply.json["content"] == [{"type": "text", "text": "whole"}]


async def test_b66_stop_sequences_reach_the_worker_and_come_back() -> None:
    async def stopped(x: Exchange) -> None:
        await x.role()
        choice = {
            "index": 0,
            "delta": {"content": "a"},
            "finish_reason": "stop",
            "stop_reason": x.body["stop"][0],
        }
        await x.chunk({"choices": [choice]})
        await x.done()
        await x.end()

    async with open_stack(stopped) as stack:
        _, octets, _ = await streamed(await ask(stack, messages(stop_sequences=["X"])))

    assert events_of(octets)[-2].body["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": "X",
    }


async def test_b66_as_many_stop_sequences_as_are_asked_for_reach_the_worker() -> None:
    stops = [f"stop {number}" for number in range(9)]
    async with open_stack(answers("ok")) as stack:
        client = await ask(stack, messages(stream=False, stop_sequences=stops))
        assert (await client.reply()).status == 200
        [exchange] = stack.engines[0].seen

        assert exchange.body["stop"] == stops


async def test_b80_a_whole_message_has_the_arguments_as_the_model_wrote_them() -> None:
    arguments = '{"n":1.0,"big":12345678901234567890123,"k":1,"k":2}'

    async def calls(x: Exchange) -> None:
        await x.role()
        await x.tool(0, arguments[:7], call_id="t", name="f")
        await x.tool(0, arguments[7:])
        await x.finish("tool_calls")
        await x.done()
        await x.end()

    async with open_stack(calls) as stack:
        client = await ask(stack, messages(stream=False))
        reply = await client.reply()

    assert b'"input":' + arguments.encode() + b"}" in reply.body


async def test_b79_a_call_that_was_cut_before_its_arguments_is_not_made_up() -> None:
    async def cut_call(x: Exchange) -> None:
        await x.role()
        await x.text("I write.")
        await x.tool(0, "", call_id="t", name="rm")
        await x.finish("length")
        await x.done()
        await x.end()

    async with open_stack(cut_call) as stack:
        client = await ask(stack, messages(stream=False))
        whole = (await client.reply()).json
        _, octets, _ = await streamed(await ask(stack))

    assert whole["content"] == [{"type": "text", "text": "I write."}]
    assert whole["stop_reason"] == "max_tokens"
    assert accumulate(events_of(octets)).message.stop_reason == "max_tokens"


@pytest.mark.parametrize("kind", ["generic", "llama-server"])
async def test_b70_what_a_model_is_told_of_tools_is_in_the_estimate(kind: str) -> None:
    bios = f'{{tools}}\nCall by {{"tool_calls": []}}. {"rule é漢字 " * 2_000}'
    models = {"m": ModelSettings(bios=bios, exit_tools=("POLICY_RISK",))}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "z" * 900}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "é" * 900}
    asked: dict[str, Any] = {
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }
    async with open_stack(answers("ok"), kind=kind, models=models) as stack:
        stack.engines[0].counts = None
        client = await ask(stack, messages(stream=False, **asked))
        assert (await client.reply()).status == 200
        path = "/v1/messages/count_tokens"
        client = await ask(stack, messages(path=path, **asked))
        counted = (await client.reply()).json["input_tokens"]
        sent = stack.engines[0].seen[0].body["messages"]

    assert counted >= sum(len(message["content"].encode()) for message in sent)


async def torn_arguments(x: Exchange) -> None:
    await x.role()
    await x.tool(0, '{"a": tru', call_id="t", name="f")
    await x.finish("tool_calls")
    await x.done()
    await x.end()


async def test_b80_torn_arguments_blame_no_worker() -> None:
    async with open_stack(torn_arguments) as stack:
        _, octets, clean = await streamed(await ask(stack))
        client = await ask(stack, messages(stream=False))
        reply = await client.reply()
        [member] = stack.router.fleet.members.values()

        assert clean
        assert check_grammar(events_of(octets))
        assert (reply.status, reply.json["error"]["type"]) == (500, "api_error")
        assert reply.json["error"]["message"].startswith("tool_parse_error")
        assert member.faults == 0


async def mixed_calls(x: Exchange) -> None:
    await x.role()
    await x.text("I call.")
    await x.tool(0, call_id="t0", name="f")
    for _ in range(40):
        await x.tool(1, "x" * 50_000, call_id="t1", name="g")
    await x.finish("tool_calls")
    await x.done()
    await x.end()


async def test_m3_mixed_calls_beyond_what_is_held_end_in_an_error() -> None:
    async with open_stack(mixed_calls) as stack:
        _, octets, clean = await streamed(await ask(stack))
        await stack.settle()

    assert not clean
    assert events_of(octets)[-1].name == "error"


async def test_m5_pings_span_a_queue_and_a_silent_prefill() -> None:
    pinged = trio.Event()

    async def late(x: Exchange) -> None:
        await pinged.wait()
        await x.role()
        await x.text("Hi")
        await x.finish()
        await x.done()
        await x.end()

    pace = RouterSettings(commit_after_ms=50, keepalive_ms=50)
    async with open_stack(late, router=pace) as stack:
        client = await ask(stack)
        await await_pings(client, 2)
        pinged.set()
        _, octets, clean = await streamed(client)

    found = events_of(octets)
    assert clean
    assert check_grammar(found)
    assert found[0].name == "message_start"
    assert [e.name for e in found].count("ping") >= 2


async def test_b40_a_ping_never_falls_into_an_event() -> None:
    pinged = trio.Event()

    async def halves(x: Exchange) -> None:
        await x.role()
        await x.text("a")
        chunk = {"choices": [{"index": 0, "delta": {"content": "b"}}]}
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        await x.data(event[:20])
        await pinged.wait()
        await x.data(event[20:])
        await x.finish()
        await x.done()
        await x.end()

    async with open_stack(halves, router=RouterSettings(keepalive_ms=50)) as stack:
        client = await ask(stack)
        await await_pings(client, 2)
        pinged.set()
        _, octets, clean = await streamed(client)

    found = events_of(octets)
    assert clean
    assert check_grammar(found)
    assert [e.name for e in found].count("ping") >= 2
    assert accumulate(found).message.content[0].text == "ab"


@pytest.mark.parametrize("status", [503, 429])
async def test_b65_workers_that_are_all_busy_are_told_by_status(status: int) -> None:
    busy = refuses(status, {"error": {"message": "busy"}})
    async with open_stack(busy, busy) as stack:
        client = await ask(stack)
        reply = await client.reply()

    assert reply.status == {503: 529, 429: 429}[status]
    assert b"[DONE]" not in reply.body


async def test_o2_completions_and_embeddings_move_like_any_job() -> None:
    async def text(x: Exchange) -> None:
        choice = {"index": 0, "text": "upon", "finish_reason": "stop"}
        await x.chunk({"choices": [choice]})
        await x.usage(1, 1)
        await x.done()
        await x.end()

    async def vectors(x: Exchange) -> None:
        await x.json(200, {"object": "list", "data": [{"embedding": [0.5]}]})

    async def half(x: Exchange) -> None:
        fields = {"Content-Type": "application/json", "Content-Length": "99"}
        await x.head(200, fields, chunked=False)
        await x.raw(b'{"data":')
        await x.reset()

    for path, field, good, bad in (
        ("/v1/completions", "prompt", text, cut),
        ("/v1/embeddings", "input", vectors, half),
    ):
        script = in_turn(bad, good)
        async with open_stack(script, script) as stack:
            body = json.dumps({"model": "m", field: "Once"}).encode()
            client = await ask(stack, request("POST", path, body))
            reply = await client.reply()

            assert reply.status == 200, reply.body
            assert reply.headers["x-fencepost-attempts"] == "2"
            await stack.settle()


# ---- unbuffered ----


async def test_m5_each_chunk_is_with_the_client_before_the_next_is_sent() -> None:
    """Lock-step: the engine sends only when the client has read the last one."""
    read, sent = trio.open_memory_channel[None](0)
    times: list[float] = []
    began = 0.0

    async def lock_step(x: Exchange) -> None:
        nonlocal began
        await x.role()
        for number in range(200):
            began = time.perf_counter()
            await x.text(f"n{number}.")
            await sent.receive()
        await x.finish()
        await x.done()
        await x.end()

    async with open_stack(lock_step) as stack:
        client = await ask(stack)
        for number in range(200):
            await client.until(b'"n%d."}}\n\n\r\n' % number)
            times.append(time.perf_counter() - began)
            await read.send(None)
        await client.until(b"0\r\n\r\n")

    # Engine, router and client share one loop here; it is far below this alone.
    assert statistics.median(times) < 0.01


@pytest.mark.deep
async def test_m5_nothing_is_gathered_over_a_long_stream() -> None:
    """A stream of ten minutes at 100 deltas a second, as fast as it goes."""
    count = size(60_000, least=6_000)

    async def long(x: Exchange) -> None:
        await x.role()
        chunk = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        for _ in range(count // 20):
            await x.data(event * 20)
        await x.finish()
        await x.usage(1, count)
        await x.done()
        await x.end()

    async with open_stack(long) as stack:
        client = await ask(stack)
        seen = 0
        marks: list[int] = []
        tail = b""
        tracemalloc.start()
        try:
            while True:
                piece = tail + await client.read()
                seen += piece.count(b"text_delta")
                tail = piece[-11:] if not piece.endswith(b"0\r\n\r\n") else b""
                seen -= tail.count(b"text_delta")
                if seen >= (len(marks) + 1) * count // 10:
                    marks.append(tracemalloc.get_traced_memory()[0])
                if piece.endswith(b"0\r\n\r\n"):
                    break
        finally:
            tracemalloc.stop()

    assert seen == count
    assert max(marks[1:]) - marks[0] < 256 * 1024
