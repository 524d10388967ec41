"""O7: the official openai SDK with nothing but ``base_url`` changed.

Every scenario runs under asyncio and under Trio; the synchronous client has its
own. The router is a daemon of its own; workers are real llama.cpp servers, or a
scripted engine where a failure or a tool call must be certain.
"""

import asyncio  # noqa: TID251 - the SDK's users are on asyncio
import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import openai
import pytest
import trio
from openai.types.chat import ChatCompletionChunk

from tests.kit.engine import answers, silent
from tests.kit.exchange import Exchange
from tests.kit.processes import Daemon, Llama, await_idle
from tests.kit.sdks import scripted

pytestmark = [
    pytest.mark.real,
    # The SDK leaves its own generators to the garbage collector, and Trio says so;
    # what is under test here runs in other processes.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Scenario: TypeAlias = Callable[[openai.AsyncOpenAI], Awaitable[None]]
Runner: TypeAlias = Callable[[Daemon, Scenario], Awaitable[None]]

MODEL = "smollm2"
ASK: Any = [{"role": "user", "content": "Tell me about a river."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def client(router: Daemon, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{router.url}/v1", api_key=api_key, max_retries=0, timeout=20
    )


async def under_trio(router: Daemon, scenario: Scenario) -> None:
    async with client(router) as sdk:
        await scenario(sdk)


async def under_asyncio(router: Daemon, scenario: Scenario) -> None:
    async def whole() -> None:
        async with client(router) as sdk:
            await scenario(sdk)

    await trio.to_thread.run_sync(asyncio.run, whole())


@pytest.fixture(params=[under_trio, under_asyncio], ids=["trio", "asyncio"])
def play(request: pytest.FixtureRequest) -> Runner:
    runner: Runner = request.param
    return runner


async def test_o7_models_are_listed_and_found(router: Daemon, play: Runner) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        listed = [model.id async for model in sdk.models.list()]
        one = await sdk.models.retrieve(MODEL)

        assert listed == [MODEL]
        assert one.id == MODEL

    await play(router, scenario)


async def test_o7_a_stream_has_text_one_finish_and_usage_last(
    router: Daemon, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

        *body, last = chunks
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 8
        assert [c.usage for c in body] == [None] * len(body)
        assert body[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].delta.role for c in body[1:]] == [None] * (len(body) - 1)
        assert "".join(c.choices[0].delta.content or "" for c in body)
        assert [c.choices[0].finish_reason for c in body if c.choices[0].finish_reason]
        assert body[-1].choices[0].finish_reason == "length"
        assert {(c.id, c.model, c.created) for c in chunks} == {
            (last.id, MODEL, last.created)
        }

    await play(router, scenario)


async def test_o7_a_whole_reply_has_text_finish_and_usage(
    router: Daemon, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        reply = await sdk.chat.completions.create(
            model=MODEL, messages=ASK, max_completion_tokens=8
        )

        [choice] = reply.choices
        assert choice.message.role == "assistant"
        assert choice.message.content
        assert choice.finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 8
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + 8

    await play(router, scenario)


async def call_weather(x: Exchange) -> None:
    await x.role()
    await x.tool(0, call_id="AbC", name="weather")
    await x.tool(0, '{"city":')
    await x.tool(0, ' "Bern"}')
    await x.finish("tool_calls")
    await x.usage(9, 7)
    await x.done()
    await x.end()


async def test_o7_tools_reach_the_worker_and_calls_come_back(
    tmp_path: Path, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        asked: Any = {
            "model": "m",
            "messages": ASK,
            "tools": [WEATHER],
            "tool_choice": "required",
        }
        async with sdk.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        whole = await sdk.chat.completions.create(**asked)

        for reply in (streamed, whole):
            [choice] = reply.choices
            assert choice.finish_reason == "tool_calls"
            assert not choice.message.content
            calls: Any = choice.message.tool_calls
            assert [(c.id, c.type) for c in calls] == [("AbC", "function")]
            assert calls[0].function.name == "weather"
            assert calls[0].function.arguments == '{"city": "Bern"}'

    async with scripted(tmp_path, call_weather) as (router, engine):
        await play(router, scenario)

        for exchange in engine.seen:
            assert exchange.body["tools"] == [WEATHER]
            assert exchange.body["tool_choice"] == "required"


async def test_o7_bad_values_are_bad_request_errors(
    router: Daemon, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(
                model=MODEL, messages=ASK, temperature=9, stream=True
            )
        assert bad.value.param == "temperature"
        assert bad.value.type == "invalid_request_error"
        assert bad.value.request_id

    await play(router, scenario)


async def test_o7_a_prompt_beyond_the_slot_is_a_bad_request_error(
    router: Daemon, play: Runner
) -> None:
    """The refusal is the real engine's, in its own shape."""

    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as bad:
            await sdk.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "river " * 3000}],
                stream=True,
            )
        assert bad.value.code == "context_length_exceeded"

    await play(router, scenario)


async def test_o7_an_unknown_model_is_a_not_found_error(
    router: Daemon, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as unknown:
            await sdk.chat.completions.create(model="gpt-99", messages=ASK)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await sdk.models.retrieve("gpt-99")

    await play(router, scenario)


async def test_o7_a_wrong_key_is_an_authentication_error(
    tmp_path: Path, play: Runner
) -> None:
    digest = hashlib.sha256(b"sk-right").hexdigest()
    keys = tmp_path / "keys"
    keys.write_text(f"{digest} alice\n")
    server = (
        f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{tmp_path}/state"\n'
        f'api_keys_file = "{keys}"\n'
    )

    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError) as wrong:
            await sdk.chat.completions.create(model="m", messages=ASK)
        assert wrong.value.code == "invalid_api_key"
        right = sdk.with_options(api_key="sk-right")
        reply = await right.chat.completions.create(model="m", messages=ASK)
        assert reply.choices[0].message.content == "Hello world"

    async with scripted(tmp_path, answers("Hello", " world"), server) as (router, _):
        await play(router, scenario)


async def test_o7_a_full_queue_is_a_rate_limit_error(
    tmp_path: Path, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.RateLimitError) as full:
            await sdk.chat.completions.create(model="m", messages=ASK, stream=True)
        assert full.value.code == "queue_full"
        assert int(full.value.response.headers["retry-after"]) >= 1

    settings = "[router]\nqueue_limit = 1\n"
    async with (
        scripted(tmp_path, silent, settings, slots=1) as (router, engine),
        client(router) as sdk,
        trio.open_nursery() as nursery,
    ):
        ask = partial(sdk.chat.completions.create, model="m", messages=ASK)
        nursery.start_soon(ask)
        await engine.next_exchange()
        nursery.start_soon(ask)
        await await_status(router, lambda status: len(status["requests"]) == 2)

        await play(router, scenario)
        nursery.cancel_scope.cancel()


async def await_status(router: Daemon, holds: Callable[[Any], bool]) -> None:
    await trio.to_thread.run_sync(router.await_status, holds, 5.0)


async def test_o7_no_worker_is_an_internal_server_error(
    tmp_path: Path, play: Runner
) -> None:
    """503: the SDK's class for all of 5xx, and it would retry."""

    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.InternalServerError) as none:
            await sdk.chat.completions.create(model="m", messages=ASK, stream=True)
        assert none.value.status_code == 503
        assert none.value.code in {"no_worker_available", "model_loading"}
        assert none.value.type == "server_error"

    async with scripted(tmp_path, silent, "[waits]\nload_wait_ms = 1000\n") as (
        router,
        engine,
    ):
        engine.refuse = True
        await engine.cut()
        await await_status(router, lambda status: not status["ready"])

        await play(router, scenario)


async def read_text(
    stream: openai.AsyncStream[ChatCompletionChunk], into: list[str]
) -> None:
    async for chunk in stream:
        into += [chunk.choices[0].delta.content or ""]


async def cut_after_text(x: Exchange) -> None:
    await x.role()
    await x.text("Once", " upon")
    await x.reset()


async def test_o7_a_worker_lost_in_mid_stream_is_an_api_error(
    tmp_path: Path, play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        stream = await sdk.chat.completions.create(model="m", messages=ASK, stream=True)
        got: list[str] = []
        with pytest.raises(openai.APIError) as lost:
            await read_text(stream, into=got)
        assert "".join(got) == "Once upon"
        assert lost.value.code == "worker_lost"
        assert lost.value.type == "server_error"

    async with scripted(tmp_path, cut_after_text) as (router, _):
        await play(router, scenario)


async def test_o7_a_stream_closed_early_frees_its_slot(
    router: Daemon, llamas: list[Llama], play: Runner
) -> None:
    async def scenario(sdk: openai.AsyncOpenAI) -> None:
        stream = await sdk.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()

    await play(router, scenario)

    await trio.to_thread.run_sync(await_idle, llamas, 1.0)


async def test_o7_the_synchronous_client_does_all_of_it(
    router: Daemon, llamas: list[Llama]
) -> None:
    def scenario() -> None:
        with openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=20
        ) as sdk:
            create = sdk.chat.completions.create
            assert [model.id for model in sdk.models.list()] == [MODEL]
            chunks = list(
                create(
                    model=MODEL,
                    messages=ASK,
                    max_tokens=5,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 5
            whole = create(model=MODEL, messages=ASK, max_tokens=5, tools=[WEATHER])
            assert whole.choices[0].message.content
            with pytest.raises(openai.BadRequestError):
                create(model=MODEL, messages=[], max_tokens=5)
            with pytest.raises(openai.NotFoundError):
                create(model="gpt-99", messages=ASK)
            stream = create(model=MODEL, messages=ASK, max_tokens=1500, stream=True)
            next(iter(stream))
            stream.close()

    await trio.to_thread.run_sync(scenario)

    await trio.to_thread.run_sync(await_idle, llamas, 1.0)
