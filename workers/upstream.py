"""One connection to a worker, from its connect to its close.

It moves bytes and knows HTTP's framing; what an answer means is its taker's
business (``workers.source``). Two rules: a connection serves again only after
a message that ended cleanly, with not a byte too many; and it belongs to one
taker at a time, which may close it from inside any call.
"""

from typing import Final, Protocol

from router.errors import LocalError
from router.http1 import ProtocolError, ResponseParser
from workers.poll import READ, WRITE, Poll
from workers.transport import Transport

#: Bytes that may follow an answer whose end was reported, before the
#: connection is not worth its pool place.
_TAIL_MAX: Final = 65536


class Taker(Protocol):
    """Who a connection works for."""

    def connected(self, now: float) -> None:
        """The connection can carry bytes; `Upstream.begin` is next."""

    def refused(self, now: float) -> None:
        """There is no connection; this one has closed itself."""

    def moved(self, now: float) -> None:
        """The worker took bytes of the request."""

    def sent(self, now: float) -> None:
        """The request is with the kernel to its last byte."""

    def received(self, octets: bytes, now: float) -> None:
        """Bytes of the answer; the parser has not seen them."""

    def ended(self, now: float, *, clean: bool) -> None:
        """No byte follows: a FIN (*clean*) or a RST."""

    def close(self) -> None:
        """Give it up: its connection is taken away."""

    def crashed(self, bug: Exception, now: float) -> None:
        """A call of this connection's raised what nobody expected (L1)."""


class Home(Protocol):
    """The worker that owns a connection."""

    def parked(self, upstream: "Upstream", now: float) -> None:
        """It is free for another request; keep it, or close it."""

    def lingers(self, upstream: "Upstream", now: float) -> None:
        """Its answer is over but not read to its end; close it in a second."""

    def gone(self, upstream: "Upstream") -> None:
        """It has closed."""

    def report_bug(self, where: str, bug: Exception) -> None:
        """Log and count an exception that was kept to one connection."""


