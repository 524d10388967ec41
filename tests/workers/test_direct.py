"""The direct worker on real sockets: a whole answer, and each way it can end."""

from typing import Any

import pytest
import trio

from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.messages import (
    Finished,
    FinishReason,
    GenerationParams,
    Kind,
    Trace,
    Usage,
)
from router.ports import SourcePhase
from router.settings import WaitSettings, WorkerSettings
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.direct import bench
from tests.kit.engine import Script, answers, in_turn, open_engine, silent
from tests.kit.exchange import Exchange
from workers import direct
from workers.direct import DirectWorker


async def test_a_whole_answer_comes_stamped_and_ends_explicitly() -> None:
    async with bench(answers("Hello", " world", usage=(3, 2))) as b:
        source, delivery = b.send()

        finished = await delivery.finish()

    assert finished == Finished(assignment(), FinishReason.STOP, Usage(3, 2))
    assert delivery.text == "Hello world"
    assert [d.index for d in delivery.taken] == [0, 1]
    assert {d.assignment for d in delivery.taken} == {assignment()}
    assert source.phase is SourcePhase.CLOSED
    assert b.bugs == []


async def test_f9_reasoning_and_tools_are_stamped_by_one_counter() -> None:
    async def script(x: Exchange) -> None:
        await x.reasoning("hm")
        await x.tool(0, "", call_id="c1", name="f")
        await x.tool(0, '{"a":1}')
        await x.finish("tool_calls")
        await x.done()
        await x.end()

    async with bench(script) as b:
        _, delivery = b.send()
        assert (await delivery.finish()).reason is FinishReason.TOOL_CALLS

    kinds = [(d.index, d.kind) for d in delivery.taken]
    assert kinds == [(0, Kind.REASONING), (1, Kind.TOOL_CALL), (2, Kind.TOOL_CALL)]


async def test_a1_the_head_is_the_acceptance_and_deltas_follow_it() -> None:
    async with bench() as b:
        _, delivery = b.send()
        await delivery.ended()

    assert delivery.names[0] == "accepted"
    assert delivery.names[-1] == "finished"
    assert set(delivery.names[1:-1]) == {"deltas"}


async def test_a_url_may_end_in_v1() -> None:
    async with open_engine() as engine:
        worker = DirectWorker(
            WorkerSettings(name="w", url=f"{engine.url}/v1"),
            WaitSettings(),
            environ={},
            report_bug=lambda _where, _bug: None,
        )
        async with served(worker):
            delivery = RecordingDelivery()
            worker.open(assignment(), JOB, delivery)
            await delivery.ended()

    assert engine.seen[0].path == "/v1/chat/completions"


async def test_h3_only_the_allowed_headers_reach_the_worker() -> None:
    settings = {"api_key_env": "KEY"}
    async with bench(settings=settings) as b:
        _, delivery = b.send()
        await delivery.ended()

        x = b.engine.seen[0]
    assert x.headers == {
        "host": f"127.0.0.1:{b.engine.port}",
        "content-type": "application/json",
        "accept": "text/event-stream",
        "authorization": "Bearer sk-1",
        "x-request-id": "r1/1",
        "content-length": str(len(x.content)),
    }


async def test_x4_a_trace_goes_to_the_worker_and_a_torn_one_does_not() -> None:
    torn = "00\r\nevil: 1"
    traces = [Trace("00-a-b-01", "k=v"), Trace("00-a-b-01", torn), Trace(torn, "k=v")]
    async with bench() as b:
        for trace in (*traces, None):
            _, delivery = b.send(trace=trace)
            await delivery.ended()

    found = [
        (x.headers.get("traceparent"), x.headers.get("tracestate"))
        for x in b.engine.seen
    ]
    assert found == [
        ("00-a-b-01", "k=v"),
        ("00-a-b-01", None),
        (None, None),
        (None, None),
    ]
    assert all("evil" not in x.headers for x in b.engine.seen)


async def test_the_body_always_asks_for_a_stream_with_usage() -> None:
    async with bench() as b:
        _, delivery = b.send(params=GenerationParams(max_tokens=7))
        await delivery.ended()

        body = b.engine.seen[0].body
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 7
    assert body["messages"] == [{"role": "user", "content": "Hi"}]


# ---- phases ----


