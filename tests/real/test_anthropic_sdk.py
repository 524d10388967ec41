"""M9: the official anthropic SDK with nothing but ``base_url`` changed.

The Python client is synchronous and runs in a thread; one scenario is played by
the asynchronous one. The router is a daemon of its own; workers are real
llama.cpp servers, or a scripted engine where a failure, a thought or a tool call
must be certain.
"""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import pytest
import trio

from tests.kit.anthropic_events import check_grammar, events_of
from tests.kit.engine import (
    FakeEngine,
    Script,
    answers,
    in_turn,
    refuses,
    silent,
)
from tests.kit.exchange import Exchange
from tests.kit.processes import Daemon, Llama, await_idle
from tests.kit.sdks import run_js, scripted

pytestmark = pytest.mark.real

MODEL = "smollm2"
ASK: Any = [{"role": "user", "content": "Tell me about a river."}]
WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client(router: Daemon, **options: Any) -> anthropic.Anthropic:
    settings: dict[str, Any] = {
        "api_key": "none",
        "max_retries": 0,
        "timeout": 20,
    } | options
    return anthropic.Anthropic(base_url=router.url, **settings)


async def play(router: Daemon, scenario: Callable[[Any], None]) -> None:
    """Play *scenario* in a thread, with a client of its own."""

    def whole() -> None:
        with client(router) as sdk:
            scenario(sdk)

    await trio.to_thread.run_sync(whole)


