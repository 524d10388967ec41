"""However a worker cuts its bytes, the same deltas come out."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
import trio.testing

from router.errors import FaultKind
from router.messages import GenerationParams, Job
from router.ports import SourcePhase
from tests.kit.delivery import JOB, RecordingDelivery
from tests.kit.direct import bench
from tests.kit.engine import Script, refuses
from tests.kit.exchange import Exchange

TEXTS = ["Grüße", " 日本", "\u2028", " \U0001f600\U0001f468\u200d", "end"]


def frames(texts: Sequence[str] = TEXTS, newline: str = "\n") -> bytes:
    """A whole stream's body: LF, CRLF or CR, characters unescaped."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    lines = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
    return "".join(
        f"data: {line}{newline}{newline}" for line in [*lines, "[DONE]"]
    ).encode()


def sends(pieces: Sequence[bytes]) -> Script:
    """Send each piece as one HTTP chunk in a segment of its own."""

    async def script(x: Exchange) -> None:
        await x.head()
        for piece in pieces:
            await x.data(piece)
            # A write of its own, so most likely a read of its own.
            await trio.lowlevel.checkpoint()
        await x.end()

    return script


async def answer(script: Script) -> RecordingDelivery:
    async with bench(script) as b:
        _, delivery = b.send()
        await delivery.finish()
        assert b.bugs == []
    return delivery


async def test_f9_one_byte_a_write_gives_the_same_deltas() -> None:
    async def script(x: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        whole = head + b"Transfer-Encoding: chunked\r\n\r\n"
        for octet in frames():
            whole += b"1\r\n" + bytes([octet]) + b"\r\n"
        whole += b"0\r\n\r\n"
        for place in range(len(whole)):
            await x.raw(whole[place : place + 1])
            await trio.lowlevel.checkpoint()

    delivery = await answer(script)

    assert [d.text for d in delivery.taken] == TEXTS
    assert [d.index for d in delivery.taken] == list(range(len(TEXTS)))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
async def test_every_line_end_gives_the_same_deltas(newline: str) -> None:
    delivery = await answer(sends([frames(newline=newline)]))

    assert [d.text for d in delivery.taken] == TEXTS


async def test_b39_a_line_separator_in_text_cuts_nothing() -> None:
    delivery = await answer(sends([frames(["a\u2028b\u2029c\x85d"])]))

    assert delivery.text == "a\u2028b\u2029c\x85d"


async def test_b17_deltas_packed_and_split_come_out_whole() -> None:
    body = frames()
    cuts = [0, 3, 40, 41, 90, 200, len(body)]
    pieces = [body[a:b] for a, b in pairwise(cuts)]

    assert (await answer(sends(pieces))).text == "".join(TEXTS)


async def test_p7_deltas_that_come_together_are_handed_over_together() -> None:
    delivery = await answer(sends([frames([f"{n} " for n in range(50)])]))

    assert delivery.names == ["accepted", "deltas", "finished"]
    assert len(delivery.taken) == 50


async def test_comments_are_progress_and_no_deltas() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await gate.wait()
        await x.data(b":\n\n")
        await x.wait_closed()

    async with bench(script) as b:
        source, delivery = b.send()
        await delivery.until("deltas")
        before = source.last_byte_at
        gate.set()
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert source.last_byte_at > before
        assert len(delivery.taken) == 1
        source.close()


# ---- the way out ----


def big_job(mebibytes: int = 8) -> Job:
    text = "x" * (mebibytes * 1024 * 1024)
    return Job(
        model="m",
        target="m",
        messages=({"role": "user", "content": text},),
        params=GenerationParams(max_tokens=1),
    )


async def test_a_large_body_goes_out_as_the_worker_takes_it() -> None:
    job = big_job()
    async with bench() as b:
        b.engine.read_limit = 1000
        source, delivery = b.send(messages=job.messages)
        await delivery.reach(source, SourcePhase.SENDING)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert source.phase is SourcePhase.SENDING
        before = source.last_byte_at

        b.engine.read_limit = None
        await delivery.finish()
        assert source.last_byte_at > before
        x = b.engine.seen[0]
    assert x.body["messages"] == list(job.messages)
    assert delivery.text == "Hello world"


async def test_w6_an_answer_before_the_body_is_sent_is_read() -> None:
    async with bench(refuses(413, {"error": {"message": "too large"}})) as b:
        b.engine.before_body = True
        b.engine.read_limit = 1000
        source, delivery = b.send(messages=big_job().messages)

        fault = await delivery.fault()

        assert (fault.kind, fault.status) == (FaultKind.REJECTED, 413)
        assert source.phase is SourcePhase.CLOSED
        # The rest of its body is still to be sent: not a connection to keep.
        assert b.worker._all == set()


async def test_an_answer_behind_a_closed_door_is_read() -> None:
    async def script(x: Exchange) -> None:
        await x.json(413, {"error": {"message": "too large"}})
        await x.fin()

    async with bench(script) as b:
        b.engine.before_body = True
        b.engine.read_limit = 1000
        _, delivery = b.send(messages=big_job().messages)

        assert (await delivery.fault()).status == 413


async def test_a_worker_that_resets_while_we_send_ends_the_attempt() -> None:
    async def script(x: Exchange) -> None:
        await x.reset()

    async with bench(script) as b:
        b.engine.before_body = True
        b.engine.read_limit = 1000
        _, delivery = b.send(messages=big_job().messages)

        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY


async def test_the_job_is_not_changed_by_its_attempts() -> None:
    async with bench() as b:
        for number in (1, 2):
            _, delivery = b.send(number)
            await delivery.finish()
        first, second = b.engine.seen

    assert first.content == second.content
    assert JOB.messages == ({"role": "user", "content": "Hi"},)
