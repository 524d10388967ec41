"""One connection between a router and an agent: bytes, clocks and nothing else.

The same at both ends, whoever connected. One task reads: all that one read
brings is delivered before it waits again (P7). Another writes: what was queued
in one pass of the loop goes out in one write. Rule: silence is judged only
after what has arrived was read (P4).
"""

import fcntl
import os
import ssl
import sys
import termios
from contextlib import suppress
from typing import Final, Protocol

import trio

from router.blame import sort_out
from router.cork import Cork
from workers.poll import WRITE
from workers.transport import Transport
from workers.wire.frames import (
    EXPIRY_S,
    OPENING_S,
    Bye,
    Reason,
    WireError,
    pack,
)
from workers.wire.opening import NONCE_BYTES, ByeHeard, Opening, Passport, State
from workers.wire.outbox import CEILING, Outbox

#: Bytes per read, and bytes written before others get their turn. A buffer for
#: 128 KiB or more is mapped anew by the C library for every read: 20 us.
READ_SIZE: Final = 64 * 1024
WRITE_BUDGET: Final = 1024 * 1024
#: Seconds between two looks at the clock.
TICK_S: Final = 0.5
#: Seconds in which nothing of what waits leaves, after which a peer does not read:
#: more than its silence may last, and no speed of a link is too low.
STUCK_S: Final = 5.0
#: Seconds, and bytes, for a peer to take our last word before the socket closes.
PARTING_S: Final = 0.5
PARTING_MAX: Final = 1024 * 1024

#: Closing without a word.
CLOSED: Final = "The connection ended."
BUG: Final = "a bug at this end"
UNHEARD: Final = "it closed before it said anything: perhaps one end uses TLS alone"
_UNSAID: Final = frozenset({Reason.LOST, Reason.TOO_MANY})


class End(Protocol):
    """What an open connection carries: one of the two ends of the wire."""

    outbox: Outbox

    def received(self, octets: bytes, now: float) -> None:
        """Take one read.

        Raises:
            WireError: the connection is of no more use.
        """


