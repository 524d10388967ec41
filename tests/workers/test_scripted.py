"""The scripted worker does what its script says, on the test's own clock."""

from collections.abc import Sequence

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.messages import Finished, FinishReason, Kind, ProbeResult, SlotView, Usage
from router.ports import SourcePhase
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from workers.scripted import (
    Comment,
    Fail,
    Finish,
    FinishWithoutUsage,
    Head,
    PartialHead,
    Refuse,
    Say,
    ScriptedSource,
    ScriptedWorker,
    Step,
    Stubborn,
    Wait,
    answers,
    hangs,
)

BUSY = Fault(FaultKind.DECLINED, "busy")


def worker_of(*steps: Step) -> ScriptedWorker:
    return ScriptedWorker("w", lambda _assignment, _job: steps)


def send(
    worker: ScriptedWorker, number: int = 1
) -> tuple[ScriptedSource, RecordingDelivery]:
    delivery = RecordingDelivery()
    return worker.open(assignment(number), JOB, delivery), delivery


async def play(*steps: Step) -> RecordingDelivery:
    """Let one attempt run for an hour."""
    worker = worker_of(*steps)
    async with served(worker):
        _, delivery = send(worker)
        await trio.sleep(3600)
    return delivery


async def test_answers_says_its_pieces_in_time_and_finishes(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("w", answers("a", "b", every=2.0))
    async with served(worker):
        began = trio.current_time()
        _, delivery = send(worker)
        finished = await delivery.finish()

        assert trio.current_time() - began == 4.0
    assert delivery.names == ["accepted", "deltas", "deltas", "finished"]
    assert [d.index for d in delivery.taken] == [0, 1]
    assert finished == Finished(assignment(), FinishReason.STOP, Usage(1, 2))


async def test_it_accepts_when_its_head_is_due(autojump_clock: MockClock) -> None:
    worker = worker_of(Wait(3.0), Head(), Say(("a",)))
    async with served(worker):
        began = trio.current_time()
        source, delivery = send(worker)
        assert source.phase is SourcePhase.AWAITING_HEAD
        await delivery.until("accepted")

        assert trio.current_time() - began == 3.0
        await delivery.reach(source, SourcePhase.STREAMING)


async def test_pieces_of_one_step_come_in_one_call(autojump_clock: MockClock) -> None:
    delivery = await play(Head(), Say(("a", "b"), Kind.REASONING))

    assert delivery.names == ["accepted", "deltas"]
    assert {d.kind for d in delivery.taken} == {Kind.REASONING}


@pytest.mark.parametrize(
    ("step", "indices"),
    [
        (Say(("b",)), [0, 1]),
        (Say(("b",), skip=1), [0, 2]),
        (Say(("b",), repeat=1), [0, 0]),
    ],
)
async def test_it_stamps_rightly_or_wrongly_as_told(
    step: Say, indices: Sequence[int], autojump_clock: MockClock
) -> None:
    delivery = await play(Head(), Say(("a",)), step)

    assert [d.index for d in delivery.taken] == indices


async def test_it_fails_with_the_fault_that_it_is_told(
    autojump_clock: MockClock,
) -> None:
    delivery = await play(Head(), Fail(BUSY))

    assert delivery.end == BUSY


async def test_it_hangs_for_ever(autojump_clock: MockClock) -> None:
    worker = ScriptedWorker("w", hangs(Head(), Say(("a",))))
    async with served(worker):
        _, delivery = send(worker)
        await trio.sleep(3600)

        assert delivery.names == ["accepted", "deltas"]


async def test_a_refused_connect_raises(autojump_clock: MockClock) -> None:
    worker = worker_of(Refuse())
    async with served(worker):
        with pytest.raises(WorkerFailed) as raised:
            send(worker)

    assert raised.value.fault.kind is FaultKind.CONNECT


async def test_a_worker_that_is_not_served_opens_nothing(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(WorkerFailed):
        send(worker_of(Head()))


async def test_f4_a_closed_attempt_says_no_more(autojump_clock: MockClock) -> None:
    worker = worker_of(Head(), Wait(1.0), Say(("late",)), Finish())
    async with served(worker):
        source, delivery = send(worker)
        await delivery.until("accepted")
        source.close()
        source.close()
        await trio.sleep(5)

        assert delivery.names == ["accepted"]
        assert source.closed_at is not None


async def test_f4_a_stubborn_attempt_goes_on_after_its_close(
    autojump_clock: MockClock,
) -> None:
    worker = worker_of(Head(), Stubborn(), Wait(1.0), Say(("late",)), Finish())
    async with served(worker):
        source, delivery = send(worker)
        await delivery.until("accepted")
        source.close()
        await trio.sleep(5)

        assert delivery.names == ["accepted", "deltas", "finished"]
        assert source.phase is SourcePhase.CLOSED


async def test_a_paused_attempt_waits_and_loses_nothing(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("w", answers("a", "b", every=1.0))
    async with served(worker):
        source, delivery = send(worker)
        await delivery.until("deltas")
        source.pause()
        await trio.sleep(60)
        assert delivery.text == "a"
        source.resume()
        assert source.last_byte_at == trio.current_time()

        await delivery.finish()
        assert delivery.text == "ab"


async def test_a_close_of_a_paused_attempt_leaves_no_task(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("w", answers("a", "b", every=1.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await trio.testing.wait_all_tasks_blocked()
        inner = worker._nursery
        assert inner is not None
        source, _ = send(worker)
        source.pause()
        source.close()
        await trio.sleep(5)

        assert not inner.child_tasks
        nursery.cancel_scope.cancel()


async def test_m3_usage_may_be_waited_for(autojump_clock: MockClock) -> None:
    worker = worker_of(
        Head(), Say(("a",)), FinishWithoutUsage(), Wait(1.0), Finish(usage=Usage(1, 1))
    )
    async with served(worker):
        source, delivery = send(worker)
        await delivery.reach(source, SourcePhase.FINISHING)
        source.finish_now()
        assert delivery.end == Finished(assignment(), FinishReason.STOP)
        with pytest.raises(LocalError):
            source.finish_now()
        await trio.sleep(5)
        assert delivery.names.count("finished") == 1

        _, second = send(worker, 2)
        assert (await second.finish()).usage == Usage(1, 1)


async def test_w2_a_part_of_a_head_shows(autojump_clock: MockClock) -> None:
    worker = worker_of(PartialHead(), Wait(1.0), Comment())
    async with served(worker):
        source, _ = send(worker)
        await trio.testing.wait_all_tasks_blocked()
        assert source.partial_head
        before = source.last_byte_at
        await trio.sleep(2)

        assert source.last_byte_at == before + 1.0


async def test_a_death_ends_all_and_refuses_until_it_is_revived(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("w", hangs(Head()))
    async with served(worker):
        sent = [send(worker, number) for number in (1, 2)]
        for _, delivery in sent:
            await delivery.until("accepted")
        before = worker.discovery.started_at
        worker.die()

        for source, delivery in sent:
            fault = await delivery.fault()
            assert fault.kind is FaultKind.STREAM_CLOSED_EARLY
            assert source.phase is SourcePhase.CLOSED
        with pytest.raises(WorkerFailed):
            send(worker, 3)
        assert (await worker.probe()).result is ProbeResult.REFUSED
        assert not await worker.alive()

        worker.revive()
        probe = await worker.probe()
        assert probe.discovery is not None
        assert probe.discovery.started_at != before
        _, delivery = send(worker, 4)
        await delivery.until("accepted")


async def test_probes_say_what_they_are_told(autojump_clock: MockClock) -> None:
    worker = worker_of(Head())
    worker.slots_shown = SlotView(4, 2)
    worker.result = ProbeResult.LOADING

    assert await worker.slot_view() == SlotView(4, 2)
    probe = await worker.probe()
    assert (probe.result, probe.discovery) == (ProbeResult.LOADING, None)
    assert worker.probes == 1
