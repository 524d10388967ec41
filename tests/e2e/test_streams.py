"""What a client sees of good and of broken workers, over real sockets."""

import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import trio

from router.ids import RequestId
from router.lifecycle import State
from router.settings import RouterSettings, WaitSettings
from tests.kit.edge import RawClient, chat, events, request, until
from tests.kit.engine import Script, answers, refuses
from tests.kit.exchange import Exchange
from tests.kit.stack import Stack, open_stack

#: Line separators of Unicode that are none in SSE, an emoji, CR and LF.
HARD = "a\u2028b\u0085c\u2029d 北京🙂é \r\n end"


async def stream(stack: Stack, **fields: Any) -> tuple[int, list[bytes], bool]:
    """Ask for a stream; give status, events, and whether its end was whole."""
    client = await stack.edge.connect()
    await client.send(chat(**fields))
    head = await client.until(b"\r\n\r\n")
    status = int(head.split()[1])
    if b"content-length" in head.lower():
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(client.got) < length:
            client.got += await client.read()
        return status, [client.got], True
    body, whole = await until_end(client)
    frames = b"".join(events(body)).split(b"\n\n")
    return status, [f.removeprefix(b"data: ") for f in frames if f], whole


async def until_end(client: RawClient) -> tuple[bytes, bool]:
    """Read a chunked body: to its zero chunk, or to the FIN without one."""
    while not client.got.endswith(b"\r\n0\r\n\r\n"):
        more = await client.read()
        if not more:
            return client.got, False
        client.got += more
    return client.got, True


def texts(frames: Sequence[bytes]) -> str:
    said = ""
    for frame in frames:
        if frame == b"[DONE]":
            continue
        for choice in json.loads(frame).get("choices", ()):
            said += choice["delta"].get("content") or ""
    return said


def roles(frames: Sequence[bytes]) -> int:
    return sum(b'"role"' in frame for frame in frames)


async def test_f1_a_whole_answer_arrives_once_in_order() -> None:
    async with open_stack(answers("Hel", "lo", usage=(3, 2))) as stack:
        status, frames, whole = await stream(
            stack, stream_options={"include_usage": True}
        )

        assert (status, texts(frames), whole) == (200, "Hello", True)
        assert roles(frames) == 1
        assert frames[-1] == b"[DONE]"
        usage = json.loads(frames[-2])
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2
        await stack.settle()


async def test_b32_a_role_chunk_and_a_death_leave_no_trace() -> None:
    async def dies(x: Exchange) -> None:
        await x.role()
        await x.reset()

    async with open_stack(dies, answers("whole", " answer")) as stack:
        status, frames, whole = await stream(stack)

        assert (status, texts(frames), whole) == (200, "whole answer", True)
        assert roles(frames) == 1
        assert len(stack.engines[0].seen) == len(stack.engines[1].seen) == 1
        await stack.settle()


@pytest.mark.parametrize("how", ["reset", "fin", "clean_end", "done_only", "abort"])
async def test_a5_a_death_after_text_is_an_error_frame_and_an_unclean_end(
    how: str,
) -> None:
    async def dies(x: Exchange) -> None:
        await x.role()
        await x.text("some", " text")
        match how:
            case "reset":
                await x.reset()
            case "fin":
                await x.fin()
            case "clean_end":
                await x.end()
            case "done_only":
                await x.done()
                await x.end()
            case _:
                await x.finish("abort")
                await x.done()
                await x.end()

    async with open_stack(dies, answers("never seen")) as stack:
        status, frames, whole = await stream(stack)

        assert (status, texts(frames[:-1]), whole) == (200, "some text", False)
        error = json.loads(frames[-1])["error"]
        assert error["code"] == "worker_lost"
        assert b"[DONE]" not in frames
        assert stack.engines[1].seen == []
        await stack.settle()


@pytest.mark.parametrize(
    "frame",
    [
        {"error": {"message": "queue is full", "code": 503, "type": "x"}},
        {"object": "error", "message": "queue is full", "code": 503},
        {"detail": "overloaded", "code": 503},
    ],
)
async def test_b47_an_error_as_first_frame_under_200_fails_over(
    frame: dict[str, Any],
) -> None:
    async def refuses_in_band(x: Exchange) -> None:
        await x.chunk(frame)
        await x.done()
        await x.end()

    async with open_stack(refuses_in_band, answers("ok")) as stack:
        status, frames, whole = await stream(stack)

        assert (status, texts(frames), whole) == (200, "ok", True)
        await stack.settle()


