"""A TCP proxy that is a bad network: late, slow, in slices, cut or half-open.

What it cannot be is a network that loses, doubles or reorders bytes: TCP gives
each end one stream of bytes in order, or none at all, and a proxy that moved
bytes about would be a bug that no network has. For messages out of order see
`tests.kit.wire_world`.
"""

import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

#: Bytes that one direction may hold, as a socket buffer would.
HELD_MAX: Final = 256 * 1024
_LINGER_ZERO: Final = b"\1\0\0\0\0\0\0\0"


@attrs.define
class Toxics:
    """How bad one direction is; every field may be changed while it runs."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more, but never so that bytes overtake."""
    bytes_per_s: float = float("inf")
    slice_bytes: int = 65536
    """Longest piece that is passed on at once."""
    open: bool = True
    """False: bytes are taken and go nowhere, and no end is told."""


class Toxic:
    """The proxy; ``port`` is where to connect in the server's place."""

    def __init__(self, port: int, rng: random.Random) -> None:
        """Stand before *port* of 127.0.0.1."""
        self.port = 0
        #: Towards the server, and back.
        self.there = Toxics()
        self.back = Toxics()
        #: Connections that were accepted.
        self.accepted = 0
        #: Whether new connections are refused.
        self.refuse = False
        self._server = port
        self._rng = rng
        self._pairs: set[tuple[trio.SocketStream, trio.SocketStream]] = set()

    @property
    def connections(self) -> int:
        """Connections that pass bytes now."""
        return len(self._pairs)

    def reset(self) -> None:
        """Cut every connection with a RST, at both ends."""
        for pair in list(self._pairs):
            for stream in pair:
                stream.socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO
                )
                stream.socket.close()

    def half_open(self) -> None:
        """From now on nothing passes, either way, and nobody is told."""
        self.there.open = self.back.open = False

    def heal(self) -> None:
        """Be a good network again, for new connections; old ones stay dead."""
        self.reset()
        self.there, self.back = Toxics(), Toxics()

    async def serve(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept until cancelled."""
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        async with listener, trio.open_nursery() as nursery:
            task_status.started()
            while True:
                near = await listener.accept()
                self.accepted += 1
                nursery.start_soon(self._carry, near)

    async def _carry(self, near: trio.SocketStream) -> None:
        async with near:
            if self.refuse:
                return
            try:
                far = await trio.open_tcp_stream("127.0.0.1", self._server)
            except OSError:
                return
            pair = near, far
            self._pairs.add(pair)
            try:
                async with far, trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass, near, far, "there")
                    nursery.start_soon(self._pass, far, near, "back")
            finally:
                self._pairs.discard(pair)

    async def _pass(
        self, source: trio.SocketStream, sink: trio.SocketStream, way: str
    ) -> None:
        """Pass bytes on in their order, each piece at its own time."""
        toxics: Toxics = getattr(self, way)
        send, receive = trio.open_memory_channel[tuple[float, bytes]](HELD_MAX // 1024)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, receive, sink, toxics)
            due = trio.current_time()
            with send:
                while octets := await _read(source, toxics):
                    late = toxics.latency_s + self._rng.uniform(0, toxics.jitter_s)
                    due = max(due, trio.current_time() + late)
                    for at in range(0, len(octets), toxics.slice_bytes):
                        piece = octets[at : at + toxics.slice_bytes]
                        due += len(piece) / toxics.bytes_per_s
                        await send.send((due, piece))

    async def _write(
        self,
        receive: trio.MemoryReceiveChannel[tuple[float, bytes]],
        sink: trio.SocketStream,
        toxics: Toxics,
    ) -> None:
        try:
            async for due, piece in receive:
                await trio.sleep_until(due)
                if toxics.open:
                    await sink.send_all(piece)
            if toxics.open:
                await sink.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # The other direction finds the same.
            return
        finally:
            receive.close()


async def _read(source: trio.SocketStream, toxics: Toxics) -> bytes:
    """Read a piece; b"": no more comes. A cut end is one. A checkpoint."""
    size = max(1, min(65536, toxics.slice_bytes * 64))
    try:
        octets = bytes(await source.receive_some(size))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        octets = b""
    if not octets and not toxics.open:
        # The end of one side is not told to the other either.
        await trio.sleep_forever()
    return octets


@asynccontextmanager
async def toxic(port: int, *, seed: int = 1) -> AsyncIterator[Toxic]:
    """Run a proxy before *port* for the length of the block."""
    proxy = Toxic(port, random.Random(seed))
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve)
        yield proxy
        nursery.cancel_scope.cancel()
