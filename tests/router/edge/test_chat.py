"""The chat route and its receivers: what a client reads, byte for byte."""

import json
from typing import Any

import pytest
import trio

from router.edge.sink import BEHIND, HIGH
from router.errors import Fault, FaultKind
from router.messages import Usage
from router.ports import Taken
from router.settings import RouterSettings, ServerSettings, Settings
from tests.kit.edge import (
    RawClient,
    RawReply,
    chat,
    events,
    request,
    running,
)
from tests.kit.stub_router import StubRequest, StubRouter

HEALTH = request("GET", "/healthz")
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "The worker was lost.")


def router_with(**settings: Any) -> StubRouter:
    return StubRouter(Settings(router=RouterSettings(**settings)))


async def head_of(client: RawClient) -> RawReply:
    return RawReply(await client.until(b"\r\n\r\n"))


def frames(octets: bytes) -> list[Any]:
    """Take events apart: JSON values, ``[DONE]`` as a string."""
    found = []
    for event in octets.split(b"\n\n"):
        if event:
            text = event.removeprefix(b"data: ")
            found.append("[DONE]" if text == b"[DONE]" else json.loads(text))
    return found


async def started(router: StubRouter, client: RawClient, octets: bytes) -> StubRequest:
    await client.send(octets)
    served = await router.next()
    served.route()
    return served


# ---- streams ----


async def test_o3_a_stream_is_role_deltas_finish_and_done() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        served.text("Hel", "lo")
        served.text("!")
        served.finish(Usage(3, 4))
        head = await head_of(client)
        body = b"".join(events(await client.until(b"0\r\n\r\n")))

    assert head.status == 200
    assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert head.headers["cache-control"] == "no-cache"
    assert head.headers["x-accel-buffering"] == "no"
    assert head.headers["transfer-encoding"] == "chunked"
    assert "connection" not in head.headers
    *chunks, done = frames(body)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": "!"},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"
    assert {c["id"] for c in chunks} == {f"chatcmpl-{served.request}"}
    assert {c["model"] for c in chunks} == {"m"}


async def test_o3_usage_comes_exactly_if_asked() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(
            router, client, chat(stream_options={"include_usage": True})
        )
        served.text("a")
        served.finish(Usage(3, 4))
        await head_of(client)
        body = b"".join(events(await client.until(b"0\r\n\r\n")))

    *_, usage, done = frames(body)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7
    assert done == "[DONE]"


async def test_o3_a_stream_is_followed_by_another_request() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        for _ in range(2):
            served = await started(router, client, chat())
            served.text("a")
            served.finish()
            await client.until(b"0\r\n\r\n")
        await client.send(HEALTH)
        assert (await client.reply()).status == 200


async def test_o3_an_answer_without_a_delta_is_still_whole() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        served.finish()
        await head_of(client)
        body = b"".join(events(await client.until(b"0\r\n\r\n")))

    role, finish, done = frames(body)
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_one_batch_is_one_chunk_and_the_first_takes_the_head_along() -> None:
    """Each write is a system call and a packet; a delta must not cost two."""
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())

        served.text("a", "b", "c")
        first = await client.read()
        served.text("d", "e")
        second = await client.read()
        served.finish()
        last = await client.read()

    head, _, body = first.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [len(frames(c)) for c in events(body)] == [4]
    assert [len(frames(c)) for c in events(second)] == [2]
    assert [len(frames(c)) for c in events(last)] == [2, 0]


async def test_h1_http_1_0_gets_its_stream_without_chunks_and_a_close() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(version="1.0"))
        served.text("a")
        served.finish()
        head = await head_of(client)
        body = await client.rest()

    assert "transfer-encoding" not in head.headers
    assert head.headers["connection"] == "close"
    assert frames(body)[-1] == "[DONE]"


# ---- the head is held (O4) ----


async def test_o4_nothing_is_sent_before_the_first_delta() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        await trio.testing.wait_all_tasks_blocked(0.05)
        with pytest.raises(BlockingIOError):
            client.sock.recv(1)
        served.text("a")
        assert (await head_of(client)).status == 200


async def test_o4_after_commit_after_ms_the_head_and_the_role_go_out() -> None:
    router = router_with(commit_after_ms=100)
    async with running(router) as here:
        client = await here.connect()
        began = trio.current_time()
        await client.send(chat())
        await router.next()
        head = await head_of(client)
        assert 0.1 <= trio.current_time() - began < 2
        role = await client.until(b"\n\n\r\n")

    assert head.status == 200
    assert "x-fencepost-worker" not in head.headers
    assert frames(events(role)[0])[0]["choices"][0]["delta"]["role"] == "assistant"


