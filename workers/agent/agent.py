"""The agent: connections of routers, in front of the engines of one host.

It runs the same engine as a router does (``open_router``), and lets other
routers have its slots: accepted at once or declined, never queued. Rule 1: it
is the authority over its slots, for however many routers (P3). Rule 2: a
router that is silent or gone holds nothing (P4, P5).
"""

import random
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import trio

from router.engine.flight import Flight
from router.engine.router import Router
from router.errors import LocalError, RequestFailed
from router.messages import Job
from workers.access import Access
from workers.agent.calls import Call
from workers.agent.receiver import WireReceiver
from workers.agent.visit import BUG, Visit
from workers.door import Door
from workers.link import Link, contain, lost
from workers.shares import Guest, Shares
from workers.site import Resolver, Site
from workers.transport import PlainTransport, TlsTransport, Transport
from workers.wire.frames import Reason, WireError
from workers.wire.hosting import Memory
from workers.wire.inbound import Inbound, State
from workers.wire.opening import ByeHeard, Role

#: Seconds between two looks at the clocks; while a slot changes hands; in
#: which what changes is gathered; and between two looks for rest, in a drain.
TICK_S: Final = 0.5
CONTEST_S: Final = 0.02
GATHER_S: Final = 0.005
REST_S: Final = 0.02
#: Seconds before the first and between later tries to reach a router.
BACKOFF_S: Final = (0.1, 5.0)
#: Assignments that are started before others get their turn.
STARTS_MAX: Final = 16
#: Counts of tokens at once; more are answered with nothing.
COUNTS_MAX: Final = 64


