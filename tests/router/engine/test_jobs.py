"""Jobs that are handed in, from submission to a taker or to nobody."""

import gc
import random
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import (
    JobResult,
    JobState,
    JobUnknown,
    Router,
    ToolCall,
    open_router,
)
from router.engine.bell import Bell
from router.errors import FAULTS, Fault, FaultKind, RequestFailed
from router.ids import AssignmentId, RequestId
from router.messages import (
    FinishReason,
    GenerationParams,
    Job,
    Kind,
    SignalCode,
    ToolPart,
    Usage,
)
from router.ports import Delivery
from router.settings import ModelSettings, RouterSettings, Settings
from tests.kit.engine import answers as engine_answers
from tests.kit.engine import open_engine
from workers.scripted import (
    Fail,
    Finish,
    Head,
    Refuse,
    Say,
    Script,
    ScriptedSource,
    ScriptedWorker,
    Step,
    Wait,
    answers,
    hangs,
)

JOB = Job("m", ({"role": "user", "content": "hi"},))
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "The stream was cut.")
NOBODY = RequestId("req_nobody")


@asynccontextmanager
async def opened(
    *scripts: Script, settings: Settings | None = None, **worker: Any
) -> AsyncIterator[tuple[Router, list[ScriptedWorker]]]:
    """A router with one worker a script."""
    workers = [
        ScriptedWorker(f"w{n}", script, **worker) for n, script in enumerate(scripts)
    ]
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router, workers


def steps(*said: Step) -> Script:
    return lambda *_: said


def at_rest(router: Router) -> bool:
    """S2: nothing is held anywhere."""
    return (
        not router.flights
        and not router.fleet.requests
        and len(router.fleet.room) == 0
        and all(not m.busy for m in router.fleet.members.values())
    )


# -- a job's life --------------------------------------------------------------


async def test_j1_a_job_is_handed_in_and_its_result_is_taken_once(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("Hel", "lo", every=1.0)) as (router, _):
        job = router.submit(JOB)
        result = await router.get_result(job)

        assert (result.id, result.state, result.ok) == (job, JobState.COMPLETED, True)
        assert result.text == "Hello"
        assert result.finish_reason is FinishReason.STOP
        assert result.usage == Usage(1, 2)
        assert (result.worker, result.attempts) == ("w0", 1)
        assert result.total_s == pytest.approx(2.0)
        assert (result.reason, result.message, result.fault) == (None, None, None)
        with pytest.raises(JobUnknown):
            await router.get_result(job)
        with pytest.raises(JobUnknown):
            router.get_status(job)
        assert at_rest(router)


