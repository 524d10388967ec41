"""One request's life, on scripted workers and the test's own clock."""

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, open_router
from router.errors import Fault, FaultKind
from router.fence import Verdict
from router.lifecycle import State
from router.messages import Job, ProbeResult, SlotView, Usage
from router.ports import Taken
from router.settings import RouterSettings, Settings, WaitSettings
from tests.kit.receiver import Recorder
from workers.scripted import (
    Comment,
    Connect,
    Fail,
    Finish,
    FinishWithoutUsage,
    Head,
    PartialHead,
    Refuse,
    Say,
    ScriptedWorker,
    Stubborn,
    Wait,
    answers,
    hangs,
)

JOB = Job("m", ({"role": "user", "content": "hi"},), target="m")
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")


@asynccontextmanager
async def opened(
    *workers: ScriptedWorker, settings: Settings | None = None
) -> AsyncIterator[Router]:
    """A router whose workers have all been probed once."""
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router


async def serve(router: Router, receiver: Recorder, job: Job = JOB) -> None:
    await router.serve(job, receiver, request=router.new_request_id())


def at_rest(router: Router) -> bool:
    """S2: nothing is held anywhere."""
    return (
        not router.flights
        and not router.fleet.requests
        and len(router.fleet.room) == 0
        and all(not m.busy for m in router.fleet.members.values())
    )


