"""The fake engine keeps its word, else every test on it means nothing."""

import json
import socket
import struct
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from tests.kit.engine import FakeEngine, answers, in_turn, open_engine, refuses, silent
from tests.kit.exchange import Exchange, RouterGone
from tests.kit.tls import make_contexts


def request(body: object = None, path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body if body is not None else {"model": "m"}).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: e\r\nX-Request-Id: r/1\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
    )


async def dial(engine: FakeEngine) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", engine.port)


async def read_until(stream: trio.abc.ReceiveStream, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        piece = await stream.receive_some()
        assert piece, f"closed after {got!r}"
        got += piece
    return got


async def get(engine: FakeEngine, path: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(engine.url + path)


async def test_answers_streams_a_whole_reply_and_keeps_the_connection() -> None:
    async with open_engine(answers("a", "b", usage=(3, 2))) as engine:
        async with await dial(engine) as stream:
            reply = b""
            for _ in range(2):
                await stream.send_all(request())
                reply = await read_until(stream, b"0\r\n\r\n")

        assert reply.startswith(b"HTTP/1.1 200 ")
        assert reply.count(b"data: ") == 6
        assert b"data: [DONE]\n\n" in reply
        assert engine.accepted == 1
        assert [x.nth for x in engine.seen] == [1, 2]


async def test_an_exchange_shows_head_headers_and_body() -> None:
    async with open_engine() as engine, await dial(engine) as stream:
        await stream.send_all(request({"model": "m", "stream": True}))
        x = await engine.next_exchange()

        assert x.request_head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert x.headers["x-request-id"] == "r/1"
        assert x.body == {"model": "m", "stream": True}


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_silent_script_sees_the_router_close(how: str) -> None:
    async with open_engine(silent) as engine:
        stream = await dial(engine)
        await stream.send_all(request())
        x = await engine.next_exchange()
        assert engine.live == 1

        if how == "rst":
            linger = struct.pack("ii", 1, 0)
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await stream.aclose()
        await x.wait_closed()

        assert engine.live == 0
        assert x.closed_at is not None
        assert x.closed_at >= x.started_at


async def test_a_script_that_never_looks_sees_the_close_too() -> None:
    async def forever(x: Exchange) -> None:
        await x.text("a")
        await trio.sleep_forever()

    async with open_engine(forever) as engine:
        stream = await dial(engine)
        await stream.send_all(request())
        x = await engine.next_exchange()
        await read_until(stream, b'"a"')
        await stream.aclose()

        await x.wait_closed()


async def test_a_write_after_the_close_raises_into_the_script() -> None:
    raised = trio.Event()

    async def late(x: Exchange) -> None:
        await x.wait_closed()
        with pytest.raises(RouterGone):
            await x.text("late")
        raised.set()

    async with open_engine(late) as engine:
        stream = await dial(engine)
        await stream.send_all(request())
        await engine.next_exchange()
        await stream.aclose()

        await raised.wait()


async def test_reset_is_seen_as_a_reset() -> None:
    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.reset()

    async with open_engine(script) as engine, await dial(engine) as stream:
        await stream.send_all(request())

        with pytest.raises(trio.BrokenResourceError):
            await read_until(stream, b"never")
        await engine.seen[0].wait_closed()


async def test_fin_ends_without_a_terminator_and_still_sees_the_router() -> None:
    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.fin()

    async with open_engine(script) as engine:
        stream = await dial(engine)
        await stream.send_all(request())
        got = b""
        while piece := await stream.receive_some():
            got += piece
        assert not got.endswith(b"0\r\n\r\n")
        assert not engine.seen[0].closed.is_set()

        await stream.aclose()
        await engine.seen[0].wait_closed()


async def test_idle_connections_are_closed_when_asked() -> None:
    async with open_engine() as engine, await dial(engine) as stream:
        engine.idle_close_s = 0.01
        await stream.send_all(request())
        await read_until(stream, b"0\r\n\r\n")

        assert await stream.receive_some() == b""


async def test_refuse_keeps_the_port_and_listens_again() -> None:
    async with open_engine() as engine:
        port = engine.port
        engine.refuse = True
        with pytest.raises(OSError, match="all attempts"):
            await dial(engine)
        engine.refuse = False

        async with await dial(engine) as stream:
            await stream.send_all(request())
            await read_until(stream, b"[DONE]")
        assert engine.port == port


async def test_read_limit_stops_the_reading_of_a_body() -> None:
    async with open_engine() as engine:
        engine.read_limit = 20
        stream = await dial(engine)
        await stream.send_all(request())
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert engine.seen == []

        engine.read_limit = None
        assert (await engine.next_exchange()).body == {"model": "m"}
        await stream.aclose()


async def test_before_body_answers_a_head_alone() -> None:
    async with open_engine(refuses(413, {})) as engine, await dial(engine) as stream:
        engine.before_body = True
        head, _, _ = request().partition(b"\r\n\r\n")
        await stream.send_all(head + b"\r\n\r\n")

        assert (await read_until(stream, b"{}")).startswith(b"HTTP/1.1 413 ")


async def test_in_turn_gives_each_request_its_script() -> None:
    script = in_turn(refuses(503, {}), answers("a"))
    async with open_engine(script) as engine, await dial(engine) as stream:
        await stream.send_all(request())
        assert (await read_until(stream, b"{}")).startswith(b"HTTP/1.1 503 ")
        for _ in range(2):
            await stream.send_all(request())
            await read_until(stream, b"0\r\n\r\n")


async def test_slots_tell_of_own_foreign_and_lingering_work() -> None:
    async def busy() -> int:
        slots = (await get(engine, "/slots")).json()
        return sum(slot["is_processing"] for slot in slots)

    async with open_engine(silent, slots=4) as engine:
        engine.foreign_busy = 1
        engine.linger_s = 60
        assert await busy() == 1
        stream = await dial(engine)
        await stream.send_all(request())
        x = await engine.next_exchange()
        assert await busy() == 2

        await stream.aclose()
        await x.wait_closed()
        assert engine.live == 0
        assert await busy() == 2


KINDS: dict[str, dict[str, Any]] = {
    "llama-server": {"/health": 200, "/props": 200, "/slots": 200, "/metrics": 200},
    "vllm": {"/health": 200, "/version": 200, "/metrics": 200, "/props": 404},
    "sglang": {"/health": 200, "/model_info": 200, "/v1/loads": 200, "/props": 404},
    "generic": {"/health": 404, "/props": 404},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_has_its_own_endpoints(kind: str) -> None:
    async with open_engine(kind=kind, models=("a", "b")) as engine:
        models = (await get(engine, "/v1/models")).json()
        statuses = {p: (await get(engine, p)).status_code for p in KINDS[kind]}

        assert [card["id"] for card in models["data"]] == ["a", "b"]
        assert statuses == KINDS[kind]
        assert engine.probes == ["/v1/models", *KINDS[kind]]


async def test_probe_statuses_change_at_run_time() -> None:
    async with open_engine() as engine:
        engine.health_status = 503
        engine.started_at = 7

        assert (await get(engine, "/health")).status_code == 503
        metrics = await get(engine, "/metrics")
        assert metrics.headers["Process-Start-Time-Unix"] == "7"


async def test_hanging_probes_never_answer() -> None:
    async with open_engine() as engine, await dial(engine) as stream:
        engine.hang_probes = True
        await stream.send_all(request(path="/health"))
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert engine.probes == ["/health"]
        assert engine.seen == []


async def test_it_speaks_tls_and_sees_the_close_there() -> None:
    contexts = make_contexts()
    async with open_engine(silent, tls=contexts.server) as engine:
        stream = await trio.open_ssl_over_tcp_stream(
            "localhost", engine.port, ssl_context=contexts.client
        )
        await stream.send_all(request())
        x = await engine.next_exchange()
        await stream.transport_stream.aclose()

        await x.wait_closed()
        assert engine.url.startswith("https://localhost:")


async def test_cut_resets_all_connections() -> None:
    async with open_engine(silent) as engine, await dial(engine) as stream:
        await stream.send_all(request())
        await engine.next_exchange()
        await engine.cut()

        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
