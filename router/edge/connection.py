"""One client connection: one task, one request at a time.

While a request is served nobody reads: what a client pipelines stays in the
kernel, but for the rest of one read. A hang-up is told by the ClientPoll, in
every state; what may hide one is read and dropped. One cancel scope spans the
connection: whatever cancels it ends the connection too, so that a request needs
none of its own.
"""

import fcntl
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from enum import Enum
from math import inf
from typing import Final

import trio

from router.blame import sort_out
from router.edge.dialect import dialect_of
from router.edge.exchange import (
    INTERNAL_FAULT,
    Answer,
    Exchange,
    compose,
    failure,
    id_fields,
    in_dialect,
    refusal,
)
from router.edge.intake import Intake, Routes
from router.edge.poll import ClientPoll
from router.edge.sink import Sink
from router.edge.site import Site
from router.errors import RouterError
from router.http1 import END, BadRequest, Head, RequestEvent, RequestParser

READ_SIZE: Final = 64 * 1024

#: Bytes that may wait unread behind a request that is served: half of the
#: smallest receive window that Linux begins with. A FIN behind a full window does
#: not arrive before somebody reads.
UNREAD_MAX: Final = 32 * 1024

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_CODES: Final = {413: "request_too_large"}

INTERNAL: Final = failure(INTERNAL_FAULT)
TIMED_OUT: Final = refusal(408, "The request did not arrive in time.")


class _Phase(Enum):
    #: Waiting for requests, or for the rest of one.
    READING = 1
    SERVING = 2
    #: A reply is with the sink; the kernel has not taken all of it.
    FLUSHING = 3
    #: The last reply is out; the client may read it to its end.
    PARTING = 4


