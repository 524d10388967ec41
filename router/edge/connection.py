"""One client connection: one task, one request at a time.

While a request is served nobody reads: what a client pipelines stays in the
kernel, but for the rest of one read. A hang-up is told by the ClientPoll, in
every state. One cancel scope spans the connection: whatever cancels it ends
the connection too, so that a request needs none of its own.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from enum import Enum
from math import inf
from typing import Final, Protocol

import trio

from router.edge.exchange import (
    INTERNAL_FAULT,
    Answer,
    Exchange,
    compose,
    failure,
    refusal,
)
from router.edge.poll import ClientPoll
from router.edge.sink import Sink
from router.edge.site import BODY_STEP, Site
from router.errors import LocalError, RouterError
from router.http1 import END, BadRequest, Head, RequestEvent, RequestParser

READ_SIZE: Final = 64 * 1024

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_RETRY_SOON: Final = ((b"retry-after", b"1"),)
_CODES: Final = {413: "request_too_large"}

INTERNAL: Final = failure(INTERNAL_FAULT)
BODIES_FULL: Final = refusal(
    503,
    "Too many bytes of request bodies are held.",
    error_type="server_error",
    headers=_RETRY_SOON,
)
TIMED_OUT: Final = refusal(408, "The request did not arrive in time.")


class Route(Protocol):
    """What serves the requests of one path and method."""

    reads_body: bool
    """False: a body is read and thrown away."""

    async def __call__(self, exchange: Exchange) -> None:
        """Give the reply. Returns with it at the sink, or the client gone."""


class Routes(Protocol):
    """Which route serves a request."""

    def find(self, exchange: Exchange) -> Route | Answer:
        """Give the route, or the answer that refuses the request."""


class _Phase(Enum):
    #: Between requests; not a byte of the next one is here.
    IDLE = 1
    HEAD = 2
    BODY = 3
    SERVING = 4
    #: A reply is with the sink; the kernel has not taken all of it.
    FLUSHING = 5
    #: The last reply is out; the client may read it to its end.
    PARTING = 6


#: Phases in which the task reads, and so meets the end of the stream itself.
_READING: Final = frozenset({_Phase.IDLE, _Phase.HEAD, _Phase.BODY, _Phase.PARTING})


class Connection:
    """One client's connection, until it closes."""

    __slots__ = (
        "_body",
        "_body_mark",
        "_body_size",
        "_exchange",
        "_held",
        "_hung_up",
        "_linger",
        "_now",
        "_on_close",
        "_parser",
        "_phase",
        "_poll",
        "_route",
        "_routes",
        "_scope",
        "_served",
        "_sink",
        "_site",
        "_sock",
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
        """Own *sock*, which does not block; ``run`` closes it and then calls
        *on_close*."""
        self._sock = sock
        self._on_close = on_close
        self._site = site
        self._routes = routes
        self._poll = poll
        self._sink = Sink(sock, poll, site.tally)
        self._parser = RequestParser(body_max=site.settings.body_max_bytes)
        self._scope = trio.CancelScope()
        self._phase = _Phase.IDLE
        self._hung_up = False
        self._served = False
        #: The client may have more to send, or more to read, when we close.
        self._linger = False
        #: The request that is coming or being served.
        self._exchange: Exchange | None = None
        self._route: Route | Answer = INTERNAL
        #: Pieces of its body, and how many of their bytes the site counts.
        self._body: list[bytes] = []
        self._held = 0
        #: Bytes of its body that came, and of them when the clock was set.
        self._body_size = 0
        self._body_mark = 0
        self._now = trio.current_time()
        #: When the sweep is to call ``expire``, on Trio's clock.
        self.until = self._now + site.patience.idle_s

    # ---- what others call; all synchronous ----

    def hang_up(self) -> None:
        """Learn that the client left: end what it asked for, at once (H4)."""
        if self._hung_up:
            return
        self._hung_up = True
        if self._phase in _READING:
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

    def expire(self, now: float) -> None:
        """End a connection that has waited until ``until`` in vain."""
        if self._phase is _Phase.FLUSHING:
            stall_s = self._site.stall_s
            if not self._sink.stalled(now, stall_s):
                self.until = self._sink.moved_at + stall_s
                return
            self._sink.cut()
        elif self._phase in {_Phase.HEAD, _Phase.BODY}:
            self._refuse(TIMED_OUT)
        self._scope.cancel()

    def retire(self, now: float) -> None:
        """Close if idle, since the server drains (D3).

        A connection that has not been used yet gets a moment: its first
        request may be on its way.
        """
        if self._phase is not _Phase.IDLE:
            return
        if self._served:
            self._scope.cancel()
        else:
            self.until = min(self.until, now + self._site.patience.linger_s)

    # ---- the task ----

    async def run(self) -> None:
        """Serve this client until one of us closes. A checkpoint.

        Keeps every exception to this connection (L1), but for LocalError and
        what is not an Exception. If cancelled, the socket is closed.
        """
        try:
            self._poll.add(self._sock.fileno(), self)
            with self._scope:
                try:
                    in_order = await self._talk()
                except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
                    in_order = self._contain(raised)
                if in_order:
                    await self._part()
        finally:
            self._close()

    async def _talk(self) -> bool:
        """Serve requests; True: the client should read our last words."""
        feed = self._parser.feed
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
                events = feed(chunk)
            except BadRequest as refused:
                # Whole requests before the bad one still get their replies.
                bad, events = refused, refused.events
            if not await self._follow(events):
                return True
            if bad is not None:
                code = _CODES.get(bad.status)
                self._refuse(refusal(bad.status, bad.message, code=code))
                return True
            self._set_clock()
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
            elif isinstance(event, Head):
                if not self._begin(event, is_last=place == last):
                    return False
            elif not self._gather(event):
                return False
        return True

    def _begin(self, head: Head, *, is_last: bool) -> bool:
        """Start an exchange; False: it ended in a refusal."""
        self._exchange = exchange = Exchange(self._site, self._sink, head)
        self._route = route = self._routes.find(exchange)
        self._body_size = self._body_mark = 0
        if isinstance(route, Answer):
            if head.expect_continue:
                self._refuse(route)
                return False
        elif route.reads_body and not self._site.has_room_for(head.content_length or 0):
            self._refuse(BODIES_FULL)
            return False
        if head.expect_continue and is_last:
            self._sink.write(_CONTINUE)
        return True

    def _gather(self, piece: bytes) -> bool:
        """Keep a piece of the body; False: it was refused."""
        self._body_size += len(piece)
        route = self._route
        if isinstance(route, Answer) or not route.reads_body:
            return True
        if not self._site.has_room_for(len(piece)):
            self._refuse(BODIES_FULL)
            return False
        self._body.append(piece)
        self._held += len(piece)
        self._site.bodies_held += len(piece)
        return True

    async def _serve(self) -> bool:
        """Serve the request that is now whole; False: it was the last."""
        exchange = self._exchange
        assert exchange is not None
        self._phase = _Phase.SERVING
        self.until = inf
        self._served = True
        exchange.hung_up = self._hung_up
        exchange.arrived = self._now
        pieces = self._body
        if pieces:
            exchange.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._held = 0
        route = self._route
        sink = self._sink
        if isinstance(route, Answer):
            self._site.refused(route.status)
            exchange.reply(route)
        else:
            await route(exchange)
            exchange.release_body()
            sink.quiet()
        if not exchange.started and not exchange.hung_up and not sink.cut_off:
            raise RouterError("a route returned without a reply")
        self._exchange = None
        if sink.held:
            await self._flushed()
        self._phase = _Phase.HEAD
        self._linger = not exchange.whole
        return exchange.whole and exchange.keep and not self._site.draining

    def _set_clock(self) -> None:
        """Say how long the next bytes may take, by what is missing (H1)."""
        patience = self._site.patience
        if self._exchange is not None:
            grown = self._body_size - self._body_mark
            if self._phase is not _Phase.BODY or grown >= BODY_STEP:
                self._phase = _Phase.BODY
                self._body_mark = self._body_size
                self.until = self._now + patience.body_s
        elif not self._parser.has_partial:
            self._phase = _Phase.IDLE
            self.until = self._now + patience.idle_s
        elif self._phase is not _Phase.HEAD or self.until == inf:
            self._phase = _Phase.HEAD
            self.until = self._now + patience.head_s

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
                if chunk is None and not self._linger:
                    return
                if chunk is not None:
                    if not chunk:
                        return
                    self._linger = True
                await trio.lowlevel.wait_readable(self._sock)

    # ---- ends ----

    def _refuse(self, answer: Answer) -> None:
        """Reply instead of any route, and serve no more requests."""
        self._site.refused(answer.status)
        self._linger = True
        exchange = self._exchange
        if exchange is None:
            fields = b"%bx-request-id: %b\r\n" % (
                self._site.date,
                self._site.new_request_id().encode(),
            )
            self._sink.write(compose(answer, fields, keep=False))
        else:
            exchange.keep = False
            exchange.reply(answer)

    def _contain(self, raised: BaseException) -> bool:
        """Keep a bug to this client; True: it can be told (L1).

        Of several exceptions at once one outcome is made: a client that is
        gone is told nothing, a cancellation goes on, a bug is counted (B126).

        Raises:
            BaseException: all that is not one client's: LocalError, and what
                is no Exception.
        """
        rest: BaseException | None = None
        if isinstance(raised, BaseExceptionGroup):
            if raised.subgroup(LocalError) is not None:
                raise raised
            _, rest = raised.split(Exception)
        elif isinstance(raised, LocalError):
            raise raised
        self._site.bug("edge.connection", raised)
        if rest is not None:
            raise rest
        exchange = self._exchange
        if exchange is None or self._hung_up:
            return False
        self._linger = True
        exchange.keep = False
        try:
            if exchange.receiver is not None:
                exchange.receiver.fail(INTERNAL_FAULT)
            elif not exchange.started:
                exchange.reply(INTERNAL)
        except Exception as bug:  # noqa: BLE001  a bug in telling of a bug
            self._site.bug("edge.contain", bug)
        return True

    def _close(self) -> None:
        """Let go of the socket and of all that is counted for it."""
        if self._exchange is not None:
            self._exchange.release_body()
        self._site.bodies_held -= self._held
        self._held = 0
        sink = self._sink
        if sink.cut_off:
            # Its kernel buffer is full of what nobody will read.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        sink.abandon()
        self._poll.remove(self._sock.fileno())
        self._sock.close()
        self._on_close(self)
