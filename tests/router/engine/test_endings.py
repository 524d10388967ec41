"""How a request ends when two things happen at once, and when nothing does."""

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, open_router
from router.errors import Fault, FaultKind
from router.ids import AssignmentId
from router.lifecycle import State
from router.messages import Delta, Finished, GenerationParams, Job, Kind, SlotView
from router.ports import Delivery, SourcePhase, Taken
from router.settings import ModelSettings, Settings, WaitSettings
from tests.kit.receiver import Recorder
from workers.scripted import (
    Comment,
    Fail,
    Finish,
    FinishWithoutUsage,
    Head,
    Say,
    ScriptedSource,
    ScriptedWorker,
    Step,
    Stubborn,
    Wait,
    answers,
    hangs,
)

JOB = Job("m", ({"role": "user", "content": "hi"},), target="m")
TOOL = {"type": "function", "function": {"name": "f"}}
BIOS = 'Tools: {tools}\nCall: {"tool_calls": [{"name": "f", "arguments": {}}]}'
STOPPING = Fault(FaultKind.SHUTTING_DOWN, "stopping")
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")


class LeavesAtTheEnd(Recorder):
    """A client that is found gone when the end of its answer is written."""

    def finish(self, finished: Finished) -> Taken:
        super().finish(finished)
        return Taken.GONE


class Slow(ScriptedWorker):
    """A worker that gets no further than *phase*."""

    def __init__(self, name: str, phase: SourcePhase) -> None:
        super().__init__(name, hangs())
        self._phase = phase

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> ScriptedSource:
        source = super().open(assignment, job, delivery, slot=slot)
        source.phase = self._phase
        return source


@asynccontextmanager
async def opened(
    *workers: ScriptedWorker, settings: Settings | None = None
) -> AsyncIterator[tuple[Router, list[Mapping[str, object]]]]:
    """A router whose workers are ready, and its records as they come."""
    records: list[Mapping[str, object]] = []
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        router.on_request_end = records.append
        await wait_all_tasks_blocked()
        yield router, records


async def serve(router: Router, receiver: Recorder) -> None:
    await router.serve(JOB, receiver, request=router.new_request_id())


def ends(records: list[Mapping[str, object]]) -> list[tuple[object, object]]:
    return [(record["outcome"], record["closed_by"]) for record in records]


async def test_a9_a_client_that_left_outweighs_a_whole_answer(
    autojump_clock: MockClock,
) -> None:
    async with opened(ScriptedWorker("a", answers("x"))) as (router, records):
        await serve(router, LeavesAtTheEnd())

        assert ends(records) == [("cancelled", "client")]