class Link:
    """One connection, from its first byte to its last. One task owns it."""

    def __init__(
        self, transport: Transport, passport: Passport, cork: Cork, *, whence: str = ""
    ) -> None:
        """Own *transport*, which may still be connecting.

        Args:
            transport: closed by ``part``.
            passport: ours.
            cork: this end's.
            whence: the address of a peer that came to us, for people.
        """
        self.whence = whence
        self._cork = cork
        self._kept = False
        self._transport = transport
        self._recv = transport.recv
        self._fd = transport.fileno()
        self.opening = Opening(passport, os.urandom(NONCE_BYTES))
        self.heard_at = trio.current_time()
        self._end: End | None = None
        self._rest = memoryview(b"")
        self._bell = trio.Event()
        self._watch = trio.CancelScope()
        self._why: WireError | None = None
        self._connected = False
        self._broken = False
        self._written = 0
        #: What had been written, and was not taken by the peer yet, at the last
        #: look that found a change; and when that was.
        self._moved = (0, 0)
        self._moved_at = 0.0

    # ---- the task that owns it ----

    async def open(self) -> None:
        """Connect, where that is not done yet, and prove each other (P1).

        A checkpoint. Cancelled, or raised: ``part`` is next.

        Raises:
            WireError: there is nobody to speak to; ``part`` says so.
            LocalError: an invariant is broken (L1).
        """
        try:
            with trio.fail_after(OPENING_S):
                while not self._transport.advance():
                    await self._wait(self._transport.connect_mask)
                self._connected = True
                await self._greet()
        except trio.TooSlowError:
            raise WireError(Reason.SLOW_OPENING, "no proof in time") from None
        except OSError as error:
            raise self._unmet(lost(error)) from None
        except WireError as why:
            raise self._unmet(why) from None
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            raise contain(raised, self._cork) from None

    async def carry(self, end: End) -> WireError:
        """Move bytes between the socket and *end* until that is over.

        Gives the reason. A checkpoint. Cancelled: ``part`` is next. A bug in what
        *end* does is this connection's end, and no other's (L1).
        """
        self._end = end
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                why = await self._read()
                nursery.cancel_scope.cancel()
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            why = contain(raised, self._cork)
        return why

    async def part(self, why: WireError | None) -> None:
        """Say why, and close. A checkpoint; takes `PARTING_S` at most.

        An end that stops in order sends first what its outbox still holds (D3).

        *why*: None, or what the peer said itself: nothing is said.
        """
        with trio.move_on_after(PARTING_S) as scope:
            scope.shield = True
            with suppress(OSError):
                await self._say_bye(why)
        self._broken = True
        with suppress(OSError):
            trio.lowlevel.notify_closing(self._fd)
        self._transport.close()

    # ---- calls from anywhere ----

    def ring(self) -> None:
        """Write what the outbox holds, when this turn or pass of the loop is over."""
        if not self._cork.held:
            self._bell.set()
        elif not self._kept:
            self._kept = True
            self._cork.keep(self)

    def uncork(self) -> None:
        """Write what the outbox holds: a turn is over. See `Corked`."""
        self._kept = False
        if not self.flush():
            self._bell.set()

    def crash(self) -> None:
        """End for a bug in what the outbox called. See `Corked`."""
        self._kept = False
        self.stop(WireError(Reason.INTERNAL, BUG))

    def flush(self) -> bool:
        """Write what the outbox holds; True: the kernel has all of it.

        Not a checkpoint; never raises: a broken stream is found by its reader.
        """
        if self._broken or self._end is None:
            return True
        try:
            return self._push(self._end.outbox)
        except OSError:
            self._broken = True
            return True

    def catch_up(self) -> None:
        """Read what has arrived. Not a checkpoint; never raises for the peer."""
        if self._end is None or self._why is not None:
            return
        try:
            self._pull(self._end)
        except WireError as why:
            self.stop(why)
        except OSError as error:
            self.stop(lost(error))

    def stop(self, why: WireError) -> None:
        """End ``carry`` with *why*. Not a checkpoint."""
        if self._why is None:
            self._why = why
        self._watch.deadline = -float("inf")

    # ---- inner parts ----

    def _unmet(self, why: WireError) -> WireError:
        """Say of a peer that went without any word what that may mean."""
        unheard = self._connected and self.opening.state is State.GREETED
        if unheard and why.reason is Reason.LOST and not isinstance(why, ByeHeard):
            return WireError(Reason.LOST, UNHEARD)
        return why

    async def _wait(self, mask: int) -> None:
        if mask & WRITE:
            await trio.lowlevel.wait_writable(self._fd)
        else:
            await trio.lowlevel.wait_readable(self._fd)

    async def _greet(self) -> None:
        opening = self.opening
        while True:
            while opening.out:
                await self._send_whole(opening.out.pop(0))
            octets = self._recv(4096)
            if octets is None:
                await trio.lowlevel.wait_readable(self._fd)
            elif not octets:
                raise WireError(Reason.LOST, CLOSED)
            elif opening.receive(octets):
                break
        while opening.out:
            await self._send_whole(opening.out.pop(0))
        self.heard_at = trio.current_time()

    async def _send_whole(self, octets: bytes) -> None:
        rest = memoryview(octets)
        while rest or self._transport.unsent:
            sent = self._transport.send(rest)
            rest = rest[sent:]
            if rest or self._transport.unsent:
                await trio.lowlevel.wait_writable(self._fd)

    async def _read(self) -> WireError:
        end = self._end
        try:
            if end is not None:
                # What came behind the proof.
                end.received(b"", trio.current_time())
            while end is not None and self._why is None:
                self._watch = trio.CancelScope(deadline=trio.current_time() + TICK_S)
                with self._watch:
                    while True:
                        await trio.lowlevel.wait_readable(self._fd)
                        self._pull(end)
                self._tick(end)
        except WireError as why:
            return why
        except OSError as error:
            return lost(error)
        return self._why or WireError(Reason.LOST, CLOSED)

    def _pull(self, end: End) -> bool:
        """Take one read; False: there was nothing to read."""
        octets = self._recv(READ_SIZE)
        if octets is None:
            return False
        if not octets:
            raise WireError(Reason.LOST, CLOSED)
        now = self.heard_at = trio.current_time()
        self._cork.hold(now)
        try:
            end.received(octets, now)
        finally:
            self._cork.release()
        # Answers to what was read go out before anything that it began, which may
        # take its time: an offer is answered at once. TLS may have bytes to send
        # of its own: a key update.
        if not self.flush():
            self._bell.set()
        return True

    def _tick(self, end: End) -> None:
        now = trio.current_time()
        self._check_moving(end.outbox, now)
        if now - self.heard_at > EXPIRY_S and not self._pull(end):
            raise WireError(Reason.EXPIRED, f"nothing came for {EXPIRY_S:g} s")

    def _check_moving(self, outbox: Outbox, now: float) -> None:
        """Find a peer that does not read, however little waits for it.

        What the kernel holds counts too: for megabytes of it a socket is not
        writable, while a slow link carries them off all the time.
        """
        moved = (self._written, _untaken(self._fd))
        waits = self._rest or self._transport.unsent or outbox.waits
        if moved != self._moved or not waits:
            self._moved, self._moved_at = moved, now
        if now - self._moved_at > STUCK_S:
            raise WireError(Reason.OVERFLOW, "the peer does not read")
        if len(self._rest) + outbox.size > CEILING:
            raise WireError(Reason.OVERFLOW, "the peer reads too slowly")

    async def _write(self) -> None:
        while True:
            await self._bell.wait()
            self._bell = trio.Event()
            while not self.flush():
                await trio.lowlevel.wait_writable(self._fd)

    def _push(self, outbox: Outbox) -> bool:
        transport = self._transport
        budget = WRITE_BUDGET
        while True:
            rest = self._rest
            if not rest:
                chunk = outbox.pull()
                if not chunk:
                    if transport.unsent:
                        transport.send(rest)
                    return not transport.unsent
                rest = memoryview(chunk)
            sent = transport.send(rest)
            self._rest = rest[sent:]
            self._written += sent
            if self._rest:
                return False
            outbox.wrote()
            budget -= sent
            if budget <= 0:
                self._bell.set()
                return True

    async def _say_bye(self, why: WireError | None) -> None:
        """Send the last word behind what is half out, and let it be read."""
        if not self._connected or self._broken or isinstance(why, ByeHeard):
            # Before its handshake TLS takes nothing, whatever the socket takes.
            return
        if why is not None and why.reason not in _UNSAID:
            bye = pack(Bye(why.reason.value, why.words))
            await self._send_whole(bytes(self._rest))
            if why.reason is Reason.STOPPING and self._end is not None:
                while octets := self._end.outbox.pull():
                    await self._send_whole(octets)
            await self._send_whole(bye)
            # A socket that closes over unread bytes sends a RST, which may
            # overtake the word.
            left = PARTING_MAX
            while left > 0 and (octets := await self._receive()):
                left -= len(octets)

    async def _receive(self) -> bytes:
        while (octets := self._recv(READ_SIZE)) is None:
            await trio.lowlevel.wait_readable(self._fd)
        return octets


def _untaken(number: int) -> int:
    """Count the bytes that the kernel keeps of a stream until its peer has them."""
    try:
        octets = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
    except OSError:
        # A broken stream, which its reader finds.
        return 0
    return int.from_bytes(octets, sys.byteorder)


def contain(
    raised: BaseException, cork: Cork, where: str = "workers.link"
) -> WireError:
    """Keep a bug of ours to one connection, and make the reason of its end (L1).

    Raises:
        BaseException: what is not one connection's: a broken invariant, a cancel.
    """
    bug, rest = sort_out(raised)
    if bug is not None:
        cork.on_bug(where, bug)
    if rest is not None:
        raise rest
    return WireError(Reason.INTERNAL, BUG)


def lost(error: OSError) -> WireError:
    """Make the reason of a connection that broke."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return WireError(Reason.LOST, CLOSED)
    if isinstance(error, ssl.SSLCertVerificationError):
        return WireError(Reason.TLS, f"a certificate fails: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        # OpenSSL's own word for it, as WRONG_VERSION_NUMBER: what came is no TLS.
        why = (error.reason or "the handshake failed").replace("_", " ").lower()
        return WireError(Reason.TLS, f"TLS failed: {why}")
    return WireError(Reason.LOST, error.strerror or CLOSED)
