"""Where the encoded bytes for one client go.

``write`` never blocks, never raises and never closes the socket. What the
kernel does not take at once is kept: between the high mark and the low mark
the source is to be paused, and past the ceiling the client is cut (H5).
"""

import socket
from collections.abc import Callable
from typing import Final, Protocol

import trio

from router.cork import Cork
from router.ports import Taken
from router.tally import Tally

#: Bytes. Below LOW the source reads on, from HIGH on it is paused.
LOW: Final = 32 * 1024
HIGH: Final = 64 * 1024
#: Taken behind the event that filled the sink, however large that was: what one
#: read of a worker brings with it, the end of the answer among it. More comes only
#: from a source that does not heed FULL.
BEHIND: Final = 1024 * 1024


class Socket(Protocol):
    """The part of a socket that a sink uses."""

    def send(self, octets: bytes | bytearray, /) -> int:
        """Hand over what fits; raises BlockingIOError where nothing does."""

    def fileno(self) -> int:
        """Its descriptor."""


class Rooms(Protocol):
    """The part of a ClientPoll that a sink uses."""

    def want_room(self, fd: int) -> None:
        """Have ``flush`` called each time that *fd* has room."""

    def enough(self, fd: int) -> None:
        """Have ``flush`` called no more."""


# Attributes of an enum are slow to reach.
_MORE: Final = Taken.MORE


def _nothing() -> None:
    """Stand in for a call that nobody waits for."""


class Sink:
    """One client's bytes on their way out."""

    __slots__ = (
        "_buffer",
        "_ceiling",
        "_cork",
        "_corked",
        "_fd",
        "_rooms",
        "_send",
        "_tally",
        "cut_off",
        "full",
        "moved_at",
        "on_cut",
        "on_empty",
        "on_room",
    )

    def __init__(
        self, sock: "Socket | socket.socket", rooms: Rooms, tally: Tally, cork: Cork
    ) -> None:
        """*sock* is non-blocking, and closed by its owner alone."""
        self._cork = cork
        #: Written in the turn of a worker that is under way.
        self._corked = b""
        self._send = sock.send
        self._fd = sock.fileno()
        self._rooms = rooms
        self._tally = tally
        self._buffer = bytearray()
        #: Above the high mark, and not yet back at the low one.
        self.full = False
        #: While it is full: more is never held.
        self._ceiling = 0
        #: The client takes nothing any more, for whatever reason.
        self.cut_off = False
        #: While bytes are held: when one last moved, on Trio's clock.
        self.moved_at = 0.0
        #: Called when a FULL sink has fallen to the low mark.
        self.on_room: Callable[[], None] = _nothing
        #: Called when all bytes are with the kernel, or will never be.
        self.on_empty: Callable[[], None] = _nothing
        #: Called when the client is found to be gone, and nobody is there to be
        #: told so by ``write``.
        self.on_cut: Callable[[], None] = _nothing

    @property
    def held(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._buffer) + len(self._corked)

    def write(self, octets: bytes) -> Taken:
        """Send *octets*, or keep them, whole. Not a checkpoint; never raises.

        In the turn of a worker they are kept until that is over: see `Cork`.
        """
        if self.cut_off:
            return Taken.GONE
        if self._buffer:
            if self.full and len(self._buffer) + len(octets) > self._ceiling:
                self.cut()
                return Taken.GONE
            return self._hold(octets)
        cork = self._cork
        if cork.held:
            if self._corked or len(octets) >= HIGH:
                return self._keep(octets)
            cork.keep(self)
            self._corked = octets
            return _MORE
        try:
            sent = self._send(octets)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.cut()
            return Taken.GONE
        return _MORE if sent == len(octets) else self._wait_with(octets[sent:])

    def uncork(self) -> None:
        """Send what was written in the turn that is over. See `Corked`."""
        octets = self._corked
        if not octets:
            return
        self._corked = b""
        try:
            sent = self._send(octets)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.crash()
            return
        left = len(octets) - sent
        if left:
            self._wait_with(octets[sent:])
        if self.full and left <= LOW:
            self.full = False
            self.on_room()

    def crash(self) -> None:
        """Cut the client, and tell its owner. See `Corked`."""
        self.cut()
        self.on_cut()

    def flush(self) -> None:
        """Send what is held, as far as the kernel takes it. Never raises."""
        buffer = self._buffer
        if not buffer:
            return
        try:
            sent = self._send(buffer)
        except BlockingIOError:
            return
        except OSError:
            self.cut()
            return
        del buffer[:sent]
        self.moved_at = trio.current_time()
        if not buffer:
            self._rooms.enough(self._fd)
        if self.full and len(buffer) <= LOW:
            self.full = False
            self.on_room()
        if not buffer:
            self.on_empty()

    def stalled(self, now: float, stall_s: float) -> bool:
        """Tell whether bytes are held and none moved for *stall_s* seconds."""
        return bool(self._buffer) and now >= self.moved_at + stall_s

    def cut(self) -> None:
        """Take nothing more and drop what is held. Idempotent."""
        if self.cut_off:
            return
        self.cut_off = True
        self._corked = b""
        if self._buffer:
            self._buffer.clear()
            self._rooms.enough(self._fd)
            self.on_empty()

    def abandon(self) -> None:
        """Drop what is held, the socket being closed next; tell nobody."""
        self.cut_off = True
        self._corked = b""
        self._buffer.clear()
        self.on_empty = self.on_cut = _nothing
        self.quiet()

    def quiet(self) -> None:
        """Forget ``on_room``: the request that asked for it is over."""
        self.full = False
        self.on_room = _nothing

    def _keep(self, octets: bytes) -> Taken:
        """Keep more *octets*, or many, until the turn that brought them is over."""
        kept = self._corked
        if not kept:
            self._cork.keep(self)
        elif self.full and len(kept) + len(octets) > self._ceiling:
            self.cut()
            return Taken.GONE
        octets = kept + octets
        self._corked = octets
        return self._filled(len(octets)) if len(octets) >= HIGH else _MORE

    def _wait_with(self, left: bytes) -> Taken:
        """Hold what the kernel did not take, until it has room."""
        self.moved_at = trio.current_time()
        self._rooms.want_room(self._fd)
        return self._hold(left)

    def _hold(self, octets: bytes) -> Taken:
        buffer = self._buffer
        buffer += octets
        held = len(buffer)
        tally = self._tally
        tally.buffer_high_water = max(tally.buffer_high_water, held)
        return self._filled(held) if held >= HIGH else _MORE

    def _filled(self, held: int) -> Taken:
        if not self.full:
            self.full = True
            self._ceiling = held + BEHIND
        return Taken.FULL