async def test_phases_follow_each_other_and_each_end_is_told() -> None:
    seen: list[SourcePhase] = []
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.head()
        await gate.wait()
        await x.text("a")
        await x.finish()
        await x.usage(1, 1)

    async with bench(script) as b:
        source, delivery = b.send(hook=lambda _name: seen.append(source.phase))
        await delivery.until("accepted")
        await delivery.reach(source, SourcePhase.STREAMING)
        gate.set()
        await delivery.until("deltas")
        await delivery.reach(source, SourcePhase.FINISHING)

        source.finish_now()
        assert source.phase is SourcePhase.CLOSED
        assert (await delivery.finish()).usage == Usage(1, 1)

    order = list(SourcePhase)
    assert seen == sorted(seen, key=order.index)


async def test_m3_usage_after_the_finish_is_waited_for() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.finish()
        await gate.wait()
        await x.usage(5, 6)
        await x.done()
        await x.end()

    async with bench(script) as b:
        source, delivery = b.send()
        await delivery.reach(source, SourcePhase.FINISHING)
        assert delivery.end is None

        gate.set()
        assert (await delivery.finish()).usage == Usage(5, 6)


async def test_finish_now_before_the_finish_reason_changes_nothing() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await gate.wait()
        await x.finish()
        await x.end()

    async with bench(script) as b:
        source, delivery = b.send()
        await delivery.until("deltas")
        source.finish_now()
        assert delivery.end is None
        gate.set()

        await delivery.finish()


async def test_finished_does_not_wait_for_the_end_of_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert direct.LINGER_MAX_S + direct.SWEEP_S <= 1.0
    monkeypatch.setattr(direct, "LINGER_MAX_S", 0.02)
    monkeypatch.setattr(direct, "SWEEP_S", 0.01)

    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.finish()
        await x.done()
        await x.wait_closed()

    async with bench(script) as b:
        _, delivery = b.send()
        await delivery.finish()
        assert len(b.worker._all) == 1

        # Its end never comes: the worker itself closes it.
        with trio.fail_after(3):
            await b.engine.seen[0].wait_closed()
        assert b.worker._all == set()


async def test_a_tail_that_comes_late_gives_the_connection_back() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.finish()
        await x.done()
        if x.nth == 1:
            await gate.wait()
        await x.end()

    async with bench(script) as b:
        _, delivery = b.send()
        await delivery.finish()
        assert b.worker._idle == []
        gate.set()
        await b.engine.seen[0].ended.wait()
        await trio.testing.wait_all_tasks_blocked(0.005)
        assert len(b.worker._idle) == 1

        _, delivery = b.send(2)
        await delivery.finish()
        assert b.engine.accepted == 1


# ---- ends that are failures ----


async def fails(script: Script, **engine: Any) -> tuple[Fault, RecordingDelivery]:
    async with bench(script, **engine) as b:
        source, delivery = b.send()
        fault = await delivery.fault()
        assert source.phase is SourcePhase.CLOSED
        assert b.bugs == []
    return fault, delivery


def parts(*names: str) -> Script:
    """Make a script of parameterless steps."""

    async def script(x: Exchange) -> None:
        for name in names:
            if name == "text":
                await x.text("a")
            else:
                await getattr(x, name)()

    return script


@pytest.mark.parametrize(
    "steps",
    [
        ("fin",),
        ("reset",),
        ("head", "fin"),
        ("head", "reset"),
        ("head", "end"),
        ("role", "end"),
        ("role", "done", "end"),
        ("text", "fin"),
        ("text", "reset"),
        ("text", "end"),
        ("text", "done", "end"),
    ],
)
async def test_f7_an_end_without_a_finish_reason_is_no_success(
    steps: tuple[str, ...],
) -> None:
    fault, delivery = await fails(parts(*steps))

    assert fault.kind is FaultKind.STREAM_CLOSED_EARLY
    if "reset" not in steps:
        assert delivery.text == ("a" if "text" in steps else "")


@pytest.mark.parametrize("ending", ["fin", "reset", "end"])
@pytest.mark.parametrize("usage", [True, False])
async def test_a6_a_body_cut_after_the_finish_reason_is_a_success(
    ending: str, usage: bool
) -> None:
    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.finish()
        if usage:
            await x.usage(1, 1)
        await x.raw(b"" if ending == "end" else b"ff\r\ndata: {")
        # A reset at once would take the bytes before it along.
        await trio.testing.wait_all_tasks_blocked(0.01)
        await getattr(x, ending)()

    async with bench(script) as b:
        _, delivery = b.send()
        finished = await delivery.finish()

    assert finished.usage == (Usage(1, 1) if usage else None)
    assert delivery.text == "a"


