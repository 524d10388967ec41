"""Jobs with a sieve, through the router: calls, signals and limits."""

import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, open_router
from router.engine.sieving import SievedReceiver
from router.errors import Fault, FaultKind, RequestFailed
from router.ids import AssignmentId, RequestId
from router.messages import (
    Delta,
    Endpoint,
    Finished,
    FinishReason,
    GenerationParams,
    Job,
    Kind,
    SignalCode,
    ToolPart,
    Usage,
)
from router.openai.upstream import BUDGET
from router.ports import Taken
from router.settings import ModelSettings, RouterSettings, Settings
from router.sieve import Sieve, SieveRules
from tests.kit.receiver import Recorder
from workers.scripted import (
    Fail,
    Finish,
    Head,
    Say,
    Script,
    ScriptedWorker,
    Step,
    Stubborn,
    Wait,
    answers,
    hangs,
)

BIOS = 'Tools: {tools}\nCall: {"tool_calls": [{"name": "f", "arguments": {}}]}'
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}'
USER = {"role": "user", "content": "hi"}
JOB = Job("m", (USER,), target="m", extras={"tools": [TOOL]})
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")


def told(**more: Any) -> Settings:
    """Settings of a model that is told its tools."""
    return Settings(models={"m": ModelSettings(bios=BIOS, **more)})


def limited(**more: Any) -> Settings:
    return Settings(models={"m": ModelSettings(**more)})


@asynccontextmanager
async def opened(
    *scripts: Sequence[Step], settings: Settings | None = None, settle_s: float = 0.0
) -> AsyncIterator[tuple[Router, list[ScriptedWorker]]]:
    """A router with one worker a script."""
    workers = [
        ScriptedWorker(f"w{n}", lambda *_, steps=steps: steps, settle_s=settle_s)
        for n, steps in enumerate(scripts)
    ]
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router, workers


async def serve(router: Router, receiver: Recorder, job: Job = JOB) -> str:
    request = router.new_request_id()
    await router.serve(job, receiver, request=request)
    assert_in_order(receiver)
    return request


def assert_in_order(receiver: Recorder) -> None:
    assert [d.index for d in receiver.deltas] == list(range(len(receiver.deltas)))


def at_rest(router: Router) -> bool:
    """S2: nothing is held anywhere."""
    return (
        not router.flights
        and not router.fleet.requests
        and len(router.fleet.room) == 0
        and all(not m.busy for m in router.fleet.members.values())
    )


def calls(receiver: Recorder) -> list[tuple[str | None, str]]:
    return [(d.tool.name, d.text) for d in receiver.deltas if d.tool is not None]


def receipt_of(router: Router, request: str) -> Mapping[str, Any]:
    receipt = router.receipt(request)
    assert receipt is not None
    return receipt


def codes(finished: Finished | None) -> list[SignalCode]:
    assert finished is not None
    return [signal.code for signal in finished.signals]


def said(*texts: str) -> tuple[Step, ...]:
    return (Head(), *(Say((text,)) for text in texts), Finish(usage=Usage(1, 2)))


def kept(jobs: list[Job], steps: Sequence[Step]) -> Script:
    """Make a script that keeps the jobs that it is sent."""

    def script(_: AssignmentId, job: Job) -> Sequence[Step]:
        jobs.append(job)
        return steps

    return script


# -- calls by the convention ---------------------------------------------------


@pytest.mark.parametrize("buffered", [False, True])
async def test_j4_a_told_model_calls_like_one_that_knows_calls(
    autojump_clock: MockClock, *, buffered: bool
) -> None:
    receiver = Recorder(buffered=buffered)
    async with opened(said(*CALL), settings=told()) as (router, _):
        await serve(router, receiver)

        assert calls(receiver) == [("f", '{"a": 1}')]
        assert receiver.finished is not None
        assert receiver.finished.reason is FinishReason.TOOL_CALLS
        assert receiver.finished.usage == Usage(1, 2)
        assert at_rest(router)


