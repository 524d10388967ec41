"""A client that leaves, in every phase and every manner, over real sockets.

The figures of H4 and A7: the worker's socket closes within 100 ms, and
afterwards nothing is held anywhere.
"""

import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.lowlevel

from router.engine import open_router
from router.settings import Settings, WaitSettings, WorkerSettings
from tests.kit.deep import size
from tests.kit.edge import STEP_S, RawClient, chat, request, running, until
from tests.kit.engine import answers
from tests.kit.exchange import Exchange
from tests.kit.stack import Stack, open_stack

WITHIN_S: Final = 0.1
DESCRIPTORS: Final = Path("/proc/self/fd")
#: 200 disconnects in every run: 6 phases, 4 manners.
TIMES: Final = size(10_000, least=200) // 24 + 1

MANNERS: Final = ("fin", "reset", "half-close", "behind a pipelined request")
manner = pytest.mark.parametrize("manner", MANNERS)


def nearly_all(took: list[float]) -> float:
    """Give what all but one in ten kept below: a machine may pause."""
    return sorted(took)[-1 - max(1, len(took) // 10)]


def leave(client: RawClient, how: str) -> None:
    match how:
        case "fin":
            client.close()
        case "reset":
            client.reset()
        case "half-close":
            client.fin()
        case _:
            client.sock.send(b"\r\n" + request("GET", "/healthz"))
            client.close()


async def no_head(x: Exchange) -> None:
    await x.wait_closed()


async def no_first_delta(x: Exchange) -> None:
    await x.role()
    await x.wait_closed()


async def mid_stream(x: Exchange) -> None:
    await x.text("some")
    await x.wait_closed()


async def told_of(stack: Stack, x: Exchange, phase: str, client: RawClient) -> None:
    """Wait until the router is in *phase* with *x*."""
    if phase == "mid-stream":
        await client.until(b"some")
    if phase == "no first delta":
        (flight,) = stack.router.flights.values()
        await until(lambda: flight.phase_name() == "assigned")


@manner
@pytest.mark.parametrize(
    ("phase", "script", "streams"),
    [
        ("no head", no_head, True),
        ("no first delta", no_first_delta, True),
        ("mid-stream", mid_stream, True),
        ("non-stream", mid_stream, False),
    ],
)
async def test_h4_a_client_that_leaves_closes_its_upstream_within_100_ms(
    phase: str,
    script: Callable[[Exchange], Awaitable[None]],
    streams: bool,
    manner: str,
) -> None:
    async with open_stack(script, slots=1) as stack:
        (engine,) = stack.engines
        took = []
        for _ in range(TIMES):
            client = await stack.edge.connect()
            await client.send(chat(stream=streams))
            x = await engine.next_exchange()
            await told_of(stack, x, phase, client)

            left_at = trio.current_time()
            leave(client, manner)
            with trio.fail_after(1):
                await x.closed.wait()

            assert x.closed_at is not None
            took.append(x.closed_at - left_at)
            client.close()
        assert nearly_all(took) < WITHIN_S
        await stack.settle()
        await stack.edge.empty()
        assert engine.live == 0
        assert sum(stack.router.tally.disconnects.values()) == TIMES


async def test_h4_who_leaves_more_behind_than_the_kernel_holds_frees_the_slot() -> None:
    async with open_stack(mid_stream, slots=1) as stack:
        (engine,) = stack.engines
        client = await stack.edge.connect()
        await client.send(chat(stream=False))
        x = await engine.next_exchange()
        await client.send(bytes(300_000))
        client.close()
        with trio.fail_after(STEP_S):
            await x.closed.wait()
        await stack.settle()
        await stack.edge.empty()
        assert stack.router.tally.disconnects.total() == 1


@manner
async def test_b03_a_client_that_leaves_the_queue_never_reaches_a_worker(
    manner: str,
) -> None:
    async with open_stack(mid_stream, slots=1) as stack:
        (engine,) = stack.engines
        holder = await stack.edge.connect()
        await holder.send(chat())
        await engine.next_exchange()
        took = []
        for _ in range(TIMES):
            client = await stack.edge.connect()
            await client.send(chat())
            await until(lambda: len(stack.router.fleet.room) == 1)

            left_at = trio.current_time()
            leave(client, manner)
            await until(lambda: len(stack.router.fleet.room) == 0)

            took.append(trio.current_time() - left_at)
            client.close()
        assert nearly_all(took) < WITHIN_S
        holder.close()
        engine.script = answers("ok")
        last = await stack.edge.connect()
        await last.send(chat(stream=False))
        assert (await last.reply()).status == 200
        assert len(engine.seen) == 2
        await stack.settle()


@contextmanager
def full_listener() -> Iterator[int]:
    """A port whose connects hang: its backlog is full and nobody accepts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            yield port
        finally:
            for filler in fillers:
                filler.close()


@manner
async def test_h4_a_client_that_leaves_while_we_connect_leaves_no_socket(
    manner: str,
) -> None:
    with full_listener() as port:
        worker = WorkerSettings(
            "stuck", f"http://127.0.0.1:{port}", slots=1, models=("m",), settle_ms=0
        )
        settings = Settings(
            workers=(worker,), waits=WaitSettings(connect_ms=60_000, poll_ms=100)
        )
        async with open_router(settings) as router, running(router) as edge:
            # Its probes hang as well, so it is told to be ready by hand.
            member = next(iter(router.fleet.members.values()))
            member.life.state = type(member.life.state).READY
            descriptors = None
            took = []
            for _ in range(TIMES):
                client = await edge.connect()
                await client.send(chat())
                await until(lambda: bool(router.flights))
                (flight,) = router.flights.values()
                await until(lambda f=flight: f.phase_name() == "connecting")  # type: ignore[misc]

                left_at = trio.current_time()
                leave(client, manner)
                await until(lambda: not router.flights)

                took.append(trio.current_time() - left_at)
                client.close()
                await edge.empty()
                assert member.busy == 0
                now = len(list(DESCRIPTORS.iterdir()))
                assert descriptors is None or now <= descriptors
                descriptors = now
            assert nearly_all(took) < WITHIN_S
            assert router.tally.disconnects == {"connecting": TIMES}


async def test_b07_two_hundred_who_leave_anywhere_leave_nothing_behind() -> None:
    async def slowly(x: Exchange) -> None:
        await x.role()
        for n in range(50):
            await x.text(f"{n} ")
            await trio.lowlevel.checkpoint()
        await x.finish()
        await x.done()
        await x.end()

    async def come_and_go(number: int) -> None:
        client = await stack.edge.connect()
        await client.send(chat(stream=number % 3 != 0))
        for _ in range(number % 40):
            await trio.lowlevel.checkpoint()
        leave(client, MANNERS[number % 4])
        await trio.lowlevel.checkpoint()
        client.close()

    async with open_stack(slowly, slowly, slots=4) as stack:
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(come_and_go, number)
        await stack.settle()
        await stack.edge.empty()
        assert all(engine.live == 0 for engine in stack.engines)

        placed = dict(stack.router.tally.attempts)
        for _ in range(10):
            client = await stack.edge.connect()
            await client.send(chat(stream=False))
            assert (await client.reply()).status == 200
            client.close()
        after = stack.router.tally.attempts
        assert [after[w] - placed.get(w, 0) for w in sorted(after)] == [5, 5]