async def test_o3_silence_is_filled_with_comments_between_events() -> None:
    router = router_with(commit_after_ms=50, keepalive_ms=50)
    async with running(router) as here:
        client = await here.connect()
        began = trio.current_time()
        await client.send(chat())
        served = await router.next()
        await head_of(client)
        await client.until(b"\n\n\r\n")
        assert await client.until(b": ka\n\r\n") == b"5\r\n: ka\n\r\n"
        assert await client.until(b": ka\n\r\n") == b"5\r\n: ka\n\r\n"
        assert 0.15 <= trio.current_time() - began < 2
        served.text("a")
        served.finish()
        assert b"[DONE]" in await client.until(b"0\r\n\r\n")


async def test_o3_there_is_no_comment_while_deltas_flow() -> None:
    router = router_with(keepalive_ms=200)
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        for _ in range(8):
            served.text("a")
            await trio.sleep(0.05)
        served.finish()
        assert b": ka" not in await client.until(b"0\r\n\r\n")


async def test_o3_keepalives_can_be_off() -> None:
    router = router_with(commit_after_ms=10, keepalive_ms=0)
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        await client.until(b"\n\n\r\n")
        await trio.testing.wait_all_tasks_blocked(0.05)
        with pytest.raises(BlockingIOError):
            client.sock.recv(1)
        served.finish()
        await client.until(b"0\r\n\r\n")


# ---- failures ----


async def test_o5_a_failure_before_the_head_is_a_status() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(headers={"X-Request-Id": "mine.1"}))
        served.fail(Fault(FaultKind.QUEUE_FULL, "full", retry_after=2.4))
        reply = await client.reply()
        await client.send(HEALTH)
        assert (await client.reply()).status == 200

    assert reply.status == 429
    assert reply.json["error"]["code"] == "queue_full"
    assert reply.headers["retry-after"] == "3"
    assert reply.headers["x-request-id"] == "mine.1"
    assert reply.headers["x-fencepost-request"] == served.request
    assert reply.headers["x-fencepost-worker"] == "w1"
    assert reply.headers["content-type"] == "application/json"


async def test_o5_a_useless_retry_is_advised_against() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(stream=False))
        served.fail(Fault(FaultKind.CONTEXT_LENGTH, "too long"))
        reply = await client.reply()

    assert reply.status == 400
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("fields", [{"model": None}, {"temperature": 9}, {"n": 2}])
async def test_o1_a_bad_request_is_refused_and_the_connection_lives(
    fields: dict[str, Any],
) -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat(**fields))
        reply = await client.reply()
        assert reply.status == 400
        assert reply.headers["x-should-retry"] == "false"
        assert reply.json["error"]["param"] == next(iter(fields))
        await client.send(HEALTH)
        assert (await client.reply()).status == 200
    assert router.started == 0


async def test_h1_json_beyond_all_depth_is_a_bad_request() -> None:
    deep = b'{"a":' + b"[" * 200_000
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request("POST", "/v1/chat/completions", deep))
        assert (await client.reply()).status == 400


async def test_o6_an_unknown_model_is_404_and_a_coming_one_503() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat(model="../../slots?x="))
        reply = await client.reply()
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")

        router.unknown = Fault(FaultKind.MODEL_LOADING, "coming", retry_after=1.0)
        await client.send(chat(model="new"))
        reply = await client.reply()
        assert (reply.status, reply.json["error"]["code"]) == (503, "model_loading")
        assert reply.headers["retry-after"] == "1"


async def test_a5_a_loss_after_the_head_is_a_frame_and_an_unclean_end() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        served.text("a")
        await client.until(b'"a"')
        served.fail(LOST)
        # A RST would raise here, and could have taken the frame with it.
        rest = await client.rest()
        assert served.text("late") is Taken.GONE
        assert served.finish() is Taken.GONE

    assert not rest.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in rest
    error = json.loads(rest[rest.rindex(b"data: ") + 6 : rest.rindex(b"\n\n")])
    assert error["error"]["code"] == "worker_lost"


async def test_a5_a_client_that_is_still_sending_reads_the_frame_too() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        served.text("a")
        await client.send(chat() * 20)
        served.fail(LOST)
        rest = await client.rest()

    assert b'"worker_lost"' in rest


async def test_a5_http_1_0_has_the_frame_as_its_only_sign() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(version="1.0"))
        served.text("a")
        served.fail(LOST)
        rest = await client.rest()

    assert frames(rest.partition(b"\r\n\r\n")[2])[-1]["error"]["code"] == "worker_lost"


async def test_a5_a_frame_behind_held_bytes_comes_whole() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect(rcvbuf=16_384)
        served = await started(router, client, chat())
        while served.text("x" * 8000) is Taken.MORE:
            pass
        served.fail(LOST)
        rest = await client.rest()

    body = rest.partition(b"\r\n\r\n")[2]
    assert frames(b"".join(events(body)))[-1]["error"]["code"] == "worker_lost"