async def test_m9_models_are_listed_and_found(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        assert [model.id for model in sdk.models.list()] == [MODEL]
        assert sdk.models.retrieve(MODEL).display_name == MODEL
        with pytest.raises(anthropic.NotFoundError):
            sdk.models.retrieve("claude-99")

    await play(router, scenario)


async def test_m9_a_stream_is_accumulated_by_the_sdk(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        with sdk.messages.stream(model=MODEL, max_tokens=8, messages=ASK) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()

        [block] = message.content
        assert block.type == "text"
        assert block.text == text != ""
        assert message.model == MODEL
        assert message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 8
        assert message.usage.input_tokens > 0
        assert stream.request_id

    await play(router, scenario)


async def test_m3_the_bytes_of_a_real_stream_obey_the_grammar(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        with sdk.messages.with_streaming_response.create(
            model=MODEL, max_tokens=8, messages=ASK, stream=True
        ) as response:
            octets = response.read()

        events = events_of(octets)
        assert check_grammar(events)
        assert [e.name for e in events if e.name != "content_block_delta"] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert b"[DONE]" not in octets

    await play(router, scenario)


async def test_m9_a_whole_message_has_text_and_usage(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        message = sdk.messages.create(
            model=MODEL,
            max_tokens=8,
            messages=ASK,
            system=[
                {
                    "type": "text",
                    "text": "You are brief.",
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "You like water."},
            ],
            extra_body={"temperature": 0, "top_p": 0.9, "top_k": 40},
            stop_sequences=["ZZZ"],
            metadata={"user_id": "u"},
        )

        [block] = message.content
        assert block.type == "text"
        assert block.text
        assert message.role == "assistant"
        assert message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 8

    await play(router, scenario)


async def test_m8_a_count_is_what_the_worker_then_counts(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        asked: Any = {"model": MODEL, "messages": ASK, "system": "You are brief."}
        counted = sdk.messages.count_tokens(**asked)
        beta = sdk.beta.messages.count_tokens(**asked)
        usage = sdk.messages.create(max_tokens=1, **asked).usage

        cached = usage.cache_read_input_tokens or 0
        assert counted.input_tokens == usage.input_tokens + cached
        assert beta.input_tokens == counted.input_tokens

    await play(router, scenario)


async def test_m2_a_last_turn_of_the_assistant_is_gone_on_with(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        prefill: Any = [*ASK, {"role": "assistant", "content": "One two three four"}]
        message = sdk.messages.create(model=MODEL, max_tokens=4, messages=prefill)
        counted = sdk.messages.count_tokens(model=MODEL, messages=prefill)
        usage = message.usage

        assert message.content[0].type == "text"
        cached = usage.cache_read_input_tokens or 0
        assert usage.input_tokens + cached == counted.input_tokens

    await play(router, scenario)


async def test_m2_a_real_engine_takes_tools_results_images_and_thoughts(
    router: Daemon,
) -> None:
    """This model sees no images and calls no tools: it gets notes, and no error."""

    def scenario(sdk: Any) -> None:
        png = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
        history: Any = [
            *ASK,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "SECRET", "signature": "x"},
                    {"type": "text", "text": "Wait."},
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "weather",
                        "input": {"city": "Bern"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [
                            {"type": "text", "text": "dry"},
                            {"type": "image", "source": png},
                        ],
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
        ]
        message = sdk.messages.create(
            model=MODEL,
            max_tokens=8,
            messages=history,
            tools=[WEATHER],
            tool_choice={"type": "auto"},
            thinking={"type": "enabled", "budget_tokens": 1024},
        )

        assert message.usage.output_tokens > 0

    await play(router, scenario)


async def think_and_call(x: Exchange) -> None:
    await x.role()
    await x.reasoning("Let me", " see.")
    await x.text("I ask.")
    await x.tool(0, call_id="AbC", name="weather")
    await x.tool(0, '{"city":')
    await x.tool(0, ' "Bern"}')
    await x.tool(1, call_id="DeF", name="weather")
    await x.tool(1, '{"city": "Ulm"}')
    await x.finish("tool_calls")
    await x.usage(9, 7)
    await x.done()
    await x.end()


async def test_m9_thinking_and_tools_come_the_same_streamed_and_whole(
    tmp_path: Path,
) -> None:
    settings = '[router]\nthinking_signature = "opaque"\n'

    def scenario(sdk: Any) -> None:
        asked: Any = {
            "model": "m",
            "max_tokens": 99,
            "messages": ASK,
            "tools": [WEATHER],
            "tool_choice": {"type": "any"},
        }
        with sdk.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        whole = sdk.messages.create(**asked)

        for message in (streamed, whole):
            thinking, text, first, second = message.content
            assert thinking.type == "thinking"
            assert thinking.thinking == "Let me see."
            assert thinking.signature.startswith("rt1.")
            assert text.type == "text"
            assert text.text == "I ask."
            assert first.type == second.type == "tool_use"
            assert (first.id, first.name, first.input) == (
                "AbC",
                "weather",
                {"city": "Bern"},
            )
            assert (second.id, second.input) == ("DeF", {"city": "Ulm"})
            assert message.stop_reason == "tool_use"
            assert (message.usage.input_tokens, message.usage.output_tokens) == (9, 7)
        # The next turn, as an agent sends it.
        history = [
            *ASK,
            {"role": "assistant", "content": whole.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": one, "content": "dry"}
                    for one in ("AbC", "DeF")
                ],
            },
        ]
        sdk.messages.create(**asked | {"messages": history})

    async with scripted(tmp_path, think_and_call, settings) as (router, engine):
        await play(router, scenario)

        body = engine.seen[-1].body
        assert body["tool_choice"] == "required"
        assert [m["role"] for m in body["messages"]] == [
            "user",
            "assistant",
            "tool",
            "tool",
        ]
        echoed = body["messages"][1]
        assert echoed["content"] == "I ask."
        assert echoed["reasoning_content"] == "Let me see."
        assert [c["id"] for c in echoed["tool_calls"]] == ["AbC", "DeF"]


#: What a worker is told in the second turn of a tool runner.
HISTORY = [("user", None), ("assistant", "AbC"), ("tool", "AbC")]


def told(engine: FakeEngine) -> list[list[tuple[str, str | None]]]:
    """Role and call of each message, of each request that reached a worker."""
    return [list(map(role_and_call, x.body["messages"])) for x in engine.seen]


def role_and_call(message: Any) -> tuple[str, str | None]:
    [call] = message.get("tool_calls", [{"id": message.get("tool_call_id")}])
    return message["role"], call["id"]


async def call_once(x: Exchange) -> None:
    await x.role()
    await x.tool(0, '{"city": "Bern"}', call_id="AbC", name="weather")
    await x.finish("tool_calls")
    await x.usage(9, 7)
    await x.done()
    await x.end()


async def test_m9_a_tool_runner_has_its_whole_conversation_told(
    tmp_path: Path,
) -> None:
    """It asks for a thread first, and goes on without one where it is refused."""

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"dry in {city}"

    def scenario(sdk: Any) -> None:
        runner = sdk.beta.messages.tool_runner(
            model="m", max_tokens=99, messages=ASK, tools=[weather]
        )
        messages = list(runner)
        assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]

    async with scripted(tmp_path, in_turn(call_once, answers("Dry."))) as (
        router,
        engine,
    ):
        await play(router, scenario)

        assert told(engine) == [HISTORY[:1], HISTORY]
        assert engine.seen[-1].body["messages"][-1]["content"] == "dry in Bern"
        assert "tools" in engine.seen[-1].body


async def test_m9_bad_values_are_bad_request_errors(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"max_tokens": 0}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"extra_body": {"temperature": "hot"}}, "temperature"),
            ({"system": 3}, "system"),
            ({"stream": True, "tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ]
        for fields, param in wrong:
            with pytest.raises(anthropic.BadRequestError) as bad:
                sdk.messages.create(
                    **{"model": MODEL, "max_tokens": 9, "messages": ASK} | fields
                )
            assert bad.value.type == "invalid_request_error"
            assert param in bad.value.message
            assert bad.value.request_id

    await play(router, scenario)


async def test_m9_a_prompt_beyond_the_slot_is_a_bad_request_error(
    router: Daemon,
) -> None:
    """The refusal is the real engine's; agents know it by its first words."""

    def scenario(sdk: Any) -> None:
        with pytest.raises(anthropic.BadRequestError) as bad:
            sdk.messages.create(
                model=MODEL,
                max_tokens=9,
                messages=[{"role": "user", "content": "river " * 3000}],
                stream=True,
            )
        assert "prompt is too long" in bad.value.message

    await play(router, scenario)


async def test_m9_an_unknown_model_is_a_not_found_error(router: Daemon) -> None:
    def scenario(sdk: Any) -> None:
        for call in (
            partial(sdk.messages.create, max_tokens=9),
            sdk.messages.count_tokens,
        ):
            with pytest.raises(anthropic.NotFoundError) as unknown:
                call(model="claude-99", messages=ASK)
            assert unknown.value.type == "not_found_error"

    await play(router, scenario)


async def test_m9_a_body_beyond_the_limit_is_a_content_too_large_error(
    tmp_path: Path,
) -> None:
    server = (
        f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{tmp_path}/state"\n'
        "body_max_bytes = 4096\n"
    )

    def scenario(sdk: Any) -> None:
        with pytest.raises(anthropic.APIStatusError) as caught:
            sdk.messages.create(
                model="m",
                max_tokens=9,
                messages=[{"role": "user", "content": "x" * 5000}],
            )
        large: Any = caught.value
        assert large.status_code == 413
        assert large.type == "request_too_large"
        assert large.request_id

    async with scripted(tmp_path, silent, server) as (router, _):
        await play(router, scenario)


async def test_m9_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-right").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(f"{digest} alice\n")
    server = (
        f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{tmp_path}/state"\n'
        f'api_keys_file = "{keys}"\n'
    )

    def scenario(sdk: Any) -> None:
        with pytest.raises(anthropic.AuthenticationError) as wrong:
            sdk.messages.create(model="m", max_tokens=9, messages=ASK)
        assert wrong.value.type == "authentication_error"
        right = sdk.with_options(api_key="sk-right")
        message = right.messages.create(model="m", max_tokens=9, messages=ASK)
        assert message.content[0].type == "text"

    async with scripted(tmp_path, answers("Hello"), server) as (router, _):
        await play(router, scenario)

        def by_bearer() -> None:
            with client(router, api_key=None, auth_token="sk-right") as sdk:
                sdk.messages.create(model="m", max_tokens=9, messages=ASK)

        await trio.to_thread.run_sync(by_bearer)


async def await_status(router: Daemon, holds: Callable[[Any], bool]) -> None:
    """Wait until the daemon's status *holds*; it has 5 s."""
    for _ in range(250):
        if holds(await trio.to_thread.run_sync(router.status)):
            return
        await trio.sleep(0.02)
    raise TimeoutError(await trio.to_thread.run_sync(router.status))


async def test_m9_a_full_queue_is_an_overloaded_error(tmp_path: Path) -> None:
    def scenario(sdk: Any) -> None:
        with pytest.raises(anthropic.APIStatusError) as full:
            sdk.messages.create(model="m", max_tokens=9, messages=ASK, stream=True)
        assert full.value.status_code == 529
        assert full.value.type == "overloaded_error"
        assert int(full.value.response.headers["retry-after"]) >= 1

    settings = "[router]\nqueue_limit = 1\n"
    async with (
        scripted(tmp_path, silent, settings, slots=1) as (router, engine),
        anthropic.AsyncAnthropic(
            base_url=router.url, api_key="none", max_retries=0
        ) as sdk,
        trio.open_nursery() as nursery,
    ):
        ask = partial(sdk.messages.create, model="m", max_tokens=9, messages=ASK)
        nursery.start_soon(ask)
        await engine.next_exchange()
        nursery.start_soon(ask)
        await await_status(router, lambda status: len(status["requests"]) == 2)

        await play(router, scenario)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("script", "status", "error_type"),
    [
        (refuses(503, {"error": {"message": "no"}}), 529, "overloaded_error"),
        (refuses(429, {"error": {"message": "no"}}), 429, "rate_limit_error"),
        (refuses(500, {"error": {"message": "no"}}), 500, "api_error"),
        (
            refuses(422, {"error": {"message": "no", "type": "x"}}),
            400,
            "invalid_request_error",
        ),
        (refuses(401, {"error": {"message": "no"}}), 529, "overloaded_error"),
    ],
)
async def test_m9_what_workers_refuse_has_its_class(
    tmp_path: Path, script: Script, status: int, error_type: str
) -> None:
    def scenario(sdk: Any) -> None:
        for stream in (True, False):
            with pytest.raises(anthropic.APIStatusError) as refused:
                sdk.messages.create(
                    model="m", max_tokens=9, messages=ASK, stream=stream
                )
            assert (refused.value.status_code, refused.value.type) == (
                status,
                error_type,
            )

    settings = "[waits]\nload_wait_ms = 500\n"
    async with scripted(tmp_path, script, settings) as (router, _):
        await play(router, scenario)


async def test_m9_a_silent_worker_is_a_timeout_error(tmp_path: Path) -> None:
    def scenario(sdk: Any) -> None:
        with pytest.raises(anthropic.APIStatusError) as late:
            sdk.messages.create(model="m", max_tokens=9, messages=ASK, stream=True)
        assert (late.value.status_code, late.value.type) == (504, "timeout_error")

    settings = "[waits]\nfirst_delta_ms = 300\n"
    async with scripted(tmp_path, silent, settings) as (router, _):
        await play(router, scenario)


async def cut_after_text(x: Exchange) -> None:
    await x.role()
    await x.text("Once", " upon")
    await x.reset()


async def test_m6_a_worker_lost_in_mid_stream_is_an_api_error(tmp_path: Path) -> None:
    def scenario(sdk: Any) -> None:
        got: list[str] = []
        with (
            pytest.raises(anthropic.APIStatusError) as lost,
            sdk.messages.stream(model="m", max_tokens=9, messages=ASK) as stream,
        ):
            got.extend(stream.text_stream)
        assert "".join(got) == "Once upon"
        assert lost.value.type == "api_error"

    async with scripted(tmp_path, cut_after_text) as (router, _):
        await play(router, scenario)


async def test_m9_a_stream_closed_early_frees_its_slot(
    router: Daemon, llamas: list[Llama]
) -> None:
    def scenario(sdk: Any) -> None:
        with sdk.messages.stream(model=MODEL, max_tokens=1500, messages=ASK) as stream:
            next(iter(stream.text_stream))

    await play(router, scenario)

    await trio.to_thread.run_sync(await_idle, llamas, 1.0)


# ---- the JavaScript SDK ----


async def node(router: Daemon, scenario: str, **asked: Any) -> Any:
    """Play one scenario of ``js/messages.mjs``; give what the SDK gave."""
    return await run_js(
        "messages.mjs", "@anthropic-ai/sdk", router.url, scenario, json.dumps(asked)
    )


async def test_m9_javascript_streams_and_whole_messages(router: Daemon) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 8, "messages": ASK}
    asked["system"] = [{"type": "text", "text": "You are brief."}]

    streamed = await node(router, "stream", **asked)
    whole = await node(router, "whole", **asked)
    counted = await node(router, "count", **asked | {"max_tokens": None})

    assert streamed["events"][0] == "message_start"
    assert streamed["events"][-1] == "message_stop"
    for said in (streamed, whole):
        message = said["message"]
        assert message["content"][0]["text"]
        assert message["stop_reason"] == "max_tokens"
        assert message["usage"]["output_tokens"] == 8
    usage = whole["message"]["usage"]
    assert counted["input_tokens"] == (
        usage["input_tokens"] + usage["cache_read_input_tokens"]
    )


async def test_m9_javascript_thinking_and_tools(tmp_path: Path) -> None:
    asked: Any = {"model": "m", "max_tokens": 99, "messages": ASK, "tools": [WEATHER]}
    async with scripted(tmp_path, think_and_call) as (router, _):
        for scenario in ("stream", "whole"):
            said = await node(router, scenario, **asked)

            thinking, text, first, second = said["message"]["content"]
            assert thinking["thinking"] == "Let me see."
            assert text["text"] == "I ask."
            assert first["input"] == {"city": "Bern"}
            assert second["input"] == {"city": "Ulm"}
            assert said["message"]["stop_reason"] == "tool_use"


async def test_m9_javascript_a_tool_runner_has_its_whole_conversation_told(
    tmp_path: Path,
) -> None:
    asked: Any = {"model": "m", "max_tokens": 99, "messages": ASK, "tools": [WEATHER]}
    script = in_turn(call_once, answers("Dry."))
    async with scripted(tmp_path, script) as (router, engine):
        said = await node(router, "runner", **asked)

        assert said == {"reasons": ["tool_use", "end_turn"]}
        assert told(engine) == [HISTORY[:1], HISTORY]
        assert engine.seen[-1].body["messages"][-1]["content"] == "Bern"


async def test_m9_javascript_errors_have_their_classes(router: Daemon) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 9, "messages": ASK}

    bad = await node(router, "stream", **asked | {"temperature": 9})
    unknown = await node(router, "whole", **asked | {"model": "claude-99"})

    assert (bad["error"], bad["status"]) == ("BadRequestError", 400)
    assert bad["type"] == "invalid_request_error"
    assert bad["requestID"]
    assert (unknown["error"], unknown["type"]) == ("NotFoundError", "not_found_error")


async def test_m9_javascript_a_lost_worker_is_an_api_error(tmp_path: Path) -> None:
    asked: Any = {"model": "m", "max_tokens": 9, "messages": ASK}
    async with scripted(tmp_path, cut_after_text) as (router, _):
        said = await node(router, "stream", **asked)

    assert said["type"] == "api_error"


async def test_m9_javascript_a_stream_closed_early_frees_its_slot(
    router: Daemon, llamas: list[Llama]
) -> None:
    asked: Any = {"model": MODEL, "max_tokens": 1500, "messages": ASK}

    said = await node(router, "close", **asked)

    assert said == {"left": True}
    await trio.to_thread.run_sync(await_idle, llamas, 1.0)