class Upstream:
    """One socket to the worker, and the parser of what comes from it."""

    __slots__ = (
        "_broken",
        "_closed",
        "_connected",
        "_home",
        "_out",
        "_poll",
        "_reading",
        "_recv",
        "_secure",
        "_tail",
        "_transport",
        "idle_since",
        "mask",
        "parser",
        "taker",
        "used",
    )

    def __init__(
        self, transport: Transport, poll: Poll, home: Home, *, secure: bool
    ) -> None:
        """Own *transport*, which is connecting, for *home*."""
        self._transport = transport
        self._recv = transport.recv
        self._poll = poll
        self._home = home
        self._secure = secure
        self._connected = False
        self._closed = False
        self._reading = True
        self._broken = False
        self._out: list[memoryview] = []
        self._tail = 0
        self.parser = ResponseParser()
        self.taker: Taker | None = None
        #: For `Poll` alone.
        self.mask = 0
        #: Whole answers it has brought.
        self.used = 0
        #: When it was parked, or began to linger.
        self.idle_since = 0.0

    def fileno(self) -> int:
        """Give the socket's number, for the poll only."""
        return self._transport.fileno()

    # ---- its taker's calls ----

    def connect(self, taker: Taker) -> bool:
        """Work for *taker*; True where the connection can carry bytes at once.

        Else it is told by ``connected`` or ``refused``.

        Raises:
            OSError: there is no connection, and will be none.
        """
        self.taker = taker
        self._connected = self._transport.advance()
        self._watch()
        return self._connected

    def reuse(self, taker: Taker) -> None:
        """Work for *taker* after another's whole answer."""
        self.taker = taker
        self.parser.reset()

    def begin(self, pieces: tuple[bytes, ...]) -> bool:
        """Send what the socket takes of a request; the rest follows by itself.

        True: all of it went. Not so where the stream is broken: then its end
        is read, maybe behind an answer that came early.
        """
        self._out = [memoryview(piece) for piece in pieces if piece]
        self._push()
        self._watch()
        return not self._out and not self._broken

    @property
    def broken(self) -> bool:
        """Whether the worker takes no more bytes on it."""
        return self._broken

    def read(self, reading: bool) -> None:
        """Read on, or leave the bytes to TCP (section 5 of the design)."""
        self._reading = reading
        if not self._closed:
            self._watch()

    def release(self, now: float) -> None:
        """Work for nobody: free, lingering for the end of a message, or closed.

        To be called only after an answer whose meaning is complete.
        """
        self.taker = None
        self._reading = True
        parser = self.parser
        if self._out or self._broken:
            self.close()
        elif parser.complete:
            self._park(now)
        else:
            self._tail = 0
            self.idle_since = now
            self._watch()
            self._home.lingers(self, now)

    def close(self) -> None:
        """Close at once, which is the abort. Idempotent; never raises."""
        if self._closed:
            return
        self._closed = True
        self.taker = None
        self._out.clear()
        try:
            self._poll.want(self, 0)
        finally:
            self._transport.close()
            self._home.gone(self)

    def abandon(self) -> None:
        """Close, and whoever it works for too. Nothing is reported."""
        taker = self.taker
        if taker is not None:
            taker.close()
        self.close()

    # ---- its poll's calls ----

    def ready(self, mask: int, now: float) -> int:
        """Move what can be moved; give the bytes.

        Raises:
            LocalError: an invariant is broken; the process is to end.
        """
        taker = self.taker
        try:
            if not self._connected:
                return self._advance(now)
            moved = self._flush(now) if mask & WRITE else 0
            if mask & ~WRITE and self.mask & READ:
                moved += self._pull(now)
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001  kept to one request (L1)
            self._crash(taker, bug, now)
            return 0
        return moved

    def _crash(self, taker: Taker | None, bug: Exception, now: float) -> None:
        self._home.report_bug("workers.upstream", bug)
        if taker is None:
            self.close()
            return
        try:
            taker.crashed(bug, now)
        except LocalError:
            raise
        except Exception as second:  # noqa: BLE001  the same request, again (L1)
            self._home.report_bug("workers.upstream", second)

    def _advance(self, now: float) -> int:
        taker = self.taker
        try:
            self._connected = self._transport.advance()
            self._watch()
        except OSError:
            self.close()
            if taker is not None:
                taker.refused(now)
            return 0
        if self._connected and taker is not None:
            taker.connected(now)
        return 0

    def _flush(self, now: float) -> int:
        waited = bool(self._out)
        moved = self._push()
        self._watch()
        taker = self.taker
        if taker is not None and waited and not self._broken:
            if moved:
                taker.moved(now)
            if not self._out:
                taker.sent(now)
        return moved

    def _push(self) -> int:
        moved = 0
        out = self._out
        try:
            if not out and self._transport.unsent:
                self._transport.send(memoryview(b""))
            while out:
                taken = self._transport.send(out[0])
                moved += taken
                if taken < len(out[0]):
                    out[0] = out[0][taken:]
                    break
                del out[0]
        except OSError:
            # The worker may have answered and closed before it read all; its
            # answer is still to be read, and then its end.
            out.clear()
            self._broken = True
        return moved

    def _pull(self, now: float) -> int:
        try:
            octets = self._recv()
        except OSError:
            self._end(now, clean=False)
            return 0
        if octets is None:
            if self._secure:
                self._watch()
            return 0
        taker = self.taker
        if not octets:
            self._end(now, clean=True)
        elif taker is not None:
            taker.received(octets, now)
        else:
            self._linger(octets, now)
        if self._secure and not self._closed:
            # Reading may have made bytes to send: a key update.
            self._watch()
        return len(octets)

    def _end(self, now: float, *, clean: bool) -> None:
        taker = self.taker
        if taker is None:
            self.close()
        else:
            taker.ended(now, clean=clean)

    def _linger(self, octets: bytes, now: float) -> None:
        """Take bytes that nobody waits for: the end of a message, or too many."""
        parser = self.parser
        was_whole = parser.complete
        self._tail += len(octets)
        if was_whole or self._tail > _TAIL_MAX:
            self.close()
            return
        try:
            parser.feed(octets)
        except ProtocolError:
            self.close()
            return
        parser.body.clear()
        if parser.complete:
            self._park(now)

    def _park(self, now: float) -> None:
        parser = self.parser
        if not parser.keep_alive or parser.excess:
            self.close()
            return
        parser.body.clear()
        self.used += 1
        self._tail = 0
        self.idle_since = now
        self._watch()
        self._home.parked(self, now)

    def _watch(self) -> None:
        """Register for what is waited for now."""
        if self._connected:
            mask = READ if self._reading else 0
            if self._out or self._transport.unsent:
                mask |= WRITE
        else:
            mask = self._transport.connect_mask
        if mask != self.mask:
            self._poll.want(self, mask)