# ---- backpressure (H5) ----


async def test_h5_a_full_sink_says_so_and_asks_for_more_when_it_is_low() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect(rcvbuf=65_536)
        served = await started(router, client, chat())
        count = 0
        while served.text("x" * 8000) is Taken.MORE:
            count += 1
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not served.room.is_set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(served.wait_room)
            while nursery.child_tasks:
                client.got += await client.read()
        served.text("end")
        served.finish()
        rest = await client.until(b"0\r\n\r\n")

    body = rest.partition(b"\r\n\r\n")[2]
    texts = [
        f["choices"][0]["delta"].get("content", "")
        for f in frames(b"".join(events(body)))[:-1]
    ]
    assert "".join(texts) == "x" * 8000 * (count + 1) + "end"
    assert 64 * 1024 <= router.tally.buffer_high_water < 80_000


async def test_h5_a_client_that_reads_nothing_is_cut_when_its_time_is_up() -> None:
    router = StubRouter()
    settings = ServerSettings(client_stall_ms=300)
    async with running(router, settings) as here:
        client = await here.connect(rcvbuf=16_384)
        served = await started(router, client, chat())
        while served.text("x" * 8000) is Taken.MORE:
            pass
        began = trio.current_time()
        with trio.fail_after(3):
            await served.over.wait()
        assert trio.current_time() - began > 0.25
        assert served.steps == ["tick gone"]
        assert served.text("more") is Taken.GONE
        await here.empty()
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_h5_a_stalled_client_gets_no_keepalives_on_top() -> None:
    router = router_with(keepalive_ms=20)
    async with running(router) as here:
        client = await here.connect(rcvbuf=16_384)
        served = await started(router, client, chat())
        while served.text("x" * 8000) is Taken.MORE:
            pass
        high = router.tally.buffer_high_water
        await trio.sleep(0.2)
        assert router.tally.buffer_high_water == high


async def test_h5_past_the_ceiling_the_client_is_cut() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect(rcvbuf=16_384)
        served = await started(router, client, chat())
        taken: Taken | Fault = Taken.MORE
        while taken is not Taken.GONE:  # a source that heeds no FULL
            taken = served.text("x" * 60_000)
        await here.empty()
    # The event that filled it may be one byte short of the mark.
    assert router.tally.buffer_high_water < HIGH + 61_000 + BEHIND


# ---- replies that are whole ----


async def test_a_non_stream_reply_is_one_json_value() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(stream=False))
        served.text("Hel", "lo")
        served.finish(Usage(3, 4))
        reply = await client.reply()
        await client.send(HEALTH)
        assert (await client.reply()).status == 200

    assert reply.status == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"][0]["message"]["content"] == "Hello"
    assert reply.json["usage"]["completion_tokens"] == 4


async def test_a5_a_reply_that_starts_over_keeps_nothing_of_the_first_try() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(stream=False))
        served.text("wrong")
        served.receiver.restart()
        served.route(attempts=2)
        served.text("right")
        served.finish()
        reply = await client.reply()

    assert reply.json["choices"][0]["message"]["content"] == "right"
    assert reply.headers["x-fencepost-attempts"] == "2"


async def test_a_large_reply_is_taken_whole() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(stream=False))
        for _ in range(30):
            served.text("x" * 100_000)
        assert served.finish() is Taken.FULL
        reply = await client.reply()
        assert len(reply.json["choices"][0]["message"]["content"]) == 3_000_000


# ---- names ----


@pytest.mark.parametrize("given", ["bad id", "x" * 129, "a/b", "a\tb", "é", 'a"b', ""])
async def test_h3_an_unsafe_request_id_is_replaced(given: str) -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat(headers={"X-Request-Id": given}))
        served.finish()
        head = await head_of(client)

    assert served.client_ref is None
    assert head.headers["x-request-id"] == served.request


async def test_h3_a_safe_request_id_is_kept_and_ours_is_told_beside_it() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(
            router, client, chat(headers={"X-Request-Id": "a-Z_0.9"})
        )
        served.finish()
        head = await head_of(client)

    assert served.client_ref == "a-Z_0.9"
    assert head.headers["x-request-id"] == "a-Z_0.9"
    assert head.headers["x-fencepost-request"] == served.request
    assert head.headers["x-fencepost-worker"] == "w1"
    assert head.headers["x-fencepost-attempts"] == "1"


async def test_a7_a_client_that_left_is_told_nothing_more() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        served = await started(router, client, chat())
        client.close()
        await served.gone.wait()

        assert served.text("late") is Taken.GONE
        assert served.finish() is Taken.GONE
        served.receiver.fail(LOST)
        assert served.receiver.tick(trio.current_time()) is Taken.GONE
        await here.empty()
