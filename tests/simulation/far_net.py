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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import attrs
import trio

from workers.transport import Address
from workers.wire.frames import LENGTH

#: Bytes that a pair and a relay hold in one direction, as socket buffers would.
BUFFER: Final = 16 * 1024
HELD_MAX: Final = 64 * 1024
#: Bytes that an eavesdropper has of a connection's beginning.
RECORDED_MAX: Final = 4096
REPLAY_S: Final = 4.0
#: Frames that a stranger gets: a hello, a proof and a bye.
REFUSAL: Final = 3
_EAVESDROPPER: Final = "eve"


class FarSocket(socket.socket):
    """An end of a connection as the product has it; cut, it shows a reset."""

    cut = False
    #: Bytes of one call, at most.
    bite = 65536

    def setsockopt(self, level: int, *rest: Any) -> None:
        """Set what a pair has; it has nothing of TCP."""
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *rest)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Read, in short pieces where these are asked for."""
        self._check()
        return super().recv(min(size, self.bite), flags)

    def send(self, octets: Any, flags: int = 0) -> int:
        """Write, in short pieces where these are asked for."""
        self._check()
        return super().send(octets[: self.bite], flags)

    def _check(self) -> None:
        if self.cut:
            raise ConnectionResetError(errno.ECONNRESET, "cut")


def pair() -> tuple[FarSocket, socket.socket]:
    """Make the product's end and ours."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    product = FarSocket(fileno=ends[0].detach())
    product.setblocking(False)
    return product, ends[1]


class FarListener(socket.socket):
    """Where connections come in; readable while one waits."""

    def __init__(self) -> None:
        ours, self._bell = socket.socketpair()
        super().__init__(fileno=ours.detach())
        self.setblocking(False)
        self._waiting: deque[tuple[FarSocket, str]] = deque()
        self._ports = 0

    def offer(self, sock: FarSocket, host: str) -> None:
        """Let *sock* be accepted, as from *host*."""
        self._waiting.append((sock, host))
        self._bell.send(b"x")

    def accept(self) -> tuple[FarSocket, Any]:
        """Take the next, or raise BlockingIOError."""
        self.recv(1)
        sock, host = self._waiting.popleft()
        self._ports += 1
        return sock, (host, self._ports)

    def close(self) -> None:
        """Close, and what nobody has accepted."""
        super().close()
        self._bell.close()
        for sock, _ in self._waiting:
            sock.close()


@attrs.define
class Weather:
    """How bad the way between two hosts is, in one direction."""

    latency_s: float = 0.0
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
        fine = Weather()
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
