"""The library's receivers, through the router."""

import gc
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, ToolCall, open_router
from router.engine.flight import Flight
from router.engine.queue import HIGH, LOW, CompletionReceiver
from router.errors import Fault, FaultKind, RequestFailed
from router.ids import AssignmentId, RequestId
from router.messages import (
    Delta,
    Finished,
    FinishReason,
    Job,
    Kind,
    SignalCode,
    ToolPart,
)
from workers.scripted import (
    Fail,
    Finish,
    Head,
    Say,
    Script,
    ScriptedWorker,
    answers,
    hangs,
)

JOB = Job("m", ({"role": "user", "content": "hi"},))
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")


@asynccontextmanager
async def opened(script: Script) -> AsyncIterator[tuple[Router, ScriptedWorker]]:
    worker = ScriptedWorker("a", script)
    async with open_router(workers=[worker], rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router, worker


async def test_e1_a_stream_is_iterated_and_ends_with_its_finish(
    autojump_clock: MockClock,
) -> None:
    async with (
        opened(answers("a", "b", every=1.0)) as (router, _),
        router.stream(JOB) as deltas,
    ):
        assert [d.text async for d in deltas] == ["a", "b"]
        assert deltas.finished is not None
        assert deltas.finished.reason is FinishReason.STOP


async def test_e1_a_stream_that_is_refused_raises_its_fault_alone(
    autojump_clock: MockClock,
) -> None:
    job = attrs.evolve(JOB, exit_tools=(SignalCode.LOOP_DETECTED,))
    async with opened(answers("a")) as (router, _):
        with pytest.raises(RequestFailed) as raised:
            async with router.stream(job) as deltas:
                await anext(deltas)
    assert raised.value.fault.kind is FaultKind.REJECTED


async def test_l1_a_bug_ends_its_stream_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Flight) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Flight, "begin", broken)
    async with opened(answers("a")) as (router, _):
        with pytest.raises(RequestFailed) as raised:
            async with router.stream(JOB) as deltas:
                await anext(deltas)
        assert router.tally.bugs == {"stream": 1}
    assert raised.value.fault.kind is FaultKind.INTERNAL


async def test_l1_who_is_told_of_ends_and_fails_harms_no_answer(
    autojump_clock: MockClock,
) -> None:
    def failing(_: Mapping[str, object]) -> None:
        raise OSError("the disk is full")

    async with opened(answers("a")) as (router, _):
        router.on_request_end = failing
        assert (await router.complete(JOB)).text == "a"
        assert router.tally.bugs == {"on_request_end": 1}


async def test_f7_a_loss_is_raised_and_says_that_text_had_come(
    autojump_clock: MockClock,
) -> None:
    async with (
        opened(lambda *_: (Head(), Say(("a",)), Fail(LOST))) as (router, _),
        router.stream(JOB) as deltas,
    ):
        assert (await anext(deltas)).text == "a"
        with pytest.raises(RequestFailed) as raised:
            await anext(deltas)

        assert raised.value.reason == "stream_closed_early"
        assert raised.value.committed


async def test_e1_leaving_the_block_is_the_disconnect(
    autojump_clock: MockClock,
) -> None:
    async with opened(hangs(Head(), Say(("a",)))) as (router, worker):
        async with router.stream(JOB) as deltas:
            async for _ in deltas:
                break

        assert worker.sources[0].closed_at is not None
        assert not router.flights


async def test_b126_an_exception_of_the_caller_comes_out_as_itself(
    autojump_clock: MockClock,
) -> None:
    async with opened(hangs(Head(), Say(("a",)))) as (router, _):
        with pytest.raises(ZeroDivisionError):
            await divide_by_zero(router)


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(3)])
async def test_b126_what_the_block_of_a_router_raises_comes_out_as_itself(
    autojump_clock: MockClock, error: BaseException
) -> None:
    with pytest.raises(type(error)) as raised:
        async with opened(answers("x")):
            raise error
    assert raised.value is error

    with pytest.raises(type(error)) as raised:
        async with opened(hangs(Head())) as (router, _), router.stream(JOB):
            raise error
    assert raised.value is error


async def test_b126_a_worker_that_can_not_be_hired_is_an_error_in_no_group() -> None:
    with pytest.raises(ValueError, match="URL"):
        async with open_router(workers=["ftp://nowhere"]):
            pass


async def test_b124_breaking_out_of_a_stream_leaves_no_scope_behind(
    autojump_clock: MockClock,
) -> None:
    async with opened(hangs(Head(), Say(("a", "b")))) as (router, worker):
        for _ in range(3):
            async with router.stream(JOB) as deltas:
                async for delta in deltas:
                    assert delta.text == "a"
                    break
            with trio.move_on_after(1) as scope:
                await trio.sleep(0.5)
            assert not scope.cancelled_caught

        assert all(source.closed_at is not None for source in worker.sources)


