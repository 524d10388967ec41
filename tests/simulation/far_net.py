"""The network of a simulation: byte streams between hosts, on logical time.

Each connection is two socket pairs with a relay of ours in between, so that both
ends run their whole code, system calls included, and yet nothing happens at a
time that is not the clock's: what is written to such a pair can be read at once.
Loss, doubling and reordering of single messages are not here, as no byte stream
has them; ``tests.kit.wire_world`` has.
"""

import errno
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import trio

from tests.simulation.far_sockets import FarListener, FarSocket, pair
from tests.simulation.far_wires import RECORDED_MAX, Path, Way, Wire
from workers import transport
from workers.transport import Address
from workers.wire.frames import LENGTH

#: Seconds for which somebody who says a recorded opening again listens.
REPLAY_S: Final = 4.0
#: Frames that a stranger gets: a hello, a proof and a bye.
REFUSAL: Final = 3
_EAVESDROPPER: Final = "eve"


class Net:
    """All paths, who listens, and every connection."""

    def __init__(
        self,
        nursery: trio.Nursery,
        rng: random.Random,
        breach: Callable[[str], None],
    ) -> None:
        """Connections are tasks of *nursery*."""
        self._nursery = nursery
        self._breach = breach
        #: Recorded openings that were said again.
        self.replays = 0
        self._rng = rng
        #: By the address that is dialled.
        self.paths: dict[str, Path] = {}
        self.listeners: dict[str, FarListener] = {}

    def dial(self, address: Address) -> socket.socket:
        """Stand for ``workers.transport._dial``."""
        host = address[1][0]
        path, listener = self.paths[host], self.listeners.get(host)
        if path.refuses or listener is None or listener.fileno() < 0:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        near, ours = pair()
        wire = self._wire(path, listener, near, ours)
        self._nursery.start_soon(wire.run)
        return near

    def replay(self, wire: Wire) -> bool:
        """Connect once more, and say what was said on *wire* at its beginning."""
        for host, path in self.paths.items():
            listener = self.listeners.get(host)
            if path is wire.path and listener is not None and listener.fileno() >= 0:
                self._nursery.start_soon(self._replay, listener, wire)
                return True
        return False

    async def _replay(self, listener: FarListener, wire: Wire) -> None:
        product, ours = pair()
        listener.offer(product, _EAVESDROPPER)
        self.replays += 1
        heard = b""
        with suppress(OSError), trio.move_on_after(REPLAY_S):
            ours.send(wire.ways[0].recorded[:RECORDED_MAX])
            octets = b"-"
            while octets:
                await trio.lowlevel.wait_readable(ours)
                octets = ours.recv(65536)
                heard += octets
        ours.close()
        if _frames(heard) > REFUSAL:
            self._breach("a recorded opening was believed (P1)")

    def _wire(
        self, path: Path, listener: FarListener, near: FarSocket, ours: socket.socket
    ) -> Wire:
        far, theirs = pair()
        there = Way(path.there, ours, theirs, self._rng)
        back = Way(path.back, theirs, ours, self._rng)
        listener.offer(far, path.router if path.router_dials else path.agent)
        return Wire(path, near, far, (ours, theirs), (there, back))


def _frames(octets: bytes) -> int:
    """Count the frames in *octets*."""
    count = at = 0
    while at < len(octets):
        at += LENGTH + int.from_bytes(octets[at : at + LENGTH], "big")
        count += 1
    return count


async def _inline(sync: Callable[..., Any], *args: Any, **_: Any) -> Any:
    """Stand for a thread: its end would come at no logical time."""
    await trio.lowlevel.checkpoint()
    return sync(*args)


@contextmanager
def patched(net: Callable[[], Net]) -> Iterator[None]:
    """Let connections be *net*'s, and no thread be anybody's."""
    dial, run_sync = transport._dial, trio.to_thread.run_sync

    def dial_here(address: Address) -> socket.socket:
        return net().dial(address)

    transport._dial = dial_here
    trio.to_thread.run_sync = _inline  # type: ignore[assignment]
    try:
        yield
    finally:
        transport._dial, trio.to_thread.run_sync = dial, run_sync
