"""What goes wrong with hosts and paths of a simulation, by the seed's draw."""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

import attrs
import trio

from router.messages import ProbeResult
from tests.simulation.far_clients import Books
from tests.simulation.far_net import Net
from tests.simulation.far_parts import AgentPart, Part, RouterPart
from tests.simulation.far_wires import Path

#: Troubles a second, and seconds for which an agent that drains may take.
RATE: Final = 0.6
DRAIN_S: Final = 5.0
#: Logical milliseconds by which a wall clock may be put back.
PUT_BACK: Final = 500_000


class World(Protocol):
    """What is in trouble."""

    rng: random.Random
    books: Books
    net: Net
    paths: list[Path]
    routers: list[RouterPart]
    agents: list[AgentPart]

    def new_epoch(self) -> int:
        """Give an epoch greater than all before."""


class Trouble:
    """Draws troubles until it is ended; each heals by itself."""

    def __init__(self, world: World, hosts: trio.Nursery, names: Sequence[str]) -> None:
        """Draw some of *names*; hosts that are begun anew are tasks of *hosts*."""
        self._world = world
        self._names = names
        #: A router that dies takes every client along, so it does so more seldom.
        self._weights = [0.4 if "router" in name else 1.0 for name in names]
        self._hosts = hosts
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Make trouble, several at a time. A checkpoint."""
        rng = self._world.rng
        with self._scope:
            async with trio.open_nursery() as nursery:
                while self._names:
                    await trio.sleep(rng.expovariate(RATE))
                    (name,) = rng.choices(self._names, self._weights)
                    self._world.books.faults[name] += 1
                    nursery.start_soon(TROUBLES[name], self)

    async def end(self) -> None:
        """Heal everything, and begin what is down. A checkpoint."""
        self._scope.cancel()
        world = self._world
        for path in world.paths:
            self._heal(path)
        for part in (*world.routers, *world.agents):
            await part.idle.wait()

    # ---- paths ----

    def _path(self, what: str) -> Path:
        path = self._world.rng.choice(self._world.paths)
        self._world.books.note(f"{path.router}-{path.agent} {what}")
        path.quiet_since = trio.current_time()
        return path

    def _heal(self, path: Path) -> None:
        path.refuses = False
        path.quiet_since = trio.current_time()
        for weather in path.both:
            weather.clear()
        for wire in path.wires:
            wire.bite(65536)

    async def _while(self, path: Path, mean_s: float) -> None:
        try:
            # Till then it is not quiet.
            path.quiet_since = float("inf")
            await trio.sleep(self._world.rng.expovariate(1 / mean_s))
        finally:
            self._heal(path)

    async def late(self) -> None:
        path, rng = self._path("late"), self._world.rng
        for weather in path.both:
            weather.set(latency_s=rng.uniform(0, 0.3), jitter_s=rng.uniform(0, 0.3))
        await self._while(path, 2)

    async def slow(self) -> None:
        path, rng = self._path("slow"), self._world.rng
        for weather in path.both:
            weather.set(bytes_per_s=rng.uniform(30_000, 200_000))
        await self._while(path, 2)

    async def slivers(self) -> None:
        path, rng = self._path("slivers"), self._world.rng
        path.there.set(slice_bytes=rng.randint(1, 40), jitter_s=0.0)
        path.back.set(slice_bytes=rng.randint(20, 400), jitter_s=0.0)
        for wire in path.wires:
            wire.bite(rng.randint(1, 100))
        await self._while(path, 0.5)

    async def part(self) -> None:
        path = self._path("part")
        for weather in path.both:
            weather.set(held=True)
        await self._while(path, 2)

    async def part_one_way(self) -> None:
        path, rng = self._path("part one way"), self._world.rng
        rng.choice(path.both).set(held=True)
        await self._while(path, 2)

    async def part_and_reset(self) -> None:
        path = self._path("part and reset")
        for weather in path.both:
            weather.set(held=True)
        path.refuses = True
        await self._while(path, 2)
        self._cut(path)

    async def half_open(self) -> None:
        path = self._path("half open")
        for weather in path.both:
            weather.set(lost=True)
        await self._while(path, 4)

    async def half_open_one_way(self) -> None:
        path, rng = self._path("half open one way"), self._world.rng
        rng.choice(path.both).set(lost=True)
        await self._while(path, 4)

    async def cut(self) -> None:
        self._cut(self._path("cut"))
        await trio.lowlevel.checkpoint()

    async def cut_one_end(self) -> None:
        path = self._path("cut one end")
        near = self._world.rng.random() < 0.5
        for wire in list(path.wires):
            wire.cut(near=near, far=not near)
        await trio.lowlevel.checkpoint()

    async def refuse(self) -> None:
        path = self._path("refuse")
        path.refuses = True
        self._cut(path)
        await self._while(path, 2)

    async def replay(self) -> None:
        path = self._path("replay")
        for wire in list(path.wires):
            self._world.net.replay(wire)
        await trio.lowlevel.checkpoint()

    def _cut(self, path: Path) -> None:
        for wire in list(path.wires):
            wire.cut()

    # ---- hosts ----

    async def pause(self) -> None:
        """A host stands still, as by SIGSTOP: it neither reads nor writes."""
        world = self._world
        part = world.rng.choice([*world.routers, *world.agents])
        paths = [p for p in world.paths if part.name in (p.router, p.agent)]
        world.books.note(f"{part.name} pauses")
        for path in paths:
            for weather in path.both:
                weather.set(held=True)
        async with trio.open_nursery() as nursery:
            for path in paths:
                nursery.start_soon(self._while, path, 2)

    async def kill_agent(self) -> None:
        await self._kill(self._agent(), heard=True)

    async def cut_power_of_agent(self) -> None:
        await self._kill(self._agent(), heard=False)

    async def agent_of_yesterday(self) -> None:
        """It comes back with an earlier wall clock."""
        rng, agent = self._world.rng, self._agent()
        epoch = self._world.new_epoch() - PUT_BACK
        await self._kill(agent, heard=rng.random() < 0.5, epoch=epoch)

    async def kill_router(self) -> None:
        await self._kill(self._router(), heard=True)

    async def cut_power_of_router(self) -> None:
        await self._kill(self._router(), heard=False)

    async def _kill(self, part: Part, *, heard: bool, epoch: int = 0) -> None:
        if part.busy:
            return
        part.idle = trio.Event()
        self._world.books.note(f"{part.name} killed, heard {heard}, back as {epoch}")
        # What was begun to be ended is seen to its end.
        with trio.CancelScope(shield=True):
            await part.kill(heard=heard)
            await trio.sleep(self._world.rng.expovariate(0.5))
            part.epoch = epoch
            await self._hosts.start(part.run)
            part.idle.set()

    async def drain_agent(self) -> None:
        """As its daemon does at SIGTERM, and it is begun anew (L5)."""
        part = self._agent()
        agent = part.agent
        if part.busy or agent is None:
            return
        part.idle = trio.Event()
        self._world.books.note(f"{part.name} drains")
        with trio.CancelScope(shield=True):
            agent.drain()
            with trio.move_on_after(DRAIN_S):
                await agent.rested.wait()
            agent.dismiss()
            await trio.lowlevel.checkpoint()
            part.scope.cancel()
            await part.gone.wait()
            await trio.sleep(self._world.rng.expovariate(1))
            await self._hosts.start(part.run)
            part.idle.set()

    async def router_drains_agent(self) -> None:
        rng, part = self._world.rng, self._router()
        router = part.router
        if router is None:
            return
        worker = rng.choice(self._world.agents).name
        self._world.books.note(f"{part.name} drains {worker}")
        router.drain(worker)
        try:
            await trio.sleep(rng.expovariate(1))
            if rng.random() < 0.5:
                router.cut(worker)
        finally:
            router.undrain(worker)

    async def engine(self) -> None:
        """An engine is lost, silent or loading, or comes back as a new one."""
        rng = self._world.rng
        engines = [e for part in self._world.agents for e in part.engines]
        engine = rng.choice(engines)
        what = rng.choice([*_PROBES, "restart"])
        self._world.books.note(f"{engine.id} {what}")
        if what == "restart":
            started = (engine.discovery.started_at or 0.0) + 1
            engine.discovery = attrs.evolve(engine.discovery, started_at=started)
            return
        engine.result = _PROBES[what]
        try:
            await trio.sleep(rng.expovariate(0.5))
        finally:
            engine.result = ProbeResult.ANSWERED

    def _agent(self) -> AgentPart:
        return self._world.rng.choice(self._world.agents)

    def _router(self) -> RouterPart:
        return self._world.rng.choice(self._world.routers)


_PROBES: Final = {
    "lost": ProbeResult.REFUSED,
    "silent": ProbeResult.SILENT,
    "loading": ProbeResult.LOADING,
}

TROUBLES: Final[Mapping[str, Callable[[Trouble], Awaitable[None]]]] = {
    "late": Trouble.late,
    "slow": Trouble.slow,
    "slivers": Trouble.slivers,
    "part": Trouble.part,
    "part one way": Trouble.part_one_way,
    "part and reset": Trouble.part_and_reset,
    "half open": Trouble.half_open,
    "half open one way": Trouble.half_open_one_way,
    "cut": Trouble.cut,
    "cut one end": Trouble.cut_one_end,
    "refuse": Trouble.refuse,
    "replay": Trouble.replay,
    "pause": Trouble.pause,
    "kill agent": Trouble.kill_agent,
    "cut power of agent": Trouble.cut_power_of_agent,
    "agent of yesterday": Trouble.agent_of_yesterday,
    "kill router": Trouble.kill_router,
    "cut power of router": Trouble.cut_power_of_router,
    "drain agent": Trouble.drain_agent,
    "router drains agent": Trouble.router_drains_agent,
    "engine": Trouble.engine,
}