async def test_b125_each_delta_may_be_read_from_a_task_of_its_own(
    autojump_clock: MockClock,
) -> None:
    got: list[str] = []
    async with (
        opened(answers("a", "b", "c", every=1.0)) as (router, _),
        router.stream(JOB) as deltas,
    ):

        async def read() -> None:
            got.append((await anext(deltas)).text)

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)

    assert got == ["a", "b", "c"]


async def test_b125_a_dropped_queue_of_a_stream_is_closed_by_its_block(
    autojump_clock: MockClock,
) -> None:
    """The block owns the request; what a reader drops changes nothing."""
    async with opened(hangs(Head(), Say(("a",)))) as (router, worker):
        async with router.stream(JOB) as deltas:
            await anext(deltas)
            del deltas
            gc.collect()
            assert router.flights

        assert worker.sources[0].closed_at is not None
        assert not router.flights


async def divide_by_zero(router: Router) -> None:
    async with router.stream(JOB) as deltas:
        async for _ in deltas:
            _ = 1 / 0


async def test_e1_cancelling_the_caller_is_the_disconnect(
    autojump_clock: MockClock,
) -> None:
    async with opened(hangs(Head(), Say(("a",)))) as (router, worker):
        with trio.move_on_after(3) as scope:
            async with router.stream(JOB) as deltas:
                async for _ in deltas:
                    pass

        assert scope.cancelled_caught
        assert worker.sources[0].closed_at == trio.current_time()
        assert not router.flights


async def test_s1_a_slow_reader_pauses_its_worker_and_holds_a_bounded_queue(
    autojump_clock: MockClock,
) -> None:
    said = [Say((str(n),)) for n in range(3 * HIGH)]
    async with (
        opened(lambda *_: (Head(), *said, Finish())) as (router, worker),
        router.stream(JOB) as deltas,
    ):
        await wait_all_tasks_blocked()
        source = worker.sources[0]
        paused = [source.paused]
        assert len(deltas._deltas) == HIGH

        first = [await anext(deltas) for _ in range(HIGH - LOW)]
        paused.append(source.paused)
        assert paused == [True, False]
        rest = [d async for d in deltas]

        texts = [d.text for d in (*first, *rest)]
        assert texts == [str(n) for n in range(3 * HIGH)]


async def test_e1_leaving_the_router_ends_what_another_task_has_under_way(
    autojump_clock: MockClock,
) -> None:
    failures: list[str] = []

    async def ask(router: Router) -> None:
        try:
            await router.complete(JOB)
        except RequestFailed as failed:
            failures.append(failed.reason)

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        async with opened(hangs(Head(), Say(("a",)))) as (router, worker):
            nursery.start_soon(ask, router)
            await wait_all_tasks_blocked()

    assert failures == ["no_worker"]
    assert worker.sources[0].closed_at == trio.current_time() == start


async def test_e1_complete_answers_whole(autojump_clock: MockClock) -> None:
    async with opened(answers("Hel", "lo")) as (router, _):
        completion = await router.complete(JOB)

    assert completion.text == "Hello"
    assert completion.reason is FinishReason.STOP


async def test_e1_complete_raises_what_went_wrong(autojump_clock: MockClock) -> None:
    async with opened(lambda *_: (Head(), Say(("a",)), Fail(LOST))) as (router, _):
        with pytest.raises(RequestFailed) as raised:
            await router.complete(JOB)

    assert raised.value.fault is LOST


async def test_o6_an_unknown_model_is_refused_by_the_table(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x")) as (router, worker):
        with pytest.raises(RequestFailed) as raised:
            await router.complete(Job("other", ()))

    assert raised.value.fault.kind is FaultKind.MODEL_NOT_FOUND
    assert worker.sources == []


def test_tool_calls_are_put_together_by_their_index() -> None:
    receiver = CompletionReceiver()
    assignment = AssignmentId(RequestId("r"), 1)
    parts = [
        Delta(assignment, 0, Kind.REASONING, "hm"),
        Delta(assignment, 1, Kind.TOOL_CALL, "", ToolPart(0, "t0", "f")),
        Delta(assignment, 2, Kind.TOOL_CALL, "", ToolPart(1, "t1", "g")),
        Delta(assignment, 3, Kind.TOOL_CALL, '{"a"', ToolPart(0)),
        Delta(assignment, 4, Kind.TOOL_CALL, ":1}", ToolPart(0)),
    ]
    receiver.take(parts)
    receiver.finish(Finished(assignment, FinishReason.TOOL_CALLS))

    completion = receiver.completion()

    assert completion.reasoning == "hm"
    assert completion.tool_calls == (
        ToolCall("t0", "f", '{"a":1}'),
        ToolCall("t1", "g", ""),
    )
