"""The agent: connections of routers, in front of the engines of one host.

It runs the same engine as a router does (``open_router``), and lets other
routers have its slots: accepted at once or declined, never queued. Rule 1: it
is the authority over its slots, for however many routers (P3). Rule 2: a
router that is silent or gone holds nothing (P4, P5).
"""

import errno
import random
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, Final

import trio

from router.engine.flight import Flight
from router.engine.router import Router
from router.errors import LocalError
from router.messages import Job
from workers.agent.visit import Visit
from workers.link import Link
from workers.shares import Guest, Shares
from workers.site import Resolver, Site
from workers.transport import PlainTransport, TlsTransport, Transport
from workers.wire.frames import Reason, WireError
from workers.wire.hosting import Memory
from workers.wire.inbound import Inbound, State
from workers.wire.opening import ByeHeard, Passport

#: Connections at once, and of these, such as have not proven themselves.
VISITS_MAX: Final = 1024
STRANGERS_MAX: Final = 64
#: Seconds between two looks at the clocks; while routers contend for slots; and
#: in which what changes is gathered.
TICK_S: Final = 0.5
CONTEST_S: Final = 0.02
GATHER_S: Final = 0.005
#: Seconds to wait where no descriptor is left (H6).
CALM_S: Final = 0.1
#: Seconds before the first and between later tries to reach a router.
BACKOFF_S: Final = (0.1, 5.0)
#: Counts of tokens at once; more are answered with nothing.
COUNTS_MAX: Final = 64
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def new_epoch() -> int:
    """Make an epoch: milliseconds of the wall clock, so greater at each start."""
    return time.time_ns() // 1_000_000


