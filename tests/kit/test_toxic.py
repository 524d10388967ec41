"""Is the bad network as bad as it says, and no worse?"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from tests.kit.toxic import Toxic, toxic


@asynccontextmanager
async def echoing() -> AsyncIterator[Toxic]:
    """A proxy before a server that says everything back."""

    async def echo(stream: trio.SocketStream) -> None:
        try:
            async for octets in stream:
                await stream.send_all(octets)
        except trio.BrokenResourceError:
            return

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, echo, [listener])
        async with toxic(port) as proxy:
            yield proxy
        nursery.cancel_scope.cancel()


async def connect(proxy: Toxic) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", proxy.port)


async def exchange(stream: trio.SocketStream, octets: bytes) -> float:
    """Say *octets* and hear them back, whole and in order; give the seconds."""
    began = trio.current_time()
    got = b""

    async def read() -> None:
        nonlocal got
        while len(got) < len(octets):
            more = await stream.receive_some(65536)
            assert more
            got += more

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await stream.send_all(octets)
    assert got == octets
    return trio.current_time() - began


async def test_a_good_network_passes_everything() -> None:
    async with echoing() as proxy, await connect(proxy) as stream:
        await exchange(stream, bytes(range(256)) * 400)
        await stream.send_eof()
        assert await stream.receive_some() == b""


async def test_latency_and_jitter_delay_and_never_reorder() -> None:
    async with echoing() as proxy, await connect(proxy) as stream:
        proxy.there.latency_s = proxy.back.latency_s = 0.02
        proxy.there.jitter_s = 0.02
        took = await exchange(stream, bytes(range(256)) * 20)

        assert took >= 0.04


async def test_a_slow_network_takes_its_time() -> None:
    async with echoing() as proxy, await connect(proxy) as stream:
        proxy.there.bytes_per_s = 100_000
        took = await exchange(stream, b"x" * 10_000)

        assert took >= 0.1


async def test_slices_come_one_by_one() -> None:
    async with echoing() as proxy, await connect(proxy) as stream:
        proxy.back.slice_bytes = 1
        await exchange(stream, b"0123456789" * 20)


async def test_a_reset_is_felt_at_both_ends() -> None:
    async with echoing() as proxy, await connect(proxy) as stream:
        await exchange(stream, b"x")
        proxy.reset()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()


async def test_a_half_open_connection_says_nothing_and_does_not_end() -> None:
    async with echoing() as proxy, await connect(proxy) as stream:
        await exchange(stream, b"x")
        proxy.half_open()
        await stream.send_all(b"anybody?")
        with trio.move_on_after(0.05) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
        proxy.heal()
        async with await connect(proxy) as again:
            await exchange(again, b"y")


async def test_a_refused_connection_ends_at_once() -> None:
    async with echoing() as proxy:
        proxy.refuse = True
        async with await connect(proxy) as stream:
            assert await stream.receive_some() == b""
