"""Plain and TLS byte streams keep one promise: nothing waits, nothing is lost."""

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from router.errors import FaultKind
from router.settings import WaitSettings, WorkerSettings
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.engine import answers, in_turn, open_engine, silent
from tests.kit.exchange import Exchange
from tests.kit.tls import make_contexts
from workers.direct import DirectWorker
from workers.poll import READ, WRITE
from workers.transport import Address, PlainTransport, TlsTransport, Transport

CONTEXTS = make_contexts()


class Peer:
    """The other end: what came, and a stream to send by."""

    def __init__(self) -> None:
        self.stream: trio.abc.Stream | None = None
        self.got = bytearray()
        self.ended = trio.Event()
        self.reads = trio.Event()
        self.reads.set()

    async def serve(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        try:
            while True:
                await self.reads.wait()
                octets = await stream.receive_some(65536)
                if not octets:
                    break
                self.got += octets
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        self.ended.set()


@asynccontextmanager
async def connected(kind: str) -> AsyncIterator[tuple[Transport, Peer]]:
    peer = Peer()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    address: Address = (socket.AF_INET, ("127.0.0.1", port))

    async def serve(stream: trio.SocketStream) -> None:
        if kind == "tls":
            server = CONTEXTS.server
            await peer.serve(trio.SSLStream(stream, server, server_side=True))
        else:
            await peer.serve(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        transport = make(kind, address)
        with trio.fail_after(5):
            await finish(transport)
        try:
            yield transport, peer
        finally:
            transport.close()
            nursery.cancel_scope.cancel()


def make(kind: str, address: Address) -> Transport:
    if kind == "plain":
        return PlainTransport(address)
    return TlsTransport(address, CONTEXTS.client, "localhost")


async def finish(transport: Transport) -> None:
    """Wait for the connect."""
    while not transport.advance():
        if transport.connect_mask & WRITE:
            await trio.lowlevel.wait_writable(transport.fileno())
        elif transport.connect_mask & READ:
            await trio.lowlevel.wait_readable(transport.fileno())


async def connect(kind: str, address: Address) -> None:
    transport = make(kind, address)
    try:
        await finish(transport)
    finally:
        transport.close()


async def send_all(transport: Transport, octets: bytes) -> None:
    left = memoryview(octets)
    while left or transport.unsent:
        left = left[transport.send(left) :]
        if left or transport.unsent:
            await trio.lowlevel.wait_writable(transport.fileno())


async def recv(transport: Transport) -> bytes:
    while True:
        octets = transport.recv()
        if octets is not None:
            return octets
        await trio.lowlevel.wait_readable(transport.fileno())


both = pytest.mark.parametrize("kind", ["plain", "tls"])


@both
async def test_bytes_go_both_ways(kind: str) -> None:
    async with connected(kind) as (transport, peer):
        await send_all(transport, b"ping")
        while peer.got != b"ping":
            await trio.testing.wait_all_tasks_blocked()
        assert peer.stream is not None
        await peer.stream.send_all(b"pong")

        assert await recv(transport) == b"pong"


@both
async def test_nothing_to_read_is_not_the_end(kind: str) -> None:
    async with connected(kind) as (transport, _):
        assert transport.recv() is None


@both
async def test_the_end_is_told_after_the_last_byte(kind: str) -> None:
    async with connected(kind) as (transport, peer):
        await send_all(transport, b"ping")
        while peer.stream is None:
            await trio.testing.wait_all_tasks_blocked()
        await peer.stream.send_all(b"last")
        await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert await recv(transport) == b"last"
        assert await recv(transport) == b""
        assert await recv(transport) == b""


async def test_an_end_of_tls_without_its_goodbye_is_an_end() -> None:
    async with connected("tls") as (transport, peer):
        await send_all(transport, b"ping")
        while peer.stream is None:
            await trio.testing.wait_all_tasks_blocked()
        await peer.stream.send_all(b"last")
        assert isinstance(peer.stream, trio.SSLStream)
        await peer.stream.transport_stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert await recv(transport) == b"last"
        assert await recv(transport) == b""


@both
async def test_a_peer_that_does_not_read_pushes_back(kind: str) -> None:
    async with connected(kind) as (transport, peer):
        peer.reads = trio.Event()
        octets = bytes(range(256)) * 65536  # 16 MiB, more than any buffer
        left = memoryview(octets)
        while taken := transport.send(left):
            left = left[taken:]
        assert left
        assert transport.send(left) == 0

        peer.reads.set()
        await send_all(transport, bytes(left))
        with trio.fail_after(10):
            while len(peer.got) < len(octets):
                await trio.testing.wait_all_tasks_blocked()
        assert peer.got == octets


async def test_one_read_of_tls_leaves_nothing_inside() -> None:
    async with connected("tls") as (transport, peer):
        await send_all(transport, b"ping")
        while peer.stream is None:
            await trio.testing.wait_all_tasks_blocked()
        for n in range(10):
            await peer.stream.send_all(b"%d" % n)
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert await recv(transport) == b"0123456789"


@both
async def test_a_close_is_idempotent_and_seen(kind: str) -> None:
    async with connected(kind) as (transport, peer):
        await send_all(transport, b"ping")
        transport.close()
        transport.close()

        await peer.ended.wait()


class Sore(socket.socket):
    """A socket whose close says that it failed."""

    def close(self) -> None:
        super().close()
        raise OSError("no")


@both
def test_b08_a_close_that_fails_is_no_fault(kind: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        sock = Sore(fileno=ours.detach())
        transport: Transport = (
            PlainTransport.accepted(sock)
            if kind == "plain"
            else TlsTransport.accepted(sock, CONTEXTS.server)
        )

        transport.close()

        assert theirs.recv(1) == b""


@both
async def test_a_refused_connect_raises(kind: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address: Address = (socket.AF_INET, unused.getsockname())
        with pytest.raises(ConnectionRefusedError):
            await connect(kind, address)


async def test_a_certificate_for_another_name_is_refused() -> None:
    async with open_engine(tls=CONTEXTS.server) as engine:
        address: Address = (socket.AF_INET, ("127.0.0.1", engine.port))
        transport = TlsTransport(address, CONTEXTS.client, "elsewhere.test")
        with pytest.raises(ssl.SSLCertVerificationError):
            await finish(transport)
        transport.close()


@pytest.mark.parametrize("name", ["", ".a", "a..b", f"{'a' * 64}.test"])
async def test_a_name_that_no_certificate_has_is_no_connection(name: str) -> None:
    with pytest.raises(OSError, match="no name"):
        TlsTransport((socket.AF_INET, ("127.0.0.1", 1)), CONTEXTS.client, name)


# ---- a whole worker over TLS ----


@asynccontextmanager
async def worker_on(
    url: str, tls: ssl.SSLContext = CONTEXTS.client
) -> AsyncIterator[DirectWorker]:
    worker = DirectWorker(
        WorkerSettings(name="w", url=url),
        WaitSettings(),
        environ={},
        report_bug=lambda _where, bug: pytest.fail(str(bug)),
        tls=tls,
    )
    async with served(worker):
        probe = await worker.probe()
        assert probe.discovery is not None, probe
        yield worker


def send(worker: DirectWorker, number: int = 1) -> RecordingDelivery:
    delivery = RecordingDelivery()
    worker.open(assignment(number), JOB, delivery)
    return delivery


async def test_answers_come_over_tls_and_connections_are_used_again() -> None:
    async with (
        open_engine(tls=CONTEXTS.server) as engine,
        worker_on(engine.url) as worker,
    ):
        before = engine.accepted
        for number in range(1, 4):
            delivery = send(worker, number)
            await delivery.finish()
            await trio.testing.wait_all_tasks_blocked(0.005)
            assert delivery.text == "Hello world"

        assert engine.accepted == before + 1


async def test_a_close_is_seen_at_once_over_tls() -> None:
    async with (
        open_engine(silent, tls=CONTEXTS.server) as engine,
        worker_on(engine.url) as worker,
    ):
        delivery = RecordingDelivery()
        source = worker.open(assignment(), JOB, delivery)
        x = await engine.next_exchange()
        source.close()

        await x.wait_closed()
        assert delivery.names == []


async def test_a_stream_cut_without_a_goodbye_over_tls_is_truncated() -> None:
    async def script(x: Exchange) -> None:
        await x.text("a")
        await x.fin()

    async with (
        open_engine(script, tls=CONTEXTS.server) as engine,
        worker_on(engine.url) as worker,
    ):
        delivery = send(worker)

        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert delivery.text == "a"


async def test_a_flood_over_tls_is_paused_and_loses_nothing() -> None:
    async def flood(x: Exchange) -> None:
        for n in range(200):
            await x.text(f"{n}:" + "x" * 20_000)
        await x.finish()
        await x.done()
        await x.end()

    async with (
        open_engine(in_turn(flood, answers("a")), tls=CONTEXTS.server) as engine,
        worker_on(engine.url) as worker,
    ):
        delivery = RecordingDelivery()
        source = worker.open(assignment(), JOB, delivery)
        for _ in range(5):
            await delivery.until("deltas", delivery.names.count("deltas") + 1)
            source.pause()
            taken = len(delivery.taken)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert len(delivery.taken) == taken
            source.resume()
        await delivery.finish()

    assert [d.text.partition(":")[0] for d in delivery.taken] == [
        str(n) for n in range(200)
    ]


async def test_a_worker_whose_certificate_is_wrong_is_not_spoken_to() -> None:
    async with open_engine(tls=CONTEXTS.server) as engine:
        worker = DirectWorker(
            WorkerSettings(name="w", url=f"https://127.0.0.1:{engine.port}"),
            WaitSettings(),
            environ={},
            report_bug=lambda _where, bug: pytest.fail(str(bug)),
            tls=make_contexts().client,
        )
        async with served(worker):
            assert "TLS" in (await worker.probe()).detail
            delivery = RecordingDelivery()
            worker.open(assignment(), JOB, delivery)

            assert (await delivery.fault()).kind is FaultKind.CONNECT
        assert engine.seen == []