class Agent:
    """Implements ``visit.House``. Serve once; the router is the caller's."""

    def __init__(
        self,
        router: Router,
        passport: Passport,
        *,
        rng: random.Random,
        tls: ssl.SSLContext | None = None,
        outward_tls: ssl.SSLContext | None = None,
    ) -> None:
        """Let others have the slots of *router*, whose own clients are nobody.

        Args:
            router: with this host's engines.
            passport: who this agent is.
            rng: spreads the tries to reach routers.
            tls: for those who connect to us; None: plain TCP.
            outward_tls: for routers that we connect to; None: plain TCP.
        """
        self.router = router
        self.shares = Shares()
        self.memory = Memory()
        self.epoch = passport.epoch
        self.draining = False
        self.visits: dict[Guest, Visit] = {}
        self._passport = passport
        self._rng = rng
        self._tls = tls
        self._outward_tls = outward_tls
        self._nursery: trio.Nursery | None = None
        self._strangers = 0
        self._guests = 0
        self._sequence = 0
        self._counts = 0
        self._news = trio.Event()

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        routers: Sequence[Site] = (),
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Take routers in, and call on those of *routers*.

        Returns only when cancelled, and has then closed every connection and
        the listeners. A checkpoint.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._pulse)
            for listener in listeners:
                nursery.start_soon(self._listen, listener, nursery)
            for site in routers:
                nursery.start_soon(self._call_on, site)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # ---- steering ----

    def drain(self) -> None:
        """Take no offer any more; what runs may finish (L5). Idempotent."""
        if not self.draining:
            self.draining = True
            for visit in self.visits.values():
                visit.drain()

    def dismiss(self) -> None:
        """Part with every router: the drain is over. Not a checkpoint."""
        for visit in self.visits.values():
            visit.link.flush()
            visit.link.stop(WireError(Reason.STOPPING, "the agent stops"))

    @property
    def active(self) -> int:
        """Assignments under way."""
        return sum(len(visit.receivers) for visit in self.visits.values())

    def status(self) -> dict[str, Any]:
        """Show the agent's side of ``/status``, fit for JSON."""
        now = trio.current_time()
        return {
            "agent": {
                "name": self._passport.id,
                "epoch": self.epoch,
                "draining": self.draining,
                "declines": dict(self.router.tally.declines),
                "routers": [
                    {
                        "id": visit.router_id,
                        "since_s": round(now - visit.since, 3),
                        "assignments": len(visit.receivers),
                        "late": visit.end.late,
                        "unwritten_bytes": visit.end.outbox.size,
                    }
                    for visit in self.visits.values()
                ],
            }
        }

    # ---- visit.House ----

    def next_sequence(self) -> int:
        """See ``visit.House``."""
        self._sequence += 1
        return self._sequence

    def changed(self) -> None:
        """See ``visit.House``."""
        self._news.set()

    def run(self, flight: Flight) -> None:
        """See ``visit.House``."""
        if self._nursery is None:
            raise LocalError("an agent that is not served runs nothing")
        self._nursery.start_soon(flight.run)

    def count(self, inbound: Inbound, job: Job) -> None:
        """See ``visit.House``."""
        if self._nursery is None or self._counts >= COUNTS_MAX:
            inbound.counted(None)
            return
        self._counts += 1
        self._nursery.start_soon(self._count, inbound, job)

    async def _count(self, inbound: Inbound, job: Job) -> None:
        tokens: int | None = None
        try:
            if inbound.state is not State.ENDED:
                tokens = await self.router.count_tokens(job)
        finally:
            self._counts -= 1
        inbound.counted(tokens)

    # ---- connections ----

    async def _listen(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        listener.setblocking(False)
        try:
            while True:
                await trio.lowlevel.wait_readable(listener)
                sock = await self._accept(listener)
                if sock is not None:
                    nursery.start_soon(self._take_in, sock)
        finally:
            trio.lowlevel.notify_closing(listener)
            listener.close()

    async def _accept(self, listener: socket.socket) -> socket.socket | None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                await trio.sleep(CALM_S)
            return None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._strangers >= STRANGERS_MAX or len(self.visits) >= VISITS_MAX:
            self.router.tally.wire["said", Reason.TOO_MANY.value] += 1
            sock.close()
            return None
        return sock

    async def _take_in(self, sock: socket.socket) -> None:
        transport: Transport = (
            PlainTransport.accepted(sock)
            if self._tls is None
            else TlsTransport.accepted(sock, self._tls)
        )
        await self._host(transport)

    async def _call_on(self, site: Site) -> None:
        """Announce ourselves to the router at *site*, again and again."""
        resolver = Resolver(site)
        backoff = BACKOFF_S[0]
        while True:
            began = trio.current_time()
            transport = await self._dial(site, resolver)
            if transport is not None:
                await self._host(transport)
            if trio.current_time() - began > BACKOFF_S[1]:
                backoff = BACKOFF_S[0]
            await trio.sleep(backoff * self._rng.uniform(0.5, 1.0))
            backoff = min(BACKOFF_S[1], backoff * 2)

    async def _dial(self, site: Site, resolver: Resolver) -> Transport | None:
        try:
            await resolver.refresh()
            address = resolver.addresses[0]
            # The next one is tried next time, should this one not do.
            resolver.doubt(address)
            if self._outward_tls is None:
                return PlainTransport(address)
            return TlsTransport(address, self._outward_tls, site.host)
        except (OSError, IndexError):
            return None

    async def _host(self, transport: Transport) -> None:
        """See one connection to its end."""
        link = Link(transport, self._passport)
        why = WireError(Reason.STOPPING, "the agent stops")
        visit: Visit | None = None
        try:
            self._strangers += 1
            try:
                await link.open()
            finally:
                self._strangers -= 1
            visit = self._welcome(link)
            why = await link.carry(visit.end)
        except WireError as reason:
            why = reason
        finally:
            if visit is not None:
                self.visits.pop(visit.guest, None)
                visit.leave()
            who = "heard" if isinstance(why, ByeHeard) else "said"
            self.router.tally.wire[who, why.reason.value] += 1
            await link.part(why)

    def _welcome(self, link: Link) -> Visit:
        self._guests += 1
        visit = Visit(self, Guest(self._guests), link)
        for other in list(self.visits.values()):
            if (other.router_id, other.router_epoch) == (
                visit.router_id,
                visit.router_epoch,
            ):
                # The router has come back before its old connection was missed.
                other.link.stop(
                    WireError(Reason.SUPERSEDED, "there is a newer connection")
                )
        self.visits[visit.guest] = visit
        visit.observe(trio.current_time(), fresh=True)
        if self.draining:
            visit.drain()
        return visit

    # ---- time ----

    async def _pulse(self) -> None:
        """Look at what is due: heartbeats, silences, claims (P4)."""
        while True:
            pause = CONTEST_S if self.shares.contested else TICK_S
            with trio.move_on_after(pause):
                await self._news.wait()
                await trio.sleep(GATHER_S)
            self._news = trio.Event()
            now = trio.current_time()
            self.shares.lapse(now)
            for visit in list(self.visits.values()):
                visit.tick(now)
