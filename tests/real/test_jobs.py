"""Jobs, tools by convention and limits on a real llama.cpp server."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import trio

from router.engine import JobState, Router, SyncRouter, open_router
from router.errors import RequestFailed
from router.messages import FinishReason, GenerationParams, Job, SignalCode
from router.settings import ModelSettings, Settings, WorkerSettings
from tests.kit.edge import until
from tests.kit.processes import Llama, await_idle

pytestmark = pytest.mark.real

MODEL: Final = "smollm2"
PATIENCE_S: Final = 45.0
BIOS: Final = """You can call these tools:
{tools}
To call one, answer {"tool_calls": [{"name": "NAME", "arguments": {}}]} alone.
"""
CITY: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Final = {
    "type": "function",
    "function": {"name": "weather", "parameters": CITY},
}


def job(content: str, max_tokens: int, **more: Any) -> Job:
    extras = {"ignore_eos": True, **more.pop("extras", {})}
    params = GenerationParams(max_tokens=max_tokens, **more)
    messages = ({"role": "user", "content": content},)
    return Job(MODEL, messages, params=params, extras=extras)


def settings(llama: Llama, **model: Any) -> Settings:
    return Settings(
        workers=(WorkerSettings("llama", llama.url),),
        models={MODEL: ModelSettings(**model)},
    )


async def idle(router: Router, llamas: list[Llama]) -> None:
    """No slot is at work, as the server says, and no permit is out."""
    await trio.to_thread.run_sync(await_idle, llamas, 10.0)
    await until(lambda: not any(m.busy for m in router.fleet.members.values()))
    assert router.active == 0


async def test_j1_jobs_are_handed_in_cancelled_and_taken(llamas: list[Llama]) -> None:
    """Twelve jobs on four slots: some done, some cancelled while they run or wait."""
    with trio.fail_after(PATIENCE_S):
        async with open_router(settings(llamas[0])) as router:
            await router.wait_ready()
            short = [router.submit(job(f"Name {n} rivers.", 8)) for n in range(6)]
            long = [router.submit(job("Tell a long story.", 1_500)) for _ in range(6)]
            results = [await router.get_result(one) for one in short]
            await until(lambda: router.get_status(long[0]).deltas > 0)
            for one in long[:4]:
                router.cancel(one)
            for one in long[4:]:
                router.release(one)
            cut = [await router.get_result(one) for one in long[:4]]

            assert [r.ok for r in results] == [True] * 6
            assert {r.finish_reason for r in results} == {FinishReason.LENGTH}
            assert all(r.usage and r.usage.completion_tokens == 8 for r in results)
            assert {s.code for r in results for s in r.signals} == {
                SignalCode.MAX_TOKENS_REACHED
            }
            assert {r.state for r in cut} == {JobState.CANCELLED}
            assert cut[0].text
            assert len(router.jobs) == 0
            await idle(router, llamas[:1])


async def test_j3_the_engine_takes_the_parameters_that_it_is_said_to_know(
    llamas: list[Llama],
) -> None:
    asked = job(
        "Name a river.",
        6,
        temperature=0.0,
        top_p=0.9,
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        top_k=1,
        min_p=0.05,
        typical_p=0.95,
        repeat_penalty=1.1,
        repeat_last_n=32,
        min_tokens=2,
    )
    with trio.fail_after(PATIENCE_S):
        async with open_router(settings(llamas[0])) as router:
            await router.wait_ready()
            first, again = [
                await router.get_result(router.submit(asked)) for _ in range(2)
            ]

    assert first.text == again.text != ""
    assert first.unsupported == ("min_tokens",)


async def test_j6_a_limit_of_reasoning_is_accepted_and_its_control_endpoint_is_there(
    llamas: list[Llama],
) -> None:
    """The bundled model does not reason: what counts is that nobody minds."""
    with trio.fail_after(PATIENCE_S):
        async with open_router(settings(llamas[0], thinking_max_tokens=16)) as router:
            await router.wait_ready()
            async with router.stream(job("Name a river.", 200)) as deltas:
                await anext(deltas)
                (flight,) = router.flights.values()
                source: Any = flight.source
                assert source.end_reasoning() > 0
                assert source.end_reasoning() == 0
                said = "".join([delta.text async for delta in deltas])

            assert said
            assert source._reasoning._reader.reply_id.startswith("chatcmpl-")
            await idle(router, llamas[:1])


def call_of(completion: Any) -> tuple[str, Mapping[str, Any]]:
    (call,) = completion.tool_calls
    return call.name, json.loads(call.arguments)


async def test_j4_a_model_that_knows_no_tools_calls_one(llamas: list[Llama]) -> None:
    """Its template knows no tools; a required call is forced by the output format."""
    asked = job(
        "How is the weather in Rome?",
        120,
        temperature=0.0,
        extras={
            "tools": [WEATHER],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "ignore_eos": False,
        },
    )
    with trio.fail_after(PATIENCE_S):
        async with open_router(settings(llamas[0], bios=BIOS)) as router:
            await router.wait_ready()
            completion = await router.complete(asked)
            async with router.stream(asked) as deltas:
                streamed = [delta async for delta in deltas]

    name, arguments = call_of(completion)
    assert name == "weather"
    assert arguments.keys() == {"city"}
    assert completion.text == ""
    assert completion.reason is FinishReason.TOOL_CALLS
    assert completion.usage is not None
    (delta,) = streamed
    assert delta.tool is not None
    assert delta.tool.name == "weather"


async def test_j4_a_half_call_of_a_real_model_is_told_as_cut(
    llamas: list[Llama],
) -> None:
    asked = job(
        "How is the weather in Rome?",
        9,
        extras={"tools": [WEATHER], "tool_choice": "required"},
    )
    with trio.fail_after(PATIENCE_S):
        async with open_router(settings(llamas[0], bios=BIOS)) as router:
            await router.wait_ready()
            completion = await router.complete(asked)

    assert completion.tool_calls == ()
    assert completion.text.lstrip().startswith("{")
    assert completion.reason is FinishReason.LENGTH


async def test_j5_a_real_loop_is_ended_and_its_slot_freed(
    llamas: list[Llama],
) -> None:
    """A grammar leaves the model nothing but to go round."""
    endless = job("Go on.", 1_900, extras={"grammar": 'root ::= ("on and " )+'})
    with trio.fail_after(PATIENCE_S):
        async with open_router(settings(llamas[0], loop_repeats_max=20)) as router:
            await router.wait_ready()
            result = await router.get_result(router.submit(endless))
            with pytest.raises(RequestFailed):
                await router.complete(endless)

            assert result.reason == "loop_detected"
            assert 512 <= len(result.text) < 700
            assert [s.code for s in result.signals] == [SignalCode.LOOP_DETECTED]
            await idle(router, llamas[:1])


def test_j2_threads_share_a_real_server(llamas: list[Llama]) -> None:
    with SyncRouter(settings(llamas[0])) as router:
        router.wait_ready(within_s=PATIENCE_S)

        def work(number: int) -> tuple[str, int]:
            with router.stream(job(f"Count to {number}.", 6)) as deltas:
                pieces = sum(1 for _ in deltas)
            result = router.get_result(
                router.submit(job(f"Name {number} rivers.", 4)), within_s=PATIENCE_S
            )
            left = router.stream(job("Tell a long story.", 1_500))
            next(left)
            left.close()
            return result.state.value, pieces

        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(work, range(16)))

        assert {state for state, _ in done} == {"completed"}
        assert all(pieces for _, pieces in done)
        await_idle(llamas[:1], 10.0)
        assert router.active == 0
