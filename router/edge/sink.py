"""Where the encoded bytes for one client go.

``write`` never blocks, never raises and never closes the socket. What the
kernel does not take at once is kept: between the high mark and the low mark
the source is to be paused, and past the ceiling the client is cut (H5).
"""

import socket
from collections.abc import Callable
from typing import Final, Protocol

import trio

from router.ports import Taken
from router.tally import Tally

#: Bytes. Below LOW the source reads on, from HIGH on it is paused.
LOW: Final = 32 * 1024
HIGH: Final = 64 * 1024
#: Never held for one client, except as the rest of one event that was taken
#: while the buffer was below HIGH.
CEILING: Final = 1024 * 1024


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
        "_fd",
        "_rooms",
        "_send",
        "_tally",
        "cut_off",
        "full",
        "moved_at",
        "on_empty",
        "on_room",
    )

    def __init__(
        self, sock: "Socket | socket.socket", rooms: Rooms, tally: Tally
    ) -> None:
        """*sock* is non-blocking, and closed by its owner alone."""
        self._send = sock.send
        self._fd = sock.fileno()
        self._rooms = rooms
        self._tally = tally
        self._buffer = bytearray()
        #: Above the high mark, and not yet back at the low one.
        self.full = False
        #: The client takes nothing any more, for whatever reason.
        self.cut_off = False
        #: While bytes are held: when one last moved, on Trio's clock.
        self.moved_at = 0.0
        #: Called when a FULL sink has fallen to the low mark.
        self.on_room: Callable[[], None] = _nothing
        #: Called when all bytes are with the kernel, or will never be.
        self.on_empty: Callable[[], None] = _nothing

    @property
    def held(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return len(self._buffer)

    def write(self, octets: bytes) -> Taken:
        """Send *octets*, or keep them, whole. Not a checkpoint; never raises."""
        if self.cut_off:
            return Taken.GONE
        buffer = self._buffer
        if not buffer:
            try:
                sent = self._send(octets)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.cut()
                return Taken.GONE
            if sent == len(octets):
                return _MORE
            octets = octets[sent:]
            self.moved_at = trio.current_time()
            self._rooms.want_room(self._fd)
        elif len(buffer) >= HIGH and len(buffer) + len(octets) > CEILING:
            self.cut()
            return Taken.GONE
        buffer += octets
        held = len(buffer)
        tally = self._tally
        tally.buffer_high_water = max(tally.buffer_high_water, held)
        if held >= HIGH:
            self.full = True
            return Taken.FULL
        return Taken.MORE

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
        if self._buffer:
            self._buffer.clear()
            self._rooms.enough(self._fd)
            self.on_empty()

    def abandon(self) -> None:
        """Drop what is held, the socket being closed next; tell nobody."""
        self.cut_off = True
        self._buffer.clear()
        self.on_empty = _nothing
        self.quiet()

    def quiet(self) -> None:
        """Forget ``on_room``: the request that asked for it is over."""
        self.full = False
        self.on_room = _nothing
