"""Routers and agents of a simulation: real ones, that can be killed and begun anew."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import attrs
import trio

from router.engine import Router, open_router
from router.engine.announced import Greeter
from router.settings import RouterSettings, Settings, WaitSettings, WorkerSettings
from tests.simulation.far_engines import Engine
from tests.simulation.far_net import Net
from tests.simulation.far_sockets import FarListener
from workers.access import Access
from workers.agent import Agent
from workers.remote import RemoteWorker
from workers.site import Site
from workers.wire.attempt import RemoteSource
from workers.wire.opening import Passport, Role
from workers.wire.routing import COUNTS, ENDS_REASONING

TOKEN: Final = b"a token that all hosts know"
WAITS: Final = WaitSettings(
    idle_grace_ms=3_000,
    busy_wait_ms=20_000,
    load_wait_ms=10_000,
    liveness_ms=5_000,
    ghost_ms=10_000,
)
ROUTER: Final = Settings(
    router=RouterSettings(queue_limit=200, queue_ms=60_000), waits=WAITS
)
AGENT: Final = Settings(waits=WAITS)


def passport(role: Role, name: str, epoch: int) -> Access:
    """Make one with nothing in it that is not drawn from the seed."""
    return Access(Passport(role, name, epoch, (COUNTS, ENDS_REASONING), TOKEN))


class World(Protocol):
    """What a part needs of its world."""

    net: Net
    rng: random.Random

    def new_epoch(self) -> int:
        """Give one that is greater than all before."""


def _set_event() -> trio.Event:
    event = trio.Event()
    event.set()
    return event


@attrs.define(eq=False)
class Part:
    """A host, and the one process on it."""

    world: World
    name: str
    epoch: int = 0
    lives: int = 0
    idle: trio.Event = attrs.field(factory=_set_event)
    """Not set: somebody is about to end it, or to begin it anew."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    gone: trio.Event = attrs.field(factory=trio.Event)
    listener: FarListener | None = None
    listens_at: Sequence[str] = ()

    async def run(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Live until it is killed. A checkpoint."""
        self.lives += 1
        self.epoch = self.epoch or self.world.new_epoch()
        self.scope, self.gone = trio.CancelScope(), trio.Event()
        self.listener = FarListener()
        net = self.world.net
        net.listeners.update(dict.fromkeys(self.listens_at, self.listener))
        self._trouble()
        try:
            with self.scope:
                await self._live(self.listener, task_status)
        finally:
            self.listener.close()
            self.epoch = 0
            self._trouble()
            self.gone.set()

    @property
    def busy(self) -> bool:
        """Somebody is about to end it, or to begin it anew."""
        return not self.idle.is_set()

    async def _live(
        self, listener: FarListener, task_status: trio.TaskStatus[None]
    ) -> None:
        raise NotImplementedError

    def _trouble(self) -> None:
        for path in self.world.net.paths.values():
            if self.name in (path.router, path.agent):
                path.quiet_since = max(path.quiet_since, trio.current_time())

    async def kill(self, *, heard: bool) -> None:
        """End it as a kill -9 does, or, not *heard*, as a power cut.

        Nothing that it does while it unwinds gets out. A checkpoint.
        """
        for path in self.world.net.paths.values():
            if self.name in (path.router, path.agent):
                is_near = (self.name == path.router) is path.router_dials
                for wire in list(path.wires):
                    wire.cut(near=heard or is_near, far=heard or not is_near)
        if self.listener is not None:
            self.listener.close()
        self.scope.cancel()
        await self.gone.wait()


@attrs.define(eq=False)
class RouterPart(Part):
    """A router, and how it finds its agents: it dials those of *agents*."""

    agents: Mapping[str, str] = attrs.field(factory=dict)
    """Name to address."""
    router: Router | None = None

    async def _live(
        self, listener: FarListener, task_status: trio.TaskStatus[None]
    ) -> None:
        rng = random.Random(self.world.rng.random())
        async with open_router(ROUTER, rng=rng) as router, trio.open_nursery() as own:
            name = f"{self.name}.{self.lives}"
            router.access = passport(Role.ROUTER, name, self.epoch)
            for agent, address in self.agents.items():
                await router.add_worker(WorkerSettings(agent, agent=f"{address}:1"))
            await own.start(Greeter(router).serve, [listener])
            self.router = router
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self.router = None

    def remotes(self) -> Sequence[RemoteWorker]:
        """Its workers."""
        workers = () if self.router is None else self.router.workers.values()
        return [w for w in workers if isinstance(w, RemoteWorker)]

    def sources(self) -> Sequence[RemoteSource]:
        """Every attempt on an agent that is open now."""
        return [
            source
            for worker in self.remotes()
            if worker.route is not None
            for source in worker.route.end.sources.values()
        ]

    def left(self, agents: int) -> Mapping[str, Any]:
        """Name what is not as it is at rest (S2)."""
        router = self.router
        if router is None:
            return {"router": "down"}
        fleet, remotes = router.fleet, self.remotes()
        routes = [w.route for w in remotes if w.route is not None]
        found = {
            "permits": {m.id: m.busy for m in fleet.members.values() if m.busy},
            "requests": list(fleet.requests),
            "flights": list(router.flights),
            "waiting": len(fleet.room),
            "sources": self.sources(),
            "counts": sum(len(route.end._counts) for route in routes),
            "unwritten": sum(route.end.outbox.size for route in routes),
            "unconnected": agents - len(routes),
            "unready": [m.id for m in fleet.members.values() if not m.serving],
            "bugs": dict(router.tally.bugs),
        }
        return {name: what for name, what in found.items() if what}


@attrs.define(eq=False)
class AgentPart(Part):
    """An agent and its engines; it calls on the routers at *routers*."""

    slots: Sequence[int] = ()
    routers: Sequence[str] = ()
    books: Any = None
    agent: Agent | None = None
    engines: Sequence[Engine] = ()

    async def _live(
        self, listener: FarListener, task_status: trio.TaskStatus[None]
    ) -> None:
        rng = random.Random(self.world.rng.random())
        engines = [
            Engine(f"{self.name}e{n}", self.books, slots)
            for n, slots in enumerate(self.slots)
        ]
        try:
            async with (
                open_router(AGENT, workers=engines, rng=rng) as router,
                trio.open_nursery() as own,
            ):
                access = passport(Role.AGENT, self.name, self.epoch)
                agent = Agent(router, access, rng=rng)
                sites = [
                    Site(secure=False, host=host, port=1, base="")
                    for host in self.routers
                ]
                await own.start(agent.serve, [listener], sites)
                self.agent, self.engines = agent, engines
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.agent = None
            for engine in engines:
                engine.crash()

    def left(self, routers: int) -> Mapping[str, Any]:
        """Name what is not as it is at rest (S2)."""
        agent = self.agent
        if agent is None:
            return {"agent": "down"}
        router, visits = agent.router, agent.visits.values()
        shares = agent.shares
        found = {
            "permits": {m.id: m.busy for m in router.fleet.members.values() if m.busy},
            "requests": list(router.fleet.requests),
            "flights": list(router.flights),
            "receivers": agent.active,
            "inbounds": sum(len(v.end.inbounds) for v in visits),
            "gathering": sum(len(v.end._gathering) for v in visits)
            + agent.memory.room.taken,
            "unwritten": sum(v.end.outbox.size for v in visits),
            "shares": sum(
                use.held for uses in shares._uses.values() for use in uses.values()
            ),
            "guests": {g for uses in shares._uses.values() for g in uses}
            - set(agent.visits),
            "claims": shares.contested,
            "unbegun": len(agent._begun) + agent._counts,
            "unvisited": routers - len(visits),
            "generations": [
                g.origin for e in self.engines for g in e.generations if g.open
            ],
            "bugs": dict(router.tally.bugs),
        }
        return {name: what for name, what in found.items() if what}
