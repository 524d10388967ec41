"""The edge as a whole: accepting, limits, drain and end (H6, D3, E2)."""

import errno
import hashlib
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
import trio

from router.edge.accept import Acceptor, Exhausted, tune
from router.edge.server import client_edge, serve
from router.edge.site import Site
from router.errors import Fault, FaultKind
from router.ports import Taken
from router.settings import ServerSettings
from tests.kit.edge import (
    PATIENT,
    QUICK,
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


async def test_e2_serve_takes_listeners_of_the_caller_and_leaves_them_open(
    tmp_path: Path,
) -> None:
    with listen() as tcp, listen(tmp_path / "s") as unix:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: serve(
                    StubRouter(), [tcp, unix], task_status=task_status
                )
            )
            for listener in (tcp, unix):
                client = await RawClient.connect(listener)
                await client.send(HEALTH)
                assert (await client.reply()).status == 200
                client.close()
            nursery.cancel_scope.cancel()
        assert tcp.fileno() != -1
        assert unix.fileno() != -1


async def test_e3_two_edges_live_side_by_side() -> None:
    async with (
        running(StubRouter()) as one,
        running(StubRouter()) as two,
    ):
        for here in (one, two):
            client = await here.connect()
            await client.send(request("GET", "/nowhere"))
            assert (await client.reply()).status == 404
        assert one.edge.site.tally.refused == two.edge.site.tally.refused == {"404": 1}


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_s2_descriptors_are_at_baseline_after_many_connections() -> None:
    router = StubRouter()
    async with running(router) as here:
        before = open_descriptors()
        for _ in range(100):
            client = await RawClient.connect(here.listener)
            await client.send(HEALTH)
            assert (await client.reply()).status == 200
            client.close()
        await here.empty()
        assert open_descriptors() == before


# ---- limits ----


