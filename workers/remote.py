"""A worker that is an agent on another host: the router's end of the wire.

One task and one connection for each agent, reconnected with a backoff. Rule 1:
a route is bound to its connection, so the end of an old one touches nothing of
a new one. Rule 2: the agent has the say over its slots; what it says is what
the fleet knows of it (P3, P4). Rules P1-P7, F8.
"""

import random
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

import attrs
import trio

from router.cork import Cork
from router.errors import Fault, FaultKind, WorkerFailed
from router.ids import AssignmentId, WorkerId
from router.messages import Discovery, Job, Probe, ProbeResult, Share, SlotView
from router.openai.upstream import unsupported
from router.ports import Delivery
from router.tally import Tally
from workers.access import Access
from workers.link import Link, contain
from workers.site import Resolver, Site
from workers.transport import PlainTransport, TlsTransport
from workers.wire.attempt import RemoteSource
from workers.wire.frames import Host, Observation, Reason, WireError
from workers.wire.opening import ByeHeard
from workers.wire.routing import COUNTS, RouterEnd

#: Seconds before the first and between later tries to connect; while the agent
#: refuses us for a reason that only a person can mend, the last.
BACKOFF_S: Final = (0.1, 5.0)
#: Why an agent refuses a router until somebody changes something.
_TO_BE_MENDED: Final[Mapping[Reason, str]] = {
    Reason.UNAUTHORIZED: "unauthorized",
    Reason.VERSION: "wire_version",
    Reason.ROLE: "not_an_agent",
    Reason.NOT_FENCEPOST: "not_an_agent",
    Reason.OVERSIZE: "not_an_agent",
    Reason.TLS: "tls_failed",
    Reason.NAME: "agent_name",
}
_NO_ROUTE: Final = "There is no connection to the worker."


def _nothing(_: Probe) -> None:
    """Stand in until somebody listens."""


class Route:
    """One connection to an agent while it lasts. Implements ``routing.Port``."""

    def __init__(self, worker: "RemoteWorker", link: Link) -> None:
        """Open *link* for *worker*; its peer has proven itself."""
        peer = link.opening.peer
        self.link = link
        self.epoch = 0 if peer is None else peer.epoch
        self.since = trio.current_time()
        self.hosts: list[Host] = []
        self.drains = False
        self.observation: Observation | None = None
        self._worker = worker
        self.end = RouterEnd(
            self,
            link.opening.reader,
            self.epoch,
            link.opening.capabilities,
            link.ring,
        )

    def now(self) -> float:
        """Give the time."""
        return trio.current_time()

    def observed(self, observation: Observation) -> None:
        """See ``routing.Port``; news that are not newer change nothing (P4)."""
        last = self.observation
        if last is not None and observation.sequence <= last.sequence:
            return
        self.observation = observation
        if observation.hosts is not None:
            self.hosts = observation.hosts
        self._worker.learned(self)

    def draining(self) -> None:
        """See ``routing.Port``."""
        self.drains = True
        self._worker.learned(self)

    def catch_up(self) -> None:
        """See ``routing.Port``."""
        self.link.catch_up()

    def report_bug(self, where: str, bug: Exception) -> None:
        """See ``routing.Port``."""
        self._worker.report_bug(where, bug)

    def probe(self) -> Probe:
        """Say what the agent is, as far as it has told."""
        seen = self.observation
        if self.drains:
            return Probe(ProbeResult.DRAINING, "its agent drains")
        if seen is None:
            return Probe(ProbeResult.SILENT, "its agent has not said what it hosts")
        states = {state for _, state in seen.models.values()}
        if 2 in states:
            return Probe(ProbeResult.ANSWERED, discovery=self._discovery(seen))
        if 1 in states:
            return Probe(ProbeResult.LOADING, "its agent's engines are coming up")
        return Probe(ProbeResult.REFUSED, "no engine of its agent is up")

    def _discovery(self, seen: Observation) -> Discovery:
        kinds = dict.fromkeys(h.engine for h in self.hosts if h.engine)
        versions = dict.fromkeys(h.version for h in self.hosts if h.version)
        return Discovery(
            models=tuple(seen.models),
            slots=seen.slots,
            context=seen.context,
            engine="+".join(kinds) or "agent",
            version="+".join(versions) or None,
            started_at=self.epoch / 1000,
            shares={
                model: Share(slots, serves=state == 2, coming=state == 1)
                for model, (slots, state) in seen.models.items()
            },
        )


