"""An attempt may be closed at any time and from anywhere; nothing is left."""

import random
import socket
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from router.errors import FaultKind, LocalError, WorkerFailed
from router.ports import SourcePhase
from router.settings import WaitSettings, WorkerSettings
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.direct import Bench, bench
from tests.kit.engine import answers, in_turn, open_engine, silent
from tests.kit.exchange import Exchange
from workers.direct import DirectWorker


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def at_rest(b: Bench) -> None:
    """Wait until the engine has seen every close."""
    await trio.testing.wait_all_tasks_blocked(0.02)
    while b.engine.connections:
        await trio.testing.wait_all_tasks_blocked(0.02)


async def stream(x: Exchange) -> None:
    n = 0
    while True:
        await x.text(f"{n} ")
        n += 1
        await trio.sleep(0.001)


# ---- F4: what comes after the revoke ----


async def test_f4_bytes_that_arrive_after_a_close_reach_nobody() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await gate.wait()
        await x.text("late")
        await x.finish()
        await x.done()

    async with bench(script) as b:
        source, delivery = b.send()
        await delivery.until("deltas")
        x = await b.engine.next_exchange()
        # In the socket before the close, and not yet read.
        source.pause()
        gate.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        said = list(delivery.calls)

        source.close()
        await x.wait_closed()

        assert delivery.calls == said
        assert source.phase is SourcePhase.CLOSED


async def test_f4_a_close_from_inside_a_delta_ends_the_reading() -> None:
    async def script(x: Exchange) -> None:
        await x.head()
        await answers("a", "b")(x)

    async with bench(script) as b:

        def leave(name: str) -> None:
            if name == "deltas":
                source.close()

        source, delivery = b.send(hook=leave)
        x = await b.engine.next_exchange()
        await x.wait_closed()

    assert delivery.names[:2] == ["accepted", "deltas"]
    assert delivery.names.count("deltas") == 1
    assert "finished" not in delivery.names


@pytest.mark.parametrize("call", ["accepted", "progress", "deltas", "finished"])
async def test_a_close_from_inside_any_call_is_the_last_word(call: str) -> None:
    async with bench() as b:

        def leave(name: str) -> None:
            if name == call:
                source.close()

        source, delivery = b.send(hook=leave)
        await delivery.until(call)
        await trio.testing.wait_all_tasks_blocked(0.02)

        assert [name for name, _ in delivery.calls][-1] == call
        assert source.phase is SourcePhase.CLOSED
        assert b.bugs == []


async def test_an_attempt_closed_by_another_in_the_same_wake_is_skipped() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.head()
        await gate.wait()
        await x.text("a")
        await x.wait_closed()

    async with bench(script, slots=8) as b:

        def leave(name: str) -> None:
            if name == "deltas":
                for source, _ in sent:
                    source.close()

        sent = [b.send(number, leave) for number in range(1, 9)]
        for _, delivery in sent:
            await delivery.until("accepted")
        gate.set()
        for x in b.engine.seen:
            await x.wait_closed()

        spoke = [d for _, d in sent if "deltas" in d.names]
        assert len(spoke) == 1
        assert b.bugs == []


async def test_a_new_attempt_in_the_same_wake_hears_no_event_of_the_old() -> None:
    gate = trio.Event()

    async def old(x: Exchange) -> None:
        await x.head()
        await gate.wait()
        await x.text("old")
        await x.wait_closed()

    async with bench(in_turn(old, old, answers("new"))) as b:
        opened: list[RecordingDelivery] = []

        def swap(name: str) -> None:
            if name == "deltas" and not opened:
                # The freed number of the closed socket goes to the next one.
                for source, _ in sent:
                    source.close()
                opened.append(b.send(9)[1])

        sent = [b.send(number, swap) for number in (1, 2)]
        for _, delivery in sent:
            await delivery.until("accepted")
        gate.set()
        while not opened:
            await trio.testing.wait_all_tasks_blocked(0.001)

        await opened[0].finish()
        assert opened[0].text == "new"


async def test_close_is_idempotent_and_reports_nothing() -> None:
    async with bench(silent) as b:
        source, delivery = b.send()
        await b.engine.next_exchange()
        for _ in range(3):
            source.close()
        source.pause()
        source.resume()
        source.finish_now()

        assert delivery.names == []


class Stubborn(socket.socket):
    """Its close fails, as a socket's may after a RST."""

    def close(self) -> None:
        super().close()
        raise OSError("it was reset")