async def test_h6_beyond_connections_max_it_is_503_and_close() -> None:
    settings = ServerSettings(connections_max=2)
    async with running(StubRouter(), settings) as here:
        clients = [await here.connect() for _ in range(2)]
        for client in clients:
            await client.send(HEALTH)
            assert (await client.reply()).status == 200
        third = await here.connect()
        reply = await third.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.headers["x-request-id"]
        assert await third.rest() == b""
        assert here.edge.connections == 2

        clients[0].close()
        await until(lambda: here.edge.connections == 1)
        fourth = await here.connect()
        await fourth.send(HEALTH)
        assert (await fourth.reply()).status == 200


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@contextmanager
def descriptors(spare: int) -> Iterator[None]:
    """Let this process open only *spare* more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if not is_open(number)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_h6_without_descriptors_it_answers_503_and_recovers() -> None:
    log = QuietLog()
    async with running(StubRouter(), log=log) as here:
        waiting = [socket.socket() for _ in range(40)]
        try:
            with descriptors(spare=5):
                for sock in waiting:
                    sock.connect(here.listener.getsockname())
                    sock.setblocking(False)
                    await trio.lowlevel.checkpoint()
                await until(lambda: here.edge.site.tally.refused["503"] >= 30)
                assert here.edge.connections <= 6
                refused = RawClient(waiting[-1])
                assert (await refused.reply()).status == 503
                assert await refused.rest() == b""
        finally:
            for sock in waiting:
                sock.close()
        await here.empty()

        freed_at = trio.current_time()
        client = await here.connect()
        await client.send(HEALTH)
        assert (await client.reply()).status == 200
        assert trio.current_time() - freed_at < 2
    exhausted = [line for line in log.lines if line[1] == "accept_exhausted"]
    assert len(exhausted) == 1  # at most one line a second


class BrokenListener(socket.socket):
    """A listener whose accepts fail as scripted."""

    failures: list[int]

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            code = self.failures.pop(0)
            raise OSError(code, os.strerror(code))
        return super().accept()


async def test_h6_an_accept_that_fails_ends_nothing() -> None:
    edge = client_edge(StubRouter(), log=QuietLog())
    with BrokenListener() as listener:
        listener.failures = [errno.ECONNABORTED, errno.EPERM, errno.ENFILE]
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: edge.serve([listener], task_status=task_status)
            )
            client = await RawClient.connect(listener)
            await client.send(HEALTH)
            # ECONNABORTED and EPERM cost nothing, ENFILE a short pause; the
            # reserve may answer 503 meanwhile, so ask until we are served.
            while (await client.reply()).status != 200:
                client.close()
                client = await RawClient.connect(listener)
                await client.send(HEALTH)
            client.close()
            nursery.cancel_scope.cancel()
    assert listener.failures == []


def site() -> Site:
    router = StubRouter()
    return Site(
        ServerSettings(),
        router.tally,
        router.cork,
        router.new_request_id,
        QuietLog(),
        PATIENT,
    )


async def test_h6_a_health_probe_is_answered_out_of_the_reserve() -> None:
    acceptor = Acceptor(site())
    with listen() as listener:
        listener.setblocking(False)
        probe = await RawClient.connect(listener)
        other = await RawClient.connect(listener)
        await probe.send(HEALTH)
        await other.send(chat())
        with descriptors(spare=0):
            with pytest.raises(Exhausted):
                list(acceptor.waiting(listener, 10))
            # The reserve is there again.
            with pytest.raises(Exhausted):
                list(acceptor.waiting(listener, 10))
        assert (await probe.reply()).status == 200
        assert (await other.reply()).status == 503
        probe.close()
        other.close()
    acceptor.close()


# ---- drain ----


async def test_d3_draining_says_not_ready_and_closes_behind_each_reply() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(request("GET", "/readyz"))
        assert (await client.reply()).status == 200

        here.edge.drain()
        await client.send(request("GET", "/readyz"))
        reply = await client.reply()
        assert (reply.status, reply.json["status"]) == (503, "draining")
        assert reply.headers["connection"] == "close"
        assert await client.rest() == b""

        late = await here.connect()
        await late.send(chat())
        served = await router.next()
        served.text("still served")
        served.finish()
        assert b"connection: close" in await late.until(b"0\r\n\r\n")
        assert await late.rest() == b""


async def test_d3_stop_accepting_lets_streams_end_and_then_serve_returns() -> None:
    router = StubRouter()
    edge = client_edge(router, log=QuietLog(), patience=QUICK)
    with listen() as listener:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: edge.serve([listener], task_status=task_status)
            )
            idle = await RawClient.connect(listener)
            await idle.send(HEALTH)
            assert (await idle.reply()).status == 200
            streaming = await RawClient.connect(listener)
            await streaming.send(chat())
            served = await router.next()
            served.text("a")
            await streaming.until(b'"a"')
            waiting = await RawClient.connect(listener)
            await waiting.send(chat())
            queued = await router.next()
            behind = await RawClient.connect(listener)  # still in the kernel
            await behind.send(HEALTH)

            edge.stop_accepting()
            edge.stop_accepting()
            assert await idle.rest() == b""
            assert (await behind.reply()).headers["connection"] == "close"
            queued.fail(Fault(FaultKind.SHUTTING_DOWN, "stopping"))
            reply = await waiting.reply()
            assert (reply.status, reply.headers["connection"]) == (503, "close")
            assert listener.fileno() == -1

            served.text("b")
            served.finish()
            assert b"[DONE]" in await streaming.until(b"0\r\n\r\n")
            assert await streaming.rest() == b""
            for client in (idle, streaming, waiting, behind):
                client.close()
        # The nursery has no task left: serve has returned.
        assert edge.connections == 0


async def test_d3_a_connection_that_was_never_used_does_not_hold_up_the_end() -> None:
    edge = client_edge(StubRouter(), log=QuietLog(), patience=QUICK)
    with listen() as listener:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: edge.serve([listener], task_status=task_status)
            )
            client = await RawClient.connect(listener)
            await until(lambda: edge.connections == 1)
            edge.stop_accepting()
            began = trio.current_time()
        assert trio.current_time() - began < QUICK.linger_s + 2
        assert await client.rest() == b""
        client.close()


async def test_d3_nor_does_one_that_the_kernel_had_accepted_and_says_nothing() -> None:
    patience = attrs.evolve(QUICK, idle_s=20.0)
    edge = client_edge(StubRouter(), log=QuietLog(), patience=patience)
    with listen() as listener, socket.socket() as silent:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: edge.serve([listener], task_status=task_status)
            )
            silent.connect(listener.getsockname())
            edge.stop_accepting()
            began = trio.current_time()
        assert trio.current_time() - began < QUICK.linger_s + 2


async def test_b97_a_drained_stream_that_is_cut_gets_its_frame_and_an_end() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        served.text("a")
        here.edge.stop_accepting()
        served.fail(Fault(FaultKind.SHUTTING_DOWN, "The router is stopping."))
        rest = await client.rest()
    assert b'"no_worker_available"' in rest
    assert not rest.endswith(b"0\r\n\r\n")


# ---- keys ----


async def test_h8_with_a_keys_file_clients_need_a_key_and_probes_do_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    path.write_text(hashlib.sha256(b"canary-key").hexdigest() + "\n")
    router, log = StubRouter(), QuietLog()
    settings = ServerSettings(api_keys_file=str(path))
    async with running(router, settings, log=log) as here:
        client = await here.connect()
        for octets in (
            chat(),
            chat(headers={"Authorization": "Bearer wrong"}),
            request("GET", "/v1/models"),
        ):
            await client.send(octets)
            reply = await client.reply()
            assert reply.status == 401
            assert reply.json["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert b"wrong" not in reply.body
        for path_ in ("/healthz", "/readyz"):
            await client.send(request("GET", path_))
            assert (await client.reply()).status == 200

        await client.send(chat(headers={"Authorization": "Bearer canary-key"}))
        served = await router.next()
        served.finish()
        await client.until(b"0\r\n\r\n")
    assert "canary" not in repr(log.lines)


# ---- many at once ----


async def test_h1_slow_senders_hold_nobody_up() -> None:
    router = StubRouter()
    patience = attrs.evolve(QUICK, head_s=1.0, body_s=1.0, idle_s=1.0)
    async with running(router, patience=patience) as here:
        drips = [await here.connect() for _ in range(60)]
        for i, client in enumerate(drips):
            octets = (b"GET /healthz HT", chat()[:-5], b"", b"\x16\x03\x01\x02")[i % 4]
            await client.send(octets)
        good = await here.connect()
        await good.send(HEALTH)
        began = trio.current_time()
        assert (await good.reply()).status == 200
        assert trio.current_time() - began < 0.9
        await here.empty()
    assert router.started == 0


async def test_h5_stalled_readers_cost_little_and_hurt_nobody() -> None:
    router = StubRouter()
    settings = ServerSettings(client_stall_ms=300)
    async with running(router, settings, patience=QUICK) as here:
        stalled = []
        for _ in range(40):
            client = await here.connect(rcvbuf=16_384)
            await client.send(chat())
            served = await router.next()
            stalled.append(served)
            while served.text("x" * 4000) is Taken.MORE:
                pass
        assert router.tally.buffer_high_water < 80_000
        healthy = await here.connect()
        await healthy.send(chat())
        served = await router.next()
        served.text("fine")
        await healthy.until(b'"fine"')
        with trio.fail_after(2):
            for request_ in stalled:
                await request_.over.wait()
        await until(lambda: here.edge.connections == 1)
        served.finish()
        await healthy.until(b"0\r\n\r\n")


async def test_clients_inherit_what_their_listener_was_given() -> None:
    """No system call per client sets these; so the kernel must."""
    tcp = socket.IPPROTO_TCP
    with listen() as listener:
        tune(listener, stall_ms=45_000)
        client = await RawClient.connect(listener)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(tcp, socket.TCP_NODELAY) == 1
            assert accepted.getsockopt(tcp, socket.TCP_NOTSENT_LOWAT) == 65_536
            assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 45_000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        client.close()