async def test_a9_a_client_that_left_outweighs_the_loss_of_its_worker(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    late = (Stubborn(), Head(), Say(("x",)), Fail(LOST))
    worker = ScriptedWorker("a", lambda *_: late)
    receiver.reply = Taken.GONE
    async with opened(worker) as (router, records):
        await serve(router, receiver)
        await wait_all_tasks_blocked()

        assert ends(records) == [("cancelled", "client")]
        assert receiver.fault is None
        assert router.status()["workers"][0]["faults_in_a_row"] == 0


Ended = Callable[[Router, str], object]


@pytest.mark.parametrize(
    ("end", "outcome", "fault"),
    [
        (lambda r, request: r.cancel(request), "cancelled", "cancelled"),
        (lambda r, _: r.cut("a"), "failed", "drained"),
        (lambda r, _: r.drain("a", within_s=0.1), "failed", "drained"),
        (lambda r, _: r.cut_all(STOPPING), "failed", "shutting_down"),
    ],
)
async def test_x3_what_the_router_ends_it_has_closed_first(
    autojump_clock: MockClock, end: Ended, outcome: str, fault: str
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Say(("x",))))
    async with (
        opened(worker) as (router, records),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        (request,) = router.flights

        end(router, request)
        await trio.sleep(1)

        (record,) = records
        assert record["closed_by"] == "router"
        assert (record["outcome"], record["fault"]) == (outcome, fault)
        assert record["phase"] == outcome


ENDLESS = '{"tool_calls": [' + " " * 300_000
UNREADABLE = '{"tool_calls": [{"name": "f"}]}'


@pytest.mark.parametrize(
    ("job", "steps", "fault"),
    [
        (
            attrs.evolve(JOB, loop_repeats_max=9),
            (Head(), *[Say(("over and over ",))] * 99, Wait(99)),
            "loop",
        ),
        (
            attrs.evolve(JOB, extras={"tools": [TOOL]}),
            (Head(), Say((UNREADABLE,)), Finish()),
            "tool_parse",
        ),
        (
            attrs.evolve(JOB, extras={"tools": [TOOL]}),
            (Head(), Say((ENDLESS,)), Wait(99)),
            "tool_parse",
        ),
    ],
)
async def test_x3_an_answer_that_the_router_refused_it_has_closed_first(
    autojump_clock: MockClock, job: Job, steps: tuple[Step, ...], fault: str
) -> None:
    settings = Settings(models={"m": ModelSettings(bios=BIOS)})
    worker = ScriptedWorker("a", lambda *_: steps)
    async with opened(worker, settings=settings) as (router, records):
        await router.serve(job, Recorder(), request=router.new_request_id())

        (record,) = records
        assert (record["closed_by"], record["fault"]) == ("router", fault)
        assert (record["phase"], record["outcome"]) == ("failed", "failed")


async def test_x3_what_a_worker_breaks_off_it_has_closed_first(
    autojump_clock: MockClock,
) -> None:
    steps = (Head(), Say(("x",)), Fail(LOST))
    async with opened(ScriptedWorker("a", lambda *_: steps)) as (router, records):
        await serve(router, Recorder())

        assert ends(records) == [("failed", "worker")]


async def test_a9_a_whole_answer_outweighs_a_loss_behind_it(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    steps = (Stubborn(), Head(), Say(("x",)), Finish(), Fail(LOST))
    async with opened(ScriptedWorker("a", lambda *_: steps)) as (router, records):
        await serve(router, receiver)
        await wait_all_tasks_blocked()

        assert ends(records) == [("completed", "worker")]
        assert receiver.fault is None
        assert router.status()["workers"][0]["faults_in_a_row"] == 0


async def test_m3_comments_for_ever_behind_the_finish_are_not_waited_for(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    comments = [step for _ in range(100) for step in (Wait(0.3), Comment())]
    steps = (Head(), Say(("x",)), FinishWithoutUsage(), *comments)
    settings = Settings(waits=WaitSettings(usage_wait_ms=1_000))
    worker = ScriptedWorker("a", lambda *_: steps)
    async with opened(worker, settings=settings) as (router, records):
        start = trio.current_time()
        await serve(router, receiver)

        assert trio.current_time() - start == pytest.approx(1.0)
        assert receiver.finished is not None
        assert receiver.finished.usage is None
        assert [record["outcome"] for record in records] == ["completed"]


async def test_w1_an_answer_may_last_as_long_as_bytes_arrive(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    # Longer than any wait there is, and never as long as liveness_ms without one.
    pieces = ["x"] * 24
    async with opened(ScriptedWorker("a", answers(*pieces, every=50.0))) as (router, _):
        start = trio.current_time()
        await serve(router, receiver)

        assert trio.current_time() - start == pytest.approx(1_200.0)
        assert receiver.finished is not None
        assert len(receiver.deltas) == len(pieces)


async def test_w5_each_poll_of_a_silence_shows_in_status_and_metrics(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 4)
    async with opened(worker) as (router, _), trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await trio.sleep(3)

        (shown,) = router.status()["requests"]
        assert (shown["waiting"], shown["slot_busy"]) == ("busy", True)
        polls = router.tally.waits["busy"]
        assert polls > 0

        worker.slots_shown = SlotView(4, 0)
        await trio.sleep(3)

        (shown,) = router.status()["requests"]
        assert (shown["waiting"], shown["slot_busy"]) == ("idle", False)
        assert router.tally.waits["idle"] > 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("phase", "kind", "seconds"),
    [
        (SourcePhase.CONNECTING, FaultKind.CONNECT, 3.0),
        (SourcePhase.SENDING, FaultKind.STALLED, 60.0),
    ],
)
async def test_w6_connecting_and_sending_have_their_limits(
    autojump_clock: MockClock, phase: SourcePhase, kind: FaultKind, seconds: float
) -> None:
    receiver = Recorder()
    async with opened(Slow("a", phase)) as (router, _):
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is kind
        assert trio.current_time() - start == pytest.approx(seconds)


async def test_s4_a_fleet_of_suspects_leaves_nobody_waiting(
    autojump_clock: MockClock,
) -> None:
    workers = [ScriptedWorker(name, lambda *_: (Fail(LOST),)) for name in "abc"]
    async with opened(*workers) as (router, _):
        receivers = [Recorder() for _ in range(30)]
        with trio.fail_after(15):
            async with trio.open_nursery() as nursery:
                for receiver in receivers:
                    nursery.start_soon(serve, router, receiver)

        faults = [receiver.fault for receiver in receivers if receiver.fault]
        assert len(faults) == 30
        assert {fault.kind for fault in faults} == {LOST.kind, FaultKind.NO_WORKER}
        waited = [f.retry_after for f in faults if f.kind is FaultKind.NO_WORKER]
        assert all(wait is not None and wait > 5.0 for wait in waited)


async def test_w6_connect_ms_is_the_operators(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    settings = Settings(waits=WaitSettings(connect_ms=100))
    slow = Slow("a", SourcePhase.CONNECTING)
    async with opened(slow, ScriptedWorker("b", answers("ok")), settings=settings) as (
        router,
        _,
    ):
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert trio.current_time() - start == pytest.approx(0.1)


def silent(name: str, *steps: Step) -> ScriptedWorker:
    """A worker that could answer and doesn't, as far as its probes tell."""
    worker = ScriptedWorker(name, lambda *_: steps, settles_by_probe=True)
    worker.slots_shown = SlotView(4, 0)
    return worker


async def test_w3_each_attempt_has_its_own_silence(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    lost = silent("a", Wait(7), Fail(LOST))
    slow = silent("b", Wait(7), Head(), Say(("ok",)), Finish())
    async with opened(lost, slow) as (router, _):
        await serve(router, receiver)

        # Together longer than idle_grace_ms, and neither is.
        assert receiver.text == "ok"
        assert router.tally.failovers == {LOST.kind.value: 1}


async def test_l9_a_grant_that_is_lost_before_it_is_used_opens_nothing(
    autojump_clock: MockClock,
) -> None:
    a = ScriptedWorker("a", hangs(), slots=1)
    b = ScriptedWorker("b", answers("ok", every=1.0), slots=1)
    receivers = [Recorder() for _ in range(3)]
    async with opened(a, b) as (router, _), trio.open_nursery() as nursery:
        for receiver in receivers:
            nursery.start_soon(serve, router, receiver)
            await wait_all_tasks_blocked()
        first = a.sources[0].assignment.request

        # In one turn: its slot is another's, and the worker is cut.
        router.cancel(first)
        assert len(router.fleet.members[a.id].held) == 1
        router.cut("a")
        await wait_all_tasks_blocked()

        assert len(a.sources) == 1
    assert sorted(r.text for r in receivers) == ["", "ok", "ok"]


async def test_s3_an_answer_that_the_router_ended_settles(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker(
        "a", hangs(Head(), *[Say(("t",), Kind.REASONING)] * 9), settle_s=2.0
    )
    job = attrs.evolve(JOB, params=GenerationParams(thinking_max_tokens=3))
    async with opened(worker) as (router, records):
        await router.serve(job, Recorder(), request=router.new_request_id())
        (member,) = router.fleet.members.values()

        assert ends(records) == [("completed", "router")]
        assert len(member.settling) == 1
        await trio.sleep(3)
        assert member.busy == 0


async def test_l5_an_undrained_worker_is_to_leave_no_more(
    autojump_clock: MockClock,
) -> None:
    a = ScriptedWorker("a", answers("x", every=1.0))
    async with opened(a) as (router, _), trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        router.remove_worker("a")
        router.undrain("a")
        await trio.sleep(3)

        # An ordinary drain of an idle worker: it stays.
        assert router.drain("a")
        await trio.sleep(1)
        assert a.id in router.workers
        assert router.fleet.members[a.id].life.state is State.DRAINING


class LastWords(ScriptedSource):
    """A first attempt that brings one more delta from inside its close."""

    def close(self) -> None:
        """Say it once."""
        was_open = self.phase is not SourcePhase.CLOSED
        super().close()
        if was_open and self.assignment.attempt == 1:
            late = Delta(self.assignment, self.index, Kind.TEXT, "late")
            self.delivery.deltas(self.assignment, [late])


@pytest.mark.parametrize("leaves", [True, False], ids=["client", "operator"])
async def test_f6_what_a_source_says_while_it_is_closed_reaches_nobody(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, *, leaves: bool
) -> None:
    monkeypatch.setattr("workers.scripted.ScriptedSource", LastWords)
    worker = ScriptedWorker("a", hangs(Head(), Say(("x",))))
    receiver = Recorder()
    async with opened(worker) as (router, records), trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()
        (request,) = router.flights
        if leaves:
            receiver.on_gone()
        else:
            router.cancel(request)
        await wait_all_tasks_blocked()

        assert receiver.text == "x"
        assert records[0]["verdicts"] == {"late": 1}


async def test_f6_an_attempt_that_is_given_up_says_nothing_more(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.scripted.ScriptedSource", LastWords)
    receiver = Recorder()
    stalls = silent("a", Wait(99))
    async with opened(stalls, ScriptedWorker("b", answers("ok"))) as (router, records):
        await serve(router, receiver)

        assert stalls.sources[0].closed_at is not None
        assert receiver.text == "ok"
        assert records[0]["outcome"] == "completed"