async def test_a_reset_whose_close_fails_too_ends_this_attempt_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = trio.Event()

    async def dies(x: Exchange) -> None:
        await x.text("a")
        await gate.wait()
        await x.reset()

    async with bench(in_turn(dies, answers("b"))) as b:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Stubborn)
            _, first = b.send()
        await first.until("deltas")
        _, second = b.send(2)
        await second.finish()
        gate.set()

        assert (await first.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert b.worker._all - set(b.worker._idle) == set()


# ---- 200 closes in every phase ----


async def head_only(x: Exchange) -> None:
    await x.head()
    await x.wait_closed()


async def finish_only(x: Exchange) -> None:
    await x.text("a")
    await x.finish()
    await x.wait_closed()


async def error_only(x: Exchange) -> None:
    await x.head(500, {"Content-Type": "text/plain"})
    await x.data(b"half an err")
    await x.wait_closed()


PHASES = {
    SourcePhase.SENDING: silent,
    SourcePhase.AWAITING_HEAD: silent,
    SourcePhase.STREAMING: head_only,
    SourcePhase.FINISHING: finish_only,
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value)
async def test_s2_200_closes_leave_no_socket(phase: SourcePhase) -> None:
    large = ({"role": "user", "content": "x" * (8 << 20)},)
    async with bench(PHASES[phase], slots=4) as b:
        sending = phase is SourcePhase.SENDING
        if sending:
            b.engine.read_limit = 1000
        before = open_files()
        for number in range(1, 41):
            batch = [
                b.send(number * 5 + n, messages=large if sending else JOB.messages)
                for n in range(1 if sending else 5)
            ]
            for source, delivery in batch:
                await delivery.reach(source, phase)
                source.close()
            assert b.worker._all == set()
        b.engine.read_limit = None
        await at_rest(b)

        assert open_files() == before


async def test_s2_closes_while_connecting_leave_no_socket() -> None:
    async with bench(silent) as b:
        before = open_files()
        for number in range(1, 201):
            source, _ = b.send(number)
            source.close()
        assert b.worker._all == set()

        await at_rest(b)
        assert open_files() == before


async def test_s2_a_close_inside_an_error_body_leaves_no_socket() -> None:
    async with bench(error_only) as b:
        source, delivery = b.send()
        await delivery.reach(source, SourcePhase.STREAMING)
        source.close()

        await b.engine.seen[0].wait_closed()
        assert b.worker._all == set()


async def test_a_cancelled_run_closes_every_socket_and_every_source() -> None:
    before = open_files()
    async with open_engine(stream) as engine:
        worker = DirectWorker(
            WorkerSettings(name="w", url=engine.url),
            WaitSettings(),
            report_bug=lambda _where, _bug: None,
        )
        async with served(worker):
            delivery = RecordingDelivery()
            source = worker.open(assignment(), JOB, delivery)
            await delivery.until("deltas")

        await engine.seen[0].wait_closed()
        assert source.phase is SourcePhase.CLOSED
        assert delivery.end is None
        with pytest.raises(WorkerFailed):
            worker.open(assignment(2), JOB, delivery)
    assert open_files() == before


async def test_a_worker_may_be_served_again() -> None:
    async with open_engine() as engine:
        worker = DirectWorker(
            WorkerSettings(name="w", url=engine.url),
            WaitSettings(),
            report_bug=lambda _where, _bug: None,
        )
        for number in (1, 2):
            async with served(worker):
                assert (await worker.probe()).discovery is not None
                delivery = RecordingDelivery()
                worker.open(assignment(number), JOB, delivery)
                await delivery.finish()


@pytest.mark.slow
async def test_b91_random_closes_leave_a_pool_that_works() -> None:
    async def script(x: Exchange) -> None:
        await trio.sleep(0.001)
        await answers("a", "b", usage=(1, 1))(x)

    async with bench(script, slots=10) as b:
        rng = random.Random(1)

        async def client(first: int) -> None:
            for number in range(first, first + 20):
                source, delivery = b.send(number)
                if rng.random() < 0.3:
                    await delivery.finish()
                with trio.move_on_after(rng.uniform(0, 0.01)):
                    await delivery.ended()
                source.close()

        async with trio.open_nursery() as nursery:
            for first in range(0, 1000, 50):
                nursery.start_soon(client, first)
        _, delivery = b.send(9999)
        await delivery.finish()
        await trio.testing.wait_all_tasks_blocked(0.02)

        assert b.worker._all == set(b.worker._idle)
        assert len(b.worker._idle) <= 4
        assert b.engine.live == 0
        assert b.bugs == []


# ---- backpressure ----


async def test_w6_a_paused_flood_pushes_back_and_loses_nothing() -> None:
    sent = 0

    async def flood(x: Exchange) -> None:
        nonlocal sent
        for n in range(400):
            await x.text(f"{n}:" + "x" * 20_000)
            sent = n
        await x.finish()
        await x.done()
        await x.end()

    async with bench(flood) as b:
        source, delivery = b.send()
        await delivery.until("deltas")
        source.pause()
        taken = len(delivery.taken)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(delivery.taken) == taken
        assert source.paused
        assert sent < 399
        paused_at = source.last_byte_at

        source.resume()
        assert source.last_byte_at > paused_at
        await delivery.finish()

    assert [d.text.partition(":")[0] for d in delivery.taken] == [
        str(n) for n in range(400)
    ]


async def test_a_pause_from_inside_a_delta_holds_at_once() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await gate.wait()
        await x.text("b")
        await x.wait_closed()

    async with bench(script) as b:

        def pause(name: str) -> None:
            if name == "deltas":
                source.pause()

        source, delivery = b.send(hook=pause)
        await delivery.until("deltas")
        gate.set()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert delivery.text == "a"

        source.resume()
        await delivery.until("deltas", 2)
        assert delivery.text == "ab"
        source.close()


async def test_a_paused_source_does_not_spin_on_a_reset() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await gate.wait()
        await x.reset()

    async with bench(script) as b:
        source, delivery = b.send()
        await delivery.until("deltas")
        source.pause()
        gate.set()
        await b.engine.seen[0].wait_closed()
        statistics = trio.lowlevel.current_statistics()
        before = statistics.tasks_runnable
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert before <= 1
        assert delivery.end is None

        source.resume()
        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY


# ---- L1: bugs ----


@pytest.mark.parametrize("call", ["accepted", "progress", "deltas", "finished"])
async def test_l1_a_bug_in_the_chain_ends_its_own_request_only(call: str) -> None:
    async with bench(in_turn(answers("a", usage=(1, 1)), stream)) as b:

        def crash(name: str) -> None:
            if name == call:
                raise ZeroDivisionError

        # The neighbour is in the middle of its stream all the time.
        _, first = b.send(1)
        await first.finish()
        neighbour, beside = b.send(2)
        await beside.until("deltas")
        b.engine.script = answers("a", usage=(1, 1))
        source, delivery = b.send(3, crash)
        await delivery.until("failed")

        assert delivery.calls[-1][1].kind is FaultKind.INTERNAL
        assert delivery.names.count("failed") == 1
        assert source.phase is SourcePhase.CLOSED
        assert [type(bug) for _, bug in b.bugs] == [ZeroDivisionError]
        await beside.until("deltas", beside.names.count("deltas") + 2)
        neighbour.close()


async def test_l1_a_bug_in_the_report_of_a_bug_is_kept_too() -> None:
    async with bench(in_turn(answers("a"), answers("b"))) as b:

        def crash(name: str) -> None:
            if name in {"deltas", "failed"}:
                raise ZeroDivisionError

        _, delivery = b.send(1, crash)
        await delivery.until("failed")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(b.bugs) == 2

        _, second = b.send(2)
        await second.finish()


async def test_l1_a_broken_invariant_leaves_the_loop() -> None:
    def breaks(name: str) -> None:
        if name == "deltas":
            raise LocalError("the fence is broken")

    with pytest.RaisesGroup(LocalError, flatten_subgroups=True):
        async with bench() as b:
            b.send(1, breaks)
            await trio.sleep_forever()


# ---- this machine's own limits ----


async def test_no_file_left_is_not_the_workers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_address: object) -> None:
        raise OSError(24, "Too many open files")

    async with bench() as b:
        monkeypatch.setattr("workers.direct.PlainTransport", full)
        with pytest.raises(WorkerFailed) as raised:
            b.send()

    assert raised.value.fault.kind is FaultKind.DECLINED
    assert not raised.value.fault.row.counts


async def test_the_next_address_is_tried_where_one_refuses() -> None:
    async with bench() as b:
        good = b.worker._resolver.addresses[0]
        async with open_engine() as other:
            other.refuse = True
            bad = (good[0], ("127.0.0.1", other.port))
            b.worker._resolver.addresses = [bad, good]
            _, delivery = b.send()
            await delivery.finish()

        # And it is not asked first again.
        assert list(b.worker._resolver.addresses) == [good, bad]


async def test_a_name_is_resolved_off_the_hot_path() -> None:
    async with open_engine() as engine:
        worker = DirectWorker(
            WorkerSettings(name="w", url=f"http://localhost:{engine.port}"),
            WaitSettings(),
            report_bug=lambda _where, _bug: None,
        )
        assert worker._resolver.addresses == []
        async with served(worker):
            await worker.probe()
            delivery = RecordingDelivery()
            worker.open(assignment(), attrs.evolve(JOB), delivery)
            await delivery.finish()