async def test_j1_a_job_is_live_as_soon_as_it_is_submitted(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x", every=5.0), slots=1) as (router, _):
        first, second = router.submit(JOB), router.submit(JOB)

        states = [router.get_status(job).state for job in (first, second)]
        assert states == [JobState.RUNNING, JobState.QUEUED]
        assert router.active == 2
        with pytest.raises(trio.WouldBlock):
            router.get_result_nowait(first)

        await trio.sleep(6)

        assert router.get_status(first).state is JobState.COMPLETED
        running = router.get_status(second)
        assert (running.state, running.worker) == (JobState.RUNNING, "w0")
        assert router.get_result_nowait(first).text == "x"


async def test_j1_the_status_shows_how_far_a_job_is(autojump_clock: MockClock) -> None:
    said = (Head(), Say(("a", "b")), Wait(5), Say(("c",)), Finish())
    async with opened(steps(*said)) as (router, _):
        job = router.submit(JOB)
        await trio.sleep(2)

        status = router.get_status(job)
        assert (status.phase, status.attempts, status.deltas) == ("assigned", 1, 2)
        assert status.age_s == pytest.approx(2.0)
        await trio.sleep(10)

        status = router.get_status(job)
        assert (status.state, status.deltas) == (JobState.COMPLETED, 3)
        assert status.age_s == pytest.approx(5.0)


async def test_j1_ids_are_unique_and_sort_by_submission(
    autojump_clock: MockClock,
) -> None:
    settings = Settings(router=RouterSettings(queue_limit=1_000))
    async with opened(hangs(Head()), settings=settings) as (router, _):
        jobs = [router.submit(JOB) for _ in range(1_000)]

    assert len(set(jobs)) == 1_000
    assert jobs == sorted(jobs)


async def test_j1_results_stay_until_they_are_taken(autojump_clock: MockClock) -> None:
    async with opened(answers("x")) as (router, _):
        job = router.submit(JOB)
        await trio.sleep(3_600)

        assert router.get_result_nowait(job).text == "x"


async def test_j1_a_result_is_swept_at_times_that_floats_round_too(
    autojump_clock: MockClock,
) -> None:
    settings = Settings(router=RouterSettings(result_ttl_ms=100))
    async with opened(answers("a"), settings=settings) as (router, _):
        for _ in range(50):
            router.submit(JOB)
            await trio.sleep(0.013)
        await trio.sleep(0.2)
        assert not len(router.jobs)


async def test_j1_results_may_be_given_a_time(autojump_clock: MockClock) -> None:
    settings = Settings(router=RouterSettings(result_ttl_ms=10_000))
    async with opened(answers("x", every=4.0), settings=settings) as (router, _):
        first = router.submit(JOB)
        await trio.sleep(3)
        second, taken = router.submit(JOB), router.submit(JOB)
        await router.get_result(taken)
        await trio.sleep(6.5)
        # 13.5 s: the first ended at 4, the second at 7.
        assert len(router.jobs) == 2

        await trio.sleep(1)
        with pytest.raises(JobUnknown):
            router.get_status(first)
        assert router.get_status(second).state is JobState.COMPLETED
        await trio.sleep(3)

        assert len(router.jobs) == 0
        third = router.submit(JOB)
        await trio.sleep(13)
        assert router.get_status(third).state is JobState.COMPLETED
        await trio.sleep(2)
        assert len(router.jobs) == 0


# -- failures ------------------------------------------------------------------


async def test_j7_what_there_was_of_a_failed_job_stays_with_its_reason(
    autojump_clock: MockClock,
) -> None:
    call = ToolPart(0, "t0", "f")
    said = (
        Head(),
        Say(("hm",), Kind.REASONING),
        Say(("Once ", "upon")),
        Say(('{"a"',), Kind.TOOL_CALL, tool=call),
        Fail(LOST),
    )
    async with opened(steps(*said)) as (router, _):
        job = router.submit(JOB)
        await trio.sleep(1)

        assert router.get_status(job).reason == "stream_closed_early"
        result = await router.get_result(job)

    assert (result.state, result.ok) == (JobState.FAILED, False)
    assert (result.reason, result.message) == ("stream_closed_early", LOST.message)
    assert result.fault is LOST
    assert (result.reasoning, result.text) == ("hm", "Once upon")
    assert result.tool_calls == (ToolCall("t0", "f", '{"a"'),)
    assert result.finish_reason is None


async def test_a5_a_job_that_lost_its_worker_starts_over_elsewhere(
    autojump_clock: MockClock,
) -> None:
    lost = steps(Head(), Say(("half",)), Fail(LOST))
    async with opened(lost, answers("whole")) as (router, _):
        result = await router.get_result(router.submit(JOB))

    assert (result.text, result.attempts, result.worker) == ("whole", 2, "w1")


async def test_j7_an_attempt_that_said_nothing_leaves_what_the_one_before_it_said(
    autojump_clock: MockClock,
) -> None:
    lost = steps(Head(), Say(("half",)), Fail(LOST))
    async with opened(lost, steps(Refuse())) as (router, _):
        result = await router.get_result(router.submit(JOB))

    assert (result.text, result.reason) == ("half", "stream_closed_early")
    assert result.attempts == 2


def test_j7_the_reasons_are_these_and_no_others() -> None:
    assert {row.reason for row in FAULTS.values()} == {
        "worker_restarted",
        "server_died",
        "connect_failed",
        "wait_timeout",
        "load_timeout",
        "stalled",
        "stream_closed_early",
        "protocol_error",
        "tool_parse_error",
        "loop_detected",
        "cancelled",
        "no_worker",
        "queue_full",
        "unknown_error",
        "rejected",
    }


@pytest.mark.parametrize(
    ("said", "settings", "reason"),
    [
        ((Refuse(),), {}, "connect_failed"),
        ((Head(), Say(("x",)), Wait(999)), {}, "stalled"),
        ((Head(), Say(("x",)), Fail(LOST)), {}, "stream_closed_early"),
        (
            (Head(), *[Say(("on and on ",))] * 200, Wait(99)),
            {"loop_repeats_max": 9},
            "loop_detected",
        ),
        (
            (Head(), Say(('{"tool_calls": [',)), Finish()),
            {"bios": 'Use {tools}: {"tool_calls": [{"name": "f"}]}'},
            "tool_parse_error",
        ),
    ],
)
async def test_j7_a_failed_job_says_its_reason(
    autojump_clock: MockClock,
    said: Sequence[Step],
    settings: dict[str, Any],
    reason: str,
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    model = Settings(models={"m": ModelSettings(**settings)})
    async with opened(steps(*said), settings=model) as (router, _):
        job = router.submit(attrs.evolve(JOB, extras={"tools": [tool]}))
        result = await router.get_result(job)

        assert (result.state, result.reason) == (JobState.FAILED, reason)
        assert (result.text == "") == (reason == "connect_failed")
        assert all(not m.held for m in router.fleet.members.values())


async def test_s4_a_full_queue_refuses_at_submit_and_keeps_nothing(
    autojump_clock: MockClock,
) -> None:
    settings = Settings(router=RouterSettings(queue_limit=2))
    async with opened(hangs(Head()), settings=settings, slots=1) as (router, _):
        for _ in range(3):
            router.submit(JOB)
        with pytest.raises(RequestFailed) as raised:
            router.submit(JOB)

        assert raised.value.reason == "queue_full"
        assert raised.value.fault.retry_after is not None
        assert len(router.jobs) == router.active == 3


async def test_o6_an_unknown_model_is_refused_at_submit(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x")) as (router, _):
        with pytest.raises(RequestFailed) as raised:
            router.submit(Job("other", ()))

        assert raised.value.fault.kind is FaultKind.MODEL_NOT_FOUND
        assert len(router.jobs) == 0


async def test_d3_a_router_that_stops_takes_no_jobs(autojump_clock: MockClock) -> None:
    async with opened(answers("x")) as (router, _):
        router.refuse_new(Fault(FaultKind.SHUTTING_DOWN, "stopping"))
        with pytest.raises(RequestFailed) as raised:
            router.submit(JOB)
        assert raised.value.reason == "no_worker"

    with pytest.raises(RequestFailed) as raised:
        router.submit(JOB)
    assert raised.value.fault.kind is FaultKind.SHUTTING_DOWN


class Burst(Bell):
    """Breaks the task that waits for it."""

    async def wait_until(self, deadline: float) -> None:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError(deadline)


async def test_l1_a_bug_met_in_one_job_ends_that_job_only(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x", every=1.0)) as (router, _):
        broken, fine = router.submit(JOB), router.submit(JOB)

        flight = router.flights[broken]
        flight._bell = Burst()
        result = await router.get_result(broken)

        assert (result.state, result.reason) == (JobState.FAILED, "unknown_error")
        assert (await router.get_result(fine)).text == "x"
        assert router.tally.bugs["job"] == 1
        assert at_rest(router)


# -- cancel and release --------------------------------------------------------


@pytest.mark.parametrize("after", [0.0, 2.0])
async def test_j1_a_cancelled_job_keeps_what_there_was(
    autojump_clock: MockClock, after: float
) -> None:
    async with opened(hangs(Head(), Say(("half",)))) as (router, (worker,)):
        job = router.submit(JOB)
        await trio.sleep(after)

        assert router.cancel(job)
        assert router.get_status(job).state is JobState.CANCELLED
        assert not router.cancel(NOBODY)
        result = await router.get_result(job)

        assert (result.state, result.reason) == (JobState.CANCELLED, "cancelled")
        assert result.text == ("half" if after else "")
        assert all(s.closed_at is not None for s in worker.sources)
        assert at_rest(router)


async def test_j1_a_job_that_waits_is_cancelled_and_never_sent(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x", every=5.0), slots=1) as (router, (worker,)):
        first, second = router.submit(JOB), router.submit(JOB)
        router.cancel(second)

        assert (await router.get_result(first)).ok
        assert (await router.get_result(second)).worker is None
        assert len(worker.sources) == 1


@pytest.mark.parametrize("live", [True, False])
async def test_j1_a_released_job_is_forgotten(
    autojump_clock: MockClock, *, live: bool
) -> None:
    async with opened(answers("x", every=2.0)) as (router, (worker,)):
        job = router.submit(JOB)
        await trio.sleep(1 if live else 3)

        assert router.release(job)
        assert not router.release(job)
        with pytest.raises(JobUnknown):
            router.get_status(job)
        await wait_all_tasks_blocked()

        assert len(router.jobs) == 0
        assert worker.sources[0].closed_at is not None
        assert at_rest(router)


async def test_j1_who_waits_for_a_released_job_is_told(
    autojump_clock: MockClock,
) -> None:
    async with opened(hangs(Head())) as (router, _), trio.open_nursery() as nursery:
        job = router.submit(JOB)

        async def wait() -> None:
            with pytest.raises(JobUnknown):
                await router.get_result(job)

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        router.release(job)


async def test_j1_of_two_takers_one_gets_the_result(autojump_clock: MockClock) -> None:
    got: list[JobResult | None] = []
    async with opened(answers("x", every=1.0)) as (router, _):
        job = router.submit(JOB)

        async def take() -> None:
            try:
                got.append(await router.get_result(job))
            except JobUnknown:
                got.append(None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            nursery.start_soon(take)

    assert sorted(result is None for result in got) == [False, True]


async def test_j1_a_taker_that_is_cancelled_took_nothing(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x", every=2.0)) as (router, _):
        job = router.submit(JOB)
        with trio.move_on_after(1):
            await router.get_result(job)
        with trio.CancelScope() as scope:
            scope.cancel()
            await router.get_result(job)

        assert (await router.get_result(job)).text == "x"


async def test_j1_nothing_is_retained_of_jobs_that_are_gone(
    autojump_clock: MockClock,
) -> None:
    async with opened(answers("x", every=1.0)) as (router, (worker,)):
        jobs = [Job("m", ({"role": "user", "content": str(n)},)) for n in range(9)]
        watched: list[weakref.ref[Any]] = [weakref.ref(job) for job in jobs]
        taken, released, cut = (
            [router.submit(job) for job in jobs[part::3]] for part in range(3)
        )
        del jobs
        for job in cut:
            router.release(job)
        watched += [weakref.ref(await router.get_result(job)) for job in taken]
        await trio.sleep(5)
        for job in released:
            router.release(job)
        worker.sources.clear()
        await wait_all_tasks_blocked()
        gc.collect()

        assert [ref() for ref in watched if ref() is not None] == []
        assert len(router.jobs) == len(router.jobs._ended) == 0
        assert at_rest(router)


@pytest.mark.parametrize("seed", range(8))
async def test_s2_cancels_at_random_moments_leave_nothing_held(
    autojump_clock: MockClock, seed: int
) -> None:
    rng = random.Random(seed)

    tool = {"type": "function", "function": {"name": "f"}}
    texts = (
        ("x", "y", "z"),
        ('{"tool_calls": [{"name": ', '"f", "arguments": {', "}}]}"),
        ('{"tool_calls": [', "and no call", ""),
        ("over and over " * 9,) * 9,
    )

    def script(_: AssignmentId, __: Job) -> Sequence[Step]:
        kind = rng.random()
        if kind < 0.2:
            return (Refuse(),)
        last = Fail(LOST) if kind < 0.5 else Finish()
        what = Kind.REASONING if rng.random() < 0.2 else Kind.TEXT
        said = [
            step
            for text in rng.choice(texts)
            for step in (Wait(rng.random()), Say((text,), what))
        ]
        return (Wait(rng.random()), Head(), *said, last)

    settings = Settings(
        models={
            "m": ModelSettings(
                bios='{tools} {"tool_calls": [{"name": "f", "arguments": {}}]}',
                thinking_max_tokens=2,
                loop_repeats_max=20,
            )
        }
    )
    asked = attrs.evolve(JOB, extras={"tools": [tool]})
    async with opened(script, script, settings=settings, slots=3, settle_s=0.5) as (
        router,
        _,
    ):
        live: list[RequestId] = []
        ended = 0
        for _ in range(150):
            with trio.move_on_after(rng.random() / 2):
                if live and rng.random() < 0.3:
                    job = rng.choice(live)
                    await router.get_result(job)
                    live.remove(job)
                    ended += 1
                await trio.sleep_forever()
            try:
                live.append(router.submit(rng.choice((JOB, asked))))
            except RequestFailed:
                continue
            if rng.random() < 0.5:
                job = rng.choice(live)
                router.cancel(job)
                if rng.random() < 0.3:
                    live.remove(job)
                    router.release(job)
        results = [await router.get_result(job) for job in live]
        await trio.sleep(60)

        assert ended
        assert {r.state for r in results} >= {JobState.COMPLETED, JobState.CANCELLED}
        assert len(router.jobs) == 0
        assert at_rest(router)


async def test_e1_leaving_the_router_ends_its_jobs(autojump_clock: MockClock) -> None:
    taken: list[JobResult] = []

    async def wait(router: Router, job: RequestId) -> None:
        taken.append(await router.get_result(job))

    async with (
        trio.open_nursery() as outside,
        opened(hangs(Head(), Say(("half",)))) as (router, (worker,)),
    ):
        outside.start_soon(wait, router, router.submit(JOB))
        await wait_all_tasks_blocked()

    (result,) = taken
    assert not result.ok
    assert result.text == "half"
    assert result.fault is not None
    assert result.fault.kind is FaultKind.SHUTTING_DOWN
    assert worker.sources[0].closed_at is not None
    assert not router.flights


# -- what a result tells -------------------------------------------------------


async def test_j5_signals_stand_in_status_and_result(autojump_clock: MockClock) -> None:
    low = ToolPart(0, "t0", "low_confidence")
    said = (
        Head(),
        Say(('{"message": "a guess"}',), Kind.TOOL_CALL, tool=low),
        Wait(5),
        Say(("So.",)),
        Finish(FinishReason.LENGTH),
    )
    job = attrs.evolve(JOB, exit_tools=(SignalCode.LOW_CONFIDENCE,))
    async with opened(steps(*said)) as (router, _):
        one = router.submit(job)
        await trio.sleep(1)
        assert [s.message for s in router.get_status(one).signals] == ["a guess"]

        result = await router.get_result(one)

    assert [(s.code.value, s.index) for s in result.signals] == [
        ("LOW_CONFIDENCE", 0),
        ("MAX_TOKENS_REACHED", 1),
    ]
    assert (result.text, result.tool_calls) == ("So.", ())


async def test_j1_what_is_neither_text_nor_call_is_not_lost(
    autojump_clock: MockClock,
) -> None:
    refuses = (Head(), Say(("I ", "won't."), Kind.REFUSAL), Finish())
    async with opened(steps(*refuses)) as (router, (worker,)):
        result = await router.get_result(router.submit(JOB))
        completion = await router.complete(JOB)
        worker.script = steps(Head(), Say(('{"data": []}',), Kind.DOCUMENT), Finish())
        document = await router.get_result(router.submit(JOB))

    assert (result.text, result.refusal) == ("", "I won't.")
    assert completion.refusal == "I won't."
    assert document.text == '{"data": []}'


async def test_j3_parameters_that_the_engine_lacks_stand_in_the_result() -> None:
    params = GenerationParams(top_k=3, repeat_penalty=1.1, min_tokens=2)
    job = Job("m", JOB.messages, params=params)
    async with (
        open_engine(engine_answers("ok"), kind="llama-server") as fake,
        open_router(workers=[fake.url]) as router,
    ):
        await router.wait_ready()
        result = await router.get_result(router.submit(job))
        completion = await router.complete(job)
        plain = await router.complete(attrs.evolve(job, params=GenerationParams()))

    assert result.text == "ok"
    assert result.unsupported == completion.unsupported == ("min_tokens",)
    assert plain.unsupported == ()
    assert fake.seen[0].body["top_k"] == 3


class Puts(ScriptedWorker):
    """Has no more than a worker must have."""

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> ScriptedSource:
        return super().open(assignment, job, delivery, slot=slot)


async def test_j3_of_a_worker_that_does_not_say_nothing_is_told(
    autojump_clock: MockClock,
) -> None:
    job = attrs.evolve(JOB, params=GenerationParams(top_k=3))
    async with open_router(workers=[Puts("a", answers("x"))]) as router:
        await wait_all_tasks_blocked()
        result = await router.get_result(router.submit(job))

    assert result.unsupported == ()


async def test_j1_a_result_that_did_not_arrive_can_be_put_back(
    autojump_clock: MockClock,
) -> None:
    settings = Settings(router=RouterSettings(result_ttl_ms=10_000))
    async with opened(answers("x"), settings=settings) as (router, _):
        job = router.submit(JOB)
        result = await router.get_result(job)

        router.jobs.put_back(result)

        assert router.get_status(job).state is JobState.COMPLETED
        assert router.get_result_nowait(job) is result
        router.jobs.put_back(result)
        await trio.sleep(11)
        assert len(router.jobs) == 0


@pytest.mark.parametrize("way", ["complete", "submit"])
async def test_h5_what_a_program_gathers_whole_has_a_bound(
    way: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gathered.WHOLE_MAX", 1_000)
    endless = hangs(Head(), *[Say(("x" * 100,)) for _ in range(20)])
    async with opened(endless) as (router, [worker]):
        if way == "complete":
            with pytest.raises(RequestFailed) as raised:
                await router.complete(JOB)
            fault = raised.value.fault
        else:
            result = await router.get_result(router.submit(JOB))
            assert (result.state, len(result.text)) == (JobState.FAILED, 600)
            assert result.fault is not None
            fault = result.fault

        assert (fault.kind, fault.message) == (
            FaultKind.PROTOCOL,
            "The answer grew beyond all bounds.",
        )
        assert all(source.closed_at is not None for source in worker.sources)
        assert at_rest(router)