@pytest.mark.parametrize("framing", ["byte by byte", "crlf", "no space", "comments"])
async def test_b34_hard_text_is_the_same_text_however_it_is_framed(
    framing: str,
) -> None:
    async def says(x: Exchange) -> None:
        await x.role()
        frame = {"choices": [{"index": 0, "delta": {"content": HARD}}]}
        line = json.dumps(frame, ensure_ascii=False).encode()
        match framing:
            case "byte by byte":
                whole = b"data: " + line + b"\n\n"
                for n in range(len(whole)):
                    await x.data(whole[n : n + 1])
            case "crlf":
                await x.data(b"data: " + line + b"\r\n\r\n")
            case "no space":
                await x.data(b"data:" + line + b"\n\n")
            case _:
                await x.data(b": hi\n\n:\ndata: " + line + b"\n: there\n\n: x\n\n")
        await x.finish()
        await x.done()
        await x.end()

    async with open_stack(says) as stack:
        status, frames, whole = await stream(stack)

        assert (status, texts(frames), whole) == (200, HARD, True)


async def test_a4_a_400_is_passed_through_and_not_retried() -> None:
    body = {"error": {"message": "no such tool", "type": "t", "param": "tools"}}
    async with open_stack(refuses(400, body), answers("no")) as stack:
        status, frames, _ = await stream(stack)

        assert status == 400
        error = json.loads(frames[0])["error"]
        assert (error["message"], error["param"]) == ("no such tool", "tools")
        assert stack.engines[1].seen == []


async def test_a2_every_worker_full_is_a_503_with_a_retry_after() -> None:
    body = {"error": {"message": "full", "code": 503}}
    async with open_stack(refuses(503, body), refuses(503, body)) as stack:
        client = await stack.edge.connect()
        await client.send(chat())
        reply = await client.reply()

        assert reply.status == 503
        assert reply.json["error"]["code"] == "no_worker_available"
        assert len(stack.engines[0].seen) == len(stack.engines[1].seen) == 1


@pytest.mark.parametrize("seconds", ["0", "0.2", "1"])
async def test_s4_a_line_waits_out_a_short_rest_of_every_worker(seconds: str) -> None:
    lined_up = trio.Event()

    def once() -> Script:
        asked: list[Exchange] = []

        async def says(x: Exchange) -> None:
            asked.append(x)
            if len(asked) > 1:
                await x.text("ok")
                await x.finish()
                await x.done()
                await x.end()
                return
            await lined_up.wait()
            body = {"error": {"message": "busy"}}
            await x.json(503, body, {"Retry-After": seconds})

        return says

    statuses: list[int] = []
    async with open_stack(once(), once(), slots=1) as stack:

        async def ask() -> None:
            statuses.append((await stream(stack))[0])

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ask)
            await until(lambda: len(stack.router.fleet.room) == 8)
            lined_up.set()

        assert statuses == [200] * 10
        await stack.settle()


async def test_a5_a_reply_that_broke_off_starts_over_elsewhere() -> None:
    async def half(x: Exchange) -> None:
        await x.text("half an ans")
        await x.reset()

    async with open_stack(half, answers("whole")) as stack:
        client = await stack.edge.connect()
        await client.send(chat(stream=False))
        reply = await client.reply()

        assert reply.status == 200
        assert reply.json["choices"][0]["message"]["content"] == "whole"
        await stack.settle()


async def test_b12_failover_works_after_our_own_head_and_keepalives() -> None:
    async def stalls(x: Exchange) -> None:
        await x.role()
        await x.wait_closed()

    async with open_stack(
        stalls,
        answers("ok"),
        router=RouterSettings(commit_after_ms=100, keepalive_ms=100),
        waits=WaitSettings(liveness_ms=600),
    ) as stack:
        client = await stack.edge.connect()
        await client.send(chat())
        await client.until(b"\r\n\r\n")
        body, whole = await until_end(client)

        assert whole
        assert body.count(b": ka\n\r\n") >= 2
        assert body.count(b'"role"') == 1
        assert b'"content":"ok"' in body


async def test_b89_a_worker_that_closes_idle_connections_costs_nobody_anything() -> (
    None
):
    async with open_stack(answers("ok")) as stack:
        (engine,) = stack.engines
        engine.idle_close_s = 0.0
        for _ in range(100):
            client = await stack.edge.connect()
            await client.send(chat(stream=False))
            assert (await client.reply()).status == 200
            client.close()

        assert stack.router.tally.failovers == {}
        assert len(engine.seen) >= 100


