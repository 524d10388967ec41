"""The doubles of the edge's tests do what those tests believe."""

# ruff: noqa: ARG002  a double has the port's arguments, used or not

import errno

import pytest
import trio

from router.messages import Job
from router.ports import Taken
from tests.kit.edge import RawClient, RawReply, chat, events, listen, request
from tests.kit.short_socket import ShortSocket
from tests.kit.stub_router import StubRouter


def test_a_short_socket_takes_what_its_script_says() -> None:
    sock = ShortSocket([2, 0, OSError(errno.EPIPE, "broken")])

    assert sock.send(b"abc") == 2
    with pytest.raises(BlockingIOError):
        sock.send(b"c")
    with pytest.raises(OSError, match="broken"):
        sock.send(b"c")
    assert sock.send(b"cd") == 2
    assert sock.sent == b"abcd"


def test_a_reply_with_a_repeated_field_is_no_reply() -> None:
    assert RawReply(b"HTTP/1.1 200 OK\r\na: 1\r\n\r\n").headers == {"a": "1"}
    with pytest.raises(AssertionError):
        RawReply(b"HTTP/1.1 200 OK\r\na: 1\r\na: 2\r\n\r\n")


def test_chunks_are_taken_apart_to_the_last() -> None:
    assert events(b"3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\n") == [
        b"abc",
        b"0123456789",
        b"",
    ]
    with pytest.raises((AssertionError, ValueError)):
        events(b"3\r\nabcd\r\n")


def test_a_request_declares_the_length_it_has() -> None:
    head, _, body = request("POST", "/x", b"abc").partition(b"\r\n\r\n")

    assert b"Content-Length: 3" in head
    assert body == b"abc"
    assert b"Content-Length" not in request("GET", "/x")
    assert b'"stream": false' in chat(stream=False)


async def test_a_client_tells_a_fin_from_a_rst() -> None:
    with listen() as listener:
        for leave, ends_well in ((RawClient.fin, True), (RawClient.reset, False)):
            client = await RawClient.connect(listener)
            ours, _ = listener.accept()
            ours.setblocking(False)
            leave(client)
            there = RawClient(ours)
            if ends_well:
                assert await there.rest() == b""
            else:
                with pytest.raises(ConnectionResetError):
                    await there.rest()
            there.close()
            client.close()


class Deaf:
    """A receiver whose client has left."""

    buffered = False
    told: list[str]

    def attach(self, on_room: object, on_gone: object) -> None:
        self.told = ["attach"]

    def take(self, deltas: object) -> Taken:
        self.told.append("take")
        return Taken.GONE

    def finish(self, finished: object) -> Taken:
        return Taken.GONE

    def routed(self, worker: object, attempts: int) -> None:
        self.told.append("routed")

    def fail(self, fault: object) -> None:
        self.told.append("fail")

    def restart(self) -> None:
        self.told.append("restart")

    def due(self, now: float) -> float:
        return now + 1000

    def tick(self, now: float) -> Taken:
        return Taken.MORE


async def test_a_stub_router_ends_a_request_whose_receiver_is_gone() -> None:
    router, receiver = StubRouter(), Deaf()
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            name = router.new_request_id()
            await router.serve(
                Job(model="m", target="m", messages=()), receiver, request=name
            )

        nursery.start_soon(serve)
        served = await router.next()
        served.route()
        assert served.text("a") is Taken.GONE
        with trio.fail_after(1):
            await served.over.wait()

    assert receiver.told == ["attach", "routed", "take"]