async def test_j4_the_worker_gets_messages_without_tools(
    autojump_clock: MockClock,
) -> None:
    sent: list[Job] = []
    async with opened(said("ok"), settings=told()) as (router, (worker,)):
        worker.script = kept(sent, said("ok"))
        await serve(router, Recorder())

    (job,) = sent
    assert "tools" not in job.extras
    assert job.messages[0]["role"] == "system"
    assert '"name":"f"' in job.messages[0]["content"]
    assert job.messages[1] == USER


async def test_j4_nothing_is_committed_while_all_is_held(
    autojump_clock: MockClock,
) -> None:
    """A loss in the middle of a call moves the job, as if nothing had come."""
    receiver = Recorder()
    half = (Head(), Say((CALL[:20],)), Wait(1), Fail(LOST))
    async with opened(half, said("fine"), settings=told()) as (router, _):
        await serve(router, receiver)

        assert receiver.text == "fine"
        assert receiver.routes == [("w0", 1), ("w1", 2)]
        assert receiver.finished is not None


async def test_f5_a_gap_while_all_is_held_fails_over(
    autojump_clock: MockClock,
) -> None:
    """The fence judges what the worker stamped, in front of the sieve."""
    receiver = Recorder()
    skips = (Head(), Say((CALL[:9],)), Say((CALL[10:],), skip=1), Wait(99))
    async with opened(skips, said(CALL), settings=told()) as (router, _):
        await serve(router, receiver)

        assert calls(receiver) == [("f", '{"a": 1}')]
        assert receiver.routes == [("w0", 1), ("w1", 2)]
        assert at_rest(router)