async def test_h3_nothing_of_the_clients_head_reaches_a_worker() -> None:
    canaries = {
        "Authorization": "Bearer canary-1",
        "X-Api-Key": "canary-2",
        "Cookie": "canary-3",
        "X-Conversation-Id": "canary-4",
        "X-Custom": "canary-5",
        "Accept-Encoding": "canary-6",
    }
    async with open_stack(answers("ok")) as stack:
        client = await stack.edge.connect()
        await client.send(chat(stream=False, headers=canaries))
        assert (await client.reply()).status == 200

        head = stack.engines[0].seen[0].request_head
        assert b"canary" not in head
        assert set(stack.engines[0].seen[0].headers) <= {
            "host",
            "content-type",
            "content-length",
            "accept",
            "x-request-id",
        }


async def test_b17_fifty_streams_at_once_keep_their_own_text() -> None:
    async def echoes(x: Exchange) -> None:
        name = x.body["messages"][0]["content"]
        for n in range(20):
            await x.text(f"{name}-{n};")
        await x.finish()
        await x.done()
        await x.end()

    async def ask(name: str) -> None:
        _, frames, whole = await stream(
            stack, messages=[{"role": "user", "content": name}]
        )
        assert whole
        assert texts(frames) == "".join(f"{name}-{n};" for n in range(20))

    async with open_stack(echoes, echoes, slots=8) as stack:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, f"client{number}")
        await stack.settle()
        await until(lambda: all(engine.live == 0 for engine in stack.engines))


async def text_without_end(x: Exchange) -> None:
    await x.text("x" * 1_000)


async def nothing_without_end(x: Exchange) -> None:
    await x.tool(0, "x")


CALLS = itertools.count()


async def names_without_end(x: Exchange) -> None:
    await x.tool(next(CALLS), call_id="c" * 1_000, name="f" * 1_000)


async def logprobs_without_end(x: Exchange) -> None:
    said = {"index": 0, "delta": {"content": "x"}}
    await x.chunk({"choices": [{**said, "logprobs": {"content": ["x" * 1_000]}}]})