async def test_f1_an_answer_reaches_the_client_once_and_in_order(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    async with opened(ScriptedWorker("a", answers("Hel", "lo", every=1.0))) as router:
        await serve(router, receiver)

        assert receiver.text == "Hello"
        assert receiver.finished is not None
        assert receiver.finished.usage == Usage(1, 2)
        assert [d.index for d in receiver.deltas] == [0, 1]
        assert at_rest(router)


async def test_f3_repeated_deltas_are_dropped_and_counted(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    steps = (Head(), Say(("a", "b")), Say(("b", "c"), repeat=1), Finish())
    async with opened(ScriptedWorker("a", lambda *_: steps)) as router:
        await serve(router, receiver)

        assert receiver.text == "abc"
        assert router.tally.verdicts[Verdict.REPEAT.value] == 1


async def test_f5_a_gap_before_commit_fails_over(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    skips = ScriptedWorker("a", lambda *_: (Head(), Say(("x",), skip=1), Wait(99)))
    async with opened(skips, ScriptedWorker("b", answers("whole"))) as router:
        await serve(router, receiver)

        assert receiver.text == "whole"
        assert receiver.routes == [("a", 1), ("b", 2)]
        assert skips.sources[0].closed_at is not None


async def test_f5_a_gap_after_commit_ends_the_stream_in_error(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    skips = (Head(), Say(("a",)), Say(("c",), skip=1), Wait(99))
    async with opened(
        ScriptedWorker("a", lambda *_: skips), ScriptedWorker("b", answers("whole"))
    ) as router:
        await serve(router, receiver)

        assert receiver.text == "a"
        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.PROTOCOL
        assert router.tally.verdicts[Verdict.GAP.value] == 1


async def test_f4_what_comes_after_a_revoke_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    stubborn = ScriptedWorker(
        "a",
        lambda *_: (
            Stubborn(),
            Wait(20),
            Head(),
            Say(("late",)),
            Fail(LOST),
            Say(("later",)),
            Finish(),
        ),
        settles_by_probe=True,
    )
    stubborn.slots_shown = SlotView(4, 0)
    settings = Settings(waits=WaitSettings(idle_grace_ms=2_000))
    slow = ScriptedWorker("b", answers("x", "y", every=30.0))
    async with opened(stubborn, slow, settings=settings) as router:
        await serve(router, receiver)

        assert receiver.text == "xy"
        assert receiver.finished is not None
        late = router.tally.verdicts
        # Text, an end, text, an end: each by its kind.
        assert late[Verdict.STALE.value] == 4
        assert late[Verdict.LATE.value] == 0
        assert at_rest(router)


async def test_a2_a_refused_connection_moves_the_job(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    async with opened(
        ScriptedWorker("a", lambda *_: (Refuse(),)), ScriptedWorker("b", answers("ok"))
    ) as router:
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert router.tally.failovers == {"connect": 1}


async def test_a2_a_head_and_a_death_leave_no_trace(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    async with opened(
        ScriptedWorker("a", lambda *_: (Head(), Wait(1), Fail(LOST))),
        ScriptedWorker("b", answers("whole")),
    ) as router:
        await serve(router, receiver)

        assert receiver.text == "whole"
        assert receiver.fault is None


async def test_a5_a_loss_after_the_first_delta_ends_the_stream(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    async with opened(
        ScriptedWorker("a", lambda *_: (Head(), Say(("a",)), Fail(LOST))),
        ScriptedWorker("b", answers("whole")),
    ) as router:
        await serve(router, receiver)

        assert receiver.text == "a"
        assert receiver.fault is LOST
        assert len(receiver.routes) == 1


async def test_a5_a_reply_that_is_not_whole_starts_over_elsewhere(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder(buffered=True)
    async with opened(
        ScriptedWorker("a", lambda *_: (Head(), Say(("half",)), Fail(LOST))),
        ScriptedWorker("b", answers("whole")),
    ) as router:
        await serve(router, receiver)

        assert receiver.text == "whole"
        assert receiver.restarts == 1


async def test_a7_a_client_that_leaves_is_cancelled_in_the_same_call(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))))
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()

        receiver.on_gone()

        assert worker.sources[0].closed_at == trio.current_time()
        assert not router.fleet.requests
        await wait_all_tasks_blocked()
        assert at_rest(router)
        assert router.tally.disconnects == {"committed": 1}
        assert router.tally.requests["m", "cancelled"] == 1


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ((), "awaiting_head"),
        ((PartialHead(),), "awaiting_head"),
        ((Head(),), "assigned"),
        ((Head(), Say(("a",))), "committed"),
    ],
)
async def test_t5_cancelling_the_task_lets_everything_go(
    autojump_clock: MockClock, steps: tuple[Head, ...], phase: str
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", hangs(*steps))
    async with opened(worker) as router:
        with trio.move_on_after(5):
            await serve(router, receiver)

        assert worker.sources[0].closed_at == trio.current_time()
        assert at_rest(router)
        assert router.tally.disconnects == {phase: 1}


async def test_b03_a_waiter_that_leaves_never_reaches_a_worker(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("x", every=10.0), slots=1)
    first, last = Recorder(), Recorder()
    async with opened(worker) as router:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, first)
            await wait_all_tasks_blocked()
            with trio.move_on_after(1):
                await serve(router, Recorder())
            await serve(router, last)

        assert len(worker.sources) == 2
        assert last.text == "x"
        assert router.tally.disconnects == {"queued": 1}


async def test_s1_more_requests_than_slots_all_end_well(
    autojump_clock: MockClock,
) -> None:
    most = 0
    worker = ScriptedWorker("a", answers("x", every=1.0), slots=2)
    receivers = [Recorder() for _ in range(10)]
    async with opened(worker) as router:
        async with trio.open_nursery() as nursery:
            for receiver in receivers:
                nursery.start_soon(serve, router, receiver)
            while router.active or not worker.sources:
                await trio.sleep(0.1)
                live = [s for s in worker.sources if s.closed_at is None]
                most = max(most, len(live))

        assert most == 2
        assert all(r.text == "x" for r in receivers)
        assert at_rest(router)


async def test_w4_idle_silence_before_the_head_fails_over_at_its_budget(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    silent = ScriptedWorker("a", hangs(), settles_by_probe=True)
    silent.slots_shown = SlotView(4, 0)
    async with opened(silent, ScriptedWorker("b", answers("ok"))) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.text == "ok"
        closed = silent.sources[0].closed_at
        assert closed is not None
        assert closed - start == pytest.approx(10.0, abs=0.25)
        assert router.tally.failovers == {"stalled": 1}


async def test_w4_a_busy_slot_is_waited_for_and_then_answers(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker(
        "a",
        lambda *_: (Wait(120), Head(), Say(("ok",)), Finish()),
        settles_by_probe=True,
        slots=1,
    )
    worker.slots_shown = SlotView(1, 1)
    async with opened(worker) as router:
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert router.tally.waits["busy"] > 200


async def test_w4_busy_silence_ends_in_a_wait_timeout(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 4)
    settings = Settings(waits=WaitSettings(busy_wait_ms=60_000))
    async with opened(worker, settings=settings) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.WAIT_TIMEOUT
        assert trio.current_time() - start == pytest.approx(60.0, abs=0.25)


async def test_w4_an_unavailable_worker_ends_in_a_load_timeout(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    settings = Settings(waits=WaitSettings(load_wait_ms=30_000))
    async with opened(worker, settings=settings) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.LOAD_TIMEOUT
        assert trio.current_time() - start == pytest.approx(30.0, abs=0.25)


async def test_w8_a_generic_server_that_answers_is_busy_never_idle(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", lambda *_: (Wait(90), Head(), Say(("ok",)), Finish()))
    async with opened(worker) as router:
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert set(router.tally.waits) == {"busy"}


async def test_w6_silence_after_the_head_is_stalled_at_its_limit(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",)), Wait(5), Comment()))
    async with opened(worker) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED
        # 60 s from the comment: any byte is progress.
        assert trio.current_time() - start == pytest.approx(65.0)


async def test_w6_a_router_that_was_stopped_blames_no_worker_for_it(
    autojump_clock: MockClock,
) -> None:
    receivers = [Recorder() for _ in range(8)]
    worker = ScriptedWorker(
        "a",
        lambda *_: (Head(), Say(("a",)), Wait(5), Say(("b",)), Finish()),
        slots=len(receivers),
    )
    async with opened(worker) as router, trio.open_nursery() as nursery:
        for receiver in receivers:
            nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()

        # All that is due in that time, theirs and ours, is due at once.
        autojump_clock.jump(3_600)

    assert [receiver.text for receiver in receivers] == ["ab"] * len(receivers)


async def test_w6_the_clock_stands_still_while_the_client_does_not_read(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    receiver.reply = Taken.FULL
    worker = ScriptedWorker(
        "a", lambda *_: (Head(), Say(("a",)), Say(("b",)), Finish())
    )
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await trio.sleep(1_000)
        assert receiver.text == "a"
        assert worker.sources[0].paused

        receiver.reply = Taken.MORE
        receiver.on_room()
        await wait_all_tasks_blocked()

        assert receiver.text == "ab"
        assert receiver.finished is not None


async def test_w8_a_first_delta_limit_fails_over(autojump_clock: MockClock) -> None:
    receiver = Recorder()
    settings = Settings(waits=WaitSettings(first_delta_ms=5_000))
    async with opened(
        ScriptedWorker("a", hangs(Head(), Comment())),
        ScriptedWorker("b", answers("ok")),
        settings=settings,
    ) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert trio.current_time() - start == pytest.approx(5.0)


async def test_w8_a_first_delta_limit_below_the_connect_limit_is_kept(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    settings = Settings(waits=WaitSettings(first_delta_ms=500))
    connects = ScriptedWorker("a", hangs(Connect(0.4)))
    async with opened(
        connects, ScriptedWorker("b", answers("ok")), settings=settings
    ) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert trio.current_time() - start == pytest.approx(0.5)


async def test_w6_a_liveness_limit_below_the_connect_limit_is_kept(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    settings = Settings(waits=WaitSettings(liveness_ms=700))
    worker = ScriptedWorker("a", hangs(Connect(0.4), Head(), Say(("a",))))
    async with opened(worker, settings=settings) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED
        assert trio.current_time() - start == pytest.approx(0.4 + 0.7)


async def test_x3_who_closed_first_is_the_router_where_no_worker_had_a_part(
    autojump_clock: MockClock,
) -> None:
    records: list[Mapping[str, object]] = []
    worker = ScriptedWorker("a", answers("x"))
    worker.result = ProbeResult.LOADING
    settings = Settings(waits=WaitSettings(load_wait_ms=2_000))
    async with opened(worker, settings=settings) as router:
        router.on_request_end = records.append
        await serve(router, Recorder())

    assert records[0]["closed_by"] == "router"


async def test_m3_usage_after_the_finish_is_waited_for_and_then_not(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    steps = (Head(), Say(("a",)), FinishWithoutUsage(), Wait(99))
    async with opened(ScriptedWorker("a", lambda *_: steps)) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.finished is not None
        assert trio.current_time() - start == pytest.approx(1.0)


async def test_h5_a_client_that_was_cut_ends_the_request(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    receiver.reply = Taken.GONE
    worker = ScriptedWorker("a", answers("a", "b", every=1.0))
    async with opened(worker) as router:
        await serve(router, receiver)

        assert receiver.deltas == []
        assert at_rest(router)
        assert router.tally.requests["m", "cancelled"] == 1


async def test_o4_the_receiver_is_ticked_when_it_is_due(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    async with opened(ScriptedWorker("a", answers("x", every=40.0))) as router:
        start = trio.current_time()
        receiver.due_at = start + 15.0
        await serve(router, receiver)

        assert receiver.ticks == [start + 15.0]


async def test_o4_the_receiver_is_ticked_while_the_request_is_queued(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    worker = ScriptedWorker("a", answers("x", every=40.0), slots=1)
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        start = trio.current_time()
        receiver.due_at = start + 15.0
        await serve(router, receiver)

        assert receiver.ticks == [start + 15.0]


async def test_l1_a_bug_in_one_receiver_ends_that_request_only(
    autojump_clock: MockClock,
) -> None:
    class Broken(Recorder):
        def fail(self, fault: Fault) -> None:
            super().fail(fault)
            raise RuntimeError

    broken, fine = Broken(), Recorder()
    worker = ScriptedWorker("a", lambda *_: (Head(), Fail(LOST)))
    async with opened(worker) as router:
        await serve(router, broken)
        worker.script = answers("ok")
        await serve(router, fine)

        assert fine.text == "ok"
        assert router.tally.bugs["fail"] == 1
        assert at_rest(router)


async def test_s4_a_queue_that_is_full_refuses_at_once(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head()), slots=1)
    refused = Recorder()
    settings = Settings(router=RouterSettings(queue_limit=1))
    async with (
        opened(worker, settings=settings) as router,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, Recorder())
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()

        await serve(router, refused)

        assert refused.fault is not None
        assert refused.fault.kind is FaultKind.QUEUE_FULL
        nursery.cancel_scope.cancel()


async def test_s4_a_queued_request_ends_at_its_own_time(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Comment()), slots=1)
    waits = Recorder()
    settings = Settings(router=RouterSettings(queue_ms=3_000))
    async with (
        opened(worker, settings=settings) as router,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await serve(router, waits)

        assert trio.current_time() - start == pytest.approx(3.0)
        assert waits.fault is not None
        assert waits.fault.kind is FaultKind.QUEUE_TIMEOUT
        nursery.cancel_scope.cancel()


async def test_d3_stopping_refuses_who_waits_and_who_comes(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("x", every=5.0), slots=1)
    runs, waits, comes = Recorder(), Recorder(), Recorder()
    stopping = Fault(FaultKind.SHUTTING_DOWN, "stopping")
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, runs)
        await wait_all_tasks_blocked()
        nursery.start_soon(serve, router, waits)
        await wait_all_tasks_blocked()

        router.refuse_new(stopping)
        await serve(router, comes)

        for refused in (waits, comes):
            assert refused.fault is not None
            assert refused.fault.kind is FaultKind.SHUTTING_DOWN
        assert not router.ready
        await trio.sleep(10)
        assert runs.text == "x"


async def test_d3_at_the_deadline_every_stream_gets_its_error(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))))
    receiver = Recorder()
    stopping = Fault(FaultKind.SHUTTING_DOWN, "stopping")
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()

        router.cut_all(stopping)

        assert receiver.fault is stopping
        assert worker.sources[0].closed_at is not None
        await wait_all_tasks_blocked()
        assert at_rest(router)


async def test_d1_an_operator_can_cancel_a_request(autojump_clock: MockClock) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))))
    receiver = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()
        (request,) = router.flights

        assert router.cancel(request)
        assert not router.cancel("req_nobody")

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.CANCELLED


async def test_l5_a_worker_is_drained_cut_and_undrained(
    autojump_clock: MockClock,
) -> None:
    a = ScriptedWorker("a", hangs(Head()))
    receiver = Recorder()
    async with opened(a, ScriptedWorker("b", answers("ok"))) as router:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, receiver)
            await wait_all_tasks_blocked()
            assert router.drain("a")
            await trio.sleep(5)
            assert receiver.finished is None

            # The job had no delta yet: being cut moves it (A2).
            assert router.cut("a")

        assert receiver.text == "ok"
        assert a.sources[0].closed_at is not None
        assert router.undrain("a")
        await trio.sleep(1)
        assert router.fleet.members[a.id].life.state is State.READY
        assert not router.undrain("a")


async def test_x3_a_receipt_tells_the_whole_route(autojump_clock: MockClock) -> None:
    async with opened(
        ScriptedWorker("a", lambda *_: (Head(), Wait(1), Fail(LOST))),
        ScriptedWorker("b", answers("x", every=1.0)),
    ) as router:
        request = router.new_request_id()
        await router.serve(JOB, Recorder(), request=request, client_ref="mine")

        receipt = router.receipt(request)

        assert receipt is not None
        assert receipt["outcome"] == "completed"
        assert receipt["client_request"] == "mine"
        assert receipt["total_s"] == pytest.approx(2.0)
        assert receipt["first_delta_s"] == pytest.approx(2.0)
        assert receipt["attempts"] == [
            {
                "worker": "a",
                "candidates": ("a", "b"),
                "at_s": 0.0,
                "fault": "stream_closed_early",
            },
            {
                "worker": "b",
                "candidates": ("b",),
                "at_s": pytest.approx(1.0),
                "fault": None,
            },
        ]


async def test_x2_the_record_of_each_request_is_told_once(
    autojump_clock: MockClock,
) -> None:
    records: list[Mapping[str, object]] = []
    async with opened(ScriptedWorker("a", answers("secret text"))) as router:
        router.on_request_end = records.append
        await serve(router, Recorder())

    assert len(records) == 1
    assert "secret" not in repr(records)


async def test_o1_made_up_field_names_are_counted_as_other(
    autojump_clock: MockClock,
) -> None:
    job = Job("m", JOB.messages, target="m", ignored=("id_slot", "made_up"))
    async with opened(ScriptedWorker("a", answers("x"))) as router:
        await serve(router, Recorder(), job)

        assert router.tally.ignored_fields == {"id_slot": 1, "other": 1}