async def test_f3_repeats_do_not_reach_the_sieve(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    steps = (
        Head(),
        Say((CALL[:9], CALL[9:20])),
        Say((CALL[9:20], CALL[20:]), repeat=1),
        Finish(),
    )
    async with opened(steps, settings=told()) as (router, _):
        await serve(router, receiver)

    assert calls(receiver) == [("f", '{"a": 1}')]
    assert receiver.finished is not None


async def test_f4_nothing_comes_through_a_sieve_after_its_end(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    ask = exit_call("needs_manager_decision", "{}")
    late = (Head(), Stubborn(), ask, Say(("late",)), Finish())
    settings = limited(exit_tools=("NEEDS_MANAGER_DECISION",))
    async with opened(late, settings=settings) as (router, _):
        await serve(router, receiver)
        await trio.sleep(1)

        assert receiver.text == ""
        assert router.tally.verdicts["late"] == 2


async def test_a5_text_that_went_through_is_committed(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    half = (Head(), Say(("{ no call",)), Wait(1), Fail(LOST))
    async with opened(half, said("fine"), settings=told()) as (router, _):
        await serve(router, receiver)

        assert receiver.text == "{ no call"
        assert receiver.fault is LOST


@pytest.mark.parametrize("buffered", [False, True])
async def test_j4_a_call_that_can_not_be_read_fails_and_blames_no_worker(
    autojump_clock: MockClock, *, buffered: bool
) -> None:
    receiver = Recorder(buffered=buffered)
    steps = said(CALL[:-1])
    async with opened(steps, steps, settings=told()) as (router, _):
        request = await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.row.reason == "tool_parse_error"
        assert len(receiver.routes) == 1
        assert receiver.text == (CALL[:-1] if buffered else "")
        receipt = receipt_of(router, request)
        assert (receipt["outcome"], receipt["reason"]) == ("failed", "tool_parse_error")
        assert all(m.faults == 0 for m in router.fleet.members.values())
        assert at_rest(router)


async def test_j4_or_it_asks_for_a_higher_reasoner(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    settings = told(tool_parse_error="signal")
    async with opened(said(CALL[:-1]), settings=settings) as (router, _):
        await serve(router, receiver)

    assert codes(receiver.finished) == [SignalCode.NEEDS_HIGHER_REASONER]
    assert receiver.text == ""


async def test_j4_a_call_beyond_256_kib_ends_the_answer_and_settles(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    more: list[Step] = [Say(("x" * 65_536,))] * 9
    endless = (Head(), Say((CALL[:20],)), *more, Wait(99))
    async with opened(endless, settings=told(), settle_s=2.0) as (router, (worker,)):
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.TOOL_PARSE
        assert worker.sources[0].closed_at == start
        assert len(router.fleet.members[worker.id].settling) == 1
        await trio.sleep(5)
        assert at_rest(router)


async def test_j4_without_tools_nothing_is_told_and_nothing_held(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    sent: list[Job] = []
    async with opened((), settings=told()) as (router, (worker,)):
        worker.script = kept(sent, said(CALL))
        await serve(router, receiver, attrs.evolve(JOB, extras={}))

    assert sent[0].messages == (USER,)
    assert receiver.text == CALL


# -- signals -------------------------------------------------------------------


def exit_call(name: str, arguments: str) -> Say:
    return Say((arguments,), Kind.TOOL_CALL, tool=ToolPart(0, "t0", name))


async def test_j5_a_stopping_signal_ends_the_job_at_once(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    ask = exit_call("needs_manager_decision", '{"message": "Which one?"}')
    steps = (Head(), Say(("I ask.",)), ask, Wait(99), Say(("never",)), Finish())
    settings = limited(exit_tools=("NEEDS_MANAGER_DECISION",))
    async with opened(steps, settings=settings) as (router, (worker,)):
        start = trio.current_time()
        request = await serve(router, receiver)

        assert trio.current_time() == worker.sources[0].closed_at == start
        assert receiver.text == "I ask."
        assert codes(receiver.finished) == [SignalCode.NEEDS_MANAGER_DECISION]
        assert receiver.finished is not None
        assert receiver.finished.reason is FinishReason.STOP
        receipt = receipt_of(router, request)
        assert (receipt["outcome"], receipt["closed_by"]) == ("completed", "router")
        assert receipt["signals"] == [
            {"code": "NEEDS_MANAGER_DECISION", "message": "Which one?", "index": 0}
        ]
        assert at_rest(router)


async def test_j5_a_job_may_bring_its_exit_tools(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    sent: list[Job] = []
    low = exit_call("low_confidence", '{"message": "a guess"}')
    steps = (Head(), low, Finish(FinishReason.TOOL_CALLS))
    async with opened(steps) as (router, (worker,)):
        worker.script = kept(sent, steps)
        job = attrs.evolve(JOB, exit_tools=(SignalCode.LOW_CONFIDENCE,))
        await serve(router, receiver, job)

    names = [tool["function"]["name"] for tool in sent[0].extras["tools"]]
    assert names == ["f", "low_confidence"]
    assert receiver.deltas == []
    assert codes(receiver.finished) == [SignalCode.LOW_CONFIDENCE]
    assert receiver.finished is not None
    assert receiver.finished.reason is FinishReason.STOP


async def test_j5_a_job_can_not_offer_the_routers_own_signals(
    autojump_clock: MockClock,
) -> None:
    async with opened(said("x")) as (router, _):
        with pytest.raises(RequestFailed) as raised:
            await router.complete(
                attrs.evolve(JOB, exit_tools=(SignalCode.LOOP_DETECTED,))
            )

    assert raised.value.fault.kind is FaultKind.REJECTED


async def test_j5_the_log_line_names_signals_and_never_says_them(
    autojump_clock: MockClock,
) -> None:
    records: list[Any] = []
    low = exit_call("low_confidence", '{"message": "secret"}')
    settings = limited(exit_tools=("LOW_CONFIDENCE",))
    async with opened((Head(), low, Finish()), settings=settings) as (router, _):
        router.on_request_end = records.append
        await serve(router, Recorder())

    (record,) = records
    assert record["signals"] == ["LOW_CONFIDENCE"]
    assert "secret" not in repr(record)


async def test_j5_a_live_request_shows_its_signals(autojump_clock: MockClock) -> None:
    low = exit_call("low_confidence", '{"message": "a guess"}')
    settings = limited(exit_tools=("LOW_CONFIDENCE",))
    steps = (Head(), low, Wait(99))
    async with (
        opened(steps, settings=settings) as (router, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        (request,) = router.flights

        receipt = receipt_of(router, request)

        assert [signal["message"] for signal in receipt["signals"]] == ["a guess"]
        nursery.cancel_scope.cancel()


async def test_j5_one_tool_call_too_many_ends_the_answer(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    made: list[Step] = [
        Say(("{}",), Kind.TOOL_CALL, tool=ToolPart(n, f"t{n}", "f")) for n in range(9)
    ]
    settings = Settings(router=RouterSettings(tool_calls_max=2))
    async with opened((Head(), *made, Wait(99)), settings=settings) as (router, _):
        await serve(router, receiver)

    assert len(calls(receiver)) == 2
    assert codes(receiver.finished) == [SignalCode.TOOL_LIMIT_REACHED]
    assert receiver.finished is not None
    assert receiver.finished.reason is FinishReason.TOOL_CALLS


async def test_j5_signals_are_at_most_signals_max(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    low = '{"name": "low_confidence", "arguments": {}}'
    text = f'{{"tool_calls": [{", ".join([low] * 5)}]}}'
    settings = attrs.evolve(
        told(exit_tools=("LOW_CONFIDENCE",)), router=RouterSettings(signals_max=3)
    )
    async with opened(said(text), settings=settings) as (router, _):
        await serve(router, receiver)

    assert receiver.finished is not None
    assert [signal.index for signal in receiver.finished.signals] == [0, 1, 2]


@pytest.mark.parametrize("settings", [None, limited(loop_repeats_max=9)])
async def test_j5_an_answer_at_its_limit_of_tokens_says_so(
    autojump_clock: MockClock, settings: Settings | None
) -> None:
    receiver = Recorder()
    steps = (Head(), Say(("x",)), Finish(FinishReason.LENGTH))
    async with opened(steps, settings=settings) as (router, _):
        request = await serve(router, receiver)
        receipt = receipt_of(router, request)

    assert codes(receiver.finished) == [SignalCode.MAX_TOKENS_REACHED]
    assert receipt["signals"][0]["code"] == "MAX_TOKENS_REACHED"


@pytest.mark.parametrize("by_job", [False, True])
async def test_j5_a_loop_fails_the_job_and_is_a_signal(
    autojump_clock: MockClock, *, by_job: bool
) -> None:
    receiver = Recorder()
    steps = (Head(), *looped(500), Wait(99))
    settings = None if by_job else limited(loop_repeats_max=20)
    job = attrs.evolve(JOB, loop_repeats_max=20 if by_job else None)
    async with opened(steps, steps, settings=settings) as (router, workers):
        request = await serve(router, receiver, job)

        assert receiver.fault is not None
        assert receiver.fault.row.reason == "loop_detected"
        assert len(receiver.deltas) < 60
        assert len(receiver.routes) == 1
        assert workers[0].sources[0].closed_at is not None
        receipt = receipt_of(router, request)
        assert [s["code"] for s in receipt["signals"]] == ["LOOP_DETECTED"]
        assert all(m.faults == 0 for m in router.fleet.members.values())


async def test_j5_a_job_may_turn_its_models_watch_off(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    steps = (Head(), *looped(500), Finish())
    settings = limited(loop_repeats_max=20)
    async with opened(steps, settings=settings) as (router, _):
        await serve(router, receiver, attrs.evolve(JOB, loop_repeats_max=0))

    assert receiver.finished is not None


def looped(count: int) -> list[Step]:
    return [Say(("over and over ",))] * count


# -- reasoning -----------------------------------------------------------------


def thoughts(count: int) -> list[Step]:
    return [Say((f"thought {n} ",), Kind.REASONING) for n in range(count)]


async def test_j6_an_engine_that_can_not_be_asked_is_cut_off_with_length(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    steps = (Head(), *thoughts(9), Wait(99), Say(("never",)), Finish())
    settings = limited(thinking_max_tokens=5)
    async with opened(steps, settings=settings) as (router, (worker,)):
        await serve(router, receiver)

        assert len(receiver.deltas) == 6
        assert receiver.finished is not None
        assert receiver.finished.reason is FinishReason.LENGTH
        assert codes(receiver.finished) == [SignalCode.MAX_TOKENS_REACHED]
        assert worker.sources[0].closed_at is not None
        assert at_rest(router)


def asked_once(grace: int) -> Callable[[], int]:
    """An engine that can be asked once to end its reasoning."""
    left = [grace]
    return lambda: left.pop() if left else 0


def cut_in(kinds: str, sizes: Sequence[int]) -> list[list[Delta]]:
    """Deltas, ``r``easoning or ``t``ext, in batches of these *sizes*."""
    letters = {"r": Kind.REASONING, "t": Kind.TEXT}
    owner = AssignmentId(RequestId("r"), 1)
    deltas = [Delta(owner, n, letters[k], k) for n, k in enumerate(kinds)]
    batches = []
    for size in sizes:
        batches.append(deltas[:size])
        deltas = deltas[size:]
    return [*batches, deltas]


def given_out(batches: Sequence[Sequence[Delta]], limit: int, grace: int) -> object:
    """What a client gets of *batches*, and how it ends; None: it goes on."""
    receiver = Recorder()
    sieved = SievedReceiver(receiver, Sieve(SieveRules(thinking_max=limit)))
    end_reasoning = asked_once(grace)
    owner = AssignmentId(RequestId("r"), 1)
    end = None
    for batch in batches:
        if sieved.take(batch) is Taken.STEER:
            end = sieved.ending(owner, end_reasoning)
            if end is not None:
                break
    return receiver.text, end


@given(
    kinds=st.text("rt", max_size=20),
    sizes=st.lists(st.integers(0, 9), max_size=6),
    limit=st.integers(0, 5),
    grace=st.integers(0, 5),
)
def test_j6_the_limit_is_the_same_however_the_bytes_are_cut(
    kinds: str, sizes: list[int], limit: int, grace: int
) -> None:
    one_by_one = given_out(cut_in(kinds, [1] * len(kinds)), limit, grace)

    assert given_out(cut_in(kinds, sizes), limit, grace) == one_by_one


@pytest.mark.parametrize(("grace", "came"), [(0, 11), (3, 15)])
async def test_j6_many_thoughts_and_an_answer_in_one_write_pass_no_limit(
    autojump_clock: MockClock, grace: int, came: int
) -> None:
    receiver = Recorder()
    burst = Say(("hm ",) * 200, Kind.REASONING)
    steps = (Head(), burst, Say(("So.",)), Finish())
    async with opened(steps, settings=limited(thinking_max_tokens=10)) as (
        router,
        (worker,),
    ):
        worker.grace = grace
        await serve(router, receiver)

        assert at_rest(router)
    assert len(receiver.deltas) == came
    assert receiver.finished is not None
    assert receiver.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("reply", [Taken.GONE, LOST])
async def test_j6_what_is_borne_with_finds_a_receiver_that_is_gone_or_fails(
    autojump_clock: MockClock, reply: Taken | Fault
) -> None:
    class Ends(Recorder):
        """Takes the first batch alone."""

        def take(self, deltas: Sequence[Delta]) -> Any:
            if self.deltas:
                return reply
            return super().take(deltas)

    receiver = Ends()
    steps = (Head(), Say(("hm ",) * 9, Kind.REASONING), Wait(99), Finish())
    async with opened(steps, settings=limited(thinking_max_tokens=5)) as (
        router,
        (worker,),
    ):
        worker.grace = 30
        request = await serve(router, receiver)

        assert worker.sources[0].closed_at is not None
        assert at_rest(router)
        outcome = receipt_of(router, request)["outcome"]
    assert len(receiver.deltas) == 6
    assert outcome == ("cancelled" if reply is Taken.GONE else "failed")


@pytest.mark.parametrize(("more", "reason"), [(2, "stop"), (4, "length")])
async def test_j6_an_engine_is_asked_once_and_then_borne_with(
    autojump_clock: MockClock, more: int, reason: str
) -> None:
    receiver = Recorder()
    steps = (Head(), *thoughts(6 + more), Say(("So.",)), Finish())
    async with opened(steps, settings=limited(thinking_max_tokens=5)) as (
        router,
        (worker,),
    ):
        worker.grace = 3
        await serve(router, receiver)

    assert worker.sources[0].asked == (1 if reason == "stop" else 2)
    assert receiver.finished is not None
    assert receiver.finished.reason.value == reason


@pytest.mark.parametrize(
    ("model", "params", "extras", "sent"),
    [
        (7, None, {}, 7),
        (7, 3, {}, 3),
        (3, 7, {}, 3),
        (None, 7, {}, 7),
        (None, None, {BUDGET: 4}, 4),
        (7, None, {"reasoning_budget_tokens": 4}, 4),
        (7, None, {"thinking_token_budget": 9}, 7),
        (7, None, {BUDGET: -1}, 7),
        (None, None, {BUDGET: -1}, -1),
        (None, None, {BUDGET: "x"}, "x"),
        (7, None, {BUDGET: True}, 7),
        (None, 0, {}, 0),
        (None, None, {}, None),
    ],
)
async def test_j6_the_least_limit_goes_to_the_engine(
    autojump_clock: MockClock,
    model: int | None,
    params: int | None,
    extras: dict[str, Any],
    sent: Any,
) -> None:
    jobs: list[Job] = []
    settings = limited(thinking_max_tokens=model)
    job = Job(
        "m",
        (USER,),
        target="m",
        params=GenerationParams(thinking_max_tokens=params),
        extras=extras,
    )
    async with opened((), settings=settings) as (router, (worker,)):
        worker.script = kept(jobs, said("x"))
        await serve(router, Recorder(), job)

    assert jobs[0].extras.get(BUDGET) == sent
    assert len(jobs[0].extras) == (0 if sent is None else 1)


# -- the receiver --------------------------------------------------------------


async def test_s1_a_full_receiver_pauses_its_source_behind_a_sieve_too(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    receiver.reply = Taken.FULL
    steps = (Head(), *thoughts(2), Wait(1), Say(("So.",)), Finish())
    async with (
        opened(steps, settings=limited(thinking_max_tokens=0)) as (router, (worker,)),
        trio.open_nursery() as nursery,
    ):
        worker.grace = 3
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()
        assert worker.sources[0].paused

        receiver.reply = Taken.MORE
        receiver.on_room()
        await trio.sleep(5)

        assert receiver.finished is not None


async def test_a7_a_client_that_leaves_while_all_is_held_is_let_go(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    held = (Head(), Say((CALL[:20],)), Wait(99))
    async with (
        opened(held, settings=told()) as (router, (worker,)),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()

        receiver.on_gone()

        assert worker.sources[0].closed_at == trio.current_time()
        await wait_all_tasks_blocked()
        assert at_rest(router)


async def test_a7_a_receiver_that_is_gone_at_the_last_deltas_is_a_client_that_left(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    receiver.reply = Taken.GONE
    async with opened(said(CALL), settings=told()) as (router, _):
        request = await serve(router, receiver)

        receipt = receipt_of(router, request)
        assert receipt["outcome"] == "cancelled"
        assert at_rest(router)


@pytest.mark.parametrize("endpoint", list(Endpoint))
async def test_jobs_of_other_endpoints_are_not_told_tools(
    autojump_clock: MockClock, endpoint: Endpoint
) -> None:
    jobs: list[Job] = []
    receiver = Recorder()
    settings = told(thinking_max_tokens=3, exit_tools=("POLICY_RISK",))
    job = Job("m", ("Once",), target="m", endpoint=endpoint)
    async with opened((), settings=settings) as (router, (worker,)):
        worker.script = kept(jobs, said(CALL))
        await serve(router, receiver, job)

    if endpoint is not Endpoint.CHAT:
        assert jobs == [job]
        assert receiver.text == CALL


async def test_m8_the_tools_that_a_model_is_told_are_counted_too(
    autojump_clock: MockClock,
) -> None:
    counted: list[Job] = []

    class Counts(ScriptedWorker):
        async def count_tokens(self, job: Job) -> int | None:
            counted.append(job)
            return await super().count_tokens(job)

    async with open_router(told(), workers=[Counts("a", answers("x"))]) as router:
        await wait_all_tasks_blocked()
        await router.count_tokens(JOB)

    assert [m["role"] for m in counted[0].messages] == ["system", "user"]


async def test_m8_a_job_as_sent_is_what_its_worker_gets(
    autojump_clock: MockClock,
) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = (
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "r"},
    )
    for settings in (
        told(exit_tools=("POLICY_RISK",), thinking_max_tokens=3),
        limited(exit_tools=("POLICY_RISK",)),
        limited(),
    ):
        for job in (JOB, attrs.evolve(JOB, messages=history, target="")):
            sent: list[Job] = []
            async with opened((), settings=settings) as (router, (worker,)):
                worker.script = kept(sent, said("x"))
                await serve(router, Recorder(), attrs.evolve(job, target="m"))

                assert router.as_sent(job) == sent[0]


async def test_j5_signals_are_counted_by_their_code(autojump_clock: MockClock) -> None:
    steps = (Head(), Say(("x",)), Finish(FinishReason.LENGTH))
    async with opened(steps) as (router, _):
        await serve(router, Recorder())

        assert router.tally.signals == {"MAX_TOKENS_REACHED": 1}


async def test_a_plain_job_keeps_its_own_receiver(autojump_clock: MockClock) -> None:
    settings = Settings(
        models={"other": ModelSettings(bios=BIOS)},
        router=RouterSettings(tool_calls_max=3),
    )
    async with open_router(
        settings, workers=[ScriptedWorker("a", hangs(Head()))]
    ) as router:
        await wait_all_tasks_blocked()
        receiver = Recorder()
        job = Job("m", (USER,), target="m")

        assert router._sieving.prepare(job, receiver) == (job, receiver)


async def test_e1_the_library_sees_calls_and_signals_too(
    autojump_clock: MockClock,
) -> None:
    low = '{"name": "low_confidence", "arguments": {"message": "m"}}'
    text = CALL.replace("]", f", {low}]")
    settings = told(exit_tools=("LOW_CONFIDENCE",))
    async with opened(said(text), settings=settings) as (router, _):
        completion = await router.complete(JOB)
        async with router.stream(JOB) as deltas:
            streamed = [delta async for delta in deltas]

    (made,) = completion.tool_calls
    assert (made.name, json.loads(made.arguments)) == ("f", {"a": 1})
    assert [s.message for s in completion.signals] == ["m"]
    assert [d.kind for d in streamed] == [Kind.TOOL_CALL]
    assert codes(deltas.finished) == [SignalCode.LOW_CONFIDENCE]


async def test_answers_are_as_ever_without_any_of_it(autojump_clock: MockClock) -> None:
    worker = ScriptedWorker("a", answers("Hel", "lo"))
    async with open_router(workers=[worker]) as router:
        await wait_all_tasks_blocked()
        receiver = Recorder()
        await serve(router, receiver)

    assert receiver.text == "Hello"
    assert codes(receiver.finished) == []
