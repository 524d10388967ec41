"""Keeping one worker, on the test's own clock."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.crew.member import Turned
from router.engine import Router, open_router
from router.errors import Fault, FaultKind
from router.lifecycle import State
from router.messages import Discovery, Job, Probe, ProbeResult, Share, SlotView
from router.ports import SourcePhase, Taken
from router.settings import Settings, WaitSettings
from tests.kit.receiver import Recorder
from workers.scripted import (
    Comment,
    Fail,
    Finish,
    Head,
    PartialHead,
    Refuse,
    Say,
    ScriptedWorker,
    Wait,
    answers,
    hangs,
)

JOB = Job("m", (), target="m")


@asynccontextmanager
async def opened(
    *workers: ScriptedWorker, settings: Settings | None = None
) -> AsyncIterator[Router]:
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router


async def serve(router: Router, receiver: Recorder) -> None:
    await router.serve(JOB, receiver, request=router.new_request_id())


def state(router: Router, worker: ScriptedWorker) -> State:
    return router.fleet.members[worker.id].life.state


async def test_l2_a_worker_that_loads_is_taken_in_when_it_answers(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    worker.result = ProbeResult.LOADING
    receiver = Recorder()
    async with opened(worker) as router:
        assert state(router, worker) is State.LOADING
        async with trio.open_nursery() as nursery:
            # Named by nobody yet, so the request goes in under its alias.
            await trio.sleep(5)
            worker.result = ProbeResult.ANSWERED
            await trio.sleep(1)
            nursery.start_soon(serve, router, receiver)

        assert receiver.text == "ok"


async def test_l3_a_lost_worker_is_probed_with_backoff_and_returns_ramped(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with opened(worker) as router:
        worker.result = ProbeResult.REFUSED
        await trio.sleep(3)
        assert state(router, worker) is State.LOST
        before = worker.probes
        await trio.sleep(300)
        assert worker.probes - before < 20

        worker.result = ProbeResult.ANSWERED
        await trio.sleep(31)

        assert state(router, worker) is State.READY
        assert router.fleet.members[worker.id].limit == 1


async def test_l3_one_missed_probe_is_no_loss(autojump_clock: MockClock) -> None:
    a = ScriptedWorker("a", answers("ok"))
    async with opened(a, ScriptedWorker("b", answers("ok"))) as router:
        a.result = ProbeResult.SILENT
        await trio.sleep(2.1)
        a.result = ProbeResult.ANSWERED
        await trio.sleep(2.1)
        assert state(router, a) is State.READY

        a.result = ProbeResult.SILENT
        await trio.sleep(7)
        assert state(router, a) is State.LOST


async def test_h6_a_probe_that_could_not_be_asked_is_no_evidence(
    autojump_clock: MockClock,
) -> None:
    a, b = ScriptedWorker("a", answers("ok")), ScriptedWorker("b", answers("ok"))
    async with opened(a, b) as router:
        a.result = b.result = ProbeResult.UNASKED
        await trio.sleep(60)
        assert [state(router, worker) for worker in (a, b)] == [State.READY] * 2

        a.result = b.result = ProbeResult.ANSWERED
        await trio.sleep(3)
        assert [state(router, worker) for worker in (a, b)] == [State.READY] * 2


async def test_b115_tokens_that_flow_outweigh_probes_that_do_not_answer(
    autojump_clock: MockClock,
) -> None:
    steps = (Head(), *(s for _ in range(30) for s in (Wait(1), Say(("x",)))))
    a = ScriptedWorker("a", lambda *_: steps)
    receiver = Recorder()
    async with (
        opened(a, ScriptedWorker("b", answers("ok"))) as router,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, receiver)
        await trio.sleep(2)
        a.result = ProbeResult.SILENT
        await trio.sleep(25)

        assert state(router, a) is State.READY
        assert receiver.fault is None
        nursery.cancel_scope.cancel()


async def test_b115_the_last_worker_is_not_put_out_on_soft_evidence(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with opened(worker) as router:
        worker.result = ProbeResult.SILENT
        await trio.sleep(60)

        assert state(router, worker) is State.READY


async def test_l3_a_refused_connection_is_looked_into_at_once(
    autojump_clock: MockClock,
) -> None:
    a = ScriptedWorker("a", lambda *_: (Refuse(),))
    async with opened(a, ScriptedWorker("b", answers("ok"))) as router:
        a.result = ProbeResult.REFUSED

        await serve(router, Recorder())
        await wait_all_tasks_blocked()

        assert state(router, a) is State.LOST


async def test_a4_a_worker_that_refuses_our_key_is_out_until_it_takes_it(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    worker.result = ProbeResult.UNAUTHORIZED
    async with opened(worker) as router:
        life = router.fleet.members[worker.id].life
        assert (life.state, life.reason) == (State.FAILED, "unauthorized")

        worker.result = ProbeResult.ANSWERED
        await trio.sleep(31)

        assert state(router, worker) is State.READY


async def test_l9_a_restarted_engine_is_noticed_and_counted(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))))
    worker.discovery = Discovery(("m",), 4, started_at=1_000.0)
    receiver = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()

        worker.discovery = Discovery(("m",), 4, started_at=2_000.0)
        await trio.sleep(3)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.WORKER_RESTARTED
        assert router.tally.restarts == {"a": 1}
        assert worker.sources[0].closed_at is not None


async def leave_early(router: Router) -> None:
    with trio.move_on_after(0.5):
        await serve(router, Recorder())


async def test_s3_a_permit_settles_when_a_probe_shows_the_slot_free(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker(
        "a", hangs(Head(), Comment()), slots=1, settle_s=1.0, settles_by_probe=True
    )
    worker.slots_shown = SlotView(1, 1)
    async with opened(worker) as router:
        await leave_early(router)
        member = router.fleet.members[worker.id]
        await trio.sleep(0.3)
        assert member.busy == 1

        worker.slots_shown = SlotView(1, 0)
        await trio.sleep(0.5)

        assert member.busy == 0


async def test_s3_a_permit_settles_by_time_only_where_no_probe_can_tell(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Comment()), slots=1, settle_s=6.0)
    async with opened(worker) as router:
        await leave_early(router)
        member = router.fleet.members[worker.id]
        await trio.sleep(5.9)
        assert member.busy == 1

        await trio.sleep(1.1)

        assert member.busy == 0


async def test_b04_a_ghost_keeps_its_permit_and_new_work_goes_elsewhere(
    autojump_clock: MockClock,
) -> None:
    ghostly = ScriptedWorker(
        "a", hangs(Head(), Comment()), slots=1, settle_s=1.0, settles_by_probe=True
    )
    ghostly.slots_shown = SlotView(1, 1)
    receiver = Recorder()
    settings = Settings(waits=WaitSettings(ghost_ms=20_000))
    other = ScriptedWorker("b", answers("ok"), slots=1)
    async with opened(ghostly, other, settings=settings) as router:
        await leave_early(router)
        await trio.sleep(3)
        member = router.fleet.members[ghostly.id]
        assert len(member.ghosts) == 1
        assert router.tally.ghosts == {"a": 1}

        for _ in range(3):
            await serve(router, receiver := Recorder())
            assert receiver.routes == [("b", 1)]

        # Held at most ghost_ms, then given up.
        await trio.sleep(20)
        assert member.busy == 0
        assert not member.ghosts


async def test_s3_looks_leave_an_engine_more_than_a_second_of_quiet(
    autojump_clock: MockClock,
) -> None:
    """llama-server looks for clients that left only after a quiet second."""
    looks: list[float] = []

    class Asked(ScriptedWorker):
        async def slot_view(self) -> SlotView | None:
            looks.append(trio.current_time())
            return await super().slot_view()

    worker = Asked(
        "a", hangs(Head(), Comment()), slots=1, settle_s=1.0, settles_by_probe=True
    )
    worker.slots_shown = SlotView(1, 1)
    async with opened(worker) as router:
        await leave_early(router)
        await trio.sleep(8)

    gaps = [after - before for before, after in pairwise(looks)]
    assert gaps[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert max(gaps) == pytest.approx(2.0)


async def test_s3_a_slot_that_works_for_a_live_request_settles_nobody(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker(
        "a", hangs(Head(), Comment()), slots=2, settle_s=1.0, settles_by_probe=True
    )
    worker.slots_shown = SlotView(2, 2)
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        await leave_early(router)
        member = router.fleet.members[worker.id]
        await trio.sleep(2)
        assert member.busy == 2

        worker.slots_shown = SlotView(2, 1)
        await trio.sleep(2.1)

        assert member.busy == 1
        nursery.cancel_scope.cancel()


async def test_a8_a_rested_worker_takes_its_waiters_without_being_asked(
    autojump_clock: MockClock,
) -> None:
    full = Fault(FaultKind.DECLINED, "full", status=503)
    worker = ScriptedWorker("a", lambda *_: (Fail(full),))
    second = Recorder()
    async with opened(worker) as router:
        await serve(router, Recorder())
        worker.script = answers("ok")
        start = trio.current_time()

        await serve(router, second)

        assert second.text == "ok"
        assert 0.2 < trio.current_time() - start < 0.8


async def test_l5_an_operators_drain_stays_when_the_agent_that_drained_is_back(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with opened(worker) as router:
        worker.result = ProbeResult.DRAINING
        await trio.sleep(3)
        assert router.drain("a")
        worker.result = ProbeResult.REFUSED
        await trio.sleep(3)
        worker.result = ProbeResult.ANSWERED
        await trio.sleep(31)
        assert state(router, worker) is State.DRAINING

        assert router.undrain("a")
        await trio.sleep(1)
        assert state(router, worker) is State.READY


async def test_p3_a_worker_that_rests_from_two_models_is_asked_after_each(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with opened(worker) as router:
        began = trio.current_time()
        member = router.fleet.members[worker.id]
        member.turned = {
            "m": Turned(until=began + 0.1),
            "n": Turned(until=began + 0.2),
        }
        asked: list[float] = []
        monkeypatch.setattr(router.fleet, "dispatch", lambda _, now: asked.append(now))
        monkeypatch.setattr(router, "apply", lambda _: None)
        router._keepers[worker.id].rest(member.wakes_at(began))
        await trio.sleep(1)

        assert asked == pytest.approx([began + 0.1, began + 0.2])


async def test_w2_a_request_that_left_while_it_was_probed_is_not_judged(
    autojump_clock: MockClock,
) -> None:
    class Slow(ScriptedWorker):
        async def slot_view(self) -> SlotView | None:
            await trio.sleep(0.3)
            return SlotView(4, 0)

    worker = Slow("a", hangs(), settles_by_probe=True)
    async with opened(worker) as router:
        with trio.move_on_after(0.6):
            await serve(router, Recorder())
        await trio.sleep(1)

        assert router.tally.waits == {}


@pytest.mark.parametrize("seed", range(20))
async def test_w9_budgets_end_within_half_a_poll_wherever_they_begin(
    autojump_clock: MockClock, seed: int
) -> None:
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 0)
    receiver = Recorder()
    async with opened(worker) as router:
        await trio.sleep(random.Random(seed).uniform(0, 5))
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED
        assert trio.current_time() - start == pytest.approx(10.0, abs=0.2501)


async def test_d5_a_worker_that_is_not_there_at_the_start_is_one_line_with_what_to_do(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    worker.result = ProbeResult.REFUSED
    async with opened(worker):
        await trio.sleep(10)

    (line,) = [r.getMessage() for r in caplog.records]
    assert "worker a does not answer yet" in line
    assert "start it, or check its address" in line


@pytest.mark.parametrize("seed", range(20))
async def test_w9_budgets_end_in_time_where_probes_get_no_answer(
    autojump_clock: MockClock, seed: int
) -> None:
    class Stopped(ScriptedWorker):
        async def slot_view(self) -> SlotView | None:
            await trio.sleep(1_000)
            return None

    worker = Stopped("a", hangs(), settles_by_probe=True)
    receiver = Recorder()
    settings = Settings(waits=WaitSettings(load_wait_ms=10_000))
    async with opened(worker, settings=settings) as router:
        await trio.sleep(random.Random(seed).uniform(0, 5))
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.LOAD_TIMEOUT
        assert trio.current_time() - start == pytest.approx(10.0, abs=0.2501)


async def test_w10_a_busy_worker_whose_processes_do_nothing_stalls(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 4)
    worker.works = True
    receiver = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await trio.sleep(60)
        assert router.active == 1
        assert set(router.tally.waits) == {"busy"}

        worker.works = False
        await trio.sleep(10.6)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED


async def test_w10_a_generic_worker_whose_processes_do_nothing_stalls_too(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs())
    worker.works = False
    receiver = Recorder()
    async with opened(worker) as router:
        start = trio.current_time()
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED
        assert trio.current_time() - start == pytest.approx(10.0, abs=0.2501)


@asynccontextmanager
async def pinned_router(
    worker: ScriptedWorker, settings: Settings | None = None, *, pinned: bool = True
) -> AsyncIterator[Router]:
    """A router whose only worker is pinned, slot by slot."""
    async with open_router(settings, rng=random.Random(1)) as router:
        keeper = router.add(worker, slots=None, models=(), pin_slots=pinned)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await wait_all_tasks_blocked()
            yield router
            nursery.cancel_scope.cancel()


async def test_w2_a_pinned_request_waits_for_its_own_slot_however_many_are_free(
    autojump_clock: MockClock,
) -> None:
    steps = (Wait(60), Head(), Say(("ok",)), Finish())
    worker = ScriptedWorker("a", lambda *_: steps, settles_by_probe=True)
    # Three of four slots are free, and a foreign client has ours.
    worker.slots_shown = SlotView(4, 1, frozenset({0}))
    receiver = Recorder()
    async with pinned_router(worker) as router:
        await serve(router, receiver)

        assert receiver.text == "ok"
        assert worker.sources[0].slot == 0
        assert set(router.tally.waits) == {"busy"}


async def test_w2_a_pinned_request_whose_slot_is_free_stalls_though_others_work(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 3, frozenset({1, 2, 3}))
    receiver = Recorder()
    async with pinned_router(worker) as router:
        await serve(router, receiver)

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED


async def test_w2_a_slot_that_settles_is_given_to_nobody(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker(
        "a", hangs(Head(), Comment()), settle_s=1.0, settles_by_probe=True
    )
    worker.slots_shown = SlotView(4, 2, frozenset({0, 3}))
    async with pinned_router(worker) as router:
        for _ in range(3):
            await leave_early(router)
            await trio.sleep(1.1)
        slots = [source.slot for source in worker.sources]

        # Slot 0 is still at work for the first; 1 was free when it was asked for.
        assert slots == [0, 1, 1]
        assert len(router.fleet.members[worker.id].ghosts) == 1


def down(detail: str = "", died: str = "") -> Probe:
    return Probe(ProbeResult.STARTING, detail, reason="restarting", died=died)


async def test_l8_when_its_process_ends_all_that_ran_there_ends_at_once(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))), slots=2, settle_s=5.0)
    cut, waits = Recorder(), Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        await leave_early(router)
        nursery.start_soon(serve, router, cut)
        await wait_all_tasks_blocked()
        nursery.start_soon(serve, router, waits)
        await wait_all_tasks_blocked()
        member = router.fleet.members[worker.id]
        assert (len(member.held), len(member.settling)) == (1, 1)

        worker.result = ProbeResult.STARTING
        router._keepers[worker.id].told(down(detail="so it is", died="It is gone."))

        assert cut.fault is not None
        assert cut.fault.row.reason == "server_died"
        assert cut.fault.message == "It is gone."
        assert (cut.text, worker.sources[1].closed_at) == ("a", trio.current_time())
        # Nobody is sent after it, and nothing of it is still settling.
        assert member.busy == 0
        life = member.life
        assert (life.state, life.reason) == (State.STARTING, "restarting")
        assert life.detail == "so it is"
        assert waits.fault is None

        worker.result, worker.script = ProbeResult.ANSWERED, answers("back")
        await trio.sleep(1)

        assert waits.text == "back"
        assert life.state is State.READY


async def test_s7_a_worker_whose_process_was_restarted_returns_ramped(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with opened(worker) as router:
        router._keepers[worker.id].told(down())
        await trio.sleep(1)

        assert state(router, worker) is State.READY
        assert router.fleet.members[worker.id].limit == 1


async def test_l8_a_job_without_a_delta_moves_off_a_process_that_ended(
    autojump_clock: MockClock,
) -> None:
    dies = ScriptedWorker("a", hangs(Head()))
    receiver = Recorder()
    async with (
        opened(dies, ScriptedWorker("b", answers("whole"))) as router,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()

        router._keepers[dies.id].told(down())
        await wait_all_tasks_blocked()

        assert receiver.text == "whole"
        assert receiver.routes == [("a", 1), ("b", 2)]
        assert router.tally.failovers == {"server_died": 1}


async def test_l8_a_worker_that_nothing_can_come_of_refuses_who_waits(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head()), slots=1)
    waits = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        nursery.start_soon(serve, router, waits)
        await wait_all_tasks_blocked()

        worker.result = ProbeResult.UNFIT
        router._keepers[worker.id].told(
            Probe(ProbeResult.UNFIT, "five times", reason="crash_loop")
        )

        life = router.fleet.members[worker.id].life
        assert (life.state, life.reason) == (State.FAILED, "crash_loop")
        assert waits.fault is not None
        assert waits.fault.kind is FaultKind.NO_WORKER


async def test_w5_what_a_request_waits_for_is_told_until_the_head_is_here(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Wait(5), Head()), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 4)
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await trio.sleep(3.1)
        (waits,) = router.status()["requests"]
        assert (waits["waiting"], waits["slot_busy"]) == ("busy", True)
        assert waits["waiting_s"] == pytest.approx(3.0, abs=0.5)
        assert router.tally.waits["busy"] == 6

        await trio.sleep(3)

        (runs,) = router.status()["requests"]
        assert "waiting" not in runs
        nursery.cancel_scope.cancel()


async def test_l3_tokens_that_flow_outweigh_a_refused_probe_too(
    autojump_clock: MockClock,
) -> None:
    steps = (Head(), *(s for _ in range(30) for s in (Wait(1), Say(("x",)))))
    a = ScriptedWorker("a", lambda *_: steps)
    async with (
        opened(a, ScriptedWorker("b", answers("ok"))) as router,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, Recorder())
        await trio.sleep(2)
        a.result = ProbeResult.REFUSED
        await trio.sleep(10)

        assert state(router, a) is State.READY
        nursery.cancel_scope.cancel()


async def test_s3_a_probe_that_can_tell_and_does_not_frees_nothing(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker(
        "a", hangs(Head(), Comment()), slots=1, settle_s=1.0, settles_by_probe=True
    )
    worker.slots_shown = SlotView(1, 1)
    async with opened(worker) as router:
        await leave_early(router)
        member = router.fleet.members[worker.id]
        await trio.sleep(0.3)
        worker.slots_shown = None
        await trio.sleep(20)
        assert member.busy == 1

        worker.slots_shown = SlotView(1, 0)
        await trio.sleep(2.1)

        assert member.busy == 0


NONE_FREE = SlotView(4, 4, frozenset(range(4)))
OURS = SlotView(4, 1, frozenset({0}))
OTHERS = SlotView(4, 3, frozenset({1, 2, 3}))
NOTHING = SlotView(4, 0, frozenset())
#: What is shown, whether part of a head is here, whether the request is pinned (it
#: gets slot 0): the fault it comes to, after so many seconds.
ROWS = {
    "part of a head": (NONE_FREE, True, False, FaultKind.STALLED, 10),
    "part of a head, no answer": (None, True, False, FaultKind.STALLED, 10),
    "no slot is free": (NONE_FREE, False, False, FaultKind.WAIT_TIMEOUT, 60),
    "as many at work as we have": (OURS, False, False, FaultKind.WAIT_TIMEOUT, 60),
    "nothing is at work": (NOTHING, False, False, FaultKind.STALLED, 10),
    "no answer": (None, False, False, FaultKind.LOAD_TIMEOUT, 30),
    "pinned, its slot works": (OURS, False, True, FaultKind.WAIT_TIMEOUT, 60),
    "pinned, others work": (OTHERS, False, True, FaultKind.STALLED, 10),
    "pinned, its slot is missing": (NOTHING, False, True, FaultKind.STALLED, 10),
    "pinned, no answer": (None, False, True, FaultKind.LOAD_TIMEOUT, 30),
}
BUDGETS = WaitSettings(busy_wait_ms=60_000, load_wait_ms=30_000, idle_grace_ms=10_000)


@pytest.mark.parametrize("row", ROWS)
async def test_w4_each_kind_of_silence_ends_at_its_budget(
    autojump_clock: MockClock, row: str
) -> None:
    view, part, pinned, kind, seconds = ROWS[row]
    steps = hangs(PartialHead()) if part else hangs()
    worker = ScriptedWorker("a", steps, settles_by_probe=True)
    worker.slots_shown = view
    settings = Settings(waits=BUDGETS)
    async with pinned_router(worker, settings, pinned=pinned) as router:
        start = trio.current_time()
        await serve(router, receiver := Recorder())

        assert receiver.fault is not None
        assert receiver.fault.kind is kind
        assert trio.current_time() - start == pytest.approx(seconds, abs=0.2501)
        assert len(router.tally.waits) == 1


async def test_w3_a_change_of_state_starts_its_time_again(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    settings = Settings(waits=BUDGETS)
    async with opened(worker, settings=settings) as router:
        receiver = Recorder()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, receiver)
            # None of these is long enough, all together are more than any.
            for view, seconds in ((NOTHING, 9), (None, 29), (NOTHING, 9), (OURS, 59)):
                worker.slots_shown = view
                await trio.sleep(seconds)
            assert router.active == 1
            worker.slots_shown = NOTHING
            last = trio.current_time()

        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.STALLED
        assert trio.current_time() - last == pytest.approx(10.0, abs=0.5001)


async def test_l5_a_worker_that_is_removed_as_soon_as_it_is_taken_in_leaves_nothing(
    autojump_clock: MockClock,
) -> None:
    async with opened(ScriptedWorker("a", answers("ok"))) as router:
        for turns in range(8):
            more = ScriptedWorker("more", answers("ok"))
            await router.add_worker(more)
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            assert router.remove_worker("more")
            await trio.sleep(5)

            assert list(router.workers) == ["a"]
            assert more.sources == []
        assert router.ready


# ---- whom a view of the slots has to show (W2, S3) ----

#: Nothing but silence before a head ends within a minute here.
PATIENT = Settings(
    waits=WaitSettings(
        connect_ms=90_000,
        offer_timeout_ms=90_000,
        usage_wait_ms=90_000,
        liveness_ms=90_000,
    )
)
PREFILL = (Wait(30), Head(), Say(("ok",)), Finish())


@pytest.mark.parametrize(
    "phase",
    [
        SourcePhase.CONNECTING,
        SourcePhase.SENDING,
        SourcePhase.OFFERED,
        SourcePhase.FINISHING,
    ],
)
async def test_w2_a_request_that_is_on_its_way_or_over_makes_no_prefill_idle(
    autojump_clock: MockClock, phase: SourcePhase
) -> None:
    worker = ScriptedWorker("a", hangs(), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 1)
    prefill = Recorder()
    async with (
        opened(worker, settings=PATIENT) as router,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        worker.sources[0].phase = phase
        worker.script = lambda *_: PREFILL
        await serve(router, prefill)

        assert prefill.text == "ok"
        assert set(router.tally.waits) == {"busy"}
        assert len(router.fleet.members[worker.id].held) == 1
        nursery.cancel_scope.cancel()


async def test_w2_a_request_whose_client_does_not_read_makes_no_prefill_idle(
    autojump_clock: MockClock,
) -> None:
    """What its engine had to say may all be in the buffers between."""
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))), settles_by_probe=True)
    worker.slots_shown = SlotView(4, 1)
    reader, prefill = Recorder(), Recorder()
    reader.reply = Taken.FULL
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, reader)
        await wait_all_tasks_blocked()
        assert worker.sources[0].paused
        worker.script = lambda *_: PREFILL
        await serve(router, prefill)

        assert prefill.text == "ok"
        assert set(router.tally.waits) == {"busy"}
        nursery.cancel_scope.cancel()


async def test_w2_who_comes_or_goes_while_the_slots_are_asked_for_makes_nobody_idle(
    autojump_clock: MockClock,
) -> None:
    class Slow(ScriptedWorker):
        async def slot_view(self) -> SlotView | None:
            await trio.sleep(0.3)
            return SlotView(8, 1)

    worker = Slow("a", lambda *_: PREFILL, slots=8, settles_by_probe=True)
    prefill = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, prefill)
        await wait_all_tasks_blocked()
        # Each lives for less than a look lasts, and some come or go in each.
        worker.script = lambda *_: (Wait(0.2), Head(), Say(("x",)), Finish())
        for _ in range(300):
            nursery.start_soon(serve, router, Recorder())
            await trio.sleep(0.1)
        await trio.sleep(1)

        assert prefill.text == "ok"
        assert set(router.tally.waits) == {"busy"}


class Looked(ScriptedWorker):
    """A look at its slots takes 0.3 s."""

    looks = 0

    async def slot_view(self) -> SlotView | None:
        self.looks += 1
        await trio.sleep(0.3)
        return self.slots_shown


def slow_to_settle(slots: int) -> Looked:
    steps = hangs(Head(), Say(("a",)))
    worker = Looked("a", steps, slots=slots, settle_s=5.0, settles_by_probe=True)
    worker.slots_shown = SlotView(slots, 1)
    return worker


async def look_begins(worker: Looked) -> None:
    """Return a tenth of a second into the next look."""
    seen = worker.looks
    while worker.looks == seen:  # noqa: ASYNC110  on the test's own clock
        await trio.sleep(0.01)
    await trio.sleep(0.1)


async def test_s3_a_newcomer_that_a_look_could_not_see_frees_no_slot(
    autojump_clock: MockClock,
) -> None:
    worker = slow_to_settle(slots=2)
    async with opened(worker) as router, trio.open_nursery() as nursery:
        member = router.fleet.members[worker.id]
        await leave_early(router)
        await look_begins(worker)
        nursery.start_soon(serve, router, Recorder())
        await trio.sleep(0.25)
        # What was at work is what has left: the engine has no third slot.
        assert (len(member.held), len(member.settling)) == (1, 1)

        # Now the one at work is the newcomer.
        await look_begins(worker)
        await trio.sleep(0.25)
        assert (len(member.held), len(member.settling)) == (1, 0)
        nursery.cancel_scope.cancel()


async def test_s3_who_left_after_a_look_had_begun_is_not_judged_by_it(
    autojump_clock: MockClock,
) -> None:
    worker = slow_to_settle(slots=2)
    async with opened(worker) as router:
        member = router.fleet.members[worker.id]
        await leave_early(router)
        await look_begins(worker)
        with trio.move_on_after(0.1):
            await serve(router, Recorder())
        first, second = member.settling
        await trio.sleep(0.25)

        assert list(member.settling) == [first, second]


async def test_s3_who_goes_while_the_slots_are_looked_at_frees_no_slot(
    autojump_clock: MockClock,
) -> None:
    worker = slow_to_settle(slots=2)
    worker.slots_shown = SlotView(2, 2)
    stays = trio.CancelScope()

    async def stay(router: Router) -> None:
        with stays:
            await serve(router, Recorder())

    async with opened(worker) as router, trio.open_nursery() as nursery:
        member = router.fleet.members[worker.id]
        nursery.start_soon(stay, router)
        await leave_early(router)
        await look_begins(worker)
        (first,) = member.settling
        stays.cancel()
        # Its own slot was free at once; the other works for who left first.
        worker.slots_shown = SlotView(2, 1)
        await trio.sleep(0.25)

        assert first in member.settling


async def test_s3_a_request_whose_client_does_not_read_frees_no_slot(
    autojump_clock: MockClock,
) -> None:
    worker = slow_to_settle(slots=2)
    reader = Recorder()
    reader.reply = Taken.FULL
    async with opened(worker) as router, trio.open_nursery() as nursery:
        member = router.fleet.members[worker.id]
        nursery.start_soon(serve, router, reader)
        await wait_all_tasks_blocked()
        await leave_early(router)
        await trio.sleep(2)
        assert (len(member.held), len(member.settling)) == (1, 1)

        worker.slots_shown = SlotView(2, 0)
        await trio.sleep(3)
        assert (len(member.held), len(member.settling)) == (1, 0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "build", ["another engine", "another version", "without a view of its slots"]
)
async def test_s3_another_engine_behind_an_address_has_yet_to_show_its_slots(
    autojump_clock: MockClock, build: str
) -> None:
    worker = ScriptedWorker(
        "a", hangs(Head(), Comment()), slots=1, settle_s=1.0, settles_by_probe=True
    )
    worker.slots_shown = SlotView(1, 0)
    async with opened(worker) as router:
        member = router.fleet.members[worker.id]
        await leave_early(router)
        await trio.sleep(1)
        assert member.busy == 0

        worker.slots_shown = None
        if build == "another engine":
            worker.discovery = attrs.evolve(worker.discovery, engine="another")
        elif build == "another version":
            worker.discovery = attrs.evolve(worker.discovery, version="b1")
        else:
            worker.settles_by_probe = False
        await trio.sleep(3)
        await leave_early(router)
        await trio.sleep(3.2)

        assert member.busy == 0


# ---- what a probe without an answer does (L3) ----


@asynccontextmanager
async def one_waits(worker: ScriptedWorker) -> AsyncIterator[tuple[Router, Recorder]]:
    """A router whose only worker loads, and a request that waits for it."""
    receiver = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        worker.result = ProbeResult.LOADING
        await trio.sleep(3)
        assert state(router, worker) is State.LOADING
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()
        yield router, receiver
        nursery.cancel_scope.cancel()


async def probed(worker: ScriptedWorker, times: int) -> None:
    """Wait until it was probed so often from here on."""
    due = worker.probes + times
    while worker.probes < due:  # noqa: ASYNC110  on the test's own clock
        await trio.sleep(0.01)


async def test_l3_two_missed_probes_refuse_nobody_who_waits_for_a_worker_that_loads(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with one_waits(worker) as (router, receiver):
        for _ in range(3):
            worker.result = ProbeResult.SILENT
            await probed(worker, 2)
            worker.result = ProbeResult.LOADING
            await probed(worker, 1)
            assert state(router, worker) is State.LOADING
        worker.result = ProbeResult.ANSWERED
        await trio.sleep(1)

        assert receiver.text == "ok"


@pytest.mark.parametrize(
    ("result", "times"), [(ProbeResult.SILENT, 3), (ProbeResult.REFUSED, 1)]
)
async def test_l3_a_worker_that_loads_is_lost_by_three_misses_or_one_refusal(
    autojump_clock: MockClock, result: ProbeResult, times: int
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with one_waits(worker) as (router, receiver):
        worker.result = result
        await probed(worker, times)

        assert state(router, worker) is State.LOST
        await wait_all_tasks_blocked()
        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.NO_WORKER


async def test_l3_the_last_worker_of_one_of_its_models_is_not_put_out(
    autojump_clock: MockClock,
) -> None:
    a = ScriptedWorker("a", answers("ok"), models=("m", "n"))
    async with opened(a, ScriptedWorker("b", answers("ok"))) as router:
        a.result = ProbeResult.SILENT
        await trio.sleep(60)
        assert state(router, a) is State.READY

        # An agent that has the model, on an engine that is down.
        c = ScriptedWorker("c", answers("ok"), models=("n",))
        down_there = {"n": Share(0, serves=False)}
        c.discovery = attrs.evolve(c.discovery, shares=down_there)
        await router.add_worker(c)
        await trio.sleep(60)
        assert state(router, a) is State.READY

        c.discovery = attrs.evolve(c.discovery, shares={"n": Share(1)})
        await trio.sleep(5)
        assert state(router, a) is State.LOST


async def test_l9_a_start_that_is_rounded_otherwise_is_counted_as_no_restart(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("ok"))
    async with opened(worker) as router:
        for started in (1_000.0, 1_000.5, 1_000.0, None, 1_001.0):
            worker.discovery = attrs.evolve(worker.discovery, started_at=started)
            await trio.sleep(2.1)
        assert router.tally.restarts == {}

        worker.discovery = attrs.evolve(worker.discovery, started_at=1_003.0)
        await trio.sleep(2.1)
        assert router.tally.restarts == {"a": 1}


async def test_l2_every_change_of_a_worker_is_logged_whatever_made_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fencepost.workers")
    lost = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")
    a = ScriptedWorker("a", lambda *_: (Head(), Fail(lost)))
    b = ScriptedWorker("b", answers("ok"))
    async with opened(a, b) as router:
        for _ in range(20):
            await serve(router, Recorder())
        assert state(router, a) is State.SUSPECT
        await trio.sleep(0.01)
        router.drain("b")
        await trio.sleep(0.01)
        router.undrain("b")
        await trio.sleep(0.01)

    said = [" ".join(r.getMessage().split()[1:5]) for r in caplog.records]
    assert said[:2] == ["a: starting -> ready", "b: starting -> ready"]
    assert said[2] == "a: ready -> suspect"
    rest = [line for line in said[3:] if line.startswith("b:")]
    assert rest == [
        "b: ready -> draining",
        "b: draining -> starting",
        "b: starting -> ready",
    ]