@pytest.mark.parametrize(
    "say",
    [text_without_end, nothing_without_end, names_without_end, logprobs_without_end],
)
async def test_h5_a_reply_that_is_gathered_whole_has_a_bound(
    say: Callable[[Exchange], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gathered.WHOLE_MAX", 100_000)

    async def never_ends(x: Exchange) -> None:
        await x.role()
        while True:
            await say(x)

    async with open_stack(never_ends) as stack:
        client = await stack.edge.connect()
        await client.send(chat(stream=False))
        reply = await client.reply()

        assert reply.status == 502
        assert reply.json["error"]["code"] == "worker_lost"
        with trio.fail_after(1):
            await stack.engines[0].seen[0].closed.wait()
        await stack.settle()


#: Good in both dialects.
ASKED = {
    "model": "m",
    "stream": True,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
}


@pytest.mark.parametrize("behind", ["end", "deltas", "error"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_b42_a_line_of_a_mib_passes_with_all_that_came_behind_it(
    path: str, behind: str
) -> None:
    def event(text: str) -> bytes:
        frame = {"choices": [{"index": 0, "delta": {"content": text}}]}
        return b"data: " + json.dumps(frame).encode() + b"\n\n"

    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    small = event("z") * 600 if behind == "deltas" else b""
    last = b'data: {"error":{"message":"bad","code":500}}\n\n'
    if behind != "error":
        last = end + b"data: [DONE]\n\n"
    # The longest line there may be.
    size = 1024 * 1024 - len(event("")) + len("\n\n")

    async def says(x: Exchange) -> None:
        await x.head()
        await x.data(event("y" * size) + small + last)
        await x.end()

    async with open_stack(says) as stack:
        client = await stack.edge.connect()
        await client.send(request("POST", path, json.dumps(ASKED).encode()))
        got = await client.until(b"\r\n\r\n")
        assert got.split()[1] == b"200"
        while not client.got.endswith(b"\r\n0\r\n\r\n"):
            more = await client.read()
            if not more:
                break
            client.got += more
        whole = client.got.endswith(b"\r\n0\r\n\r\n")
        await stack.settle()

    assert client.got.count(b"y") >= size
    assert client.got.count(b'"z"') == (600 if small else 0)
    assert whole is (behind != "error")
    assert (b'"error"' in client.got) is (behind == "error")
    assert not stack.router.tally.disconnects


both_dialects = pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages"]
)


async def asked(stack: Stack, path: str, model: str = "m") -> RawClient:
    """Ask for a stream in either dialect."""
    client = await stack.edge.connect()
    body = json.dumps({**ASKED, "model": model}).encode()
    await client.send(request("POST", path, body))
    return client


def code(path: str, body: Any) -> str:
    """What a program of that dialect looks at."""
    return str(body["error"]["type" if path == "/v1/messages" else "code"])


@both_dialects
async def test_b28_all_suspect_all_full_and_unknown_are_three_answers(
    path: str,
) -> None:
    reset = False

    async def script(x: Exchange) -> None:
        if reset:
            await x.reset()
        else:
            await x.wait_closed()

    settings = RouterSettings(queue_limit=1, suspect_after=1)
    async with open_stack(script, script, slots=1, router=settings) as stack:
        unknown = await (await asked(stack, path, "nobody's")).reply()
        runs = [await asked(stack, path) for _ in range(2)]
        await until(lambda: sum(engine.live for engine in stack.engines) == 2)
        runs.append(await asked(stack, path))
        await until(lambda: len(stack.router.fleet.room) == 1)
        full = await (await asked(stack, path)).reply()
        for client in runs:
            client.close()
        await stack.settle()
        reset = True
        lost = await (await asked(stack, path)).reply()
        for member in stack.router.fleet.members.values():
            assert member.life.state is State.SUSPECT
            member.rest_until = trio.current_time() + 20.0
        suspect = await (await asked(stack, path)).reply()

    replies = [unknown, full, lost, suspect]
    told = [(reply.status, code(path, reply.json)) for reply in replies]
    if path == "/v1/messages":
        assert told == [
            (404, "not_found_error"),
            (529, "overloaded_error"),
            (500, "api_error"),
            (529, "overloaded_error"),
        ]
        assert full.json["error"]["message"] != suspect.json["error"]["message"]
    else:
        assert told == [
            (404, "model_not_found"),
            (429, "queue_full"),
            (502, "worker_lost"),
            (503, "no_worker_available"),
        ]
    assert "retry-after" not in unknown.headers
    assert int(full.headers["retry-after"]) >= 1
    assert 1 < int(suspect.headers["retry-after"]) <= 20


async def test_b14_a_400_behind_a_stall_reaches_the_client_as_it_is() -> None:
    async def stalls(x: Exchange) -> None:
        await x.role()
        await x.wait_closed()

    body = {"error": {"message": "no prefill", "type": "t", "param": "p", "code": "c"}}
    async with open_stack(
        stalls, refuses(400, body), waits=WaitSettings(liveness_ms=300)
    ) as stack:
        client = await stack.edge.connect()
        await client.send(chat())
        reply = await client.reply()

        assert (reply.status, reply.json) == (400, body)
        first, second = (engine.seen[0].body for engine in stack.engines)
        assert first == second
        await stack.settle()
        receipt = stack.router.receipt(RequestId(reply.headers["x-request-id"]))

    assert receipt is not None
    attempts = receipt["attempts"]
    assert isinstance(attempts, Sequence)
    assert [(a["worker"], a["fault"]) for a in attempts] == [
        ("w0", "stalled"),
        ("w1", "rejected"),
    ]


@both_dialects
@pytest.mark.parametrize("status", [400, 500])
async def test_b32_a_refusal_behind_our_own_head_is_one_frame_and_an_unclean_end(
    path: str, status: int
) -> None:
    head_is_out = trio.Event()

    async def refuses_late(x: Exchange) -> None:
        await head_is_out.wait()
        await x.json(status, {"error": {"message": "no such tool", "type": "t"}})

    settings = RouterSettings(commit_after_ms=50)
    async with open_stack(refuses_late, router=settings) as stack:
        client = await asked(stack, path)
        head = await client.until(b"\r\n\r\n")
        head_is_out.set()
        body, whole = await until_end(client)
        await stack.settle()

    assert head.split()[1] == b"200"
    assert not whole
    assert body.count(b'"error":{') == body.count(b"no such tool") == 1
    for end in (b"[DONE]", b"message_stop", b'finish_reason":"', b"message_delta"):
        assert end not in body


@both_dialects
@pytest.mark.parametrize("text", ["", "some text"])
async def test_b42_a_line_beyond_the_limit_is_a_fault_and_closes_the_upstream(
    path: str, text: str
) -> None:
    async def says(x: Exchange) -> None:
        if text:
            await x.text(text)
        await x.text("y" * 5 * 1024 * 1024)
        await x.finish()
        await x.done()
        await x.end()

    async with open_stack(says) as stack:
        client = await asked(stack, path)
        if text:
            await client.until(text.encode())
            got, whole = await until_end(client)
            assert not whole
            assert got.count(b'"error":{') == 1
        else:
            reply = await client.reply()
            assert reply.status == (500 if path == "/v1/messages" else 502)
            got = reply.body
        with trio.fail_after(5):
            await stack.engines[0].seen[0].closed.wait()
        await stack.settle()

    assert b"yyy" not in got
    assert not stack.engines[0].seen[0].ended.is_set()
