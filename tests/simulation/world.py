"""A seeded world: scripted workers that misbehave, clients that leave or dawdle.

One run is one seed. Everything random comes from it, Trio's scheduler
included, so that a failing seed replays to the letter (T2).
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import trio
import trio.testing

from router.engine import Router, open_router
from router.errors import Fault, FaultKind
from router.ids import AssignmentId
from router.messages import Delta, Finished, Job, ProbeResult
from router.ports import Delivery, Taken
from router.settings import RouterSettings, Settings, WaitSettings
from tests.kit.receiver import Recorder
from workers.scripted import (
    Comment,
    Fail,
    Finish,
    Head,
    Refuse,
    Say,
    ScriptedSource,
    ScriptedWorker,
    Step,
    Stubborn,
    Wait,
)

JOB: Final = Job("m", (), target="m")
PIECES: Final = 8
SETTINGS: Final = Settings(
    router=RouterSettings(queue_limit=64, queue_ms=60_000),
    waits=WaitSettings(
        idle_grace_ms=3_000,
        busy_wait_ms=20_000,
        load_wait_ms=10_000,
        liveness_ms=5_000,
        ghost_ms=10_000,
    ),
)


@attrs.define
class Books:
    """What happened, and every breach of the promise."""

    outcomes: Counter[str] = attrs.field(factory=Counter)
    faults: Counter[str] = attrs.field(factory=Counter)
    breaches: list[str] = attrs.field(factory=list)
    trace: "hashlib._Hash" = attrs.field(factory=hashlib.sha256)

    def note(self, what: str) -> None:
        """Add *what* to the trace, at its time."""
        self.trace.update(f"{trio.current_time():.6f} {what}\n".encode())


class Watched(ScriptedWorker):
    """A scripted worker that counts how much of it is in use."""

    def __init__(self, name: str, world: "World", slots: int) -> None:
        """*slots* may never be exceeded, settling requests included (S1)."""
        super().__init__(name, world.script, slots=slots, settle_s=0.5)
        self._world = world
        self._most = slots

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> ScriptedSource:
        """Count, then open."""
        source = super().open(assignment, job, delivery, slot=slot)
        live = sum(s.closed_at is None for s in self.sources)
        if live > self._most:
            self._world.books.breaches.append(f"{self.id} runs {live} of {self._most}")
        self.sources = [s for s in self.sources if s.closed_at is None]
        return source


class Client(Recorder):
    """A client that checks what it gets as it gets it."""

    def __init__(self, world: "World", number: int, *, buffered: bool) -> None:
        """*number* names it in the trace."""
        super().__init__(buffered=buffered)
        self._world = world
        self.number = number
        self.left = False

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """Take *deltas*; each must be the next of one assignment (F1)."""
        if self.left:
            self.breach("delivery after the client left")
        known = {d.assignment for d in self.deltas}
        for delta in deltas:
            if known and delta.assignment not in known:
                self.breach("two assignments in one answer")
        answer = super().take(deltas)
        indices = [d.index for d in self.deltas]
        if indices != list(range(len(indices))):
            self.breach(f"indices {indices}")
        return answer

    def routed(self, worker: object, attempts: int) -> None:
        """Note a failover after commit."""
        if self.deltas and not self.buffered:
            self.breach("failover after commit")
        super().routed(worker, attempts)  # type: ignore[arg-type]

    def finish(self, finished: Finished) -> Taken:
        """Check that a whole answer is whole (F7)."""
        if self.left:
            self.breach("finish after the client left")
        if self.text != "".join(f"{n};" for n in range(PIECES)):
            self.breach(f"finished with {self.text!r}")
        return super().finish(finished)

    def breach(self, what: str) -> None:
        """Write down a broken promise."""
        self._world.books.breaches.append(f"client {self.number}: {what}")


class World:
    """Workers, clients and faults of one seed."""

    def __init__(self, seed: int, *, requests: int, faulty: bool = True) -> None:
        """*faulty* False: the liveness half, in which everything must finish."""
        self.rng = random.Random(seed)
        self.requests = requests
        self.faulty = faulty
        self.books = Books()

    async def run(self) -> Books:
        """Play the whole world to its rest. A checkpoint."""
        workers = [Watched(f"w{n}", self, n % 3 + 1) for n in range(4)]
        async with open_router(
            SETTINGS, workers=workers, rng=random.Random(self.rng.random())
        ) as router:
            await trio.sleep(1)
            async with trio.open_nursery() as nursery:
                if self.faulty:
                    nursery.start_soon(self._trouble, router, workers)
                async with trio.open_nursery() as clients:
                    for number in range(self.requests):
                        clients.start_soon(self._client, router, number)
                        await trio.sleep(self.rng.expovariate(4))
                nursery.cancel_scope.cancel()
            for worker in workers:
                worker.result = ProbeResult.ANSWERED
            await trio.sleep(40)
            self._audit(router)
        return self.books

    def script(self, assignment: AssignmentId, _: Job) -> Sequence[Step]:
        """Draw how one attempt goes."""
        rng = self.rng
        kind = "fine"
        if self.faulty and rng.random() < 0.45:
            kind = rng.choice(sorted(BEHAVIOURS))
        self.books.faults[kind] += 1
        self.books.note(f"{assignment.attempt} {kind}")
        said: list[Step] = [Wait(rng.expovariate(5)), Head()]
        for n in range(PIECES):
            said += [Wait(rng.expovariate(20)), Say((f"{n};",))]
        said.append(Finish())
        return said if kind == "fine" else BEHAVIOURS[kind](rng, said)

    async def _client(self, router: Router, number: int) -> None:
        rng = self.rng
        client = Client(self, number, buffered=rng.random() < 0.3)
        patience = rng.expovariate(0.5) if self.faulty and rng.random() < 0.2 else 1e9
        dawdles = self.faulty and rng.random() < 0.1
        async with trio.open_nursery() as nursery:
            if dawdles:
                nursery.start_soon(self._dawdle, client)
            with trio.move_on_after(patience) as scope:
                await router.serve(JOB, client, request=router.new_request_id())
            client.left = True
            nursery.cancel_scope.cancel()
        outcome = (
            "left"
            if scope.cancelled_caught
            else client.fault.kind.value
            if client.fault
            else "whole"
        )
        if outcome == "whole" and client.finished is None:
            client.breach("served to no end")
        self.books.outcomes[outcome] += 1
        self.books.note(f"client {number} {outcome} {len(client.deltas)}")

    async def _dawdle(self, client: Client) -> None:
        """Read in fits: full, and after a while room again."""
        while True:
            client.reply = Taken.FULL
            await trio.sleep(self.rng.expovariate(1))
            client.reply = Taken.MORE
            client.on_room()
            await trio.sleep(self.rng.expovariate(1))

    async def _trouble(self, router: Router, workers: Sequence[Watched]) -> None:
        """Lose, restart, drain and undrain workers as long as there are clients."""
        rng = self.rng
        epoch = 1_000.0
        while True:
            await trio.sleep(rng.expovariate(0.3))
            worker = rng.choice(list(workers))
            trouble = rng.choice(["lost", "silent", "loading", "restart", "drain"])
            self.books.faults[trouble] += 1
            self.books.note(f"{worker.id} {trouble}")
            if trouble == "restart":
                epoch += 1_000
                worker.discovery = attrs.evolve(worker.discovery, started_at=epoch)
            elif trouble == "drain":
                router.drain(worker.id)
                await trio.sleep(rng.expovariate(1))
                if rng.random() < 0.5:
                    router.cut(worker.id)
                router.undrain(worker.id)
            else:
                worker.result = {
                    "lost": ProbeResult.REFUSED,
                    "silent": ProbeResult.SILENT,
                    "loading": ProbeResult.LOADING,
                }[trouble]
                await trio.sleep(rng.expovariate(0.5))
                worker.result = ProbeResult.ANSWERED

    def _audit(self, router: Router) -> None:
        """S2: after all that, everything is at its baseline."""
        fleet = router.fleet
        held = {m.id: m.busy for m in fleet.members.values() if m.busy}
        if held or fleet.requests or router.flights or len(fleet.room):
            self.books.breaches.append(
                f"left behind: {held} {list(fleet.requests)} {list(router.flights)}"
            )


def _fault(kind: FaultKind, **fields: int) -> Fail:
    return Fail(Fault(kind, "simulated", **fields))  # type: ignore[arg-type]


def _cut_at(rng: random.Random, said: list[Step], *then: Step) -> list[Step]:
    """Go as far as a random step, then otherwise."""
    return [*said[: rng.randrange(1, len(said))], *then]


BEHAVIOURS: Final[
    Mapping[str, Callable[[random.Random, list[Step]], Sequence[Step]]]
] = {
    "refuse": lambda _rng, _said: [Refuse()],
    "decline": lambda _rng, _said: [_fault(FaultKind.DECLINED, status=503)],
    "loading": lambda _rng, _said: [_fault(FaultKind.LOADING, status=503)],
    "reject": lambda _rng, _said: [_fault(FaultKind.REJECTED, status=400)],
    "500": lambda _rng, _said: [_fault(FaultKind.SERVER_ERROR, status=500)],
    "die": lambda rng, said: _cut_at(rng, said, _fault(FaultKind.STREAM_CLOSED_EARLY)),
    "abort": lambda rng, said: _cut_at(rng, said, _fault(FaultKind.ENGINE_ABORT)),
    "hang": lambda rng, said: _cut_at(rng, said, Wait(float("inf"))),
    "drip": lambda rng, said: _cut_at(
        rng, said, Wait(2), Comment(), Wait(float("inf"))
    ),
    "repeat": lambda _rng, said: [*said[:4], Say(("0;",), repeat=1), *said[4:]],
    "skip": lambda _rng, said: [*said[:4], Say(("x;",), skip=2), *said[4:]],
    "late": lambda rng, said: [
        Stubborn(),
        *said[:2],
        Wait(rng.uniform(0, 30)),
        *said[2:],
    ],
    "slow": lambda rng, said: [
        s if not isinstance(s, Wait) else Wait(rng.uniform(0, 2)) for s in said
    ],
}


def play(seed: int, *, requests: int, faulty: bool = True) -> Books:
    """Run one world on virtual time, from its seed alone."""
    # Hypothesis, imported by the tests' conftest, has made Trio's scheduler
    # deterministic but for this generator.
    trio._core._run._r.seed(seed)
    world = World(seed, requests=requests, faulty=faulty)
    return trio.run(world.run, clock=trio.testing.MockClock(autojump_threshold=0))
