"""One connection over real sockets: order, limits, timeouts, faults (H1, L1)."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from router.edge.connection import UNREAD_MAX
from router.edge.server import Edge, client_edge
from router.edge.sink import BEHIND, HIGH
from router.edge.site import Patience
from router.errors import Fault, FaultKind, LocalError
from router.messages import Finished
from router.openai.reply import StreamEncoder
from router.ports import Taken
from router.settings import ServerSettings
from tests.kit.edge import (
    PATIENT,
    QUICK,
    STEP_S,
    SWEPT,
    QuietLog,
    RawClient,
    chat,
    listen,
    request,
    running,
    until,
)
from tests.kit.stub_router import StubRouter

HEALTH = request("GET", "/healthz")


async def refused(client: RawClient, status: int) -> None:
    """Assert that the next reply has *status* and that a FIN, no RST, follows."""
    reply = await client.reply()
    assert reply.status == status
    assert reply.headers["connection"] == "close"
    assert "x-request-id" in reply.headers
    assert reply.json["error"]["message"]
    assert await client.rest() == b""


# ---- keep-alive and order ----


async def test_h1_a_connection_serves_one_request_after_another() -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        for _ in range(3):
            await client.send(HEALTH)
            reply = await client.reply()
            assert (reply.status, reply.json) == (200, {"status": "ok"})
            assert "connection" not in reply.headers
        assert here.edge.connections == 1


async def test_h1_pipelined_requests_are_answered_in_order() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat(stream=False) + HEALTH + chat(stream=False) + HEALTH)
        first = await router.next()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert router.started == 1
        first.text("first")
        first.finish()
        second = await router.next()
        second.text("second")
        second.finish()

        replies = [(await client.reply()).json for _ in range(4)]

    assert replies[0]["choices"][0]["message"]["content"] == "first"
    assert replies[1] == replies[3] == {"status": "ok"}
    assert replies[2]["choices"][0]["message"]["content"] == "second"


async def test_h1_a_request_in_single_bytes_is_a_request() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        for byte in chat(stream=False):
            await client.send(bytes([byte]))
        served = await router.next()
        served.finish()
        assert (await client.reply()).status == 200


async def test_h1_a_chunked_body_is_a_body() -> None:
    router = StubRouter()
    whole = chat(stream=False)
    _, _, body = whole.partition(b"\r\n\r\n")
    head = request(
        "POST", "/v1/chat/completions", None, {"Transfer-Encoding": "chunked"}
    )
    async with running(router) as here:
        client = await here.connect()
        await client.send(head)
        for piece in (body[:10], body[10:]):
            await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await client.send(b"0\r\n\r\n")
        served = await router.next()
        served.finish()
        assert (await client.reply()).status == 200


@pytest.mark.parametrize("keep", [False, True])
async def test_h1_http_1_0_keeps_alive_only_if_asked(keep: bool) -> None:
    headers = {"Connection": "keep-alive"} if keep else {}
    octets = request("GET", "/healthz", None, headers, "1.0")
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(octets)
        reply = await client.reply()
        assert reply.headers["connection"] == ("keep-alive" if keep else "close")
        if keep:
            await client.send(octets)
            assert (await client.reply()).status == 200
        else:
            assert await client.rest() == b""


async def test_h1_connection_close_is_done_and_said() -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request("GET", "/healthz", headers={"Connection": "close"}))
        assert (await client.reply()).headers["connection"] == "close"
        assert await client.rest() == b""


async def test_h4_a_probe_that_half_closes_still_gets_its_answer() -> None:
    """Only work costs a slot: what is answered at once is answered."""
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(HEALTH)
        client.fin()
        assert (await client.reply()).status == 200
        assert await client.rest() == b""


async def test_h4_a_request_that_came_with_its_fin_starts_no_work() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        # The first request holds the second back until the FIN is there too.
        await client.send(chat() + chat())
        first = await router.next()
        client.fin()
        await first.gone.wait()
        await here.empty()

    assert router.started == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_h4_who_pipelines_too_much_gets_the_present_reply_and_a_close(
    stream: bool,
) -> None:
    router = StubRouter()
    async with running(router, patience=Patience(linger_s=60)) as here:
        client = await here.connect()
        await client.send(chat(stream=stream))
        served = await router.next()
        served.text("a")
        await client.send(HEALTH * (UNREAD_MAX // len(HEALTH) + 1))
        (connection,) = here.edge._live
        connection.expire(trio.current_time())
        await trio.testing.wait_all_tasks_blocked()
        # The client has not left: it is served, and reads all of it.
        assert not served.gone.is_set()
        served.finish()
        whole = await client.rest()
        # It may be sending still: a RST would take its last bytes from it.
        await trio.testing.wait_all_tasks_blocked()
        assert here.edge.connections == 1
        client.close()
        await here.empty()

    assert whole.count(b"HTTP/1.1 200 OK") == 1
    if stream:
        assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert b"connection: close\r\n" in whole


async def test_h4_what_is_pipelined_within_bounds_waits_for_its_turn() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat(stream=False))
        served = await router.next()
        await client.send(HEALTH * 10)
        (connection,) = here.edge._live
        connection.expire(trio.current_time())
        served.finish()
        for _ in range(11):
            reply = await client.reply()
            assert reply.status == 200
            assert "connection" not in reply.headers


# ---- Expect, bodies, limits ----


async def test_h1_expect_100_continue_is_answered_before_the_body() -> None:
    router = StubRouter()
    whole = chat(stream=False, headers={"Expect": "100-continue"})
    head, _, body = whole.partition(b"\r\n\r\n")
    async with running(router) as here:
        client = await here.connect()
        await client.send(head + b"\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(body)
        served = await router.next()
        served.finish()
        assert (await client.reply()).status == 200


async def test_h1_a_body_that_came_along_needs_no_100() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat(stream=False, headers={"Expect": "100-continue"}))
        served = await router.next()
        served.finish()
        assert (await client.reply()).status == 200


@pytest.mark.parametrize(("path", "status"), [("/nowhere", 404), ("/v1/models", 405)])
async def test_h1_who_waits_for_100_is_refused_without_his_body(
    path: str, status: int
) -> None:
    octets = request("POST", path, b"x" * 100, {"Expect": "100-continue"})
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(octets[:-100])
        await refused(client, status)


async def test_h1_who_waits_for_100_with_a_body_too_many_is_refused_instead() -> None:
    settings = ServerSettings(bodies_max_bytes=1000)
    headers = {"Expect": "100-continue"}
    octets = request("POST", "/v1/chat/completions", b"x" * 1001, headers)
    async with running(StubRouter(), settings) as here:
        client = await here.connect()
        await client.send(octets[:-1001])
        await refused(client, 503)


@pytest.mark.parametrize(("method", "path"), [("POST", "/no"), ("GET", "/healthz")])
async def test_h1_a_body_that_nobody_wants_is_not_held(method: str, path: str) -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request(method, path, b"x" * 600)[:-1])
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert here.edge.site.bodies_held == 0
        await client.send(b"x")
        await client.reply()
        assert here.edge.site.bodies_held == 0


async def test_h1_the_body_of_a_refused_request_is_read_and_dropped() -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request("POST", "/nowhere", b"x" * 200_000) + HEALTH)
        assert (await client.reply()).status == 404
        assert (await client.reply()).status == 200
        assert here.edge.site.tally.refused == {"404": 1}


async def test_h1_a_declared_oversize_body_is_refused_before_it_is_read() -> None:
    settings = ServerSettings(body_max_bytes=1000)
    async with running(StubRouter(), settings) as here:
        client = await here.connect()
        await client.send(request("POST", "/v1/chat/completions", b"x" * 1001)[:-1001])
        reply = await client.reply()
        assert (reply.status, reply.json["error"]["code"]) == (413, "request_too_large")
        assert await client.rest() == b""


async def test_h1_a_client_that_sends_on_still_reads_its_413() -> None:
    settings = ServerSettings(body_max_bytes=1000)
    async with running(StubRouter(), settings) as here:
        client = await here.connect()
        await client.send(request("POST", "/v1/chat/completions", b"x" * 300_000))
        await refused(client, 413)


async def test_h1_a_chunked_body_is_cut_at_the_limit() -> None:
    settings = ServerSettings(body_max_bytes=1000)
    head = request(
        "POST", "/v1/chat/completions", None, {"Transfer-Encoding": "chunked"}
    )
    async with running(StubRouter(), settings) as here:
        client = await here.connect()
        await client.send(head + b"3e9\r\n" + b"x" * 1001)
        await refused(client, 413)


async def test_h1_all_bodies_together_are_bounded() -> None:
    settings = ServerSettings(bodies_max_bytes=1000)
    big = request("POST", "/v1/chat/completions", b"x" * 600)
    async with running(StubRouter(), settings) as here:
        first = await here.connect()
        await first.send(big[:-1])
        await until(lambda: here.edge.site.bodies_held == 599)
        second = await here.connect()
        await second.send(big)
        await refused(second, 503)
        assert here.edge.site.tally.refused == {"503": 1}

        first.close()
        await until(lambda: here.edge.site.bodies_held == 0)
        third = await here.connect()
        await third.send(big)
        assert (await third.reply()).status == 400  # it is no JSON, but was read
        assert here.edge.site.bodies_held == 0


async def test_h1_a_chunked_body_counts_as_it_comes() -> None:
    settings = ServerSettings(bodies_max_bytes=1000)
    head = request(
        "POST", "/v1/chat/completions", None, {"Transfer-Encoding": "chunked"}
    )
    async with running(StubRouter(), settings) as here:
        client = await here.connect()
        await client.send(head + b"258\r\n" + b"x" * 600 + b"\r\n")
        await until(lambda: here.edge.site.bodies_held == 600)
        await client.send(b"258\r\n" + b"x" * 600 + b"\r\n")
        await refused(client, 503)
        await here.empty()
        assert here.edge.site.bodies_held == 0


async def test_h1_the_body_is_let_go_when_it_is_parsed() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        await router.next()
        assert here.edge.site.bodies_held == 0


# ---- malformed requests ----


async def test_h2_a_malformed_request_is_refused_in_the_openai_shape() -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\nx")
        await refused(client, 400)


async def test_h2_whole_requests_before_a_malformed_one_get_their_replies() -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(HEALTH + b"NONSENSE\r\n\r\n")
        assert (await client.reply()).status == 200
        await refused(client, 400)


async def test_h2_a_broken_chunk_ends_its_request_and_reaches_no_router() -> None:
    router = StubRouter()
    head = request(
        "POST", "/v1/chat/completions", None, {"Transfer-Encoding": "chunked"}
    )
    async with running(router) as here:
        client = await here.connect()
        await client.send(head + b"2\r\n{}XX0\r\n\r\n")
        await refused(client, 400)
    assert router.started == 0


# ---- clocks ----


async def test_h1_a_head_has_its_time_from_its_first_byte() -> None:
    async with running(StubRouter(), patience=QUICK) as here:
        client = await here.connect()
        await client.send(b"GET /healthz HTTP/1.1\r\n")
        began = trio.current_time()
        await refused(client, 408)
        assert QUICK.head_s * 0.9 < trio.current_time() - began < QUICK.head_s + 2


async def test_h1_trickling_a_head_gains_no_time() -> None:
    async with running(StubRouter(), patience=QUICK) as here:
        client = await here.connect()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def trickle() -> None:
                for byte in b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 1000:
                    await client.send(bytes([byte]))
                    await trio.sleep(0.02)

            nursery.start_soon(trickle)
            assert (await client.reply()).status == 408
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began < QUICK.head_s + 2


async def test_h1_a_body_must_go_on() -> None:
    async with running(StubRouter(), patience=QUICK) as here:
        client = await here.connect()
        await client.send(chat()[:-1])
        await refused(client, 408)
        await here.empty()
        assert here.edge.site.bodies_held == 0


async def test_h1_trickling_a_body_is_no_progress() -> None:
    async with running(StubRouter(), patience=QUICK) as here:
        client = await here.connect()
        await client.send(request("POST", "/v1/chat/completions", b"x" * 900)[:-900])
        began = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def trickle() -> None:
                for _ in range(800):
                    await client.send(b"x")
                    await trio.sleep(0.02)

            nursery.start_soon(trickle)
            assert (await client.reply()).status == 408
            nursery.cancel_scope.cancel()
        assert trio.current_time() - began < QUICK.body_s + 2


async def test_h1_a_body_that_goes_on_slowly_is_taken() -> None:
    router = StubRouter()
    octets = chat(stream=False, pad="x" * 6000)
    async with running(router, patience=QUICK) as here:
        client = await here.connect()
        began = trio.current_time()
        for at in range(0, len(octets), 1100):
            await client.send(octets[at : at + 1100])
            await trio.sleep(0.08)
        served = await router.next()
        served.finish()
        assert (await client.reply()).status == 200
        assert trio.current_time() - began > QUICK.body_s


async def test_h1_an_idle_connection_is_closed_without_a_word() -> None:
    async with running(StubRouter(), patience=QUICK) as here:
        client = await here.connect()
        await client.send(HEALTH)
        assert (await client.reply()).status == 200
        assert await client.rest() == b""


async def test_h1_a_request_that_is_served_has_no_clock_of_the_edge() -> None:
    router = StubRouter()
    async with running(router, patience=QUICK) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        await trio.sleep(QUICK.idle_s + 0.1)
        served.finish()
        assert b"[DONE]" in await client.until(b"0\r\n\r\n")


async def test_h1_a_router_that_was_stopped_reads_what_came_in_time(
    mock_clock: MockClock,
) -> None:
    async with running(StubRouter()) as here:
        idle, slow = [await here.connect() for _ in range(2)], await here.connect()
        await slow.send(HEALTH[:-2])
        await trio.testing.wait_all_tasks_blocked()

        mock_clock.jump(3_600)
        for client, octets in ((idle[0], HEALTH), (slow, HEALTH[-2:])):
            client.sock.send(octets)

        for client in (idle[0], slow):
            assert (await client.reply()).status == 200
        # It is punctual again, and one of them still says nothing.
        mock_clock.jump(PATIENT.sweep_s)
        assert await idle[1].rest() == b""
        assert here.edge.connections == 2


async def test_h1_a_router_that_is_always_late_ends_idle_connections_all_the_same(
    mock_clock: MockClock,
) -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        for _ in range(2):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(3_600)
        assert await client.rest() == b""


# ---- a client that does not read ----


async def test_h5_pipelining_without_reading_is_pushed_back() -> None:
    router = StubRouter()
    router.models = {f"model-{n}-{'x' * 100}": "m" for n in range(1000)}
    models = request("GET", "/v1/models")
    async with running(router) as here:
        client = await here.connect()
        await client.send(models * 50)
        await trio.testing.wait_all_tasks_blocked(0.05)
        # 50 replies are 9 MB. One was taken whole, no second one behind it.
        assert here.edge.site.tally.buffer_high_water < 200_000
        for _ in range(50):
            assert (await client.reply()).status == 200


async def test_h5_who_leaves_a_reply_unread_for_too_long_is_cut() -> None:
    router = StubRouter()
    router.models = {f"model-{n}-{'x' * 100}": "m" for n in range(50_000)}
    settings = ServerSettings(client_stall_ms=200)
    async with running(router, settings, patience=SWEPT) as here:
        client = await here.connect(rcvbuf=4096)
        await client.send(request("GET", "/v1/models"))
        began = trio.current_time()
        await here.empty()
        assert trio.current_time() - began > 0.2
        with pytest.raises(ConnectionResetError):
            await client.rest()


async def test_h5_who_is_cut_by_the_end_of_an_answer_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def long(self: StreamEncoder, finished: Finished) -> bytes:
        return b"data: " + bytes(2 * BEHIND) + b"\n\n"

    monkeypatch.setattr(StreamEncoder, "finish", long)
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        while served.text("a" * HIGH) is not Taken.FULL:
            pass
        assert served.finish() is Taken.GONE
        await until(lambda: here.edge.connections == 0)


async def test_h5_who_reads_slowly_is_not_cut() -> None:
    router = StubRouter()
    router.models = {f"model-{n}-{'x' * 100}": "m" for n in range(30_000)}
    settings = ServerSettings(client_stall_ms=800)
    async with running(router, settings, patience=SWEPT) as here:
        client = await here.connect(rcvbuf=200_000)
        await client.send(request("GET", "/v1/models"))
        began = trio.current_time()
        head = await client.until(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(client.got) < length:
            client.got += await client.read()
            await trio.sleep(0.02)
        assert trio.current_time() - began > 1.0


# ---- faults ----


async def test_l1_a_bug_before_the_reply_is_a_500_and_hits_one_client() -> None:
    router, log = StubRouter(), QuietLog()
    router.bug = ValueError("secret content")
    async with running(router, log=log) as here:
        other = await here.connect()
        await other.send(HEALTH)
        assert (await other.reply()).status == 200
        client = await here.connect()
        await client.send(chat())
        await refused(client, 500)

        await other.send(HEALTH)
        assert (await other.reply()).status == 200

    assert router.tally.bugs == {"edge.connection": 1}
    assert [(level, event) for level, event, _ in log.lines] == [("error", "bug")]
    assert log.lines[0][2]["exc_info"] is router.bug


async def test_l1_a_bug_after_the_head_is_an_error_frame_and_an_unclean_end() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        served.text("a")
        served.crash(ValueError("a bug"))
        rest = await client.rest()

    assert b'"error"' in rest
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n")


async def test_a5_after_an_unclean_end_the_client_has_time_to_read_it() -> None:
    """Closed at once, it may lose its last bytes to the RST for what it sends."""
    router = StubRouter()
    async with running(router, patience=Patience(linger_s=60)) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        served.text("a")
        served.fail(Fault(FaultKind.STREAM_CLOSED_EARLY, "lost"))
        assert b'"worker_lost"' in await client.rest()
        await trio.testing.wait_all_tasks_blocked()
        assert here.edge.connections == 1
        client.close()
        await here.empty()


async def test_l1_after_a_bug_no_clock_of_the_request_is_left() -> None:
    router = StubRouter()
    router.bug = ValueError("a bug")
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        await refused(client, 500)
        (connection,) = here.edge._live
        assert connection.until == inf


async def test_l1_a_bug_at_the_end_of_an_answer_is_an_error_frame_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: StreamEncoder, finished: Finished) -> bytes:
        raise ValueError("a bug")

    monkeypatch.setattr(StreamEncoder, "finish", broken)
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        served.text("a")
        with pytest.raises(ValueError, match="a bug"):
            served.finish()
        served.fail(Fault(FaultKind.INTERNAL, "The router failed here."))
        rest = await client.rest()

    assert b'"error"' in rest
    assert not rest.endswith(b"0\r\n\r\n")


async def test_b126_a_group_is_one_bug() -> None:
    router = StubRouter()
    router.bug = ExceptionGroup("", [ValueError(), ExceptionGroup("", [OSError()])])
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        await refused(client, 500)
    assert router.tally.bugs == {"edge.connection": 1}


async def test_l1_a_route_that_forgets_to_reply_is_a_bug() -> None:
    router = StubRouter()

    async def forget(*_: object, **__: object) -> None:
        """Return without a word."""

    router.serve = forget  # type: ignore[method-assign]
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        await refused(client, 500)
    assert router.tally.bugs == {"edge.connection": 1}


@pytest.mark.parametrize("place", ["find", "log", "new_request_id"])
async def test_l1_a_bug_anywhere_leaves_the_server_alive(place: str) -> None:
    router, log = StubRouter(), QuietLog()

    def broken(*_: object, **__: object) -> None:
        raise ValueError(place)

    async with running(router, log=log) as here:
        good = await here.connect()
        await good.send(HEALTH)
        assert (await good.reply()).status == 200

        if place == "find":
            here.edge.routes.find = broken  # type: ignore[method-assign,assignment]
        elif place == "new_request_id":
            here.edge.site.new_request_id = broken  # type: ignore[assignment]
        else:
            router.bug = ValueError("a bug to log")
            log.error = broken  # type: ignore[method-assign]
        for _ in range(20):
            client = await here.connect()
            await client.send(chat())
            await client.rest()
            client.close()
        await until(lambda: here.edge.connections == 1)
        assert router.tally.bugs["edge.connection"] == 20


async def test_l1_a_broken_invariant_ends_the_server() -> None:
    router = StubRouter()
    router.bug = LocalError("broken")

    async def serve_one() -> None:
        async with running(router) as here:
            client = await here.connect()
            await client.send(chat())
            await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        await serve_one()
    assert caught.value.subgroup(LocalError) is not None


async def test_l1_a_broken_invariant_met_while_parsing_is_one_clients() -> None:
    router = StubRouter()

    def broken(model: str) -> str | None:
        raise LocalError(model)

    router.resolve = broken  # type: ignore[method-assign]
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        assert (await client.reply()).status == 500
        await client.send(HEALTH)
        assert (await client.reply()).status == 200
    assert router.tally.bugs == {"edge.parse": 1}


async def test_b132_a_cancelled_server_closes_every_socket() -> None:
    router = StubRouter()
    edge = client_edge(router, log=QuietLog(), patience=PATIENT)
    with listen() as listener:
        async with serving(edge, listener) as scope:
            idle, partial, body, whole, stream = [
                await RawClient.connect(listener) for _ in range(5)
            ]
            await partial.send(b"GET / HT")
            await body.send(chat()[:-3])
            await whole.send(chat(stream=False))
            await router.next()
            await stream.send(chat())
            (await router.next()).text("a")
            await stream.until(b'"a"')
            await until(lambda: edge.connections == 5)

            waiting = socket.create_connection(listener.getsockname())
            scope.cancel()
        assert scope.cancelled_caught  # and nothing else came out
        assert edge.connections == 0
        for client in (idle, partial, body, whole, stream):
            await ends(client)

        # This one the kernel still has, with the listener, which is the caller's.
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.recv(1)
    await ends(RawClient(waiting))


async def test_b132_a_server_cancelled_as_it_accepts_closes_that_socket_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edge = client_edge(StubRouter(), log=QuietLog(), patience=PATIENT)
    with listen() as listener:
        async with serving(edge, listener) as scope:
            admit = edge._admit

            def admit_and_cancel(*accepted: Any) -> None:
                admit(*accepted)
                scope.cancel()

            monkeypatch.setattr(edge, "_admit", admit_and_cancel)
            client = await RawClient.connect(listener)
            await client.send(HEALTH)
        assert scope.cancelled_caught
        assert edge.connections == 0
        await ends(client)


@asynccontextmanager
async def serving(
    edge: Edge, listener: socket.socket
) -> AsyncIterator[trio.CancelScope]:
    """Serve until the scope that is given is cancelled; closes nobody's socket."""
    scope = trio.CancelScope()

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await edge.serve([listener], task_status=task_status)

    with trio.fail_after(STEP_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            yield scope


async def ends(client: RawClient) -> None:
    """Wait for the end of what the server sends: a FIN or a RST."""
    with client.sock, suppress(ConnectionResetError):
        await client.rest()


async def test_the_same_over_a_unix_socket(tmp_path: Path) -> None:
    router = StubRouter()
    async with running(router, unix=tmp_path / "s") as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        served.text("a")
        served.fail(Fault(FaultKind.STREAM_CLOSED_EARLY, "lost"))
        rest = await client.rest()
    assert b'"worker_lost"' in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert here.listener.family == socket.AF_UNIX