async def test_a6_a_close_delimited_answer_is_whole_by_its_finish_reason() -> None:
    async def script(x: Exchange) -> None:
        await x.head(chunked=False)
        await x.text("a")
        await x.finish()
        await x.fin()

    async with bench(script) as b:
        _, delivery = b.send()
        await delivery.finish()
        assert b.worker._all == set()


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_a6_finish_reasons_of_a_failing_engine_are_failures(reason: str) -> None:
    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.finish(reason)

    fault, delivery = await fails(script)
    assert fault.kind is FaultKind.ENGINE_ABORT
    assert delivery.text == "a"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, FaultKind.REJECTED),
        (404, FaultKind.REJECTED),
        (401, FaultKind.UNAUTHORIZED),
        (429, FaultKind.DECLINED),
        (500, FaultKind.SERVER_ERROR),
        (503, FaultKind.DECLINED),
        (529, FaultKind.DECLINED),
        (302, FaultKind.PROTOCOL),
    ],
)
async def test_a4_each_status_has_its_fault_and_the_connection_lives_on(
    status: int, kind: FaultKind
) -> None:
    async def script(x: Exchange) -> None:
        await x.json(status, {"error": {"message": "no"}}, {"Retry-After": "7"})

    async with bench(script) as b:
        _, delivery = b.send()
        fault = await delivery.fault()
        assert (fault.kind, fault.status) == (kind, status)
        assert "accepted" not in delivery.names
        if kind is FaultKind.DECLINED:
            assert fault.retry_after == 7

        _, second = b.send(2)
        await second.fault()
        assert b.engine.accepted == 1


async def test_a3_loading_is_told_apart() -> None:
    async def script(x: Exchange) -> None:
        await x.json(503, {"error": {"message": "Loading model", "code": 503}})

    fault, _ = await fails(script)
    assert fault.kind is FaultKind.LOADING


async def test_w7_an_error_body_is_cut_at_64_kib_and_keeps_its_status() -> None:
    async def script(x: Exchange) -> None:
        await x.head(500, {"Content-Type": "text/plain"})
        while True:
            await x.data(b"x" * 8192)

    fault, _ = await fails(script)
    assert fault.status == 500
    assert len(fault.body) == 64 * 1024


async def test_w7_an_error_body_that_is_cut_off_keeps_its_status() -> None:
    async def script(x: Exchange) -> None:
        await x.head(503, {"Content-Length": "1000"}, chunked=False)
        await x.raw(b'{"error":')
        await x.fin()

    fault, _ = await fails(script)
    assert (fault.kind, fault.status) == (FaultKind.DECLINED, 503)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (503, FaultKind.DECLINED),
        (500, FaultKind.SERVER_ERROR),
        (400, FaultKind.REJECTED),
    ],
)
async def test_a2_an_error_frame_under_200_is_what_its_code_says(
    code: int, kind: FaultKind
) -> None:
    async def script(x: Exchange) -> None:
        await x.chunk({"error": {"message": "no", "code": code}})
        await x.done()
        await x.end()

    fault, delivery = await fails(script)
    assert fault.kind is kind
    assert delivery.taken == []


async def test_deltas_before_an_error_frame_in_one_read_come_first() -> None:
    async def script(x: Exchange) -> None:
        await x.head()
        await x.data(
            b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
            b'data: {"error":{"message":"no","code":503}}\n\n'
        )

    _, delivery = await fails(script)
    assert delivery.names == ["accepted", "deltas", "failed"]


async def test_the_old_error_line_of_llama_server_is_seen() -> None:
    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.data(b'error: {"code":500,"message":"no"}\n\n')
        await x.done()
        await x.end()

    fault, _ = await fails(script)
    assert fault.kind is FaultKind.SERVER_ERROR


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ({"error": {"message": "busy", "code": 503}}, FaultKind.DECLINED),
        ({"error": {"message": "bad", "code": 400}}, FaultKind.REJECTED),
        ({"choices": [{"message": {"content": "Hi"}}]}, FaultKind.PROTOCOL),
        ("hello", FaultKind.PROTOCOL),
    ],
)
async def test_a_plain_reply_under_200_is_an_error_or_a_breach(
    reply: object, kind: FaultKind
) -> None:
    async def script(x: Exchange) -> None:
        await x.json(200, reply)

    fault, delivery = await fails(script)
    assert fault.kind is kind
    assert delivery.names == ["failed"]


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
GARBAGE = [
    b"SSH-2.0-OpenSSH_9\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"y" * 40_000,
    STREAM + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    STREAM + b"\r\ndata: " + b"x" * (1024 * 1024 + 10),
    STREAM + b"\r\ndata: nope\n\n",
]