class RemoteWorker:
    """Implements ``ports.Worker`` over the wire."""

    def __init__(
        self,
        name: str,
        site: Site | None,
        access: Access,
        *,
        tally: Tally,
        report_bug: Callable[[str, Exception], None],
        rng: random.Random,
        waiting: Callable[[str], int] = lambda _: 0,
        cork: Cork | None = None,
    ) -> None:
        """Connect nowhere yet.

        Args:
            name: this worker's.
            site: where its agent listens; None: the agent comes to us, see
                ``carry``.
            access: who we are to it.
            tally: gets what goes wrong on the wire.
            report_bug: told of each exception that was kept to one request.
            rng: spreads the tries of many routers to reconnect.
            waiting: gives how many requests wait for a model.
            cork: the router's, for what its clients are sent; None: they are
                sent each delta by itself.
        """
        self.id = WorkerId(name)
        self.works: bool | None = None
        # A slot settles at its agent, which says when it is free.
        self.settle_s = 0.0
        self.settles_by_probe = False
        #: Called with what the agent says, as soon as it says it.
        self.told: Callable[[Probe], None] = _nothing
        self.report_bug = report_bug
        self.route: Route | None = None
        #: While there is no route: since when.
        self.away_since = trio.current_time()
        self._site = site
        self._resolver = None if site is None else Resolver(site)
        self._access = access
        # Each worker is somebody by itself to an agent, or two that lead to one
        # agent would take each other's place for ever.
        passport = access.passport
        self._passport = attrs.evolve(passport, id=f"{passport.id}/{name}")
        self._tally = tally
        self._rng = rng
        self._waiting = waiting
        self._cork = cork or Cork(report_bug)
        self._served = False
        self._begun = trio.Event()
        self._last = Probe(ProbeResult.REFUSED, "there is no connection to its agent")

    # ---- ports.Worker ----

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,  # noqa: ARG002 - pinning is its agent's
    ) -> RemoteSource:
        """Offer one attempt. Not a checkpoint; *delivery* is not called.

        Raises:
            WorkerFailed: there is no connection to the agent.
        """
        route = self.route
        if route is None or not self._served:
            raise WorkerFailed(Fault(FaultKind.CONNECT, _NO_ROUTE))
        if route.drains:
            raise WorkerFailed(Fault(FaultKind.DRAINED, "The worker drains."))
        # The offer and its first part go out at once, and in one write.
        self._cork.hold(trio.current_time())
        try:
            source = route.end.offer(
                assignment, job, delivery, self._waiting(job.target)
            )
        finally:
            self._cork.release()
        source.opening = False
        return source

    async def run(self) -> NoReturn:
        """Keep a connection to the agent, and read all that comes on it.

        Returns only when cancelled, and has then closed it; sources that were
        still open are closed without a report.
        """
        self._served = True
        self._begun.set()
        try:
            if self._site is None:
                await trio.sleep_forever()
            backoff = BACKOFF_S[0]
            while True:
                met_at = trio.current_time()
                why = await self._meet()
                if trio.current_time() - met_at > BACKOFF_S[1]:
                    backoff = BACKOFF_S[0]
                if isinstance(why, ByeHeard) or why.reason in _TO_BE_MENDED:
                    backoff = max(backoff, BACKOFF_S[1] / 5)
                await trio.sleep(backoff * self._rng.uniform(0.5, 1.0))
                backoff = min(BACKOFF_S[1], backoff * 2)
        finally:
            self._served = False

    async def probe(self) -> Probe:
        """Say what the agent said last. A checkpoint; nothing is asked."""
        await trio.lowlevel.checkpoint()
        return self._last if self.route is None else self.route.probe()

    async def slot_view(self) -> SlotView | None:
        """Give the agent's slots, as it told them last. A checkpoint."""
        await trio.lowlevel.checkpoint()
        seen = None if self.route is None else self.route.observation
        return None if seen is None else SlotView(seen.slots, seen.load)

    async def alive(self) -> bool:
        """Say whether the agent is connected. A checkpoint."""
        await trio.lowlevel.checkpoint()
        return self.route is not None

    async def count_tokens(self, job: Job) -> int | None:
        """Have the agent count a prompt; None: it did not. A checkpoint.

        Cancelled: the agent is told.
        """
        route = self.route
        if route is None or COUNTS not in route.end.capabilities:
            await trio.lowlevel.checkpoint()
            return None
        answer: list[int | None] = []
        come = trio.Event()

        def told(tokens: int | None) -> None:
            answer.append(tokens)
            come.set()

        number = route.end.count(job, told)
        try:
            await come.wait()
        finally:
            route.end.drop_count(number)
        return answer[0]

    def unsupported(self, job: Job) -> tuple[str, ...]:
        """Name the sampling parameters of *job* that an engine there lacks (J3)."""
        seen = None if self.route is None else self.route.observation
        if seen is None:
            return ()
        return tuple(name for name in unsupported(job, {}) if name in seen.lacks)

    def agent_status(self) -> Mapping[str, object]:
        """Show the agent and what it hosts. Fit for JSON."""
        where = None if self._site is None else self._site.host_field
        route = self.route
        if route is None:
            return {"address": where, "connected": False}
        peer = route.link.opening.peer
        return {
            "address": where,
            "connected": True,
            "agent": None if peer is None else peer.id,
            "epoch": route.epoch,
            "since_s": round(trio.current_time() - route.since, 3),
            "drains": route.drains,
            "late": route.end.late,
            "load": None if route.observation is None else route.observation.load,
            "hosts": [
                {
                    "name": host.name,
                    "state": host.state,
                    "reason": host.reason,
                    "engine": host.engine,
                    "version": host.version,
                    "slots": host.slots,
                    "busy": host.busy,
                    "models": host.models,
                }
                for host in route.hosts
            ],
        }

    # ---- routes ----

    def learned(self, route: Route) -> None:
        """Tell what *route* has brought, if it is the present one."""
        if route is self.route:
            self.told(route.probe())

    async def carry(self, link: Link) -> WireError:
        """Use *link*, whose peer has proven itself, until its end; gives why.

        A connection that was there before is given up, if its agent is not a
        newer one. A checkpoint. Cancelled: its sources are closed without a
        report; closing the socket is the caller's.
        """
        # An agent that comes by itself may be here before its worker is kept, and
        # what is told of it is the word that requests may come.
        if not self._served:
            await self._begun.wait()
        route = Route(self, link)
        old = self.route
        why = WireError(Reason.SUPERSEDED, "there is a newer connection")
        if old is not None and old.epoch > route.epoch:
            return why
        self.route = route
        if old is not None:
            old.link.stop(why)
            self._lose(old, why)
        why = WireError(Reason.STOPPING, "the router stops")
        ended = False
        try:
            why = await link.carry(route.end)
            ended = True
        finally:
            if ended:
                self._lose(route, why)
            else:
                self._abandon(route)
        return why

    async def _meet(self) -> WireError:
        """Connect, and stay connected; gives why that is over. A checkpoint."""
        link: Link | None = None
        said = WireError(Reason.STOPPING, "the router stops")
        try:
            link = await self._dial()
            said = await self.carry(link)
        except WireError as why:
            said = why
            self._note(why)
            self._last = _why(why)
            self.told(self._last)
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            said = contain(raised, self._cork)
        finally:
            if link is not None:
                await link.part(said)
        return said

    async def _dial(self) -> Link:
        """Connect to one of the agent's addresses, and prove each other.

        Raises:
            WireError: none of them is of use.
        """
        site, resolver = self._site, self._resolver
        if site is None or resolver is None:
            raise WireError(Reason.LOST, "its agent comes by itself")
        try:
            await resolver.refresh()
        except OSError:
            if not resolver.addresses:
                raise WireError(Reason.LOST, "its name does not resolve") from None
        tls = self._access.outward
        why = WireError(Reason.LOST, "the agent takes no connection")
        for address in list(resolver.addresses):
            try:
                transport = (
                    PlainTransport(address)
                    if tls is None
                    else TlsTransport(address, tls, site.host)
                )
            except OSError:
                resolver.doubt(address)
                continue
            link = Link(transport, self._passport, self._cork)
            try:
                await link.open()
            except WireError as reason:
                why = reason
                await link.part(why)
                resolver.doubt(address)
            except BaseException:
                await link.part(None)
                raise
            else:
                return link
        raise why

    def _lose(self, route: Route, why: WireError) -> None:
        """End all that *route* carried, and nothing else (P5)."""
        if route.end.closed:
            return
        self._note(why)
        # What was heard on a connection that is gone is no sign of life.
        route.end.silence()
        if route is self.route:
            self.route = None
            self.away_since = trio.current_time()
            self._last = _why(why)
            # First of all, so that no waiter is sent after those that end here.
            self.told(self._last)
        route.end.end(
            Fault(FaultKind.STREAM_CLOSED_EARLY, "The connection to the worker broke.")
        )

    def _abandon(self, route: Route) -> None:
        """The router stops: close what is open, and report nothing."""
        if route is self.route:
            self.route = None
        for source in list(route.end.sources.values()):
            source.close()
        route.end.closed = True

    def _note(self, why: WireError) -> None:
        who = "heard" if isinstance(why, ByeHeard) else "said"
        self._tally.wire[who, why.reason.value] += 1


def _why(why: WireError) -> Probe:
    """Say what the end of a connection shows of a worker."""
    reason = _TO_BE_MENDED.get(why.reason)
    if why.reason is Reason.UNAUTHORIZED:
        return Probe(ProbeResult.UNAUTHORIZED, why.words)
    if reason is not None:
        return Probe(ProbeResult.UNFIT, why.words, reason=reason)
    if why.reason is Reason.LOST:
        # As its state will be called: the words alone say more.
        return Probe(ProbeResult.REFUSED, why.words)
    return Probe(ProbeResult.REFUSED, f"{why.reason.value}: {why.words}")
