"""Connections are used again, and never where that could cost a request."""

import pytest
import trio
import trio.testing

from router.errors import FaultKind, WorkerFailed
from tests.kit.direct import Bench, bench
from tests.kit.engine import Script, answers, in_turn, silent
from tests.kit.exchange import Exchange
from workers import direct


async def finish_one(b: Bench, number: int = 1) -> None:
    _, delivery = b.send(number)
    await delivery.finish()
    await trio.testing.wait_all_tasks_blocked()


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    async with bench() as b:
        for number in range(1, 6):
            await finish_one(b, number)

        assert b.engine.accepted == 1
        assert [x.nth for x in b.engine.seen] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_b89_a_pooled_connection_that_dies_unused_is_replaced_once(
    how: str,
) -> None:
    async def dies(x: Exchange) -> None:
        await (x.fin() if how == "fin" else x.reset())

    script = in_turn(answers("a"), dies, answers("b"))
    async with bench(script) as b:
        await finish_one(b)
        _, delivery = b.send(2)
        await delivery.finish()

        assert delivery.text == "b"
        assert delivery.names == ["accepted", "deltas", "finished"]
        assert b.engine.accepted == 2
        assert b.engine.seen[1].content == b.engine.seen[2].content


async def test_b89_a_fresh_connection_that_dies_is_not_replaced() -> None:
    async def dies(x: Exchange) -> None:
        await x.reset()

    async with bench(dies) as b:
        _, delivery = b.send()

        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert len(b.engine.seen) == 1


async def test_b89_the_replacement_is_not_replaced_again() -> None:
    async def dies(x: Exchange) -> None:
        await x.reset()

    async with bench(in_turn(answers("a"), dies)) as b:
        await finish_one(b)
        _, delivery = b.send(2)

        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert len(b.engine.seen) == 3


async def test_b89_one_byte_of_an_answer_makes_the_loss_count() -> None:
    async def dies(x: Exchange) -> None:
        await x.raw(b"H")
        await trio.testing.wait_all_tasks_blocked(0.01)
        await x.reset()

    async with bench(in_turn(answers("a"), dies)) as b:
        await finish_one(b)
        _, delivery = b.send(2)

        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert len(b.engine.seen) == 2


async def test_b89_no_worker_behind_the_replacement_is_a_connect_fault() -> None:
    gate = trio.Event()

    async def dies(x: Exchange) -> None:
        await gate.wait()
        await x.reset()

    async with bench(in_turn(answers("a"), dies)) as b:
        await finish_one(b)
        _, delivery = b.send(2)
        await trio.testing.wait_all_tasks_blocked(0.01)
        b.engine.refuse = True
        gate.set()

        assert (await delivery.fault()).kind is FaultKind.CONNECT


async def test_b89_a_close_seen_while_idle_costs_nothing() -> None:
    async with bench() as b:
        b.engine.idle_close_s = 0.0
        for number in range(1, 6):
            await finish_one(b, number)
            await b.engine.seen[-1].wait_closed()

        assert b.worker._idle == []
        assert b.engine.accepted == 5


async def test_b89_requests_race_the_workers_idle_close_and_all_succeed() -> None:
    async with bench(slots=4) as b:
        b.engine.idle_close_s = 0.002
        for number in range(1, 101):
            _, delivery = b.send(number)
            await delivery.finish()
            # Around the instant of the close, now before and now after it.
            await trio.sleep(0.001 + number % 5 * 0.0005)

        assert len(b.engine.seen) >= 100


CLOSING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


def finishes_with(head: bytes, tail: bytes) -> Script:
    async def script(x: Exchange) -> None:
        body = (
            b'data: {"choices":[{"index":0,"delta":{"content":"a"},'
            b'"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        )
        await x.raw(
            head
            + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body)
            + tail
        )
        x.ended.set()

    return script


KEEPING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (CLOSING, b"0\r\n\r\n"),
        (KEEPING, b"0\r\n\r\nHTTP/1.1 200 OK\r\n"),
        (KEEPING, b"0\r\n\r\n\r\n"),
        (KEEPING, b"zz\r\n"),
    ],
    ids=["asked to close", "a second answer", "a byte too many", "a torn end"],
)
async def test_a_connection_with_a_doubtful_end_is_not_used_again(
    head: bytes, tail: bytes
) -> None:
    async with bench(finishes_with(head, tail)) as b:
        for number in (1, 2):
            await finish_one(b, number)
        assert b.worker._all == set()

        assert b.engine.accepted == 2


async def test_bytes_on_an_idle_connection_close_it() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await answers("a")(x)
        if x.nth == 1:
            await gate.wait()
            await x.raw(b"HTTP/1.1 408 Request Timeout\r\n\r\n")

    async with bench(script) as b:
        await finish_one(b)
        assert len(b.worker._idle) == 1
        gate.set()
        await b.engine.seen[0].wait_closed()

        assert b.worker._all == set()


async def test_a_closed_attempt_gives_no_connection_back() -> None:
    async with bench(in_turn(silent, answers("a"))) as b:
        source, _ = b.send()
        x = await b.engine.next_exchange()
        source.close()
        await x.wait_closed()

        await finish_one(b, 2)
        assert b.engine.accepted == 2


async def test_the_pool_keeps_no_more_than_one_connection_a_slot() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await gate.wait()
        await answers("a")(x)

    async with bench(script, settings={"slots": 2}) as b:
        sent = [b.send(number)[1] for number in range(1, 6)]
        for _ in sent:
            await b.engine.next_exchange()
        gate.set()
        for delivery in sent:
            await delivery.finish()
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert len(b.worker._idle) == 2
        assert len(b.worker._all) == 2


def test_b89_an_idle_connection_is_closed_before_the_worker_closes_it() -> None:
    # llama-server (by cpp-httplib) and uvicorn close theirs after 5 s. A request that
    # meets this close is sent twice, so ours comes first, the sweep included.
    assert direct.IDLE_MAX_S + direct.SWEEP_S < 5.0


async def test_an_idle_connection_is_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "IDLE_MAX_S", 0.01)
    monkeypatch.setattr(direct, "SWEEP_S", 0.01)
    async with bench() as b:
        await finish_one(b)
        with trio.fail_after(2):
            await b.engine.seen[0].wait_closed()

        assert b.worker._all == set()


async def test_an_idle_connection_that_is_too_old_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:
        await finish_one(b)
        monkeypatch.setattr(direct, "IDLE_MAX_S", 0.0)
        await finish_one(b, 2)

        assert b.engine.accepted == 2


async def test_a_worker_that_left_after_an_answer_is_a_connect_fault() -> None:
    async with bench() as b:
        await finish_one(b)
        b.engine.refuse = True
        await b.engine.cut()
        await trio.testing.wait_all_tasks_blocked(0.01)

        with pytest.raises(WorkerFailed) as raised:
            b.send(2)
    assert raised.value.fault.kind is FaultKind.CONNECT