class Connection:
    """One client's connection, until it closes."""

    __slots__ = (
        "_exchange",
        "_hung_up",
        "_intake",
        "_linger",
        "_now",
        "_on_close",
        "_parser",
        "_phase",
        "_poll",
        "_scope",
        "_served",
        "_sink",
        "_site",
        "_sock",
        "_spills",
        "until",
    )

    def __init__(
        self,
        sock: socket.socket,
        site: Site,
        routes: Routes,
        poll: ClientPoll,
        on_close: Callable[["Connection"], None],
    ) -> None:
        """Own *sock*, which does not block; ``run`` closes it, then calls
        *on_close*."""
        self._sock = sock
        self._on_close = on_close
        self._site = site
        self._poll = poll
        self._now = trio.current_time()
        self._sink = Sink(sock, poll, site.tally, site.cork)
        self._sink.on_cut = self.hang_up
        self._parser = RequestParser(body_max=site.settings.body_max_bytes)
        self._intake = Intake(site, routes, self._sink, self._now)
        self._scope = trio.CancelScope()
        self._phase = _Phase.READING
        self._hung_up = False
        self._served = False
        #: The client may have more to send, or more to read, when we close.
        self._linger = False
        #: What the client sends is dropped: it has pipelined too much (H4).
        self._spills = False
        #: The request that is being served.
        self._exchange: Exchange | None = None
        #: When the sweep is to call ``expire``, on Trio's clock.
        self.until = self._intake.until

    # ---- what others call; all synchronous ----

    def hang_up(self) -> None:
        """Learn that the client left: end what it asked for, at once (H4)."""
        if self._hung_up:
            return
        self._hung_up = True
        if self._phase is _Phase.READING or self._phase is _Phase.PARTING:
            # What came before the FIN is still read; EOF ends the task.
            return
        exchange = self._exchange
        try:
            if exchange is not None:
                exchange.hung_up = True
                if exchange.receiver is not None:
                    exchange.receiver.gone()
        finally:
            self._scope.cancel()

    def flush(self) -> None:
        """Send on what the sink holds."""
        self._sink.flush()
        if self._sink.cut_off:
            self.hang_up()

    def spill(self) -> None:
        """Read and drop some of what the client has pipelined, for its FIN."""
        if self._recv():
            # For the next part, behind the turns of others.
            self._poll.spill(self._sock.fileno())

    def abandon(self) -> None:
        """End, as if the client had left: what we did for it has failed (L1)."""
        try:
            # The fence first, then the scope (F6).
            self.hang_up()
        finally:
            self._scope.cancel()

    def expire(self, now: float) -> None:
        """End a connection that has waited until ``until`` in vain."""
        if self._phase is _Phase.SERVING:
            self._look_behind()
            return
        if self._phase is _Phase.FLUSHING:
            stall_s = self._site.stall_s
            if not self._sink.stalled(now, stall_s):
                self.until = self._sink.moved_at + stall_s
                return
            self._sink.cut()
        elif self._phase is _Phase.READING and not self._intake.idle:
            self._refuse(TIMED_OUT)
        self._scope.cancel()

    def retire(self, now: float) -> None:
        """Close if idle, since the server drains (D3).

        A connection that has not been used yet gets a moment: its first
        request may be on its way.
        """
        if self._phase is not _Phase.READING or not self._intake.idle:
            return
        if self._served:
            self._scope.cancel()
        else:
            self.until = min(self.until, now + self._site.patience.linger_s)

    def _look_behind(self) -> None:
        """Read on where a FIN may hide behind what is unread (H4).

        What is read is lost to the client, so the present reply is the last of
        its connection; the rest it may ask for again (RFC 9112 9.3.2).
        """
        exchange = self._exchange
        if exchange is None or _unread(self._sock) < UNREAD_MAX:
            return
        exchange.keep = False
        self._spills = True
        self.until = inf
        self._poll.spill(self._sock.fileno())

    # ---- the task ----

    async def run(self) -> None:
        """Serve this client until one of us closes. A checkpoint.

        Keeps every exception to this connection (L1), but for LocalError and
        what is not an Exception. If cancelled, the socket is closed.
        """
        try:
            with self._scope:
                try:
                    self._poll.add(self._sock.fileno(), self)
                    in_order = await self._talk()
                except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
                    in_order = self._contain(raised)
                if in_order:
                    await self._part()
        finally:
            self._close()

    async def _talk(self) -> bool:
        """Serve requests; True: the client should read our last words."""
        parser = self._parser
        # A client mostly sends its first request right behind its connect.
        chunk = self._recv()
        while True:
            while chunk is None:
                await trio.lowlevel.wait_readable(self._sock)
                chunk = self._recv()
            if not chunk:
                return False
            self._now = trio.current_time()
            bad = None
            events: Sequence[RequestEvent]
            try:
                events = parser.feed(chunk)
            except BadRequest as refused:
                # Whole requests before the bad one still get their replies.
                bad, events = refused, refused.events
            if not await self._follow(events):
                return True
            if bad is not None:
                code = _CODES.get(bad.status)
                answer = refusal(bad.status, bad.message, code=code)
                self._refuse(answer, bad.path)
                return True
            self._phase = _Phase.READING
            self._intake.set_clock(self._now, has_partial=parser.has_partial)
            self.until = self._intake.until
            chunk = None

    def _recv(self) -> bytes | None:
        """Read once; None: nothing is there yet; empty: the client is gone."""
        try:
            return self._sock.recv(READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    async def _follow(self, events: Sequence[RequestEvent]) -> bool:
        """Go through what one read has brought; False: no more requests."""
        last = len(events) - 1
        for place, event in enumerate(events):
            if event is END:
                if not await self._serve():
                    return False
                if place != last:
                    # Pipelined requests take turns with other clients.
                    await trio.lowlevel.checkpoint()
                continue
            if isinstance(event, Head):
                no = self._intake.begin(event, is_last=place == last)
            else:
                no = self._intake.gather(event)
            if no is not None:
                self._refuse(no)
                return False
        return True

    async def _serve(self) -> bool:
        """Serve the request that is now whole; False: it was the last."""
        exchange, route = self._intake.whole()
        self._exchange = exchange
        self._phase = _Phase.SERVING
        # Each sweep that still finds it served looks behind it.
        self.until = self._now
        self._served = True
        exchange.hung_up = self._hung_up
        exchange.arrived = self._now
        sink = self._sink
        if isinstance(route, Answer):
            self._site.refused(route.status)
            exchange.reply(route)
        else:
            await route(exchange)
            exchange.release_body()
            sink.quiet()
        self.until = inf
        if not exchange.started and not exchange.hung_up and not sink.cut_off:
            raise RouterError("a route returned without a reply")
        self._exchange = None
        if sink.held:
            await self._flushed()
        self._linger = self._spills or not exchange.whole
        if sink.cut_off:
            # A whole reply, of which the last part went beyond the ceiling (H5).
            return False
        return exchange.whole and exchange.keep and not self._site.draining

    async def _flushed(self) -> None:
        """Wait until the kernel has all, or the sink is cut. A checkpoint."""
        self._phase = _Phase.FLUSHING
        self.until = self._sink.moved_at + self._site.stall_s
        empty = trio.Event()
        self._sink.on_empty = empty.set
        await empty.wait()
        self.until = inf

    async def _part(self) -> None:
        """Close so that the client can read our last words to their end (A5).

        A socket that is closed with unread bytes sends a RST, which may throw
        away what the client has not read yet.
        """
        self.until = inf
        if self._sink.held:
            await self._flushed()
        if self._sink.cut_off:
            return
        self._phase = _Phase.PARTING
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        with trio.move_on_after(self._site.patience.linger_s):
            while True:
                chunk = self._recv()
                if chunk == b"" or (chunk is None and not self._linger):
                    return
                self._linger = True
                await trio.lowlevel.wait_readable(self._sock)

    # ---- ends ----

    def _refuse(self, answer: Answer, path: str = "") -> None:
        """Reply instead of any route, and serve no more requests.

        *path*: of a request that was not begun, where it is known.
        """
        self._site.refused(answer.status)
        self._linger = True
        exchange = self._intake.exchange
        if exchange is None:
            dialect, request = dialect_of(path), self._site.new_request_id()
            fields = id_fields(self._site, dialect, request)
            answer = in_dialect(answer, dialect, request)
            self._sink.write(compose(answer, fields, keep=False))
        else:
            exchange.keep = False
            exchange.reply(answer)

    def _contain(self, raised: BaseException) -> bool:
        """Keep a bug to this client; True: it can be told (L1).

        Raises:
            BaseException: what is not one client's.
        """
        bug, rest = sort_out(raised)
        if bug is not None:
            self._site.bug("edge.connection", bug)
        if rest is not None:
            raise rest
        exchange = self._exchange or self._intake.exchange
        if exchange is None or self._hung_up:
            return False
        self._linger = True
        exchange.keep = False
        try:
            if exchange.receiver is not None:
                exchange.receiver.fail(INTERNAL_FAULT)
            elif not exchange.started:
                exchange.reply(INTERNAL)
        except Exception as worse:  # noqa: BLE001  a bug in telling of a bug
            self._site.bug("edge.contain", worse)
        return True

    def _close(self) -> None:
        """Let go of the socket and of all that is counted for it."""
        if self._exchange is not None:
            self._exchange.release_body()
        self._intake.drop()
        sink = self._sink
        if sink.cut_off:
            # Its kernel buffer is full of what nobody will read.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        sink.abandon()
        self._poll.remove(self._sock.fileno())
        self._sock.close()
        self._on_close(self)


def _unread(sock: socket.socket) -> int:
    """Give how many bytes the kernel holds for us to read."""
    told = fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(told, sys.byteorder)
