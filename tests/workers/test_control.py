"""The control plane says what happened, bounded and without secrets."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.kit.keeping import no_descriptor
from workers.control import ANSWER_MAX, Answer, Control, NoAnswer
from workers.site import parse_site


@asynccontextmanager
async def saying(octets: bytes, *, then_close: bool = True) -> AsyncIterator[Control]:
    """Answer every connection with these bytes."""

    async def say(stream: trio.SocketStream) -> None:
        try:
            await stream.receive_some(65536)
            await stream.send_all(octets)
            if not then_close:
                await stream.receive_some(1)
        except trio.BrokenResourceError:
            pass

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, say, listeners)
        yield Control(parse_site(f"http://127.0.0.1:{port}/v1"), "sk-1", None)
        nursery.cancel_scope.cancel()


async def test_an_answer_is_given_whole() -> None:
    head = b"HTTP/1.1 404 Nope\r\nX-Y: z\r\nContent-Length: 7\r\n\r\n"
    async with saying(head + b'{"a":1}') as control:
        answer = await control.get("/x")

    assert answer.status == 404
    assert not answer.ok
    assert answer.headers["x-y"] == "z"
    assert answer.fields() == {"a": 1}


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"SSH-2.0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: \xff\x00\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nnot gzip",
        b"HTTP/1.1 200 OK\r\nContent-Type: a; charset=\xe9\r\n\r\n\xff",
    ],
)
async def test_whatever_a_server_says_only_one_error_comes_out(octets: bytes) -> None:
    async with saying(octets) as control:
        said = ""
        with contextlib.suppress(NoAnswer):
            said = (await control.get("/x")).text()

    assert "\0" not in said
    assert len(said) < 100


async def test_an_answer_that_is_no_http_names_no_address() -> None:
    async with saying(b"SSH-2.0\r\n") as control:
        with pytest.raises(NoAnswer) as raised:
            await control.get("/x")

    assert not raised.value.refused
    assert str(raised.value) == "an answer that is not HTTP"


async def test_a_refused_connect_is_told_apart() -> None:
    async with saying(b"") as control:
        pass
    with pytest.raises(NoAnswer) as raised:
        await control.get("/x")

    assert raised.value.refused


async def test_an_answer_without_bound_is_cut() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    async with saying(head + b"x" * (ANSWER_MAX + 1)) as control:
        with pytest.raises(NoAnswer, match="more than"):
            await control.get("/x")


async def test_a_health_url_that_no_resolver_takes_is_no_answer() -> None:
    async with saying(b"") as control:
        with pytest.raises(NoAnswer):
            await control.get("http://gpu..local/health")


async def test_a_redirect_is_not_followed() -> None:
    octets = b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1/\r\n\r\n"
    async with saying(octets) as control:
        assert (await control.get("/x")).status == 302


async def test_the_environments_proxy_does_not_take_the_workers_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with saying(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as control:
        assert (await control.get("/x")).ok


async def test_a_cancelled_question_closes_its_connection() -> None:
    async with saying(b"HTTP/1.1 200 OK\r\n", then_close=False) as control:
        for _ in range(20):
            with trio.move_on_after(0.005) as scope:
                await control.get("/x")
            assert scope.cancelled_caught


@pytest.mark.parametrize("body", [b"", b"nope", b"[1]", b"null", b"[" * 100_000])
def test_a_body_that_is_no_object_has_no_fields(body: bytes) -> None:
    assert Answer(200, {}, body).fields() == {}


async def test_h6_want_of_descriptors_here_is_told_apart() -> None:
    async with saying(b"") as control:
        with no_descriptor(), pytest.raises(NoAnswer) as raised:
            await control.get("/x")

    assert raised.value.unasked
    assert not raised.value.refused
