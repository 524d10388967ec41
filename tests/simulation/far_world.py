"""A seeded world of routers, agents, engines and clients, on logical time (T2).

Real routers and real agents, each with its engine, its links and its books, over
a network that is late, slow, parted, cut or half-open; routers and agents die and
come back, agents drain, engines misbehave, clients leave or dawdle. One run is one
seed, and everything random comes from it; ``far_replay`` shows it again.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final

import hypothesis  # noqa: F401 - see `play`
import trio
import trio.testing

from router.errors import FaultKind
from router.ids import RequestId
from router.messages import Job
from router.ports import Taken
from tests.simulation.far_audit import Auditor
from tests.simulation.far_clients import Books, FarClient
from tests.simulation.far_engines import TOKENS, Engine, Generation
from tests.simulation.far_layout import lay_out
from tests.simulation.far_net import Net, patched
from tests.simulation.far_parts import AgentPart, Part, RouterPart
from tests.simulation.far_trouble import TROUBLES, Trouble
from tests.simulation.far_wires import Path
from tests.simulation.world import PIECES

#: Requests a second.
RATE: Final = 6.0
FLOOD: Final = 100.0
#: Seconds that nobody waits at a router with a short queue.
STARVED_S: Final = 8.0
#: Seconds in which hosts meet, and in which all must be at rest after the last.
MEET_S: Final = 3.0
REST_S: Final = 20.0
#: Seconds in which every client must be told its end.
PATIENCE_S: Final = 300.0
_BODY: Final = "a" * 150_000


class FarWorld:
    """Hosts, clients and faults of one seed."""

    net: Net

    def __init__(
        self,
        seed: int,
        *,
        requests: int,
        faulty: bool = True,
        flooded: bool = False,
        troubles: Sequence[str] = tuple(TROUBLES),
        hasty: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Lay nothing out yet.

        Args:
            seed: all that happens comes of it.
            requests: how many clients come.
            faulty: False: nothing goes wrong, and everything must finish.
            flooded: all come at once, and one in twenty to the last router.
            troubles: what may befall hosts and networks.
            hasty: end at the first breach.
            tell: gets the trace, line by line.
        """
        self._scope = trio.CancelScope()
        self.rng = random.Random(seed)
        self.requests = requests
        self.faulty = faulty
        self.flooded = flooded
        self.troubles = troubles
        self.books = Books(tell=tell)
        if hasty:
            self.books.on_breach = self._scope.cancel
        self.paths: list[Path] = []
        self.routers: list[RouterPart] = []
        self.agents: list[AgentPart] = []
        self._epoch = 1_000_000

    # ---- for its parts ----

    def new_epoch(self) -> int:
        """See ``far_parts.World``."""
        self._epoch += 1_000
        return self._epoch

    def began(self, engine: Engine, generation: Generation) -> None:
        """See ``far_engines.Books``: one origin has one generation (F8)."""
        books = self.books
        books.faults[generation.kind] += 1
        books.note(f"{engine.id} {generation.origin} {generation.kind}")
        if generation.origin in books.generations:
            books.breach(f"a second generation of {generation.origin}")
        books.generations[generation.origin] = generation

    def breach(self, what: str) -> None:
        """Write down a broken promise."""
        self.books.breach(what)

    # ---- the play ----

    async def run(self) -> Books:
        """Play the whole world to its rest. A checkpoint."""
        with self._scope:
            await self._play()
        return self.books

    async def _play(self) -> None:
        async with trio.open_nursery() as hosts:
            self.net = Net(hosts, random.Random(self.rng.random()), self.breach)
            lay_out(self)
            for part in self.parts:
                await hosts.start(part.run)
            await trio.sleep(MEET_S)
            async with trio.open_nursery() as watch:
                auditor = Auditor(self)
                watch.start_soon(auditor.look)
                await trio.lowlevel.checkpoint()
                baseline = auditor.size()
                trouble = Trouble(self, hosts, self.troubles)
                if self.faulty:
                    watch.start_soon(trouble.run)
                await self._clients(watch, auditor)
                await trouble.end()
                await trio.sleep(REST_S)
                # What is due just now is done before we look.
                await trio.testing.wait_all_tasks_blocked()
                auditor.audit(baseline)
                watch.cancel_scope.cancel()
            for part in self.routers:
                await self._client(part, self.requests + 1, plain=True)
            hosts.cancel_scope.cancel()

    @property
    def parts(self) -> list[Part]:
        """Every host."""
        return [*self.agents, *self.routers]

    async def _clients(self, watch: trio.Nursery, auditor: Auditor) -> None:
        async def one(part: RouterPart, number: int) -> None:
            request = await self._client(part, number)
            watch.start_soon(auditor.check_gone, request, part.name)

        async with trio.open_nursery() as clients:
            for number in range(self.requests):
                rate = FLOOD if self.flooded else RATE
                await trio.sleep(self.rng.expovariate(rate))
                up = [part for part in self.routers if part.router is not None]
                if up:
                    part = self.rng.choice(up)
                    if self.flooded:
                        part = self.routers[-1 if number % 20 == 19 else 0]
                    clients.start_soon(one, part, number)
                    if self.rng.random() < 0.1:
                        clients.start_soon(self._count, part)
                else:
                    self.books.outcomes["nobody"] += 1

    async def _client(
        self, part: RouterPart, number: int, *, plain: bool = False
    ) -> RequestId:
        rng, router = self.rng, part.router
        faulty = self.faulty and not plain
        request = RequestId(f"{part.name}.{part.lives}-{number}")
        client = FarClient(self.books, request, buffered=rng.random() < 0.3)
        patience = PATIENCE_S
        leaves = rng.random() if faulty else 1.0
        if leaves < 0.1:
            patience = rng.expovariate(0.5)
        elif leaves < 0.25:
            client.appetite = rng.randrange(1, PIECES + 1)
        tells = rng.random() < 0.5
        body = _BODY if rng.random() < 0.05 else "hello"
        job = _job(body)
        began = trio.current_time()
        assert router is not None
        async with trio.open_nursery() as nursery:
            if faulty and rng.random() < 0.15:
                nursery.start_soon(self._dawdle, client)
            with trio.move_on_after(patience) as scope:
                if tells:
                    client.leave = scope.cancel
                await router.serve(job, client, request=request)
            client.ended = True
            nursery.cancel_scope.cancel()
        if trio.current_time() >= began + PATIENCE_S:
            client.breach("was never told its end")
        left = scope.cancelled_caught or client.is_gone
        self._close(client, part, left=left)
        return request

    def _close(self, client: FarClient, part: RouterPart, *, left: bool) -> None:
        fault = client.fault
        if left:
            outcome = "left"
        elif fault is not None:
            outcome = fault.kind.value
            if fault.kind is FaultKind.SHUTTING_DOWN and not part.busy:
                client.breach("a router that shuts down by itself")
        else:
            outcome = "whole"
            if client.finished is None:
                client.breach("served to no end")
        self.books.outcomes[outcome] += 1
        self.books.note(f"{client.request} {outcome} {len(client.deltas)}")

    async def _count(self, part: RouterPart) -> None:
        """Ask how long a prompt is; an answer is the engine's, or none."""
        router, tokens = part.router, None
        assert router is not None
        with trio.move_on_after(self.rng.expovariate(0.5) if self.faulty else 1):
            tokens = await router.count_tokens(_job("hello"))
            if tokens != TOKENS and (tokens is not None or not self.faulty):
                self.breach(f"counted {tokens} tokens")
        self.books.note(f"{part.name} counted {tokens}")

    async def _dawdle(self, client: FarClient) -> None:
        """Read in fits: full, and after a while room again."""
        while True:
            client.reply = Taken.FULL
            await trio.sleep(self.rng.expovariate(0.5))
            client.reply, client.full = Taken.MORE, False
            client.on_room()
            await trio.sleep(self.rng.expovariate(1))


def _job(body: str) -> Job:
    return Job("m", ({"role": "user", "content": body},), target="m")


def play(
    seed: int,
    *,
    requests: int,
    faulty: bool = True,
    flooded: bool = False,
    troubles: Sequence[str] = tuple(TROUBLES),
    hasty: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Books:
    """Run one world on virtual time, from its seed alone. See `FarWorld`."""
    # Hypothesis has made Trio's scheduler deterministic but for this generator.
    assert trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING
    trio._core._run._r.seed(seed)
    world = FarWorld(
        seed,
        requests=requests,
        faulty=faulty,
        flooded=flooded,
        troubles=troubles,
        hasty=hasty,
        tell=tell,
    )
    with patched(lambda: world.net):
        return trio.run(world.run, clock=trio.testing.MockClock(autojump_threshold=0))


def replay(seed: int, requests: int) -> str:
    """Say how to see a seed again, line by line."""
    return f"python -m tests.simulation.far_replay {seed} {requests}"
