"""Connections of a simulation, and the relay in the middle of each.

Rule: of what one end wrote the other gets a beginning, in order and at its time;
of a way that has lost anything nothing more comes out.
"""

import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import attrs
import trio

from tests.simulation.far_sockets import FarSocket

#: Bytes that a relay holds in one direction before it reads no more.
HELD_MAX: Final = 64 * 1024
#: Bytes that an eavesdropper has of a connection's beginning.
RECORDED_MAX: Final = 4096


@attrs.define
class Weather:
    """How bad the way between two hosts is, in one direction."""

    usual_s: float = 0.0
    """Latency when all is well."""
    latency_s: float = attrs.field(
        default=attrs.Factory(lambda self: self.usual_s, takes_self=True)
    )
    jitter_s: float = 0.0
    """Up to so much more; nothing overtakes."""
    bytes_per_s: float = float("inf")
    slice_bytes: int = 65536
    held: bool = False
    """A partition: what is under way waits."""
    lost: bool = False
    """What comes vanishes, and with it the rest of its connection."""
    news: trio.Event = attrs.field(factory=trio.Event)

    @property
    def is_fine(self) -> bool:
        """Whether what comes goes on at once."""
        return not (
            self.held or self.lost or self.latency_s or self.jitter_s
        ) and self.slice_bytes + self.bytes_per_s == float("inf")

    def set(self, **fields: Any) -> None:
        """Change it, and wake whoever waits for that."""
        for name, value in fields.items():
            setattr(self, name, value)
        self.news.set()
        self.news = trio.Event()

    def clear(self) -> None:
        """Be fine again."""
        fine = Weather(self.usual_s)
        names = [a.name for a in attrs.fields(Weather) if a.name != "news"]
        self.set(**{name: getattr(fine, name) for name in names})


@attrs.define(eq=False)
class Path:
    """Between one router and one agent."""

    router: str
    agent: str
    router_dials: bool
    there: Weather = attrs.field(factory=Weather)
    """Towards whoever was dialled."""
    back: Weather = attrs.field(factory=Weather)
    refuses: bool = False
    quiet_since: float = 0.0
    """When it was last troubled, or one of its hosts."""
    wires: list["Wire"] = attrs.field(factory=list)

    @property
    def both(self) -> tuple[Weather, Weather]:
        return self.there, self.back


@attrs.define(eq=False)
class Way:
    """One direction of one connection."""

    weather: Weather
    source: socket.socket
    sink: socket.socket
    rng: random.Random
    recorded: bytearray = attrs.field(factory=bytearray)
    held: deque[tuple[float, bytes]] = attrs.field(factory=deque)
    """b"" is the end, in its order."""
    size: int = 0
    due: float = 0.0
    dead: bool = False
    """Something of it was lost, so nothing more may come out of it."""
    news: trio.Event = attrs.field(factory=trio.Event)

    def changed(self) -> None:
        """Wake both tasks."""
        self.news.set()
        self.news = trio.Event()

    async def take(self) -> None:
        """Read all that comes. A checkpoint."""
        octets = b"-"
        while octets:
            while self.size > HELD_MAX:
                await self.news.wait()
            await trio.lowlevel.wait_readable(self.source)
            try:
                octets = self.source.recv(65536)
            except BlockingIOError:
                continue
            except OSError:
                if not self.dead:
                    raise
                octets = b""
            if self.weather.lost:
                self.dead = True
            if len(self.recorded) < RECORDED_MAX:
                self.recorded += octets
            self._hold(octets)

    def _hold(self, octets: bytes) -> None:
        weather = self.weather
        if weather.is_fine and not self.held and not self.dead and octets:
            # Nothing to wait for: the whole of it, if the other end has room.
            with suppress(BlockingIOError):
                octets = octets[self.sink.send(octets) :]
            if not octets:
                return
        now = trio.current_time()
        late = weather.latency_s + self.rng.uniform(0, weather.jitter_s)
        self.due = max(self.due, now + late)
        step = weather.slice_bytes
        pieces = [octets[at : at + step] for at in range(0, len(octets), step)]
        for piece in pieces or [b""]:
            self.due += len(piece) / weather.bytes_per_s
            self.held.append((self.due, piece))
        self.size += len(octets)
        self.changed()

    async def give(self) -> None:
        """Write it, each piece at its time. A checkpoint."""
        while True:
            while not self.held:
                await self.news.wait()
            due, piece = self.held[0]
            if due > trio.current_time():
                await trio.sleep_until(due)
            while self.weather.held:
                await self.weather.news.wait()
            self.dead = self.dead or self.weather.lost
            if not self.dead:
                if not piece:
                    self.sink.shutdown(socket.SHUT_WR)
                    return
                await self._write(piece)
            elif not piece:
                return
            self.held.popleft()
            self.size -= len(piece)
            self.changed()

    async def _write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[self.sink.send(rest) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sink)
            if self.dead:
                return


@attrs.define(eq=False)
class Wire:
    """One connection: both products' ends, and ours."""

    path: Path
    near: FarSocket
    far: FarSocket
    ours: tuple[socket.socket, socket.socket]
    """Next to near, and to far."""
    ways: tuple[Way, Way]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self) -> None:
        """Carry bytes until both ends are closed or cut. A checkpoint."""
        self.path.wires.append(self)
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    for way in self.ways:
                        nursery.start_soon(self._carry, way.take, way)
                        nursery.start_soon(self._carry, way.give, way)
        finally:
            self.path.wires.remove(self)
            for sock in self.ours:
                sock.close()

    async def _carry(self, task: Callable[[], Any], way: Way) -> None:
        try:
            await task()
        except OSError:
            # One end is closed over what it had not read, or for what comes.
            if way.dead:
                return
            self.cut()

    def cut(self, *, near: bool = True, far: bool = True) -> None:
        """Reset one end or both; one that is not told hears nothing any more."""
        for told, product, way in (
            (near, self.near, self.ways[1]),
            (far, self.far, self.ways[0]),
        ):
            way.dead = True
            way.changed()
            if told:
                product.cut = True
        if near and far:
            self.scope.cancel()
            return
        for told, sock in zip((near, far), self.ours, strict=True):
            if told:
                # Readable for its product, which then finds the reset.
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def bite(self, size: int) -> None:
        """Let both products read and write *size* bytes a call."""
        self.near.bite = self.far.bite = size