@pytest.mark.parametrize("octets", GARBAGE, ids=range(len(GARBAGE)))
async def test_w7_bytes_that_break_a_protocol_are_a_breach(octets: bytes) -> None:
    async def script(x: Exchange) -> None:
        await x.raw(octets)

    fault, _ = await fails(script)
    assert fault.kind is FaultKind.PROTOCOL


# ---- connecting ----


async def test_w7_a_refused_connect_is_a_connect_fault() -> None:
    async with bench() as b:
        b.engine.refuse = True
        with pytest.raises(WorkerFailed) as raised:
            b.send()

    assert raised.value.fault.kind is FaultKind.CONNECT


async def test_a_worker_that_is_not_served_opens_nothing() -> None:
    worker = DirectWorker(
        WorkerSettings(name="w", url="http://127.0.0.1:9"),
        WaitSettings(),
        report_bug=lambda _where, _bug: None,
    )
    with pytest.raises(WorkerFailed) as raised:
        worker.open(assignment(), JOB, RecordingDelivery())

    assert raised.value.fault.kind is FaultKind.CONNECT


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "http://",
        "http://a b",
        "http://u:p@a",
        "http://a/?q=1",
        "http://a/\r\nx: y",
        "nonsense",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a worker's URL"):
        DirectWorker(
            WorkerSettings(name="w", url=url),
            WaitSettings(),
            report_bug=lambda _where, _bug: None,
        )


def test_a_key_that_would_break_the_head_is_refused_unseen() -> None:
    with pytest.raises(ValueError, match="KEY") as raised:
        DirectWorker(
            WorkerSettings(name="w", url="http://a", api_key_env="KEY"),
            WaitSettings(),
            environ={"KEY": "sk\r\nevil: 1"},
            report_bug=lambda _where, _bug: None,
        )
    assert "evil" not in str(raised.value)


async def test_a_request_id_that_would_break_the_head_is_our_bug() -> None:
    async with bench() as b:
        broken = assignment()._replace(request="r\r\nx: y")  # type: ignore[arg-type]
        with pytest.raises(LocalError):
            b.worker.open(broken, JOB, RecordingDelivery())


async def test_requests_of_one_worker_run_side_by_side() -> None:
    async with bench(silent, slots=8) as b:
        sources = [b.send(number)[0] for number in range(1, 6)]
        for _ in sources:
            await b.engine.next_exchange()
        assert b.engine.live == 5

        for source in sources:
            source.close()
        for x in b.engine.seen:
            await x.wait_closed()


async def test_an_answer_of_one_connection_never_reaches_another() -> None:
    async def script(x: Exchange) -> None:
        mark = x.headers["x-request-id"]
        for n in range(20):
            await x.text(f"{mark}:{n} ")
            await trio.lowlevel.checkpoint()
        await x.finish()
        await x.done()
        await x.end()

    async with bench(script) as b:
        sent = [b.send(number) for number in range(1, 11)]
        for _, delivery in sent:
            await delivery.finish()

    for number, (_, delivery) in enumerate(sent, 1):
        assert delivery.text == "".join(f"r{number}/1:{n} " for n in range(20))


async def test_a_vllm_head_accepts_nothing_until_a_frame_has_come() -> None:
    gate = trio.Event()

    async def script(x: Exchange) -> None:
        await x.head()
        await x.data(b": ping\n\n")
        await gate.wait()
        await answers("a")(x)

    settings = {"engine": "vllm"}
    async with bench(script, settings=settings, kind="vllm") as b:
        source, delivery = b.send()
        await b.engine.next_exchange()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert source.phase is SourcePhase.AWAITING_HEAD
        assert source.partial_head is False
        assert delivery.names == []

        gate.set()
        await delivery.finish()
    assert delivery.names[0] == "accepted"


async def test_w2_part_of_a_head_shows() -> None:
    async def script(x: Exchange) -> None:
        await x.raw(b"HTTP/1.1 200 OK\r\nContent-")
        await x.wait_closed()

    async with bench(in_turn(script)) as b:
        source, _ = b.send()
        before = source.last_byte_at
        await b.engine.next_exchange()
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert source.partial_head is True
        assert source.phase is SourcePhase.AWAITING_HEAD
        assert source.last_byte_at >= before
        source.close()
