"""What is checked of a simulation from outside, while it runs and at its end."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path as Folder
from typing import Final, Protocol

import trio

from router.ids import RequestId
from tests.simulation.far_clients import Books
from tests.simulation.far_engines import Generation
from tests.simulation.far_parts import AgentPart, Part, RouterPart
from tests.simulation.far_wires import Path
from workers.wire.frames import WINDOW

#: Seconds between two looks at what is held.
LOOK_S: Final = 0.25
#: Seconds after which no engine may work for a client that is gone, whatever the
#: network does; where it has been quiet; and from when on it counts as that.
GONE_S: Final = 12.0
PROMPT_S: Final = 1.0
SOUND_S: Final = 5.0
#: Seconds after which hosts that nothing ails must have met again.
MEND_S: Final = 12.0
#: Characters that are held besides one delta and the credit.
SLACK: Final = 4096
FDS: Final = Folder("/proc/self/fd")


class World(Protocol):
    """What is checked."""

    books: Books
    paths: list[Path]
    routers: list[RouterPart]
    agents: list[AgentPart]

    @property
    def parts(self) -> Sequence[Part]:
        """Every host."""

    def breach(self, what: str) -> None:
        """Write down a broken promise."""


class Auditor:
    """Looks at a world, and writes down what is not as was promised."""

    def __init__(self, world: World) -> None:
        """Look at *world*, when asked to."""
        self._world = world

    async def check_gone(self, request: RequestId, router: str) -> None:
        """P5: no engine works for a client that is gone, for longer than that."""
        since = trio.current_time()
        await trio.sleep(PROMPT_S)
        for path in self._world.paths:
            if path.router == router and path.quiet_since + SOUND_S < since:
                self._check_idle(request, f"{path.agent}e")
        await trio.sleep(GONE_S - PROMPT_S)
        self._check_idle(request, "")
        for origin in self._generations(request):
            # What is whole in the books is not asked for any more.
            del self._world.books.generations[origin]

    def _check_idle(self, request: RequestId, engine: str) -> None:
        for origin, generation in self._generations(request).items():
            if generation.open and generation.engine.startswith(engine):
                self._world.breach(f"{origin} is worked on for nobody")

    def _generations(self, request: str) -> dict[str, Generation]:
        every = self._world.books.generations.items()
        return {o: g for o, g in every if o.startswith(f"{request}/")}

    async def look(self) -> None:
        """P6: what is held is within its credit."""
        while True:
            await trio.sleep(LOOK_S)
            for part in self._world.routers:
                for source in part.sources():
                    assignment = source.assignment
                    name = f"{assignment.request}/{assignment.attempt}"
                    self._check_text(name, source._held, WINDOW)
            for agent in self._world.agents:
                self._check_agent(agent)
            for path in self._world.paths:
                self._check_path(path)

    def _check_path(self, path: Path) -> None:
        """P4, P5: who is up, and can be reached, is connected before long."""
        if trio.current_time() < path.quiet_since + MEND_S:
            return
        names = (path.router, path.agent)
        if any(part.busy for part in self._world.parts if part.name in names):
            return
        for part in self._world.routers:
            if part.name == path.router:
                met = {w.id for w in part.remotes() if w.route is not None}
                if path.agent not in met:
                    self._world.breach(f"{path.router} has not met {path.agent} again")

    def _check_agent(self, part: AgentPart) -> None:
        """P3, S5: nothing waits there for a slot; F8: nor for long for credit."""
        agent = part.agent
        if agent is None:
            return
        fleet = agent.router.fleet
        if len(fleet.room):
            self._world.breach(f"{part.name} lets {len(fleet.room)} wait")
        for member in fleet.members.values():
            if member.busy > member.slots:
                self._world.breach(f"{member.id} has {member.busy} of {member.slots}")
        for visit in agent.visits.values():
            for inbound in visit.end.inbounds.values():
                name = f"{inbound.offer.request}/{inbound.offer.attempt}"
                # One delta more than its engine was to be paused for.
                self._check_text(name, inbound._backlog, 0)

    def _check_text(self, name: str, held: Iterable[object], credit: int) -> None:
        text = sum(len(getattr(one, "text", "")) for one in held)
        largest = max(
            (
                generation.largest
                for origin, generation in self._world.books.generations.items()
                if origin.startswith(f"{name}#")
            ),
            default=0,
        )
        if text > credit + largest + SLACK:
            self._world.breach(f"{name} holds {text} characters")

    def size(self) -> Counter[str]:
        """Count descriptors, and tasks by name."""
        found = Counter({"descriptors": len(list(FDS.iterdir()))})
        tasks = [trio.lowlevel.current_root_task()]
        while tasks:
            task = tasks.pop()
            if task is not None:
                found[task.name] += 1
                for nursery in task.child_nurseries:
                    tasks += nursery.child_tasks
        # A script that hangs does not hear that it was closed.
        del found["workers.scripted.ScriptedWorker._play"]
        return found

    def audit(self, baseline: Counter[str]) -> None:
        """S2: after all that, everything is at its baseline."""
        if more := self.size() - baseline:
            self._world.breach(f"left of tasks and descriptors: {dict(more)}")
        for router in self._world.routers:
            if left := router.left(len(self._world.agents)):
                self._world.breach(f"left at {router.name}: {left}")
        for agent in self._world.agents:
            if left := agent.left(len(self._world.routers)):
                self._world.breach(f"left at {agent.name}: {left}")
