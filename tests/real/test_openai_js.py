"""O7: OpenAI's JavaScript SDK with nothing but ``baseURL`` changed.

It runs in a process of its own, in front of a real daemon; workers are real
llama.cpp servers, or a scripted engine where a failure or a tool call must be
certain.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from tests.kit.engine import refuses, silent
from tests.kit.exchange import Exchange
from tests.kit.processes import Daemon, Llama, await_idle
from tests.kit.sdks import run_js, scripted

pytestmark = pytest.mark.real

MODEL = "smollm2"
ASK: Any = [{"role": "user", "content": "Tell me about a river."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


async def node(router: Daemon, *plays: tuple[str, dict[str, Any]]) -> list[Any]:
    """Play scenarios of ``js/chat.mjs`` in turn; give what the SDK gave of each."""
    url = f"{router.url}/v1"
    said = await run_js("chat.mjs", "openai", url, json.dumps(plays))
    assert isinstance(said, list)
    return said


async def test_o7_javascript_models_streams_and_whole_replies(router: Daemon) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_completion_tokens": 8}
    counted = asked | {"stream_options": {"include_usage": True}}

    models, streamed, uncounted, whole, gathered = await node(
        router,
        ("models", {}),
        ("stream", counted),
        ("stream", asked),
        ("whole", asked),
        ("accumulate", counted),
    )

    assert models["listed"] == [MODEL]
    assert models["one"]["id"] == MODEL
    *body, last = streamed["chunks"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert body[0]["choices"][0]["delta"]["role"] == "assistant"
    assert body[-1]["choices"][0]["finish_reason"] == "length"
    assert {(c["id"], c["model"]) for c in body} == {(last["id"], MODEL)}
    assert not any("usage" in chunk for chunk in uncounted["chunks"])
    for reply in (whole["reply"], gathered["reply"]):
        [choice] = reply["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"]
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 8


async def mix_calls(x: Exchange) -> None:
    await x.role()
    await x.tool(0, call_id="AbC", name="weather")
    await x.tool(0, '{"city":')
    await x.tool(1, call_id="DeF", name="weather")
    await x.tool(0, ' "Bern"}')
    await x.tool(1, '{"city": "Ulm"}')
    await x.finish("tool_calls")
    await x.usage(9, 7)
    await x.done()
    await x.end()


async def test_o7_javascript_calls_are_parsed_even_if_the_engine_mixes_them(
    tmp_path: Path,
) -> None:
    asked: Any = {"model": "m", "messages": ASK, "tools": [WEATHER]}
    async with scripted(tmp_path, mix_calls) as (router, engine):
        streamed, whole = await node(router, ("accumulate", asked), ("whole", asked))

        assert engine.seen[-1].body["tools"] == [WEATHER]
    assert streamed["parsed"] == [{"city": "Bern"}, {"city": "Ulm"}]
    for reply in (streamed["reply"], whole["reply"]):
        [choice] = reply["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert [
            (c["id"], c["type"], c["function"]["name"], c["function"]["arguments"])
            for c in choice["message"]["tool_calls"]
        ] == [
            ("AbC", "function", "weather", '{"city": "Bern"}'),
            ("DeF", "function", "weather", '{"city": "Ulm"}'),
        ]


async def refuse_as_asked(x: Exchange) -> None:
    """Answer with the status that the request names."""
    status = int(x.body["messages"][0]["content"])
    await refuses(status, {"error": {"message": "no"}})(x)


async def test_o7_javascript_errors_have_their_classes(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-right").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(f"{digest} alice\n")
    server = (
        f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{tmp_path}/state"\n'
        f'api_keys_file = "{keys}"\nbody_max_bytes = 4096\n'
    )

    def asked(content: object = "hi", **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": str(content)}]
        return {"model": "m", "messages": messages, "apiKey": "sk-right"} | fields

    plays: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
        (
            "whole",
            asked(apiKey="sk-wrong"),
            ("AuthenticationError", 401, "invalid_api_key"),
        ),
        ("stream", asked(temperature=9), ("BadRequestError", 400, "invalid_value")),
        ("whole", asked(model="x"), ("NotFoundError", 404, "model_not_found")),
        ("whole", asked("x" * 5000), ("APIError", 413, "request_too_large")),
        ("stream", asked(422), ("UnprocessableEntityError", 422, None)),
        ("stream", asked(500), ("InternalServerError", 500, None)),
        ("whole", asked(503), ("InternalServerError", 503, "no_worker_available")),
    ]
    async with scripted(tmp_path, refuse_as_asked, server) as (router, _):
        said = await node(router, *(play[:2] for play in plays))

    assert [(got["error"], got["status"], got["code"]) for got in said] == [
        play[2] for play in plays
    ]
    assert all(got["requestID"] and got["type"] for got in said)
    assert said[1]["param"] == "temperature"


async def test_o7_javascript_a_full_line_is_a_rate_limit_error(tmp_path: Path) -> None:
    settings = "[router]\nqueue_limit = 0\n"
    async with (
        scripted(tmp_path, silent, settings, slots=1) as (router, engine),
        openai.AsyncOpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0
        ) as sdk,
        trio.open_nursery() as nursery,
    ):

        async def hold_the_slot() -> None:
            await sdk.chat.completions.create(model="m", messages=ASK)

        nursery.start_soon(hold_the_slot)
        await engine.next_exchange()

        [said] = await node(router, ("stream", {"model": "m", "messages": ASK}))
        nursery.cancel_scope.cancel()

    assert (said["error"], said["status"]) == ("RateLimitError", 429)
    assert said["code"] == "queue_full"
    assert int(said["retryAfter"]) >= 1


async def test_o7_javascript_a_silent_worker_is_an_internal_server_error(
    tmp_path: Path,
) -> None:
    settings = "[waits]\nfirst_delta_ms = 300\n"
    async with scripted(tmp_path, silent, settings) as (router, _):
        [said] = await node(router, ("stream", {"model": "m", "messages": ASK}))

    assert (said["error"], said["status"]) == ("InternalServerError", 504)
    assert said["code"] == "upstream_stalled"


async def cut_after_text(x: Exchange) -> None:
    await x.role()
    await x.text("Once", " upon")
    await x.reset()


async def test_o7_javascript_a_lost_worker_is_an_error_and_no_short_answer(
    tmp_path: Path,
) -> None:
    asked: Any = {"model": "m", "messages": ASK}
    async with scripted(tmp_path, cut_after_text) as (router, _):
        said = await node(router, ("stream", asked), ("accumulate", asked))

    for got in said:
        assert got["error"] == "APIError"
        assert (got["code"], got["type"]) == ("worker_lost", "server_error")
    chunks = said[0]["chunks"]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "Once upon"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * len(chunks)


async def test_o7_javascript_a_stream_closed_early_frees_its_slot(
    router: Daemon, llamas: list[Llama]
) -> None:
    asked: Any = {"model": MODEL, "messages": ASK, "max_completion_tokens": 1500}

    said = await node(router, ("close", asked | {"ignore_eos": True}))

    assert said == [{"left": True}]
    await trio.to_thread.run_sync(await_idle, llamas, 1.0)