class Agent:
    """Implements ``visit.House``. Serve once; the router is the caller's."""

    def __init__(
        self,
        router: Router,
        access: Access,
        *,
        rng: random.Random,
    ) -> None:
        """Let others have the slots of *router*, whose own clients are nobody.

        Args:
            router: with this host's engines.
            access: who this agent is, and over what it is met.
            rng: spreads the tries to reach routers.
        """
        self.router = router
        self.shares = Shares()
        self.memory = Memory()
        self.epoch = access.passport.epoch
        self.draining = False
        self.visits: dict[Guest, Visit] = {}
        #: Set when it drains, and every router has read the end of all that it had.
        self.rested = trio.Event()
        self._access = access
        self._passport = access.passport
        self._rng = rng
        self._nursery: trio.Nursery | None = None
        self._door = Door(
            access, self._take_in, self._refused, router.cork, Role.ROUTER
        )
        self._calls: list[Call] = []
        self._guests = 0
        self._sequence = 0
        self._counts = 0
        self._news = trio.Event()
        self._drains = trio.Event()
        self._begun: deque[tuple[Flight, WireReceiver]] = deque()
        self._starts = trio.Event()

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
            nursery.start_soon(self._rest)
            nursery.start_soon(self._start, nursery)
            for listener in listeners:
                nursery.start_soon(self._door.listen, listener)
            for site in routers:
                nursery.start_soon(self._call_on, site)
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None
                for flight, _ in self._begun:
                    flight.retire()

    # ---- steering ----

    def drain(self) -> None:
        """Take no offer any more; what runs may finish (L5). Idempotent."""
        if not self.draining:
            self.draining = True
            self._drains.set()
            self.changed()
            for visit in self.visits.values():
                visit.drain()

    def dismiss(self) -> None:
        """Part with every router: the drain is over. Not a checkpoint.

        What waits to be written goes first, as far as ``Link.part`` has time.
        """
        for visit in self.visits.values():
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
                "away": [
                    {
                        "address": call.address,
                        "reason": call.reason,
                        "words": call.words,
                    }
                    for call in self._calls
                    if not call.connected
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

    def run(self, flight: Flight, receiver: WireReceiver) -> None:
        """See ``visit.House``."""
        self._begun.append((flight, receiver))
        self._starts.set()

    def count(self, inbound: Inbound, job: Job) -> None:
        """See ``visit.House``."""
        if self._nursery is None or self._counts >= COUNTS_MAX:
            inbound.counted(None)
            return
        self._counts += 1
        self._nursery.start_soon(self._count, inbound, job)

    async def _start(self, nursery: trio.Nursery) -> None:
        """Start what was accepted, a few at a time.

        To start costs more than to accept: so a burst of offers is answered in
        time, whatever it leads to (A2: 100 ms).
        """
        begun = self._begun
        while True:
            await self._starts.wait()
            self._starts = trio.Event()
            while begun:
                for _ in range(min(len(begun), STARTS_MAX)):
                    nursery.start_soon(self._see_off, *begun.popleft())
                await trio.lowlevel.checkpoint()

    async def _see_off(self, flight: Flight, receiver: WireReceiver) -> None:
        """See an assignment to its end; a bug in it is no other's (L1)."""
        try:
            await flight.run()
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            contain(raised, self.router.cork, "workers.agent")
            receiver.fail(BUG)

    async def _count(self, inbound: Inbound, job: Job) -> None:
        """Count, and answer whatever comes of it: a bug stays its own (L1)."""
        tokens: int | None = None
        try:
            if inbound.state is not State.ENDED:
                tokens = await self.router.count_tokens(job)
        except RequestFailed:
            tokens = None
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: nobody else's answer ends
            self.router.report_bug("workers.agent", bug)
        finally:
            self._counts -= 1
        inbound.counted(tokens)

    # ---- connections ----

    async def _call_on(self, site: Site) -> None:
        """Announce ourselves to the router at *site*, again and again."""
        resolver = Resolver(site)
        call = Call(site.host_field)
        self._calls.append(call)
        backoff = BACKOFF_S[0]
        while True:
            began = trio.current_time()
            try:
                transport = await self._dial(site, resolver)
                link = Link(transport, self._passport, self.router.cork)
                why = await self._host(link, call)
            except WireError as reason:
                why = reason
            lasted = trio.current_time() - began > BACKOFF_S[1]
            call.ended(why, was_in=lasted)
            if lasted:
                backoff = BACKOFF_S[0]
            await trio.sleep(backoff * self._rng.uniform(0.5, 1.0))
            backoff = min(BACKOFF_S[1], backoff * 2)

    async def _dial(self, site: Site, resolver: Resolver) -> Transport:
        """Begin to connect to one of *site*'s addresses.

        Raises:
            WireError: there is none, or none of use.
        """
        try:
            await resolver.refresh()
        except OSError:
            # What was known of it before may still do.
            if not resolver.addresses:
                raise WireError(Reason.LOST, "its name does not resolve") from None
        address = resolver.addresses[0]
        # The next one is tried next time, should this one not do.
        resolver.doubt(address)
        try:
            if self._access.outward is None:
                return PlainTransport(address)
            return TlsTransport(address, self._access.outward, site.host)
        except OSError as error:
            raise lost(error) from None

    async def _take_in(self, link: Link) -> None:
        """See a connection to its end that somebody made to us."""
        await self._host(link, None)

    async def _host(self, link: Link, call: Call | None) -> WireError:
        """See one connection to its end; gives why that came. A checkpoint."""
        why = WireError(Reason.STOPPING, "the agent stops")
        visit: Visit | None = None
        try:
            if call is None:
                await self._door.open(link)
            else:
                await link.open()
                call.connected = True
            self._guests += 1
            visit = Visit(self, Guest(self._guests), link)
            self._welcome(visit)
            why = await link.carry(visit.end)
        except WireError as reason:
            why = reason
            if call is None:
                self._door.tell(link, why)
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            why = contain(raised, self.router.cork)
        finally:
            if visit is not None:
                self.visits.pop(visit.guest, None)
                visit.leave()
            who = "heard" if isinstance(why, ByeHeard) else "said"
            self.router.tally.wire[who, why.reason.value] += 1
            await link.part(why)
        return why

    def _refused(self) -> None:
        self.router.tally.wire["said", Reason.TOO_MANY.value] += 1

    def _welcome(self, visit: Visit) -> None:
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

    # ---- time ----

    async def _rest(self) -> None:
        """Set ``rested`` when it is so, once it drains."""
        await self._drains.wait()
        # Each is asked at once: an answer takes the way to a router and back.
        while [v for v in self.visits.values() if not v.at_rest()]:  # noqa: ASYNC110
            await trio.sleep(REST_S)
        self.rested.set()

    async def _pulse(self) -> None:
        """Look at what is due: heartbeats, silences, claims (P4)."""
        while True:
            with trio.move_on_after(self._pause()):
                await self._news.wait()
                await trio.sleep(GATHER_S)
            self._news = trio.Event()
            now = trio.current_time()
            self.shares.lapse(now)
            for visit in list(self.visits.values()):
                self._tick(visit, now)

    def _tick(self, visit: Visit, now: float) -> None:
        """Look at one router's clocks; a bug there ends that visit alone (L1)."""
        try:
            visit.tick(now)
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            visit.link.stop(contain(raised, self.router.cork))

    def _pause(self) -> float:
        """Seconds to the next look: short where a slot is about to change hands.

        That somebody waits is not enough: what ends by itself is told at once, and
        only a claim that runs, and a slot that settles, have nobody to tell.
        """
        shares = self.shares
        if shares.claimed or (shares.contested and self._settles()):
            return CONTEST_S
        return TICK_S

    def _settles(self) -> bool:
        members = self.router.fleet.members.values()
        return any(len(m.settling) > len(m.ghosts) for m in members)
