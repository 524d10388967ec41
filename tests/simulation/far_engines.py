"""Engines behind agents that count their work, and say of whom each word is."""

import random
from collections.abc import Sequence
from typing import Final, Protocol

import attrs
import trio

from router.engine.flight import Flight
from router.ids import AssignmentId
from router.messages import Job, Kind, ToolPart, Usage
from router.ports import Delivery, SourcePhase
from tests.simulation.world import BEHAVIOURS, PIECES
from workers.scripted import (
    Fail,
    Finish,
    FinishWithoutUsage,
    Head,
    Say,
    ScriptedSource,
    ScriptedWorker,
    Step,
    Wait,
)

#: Seconds for which an engine works on after its request was closed early.
SETTLE_S: Final = 0.5
#: Characters of one delta of a large answer, and of one that goes in pieces.
LARGE: Final = 40_000
HUGE: Final = 300_000
#: What every prompt has.
TOKENS: Final = 7


@attrs.define(eq=False)
class Generation:
    """One answer that an engine works on."""

    origin: str
    """``request/attempt`` of the router that asked."""
    engine: str
    largest: int = 0
    """Characters of its longest delta."""
    kind: str = "fine"
    """How its engine behaves."""
    source: ScriptedSource | None = None
    whole: bool = False
    """The engine has said its finish reason."""
    ended: bool = False
    """It ended by itself, or its host did."""

    def works(self, now: float) -> bool:
        """Say whether a slot is still in use for it (S3)."""
        source = self.source
        if self.ended or source is None:
            return False
        if source.closed_at is None:
            return True
        return not self.whole and now < source.closed_at + SETTLE_S

    @property
    def open(self) -> bool:
        """Whether somebody still wants it."""
        source = self.source
        return source is not None and source.phase is not SourcePhase.CLOSED


class Books(Protocol):
    """The world, as an engine needs it."""

    rng: random.Random
    faulty: bool

    def began(self, engine: "Engine", generation: Generation) -> None:
        """Write down one more generation."""

    def breach(self, what: str) -> None:
        """Write down a broken promise."""


class Engine(ScriptedWorker):
    """A scripted worker whose every delta names its assignment and its index."""

    def __init__(self, name: str, books: Books, slots: int) -> None:
        """It may never work on more than *slots* at once (S1, P3)."""
        super().__init__(name, self._script, slots=slots, settle_s=SETTLE_S)
        self.counts = TOKENS
        self.generations: list[Generation] = []
        self._books = books
        self._most = slots
        self._next: Generation

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> ScriptedSource:
        """Count, then open."""
        assert isinstance(delivery, Flight)
        origin = delivery.client_ref or ""
        generation = self._next = Generation(f"{origin}#{assignment.attempt}", self.id)
        source = super().open(assignment, job, delivery, slot=slot)
        generation.source = source
        now = trio.current_time()
        self.sources.clear()
        self.generations = [g for g in self.generations if g.works(now) or g.open]
        self.generations.append(generation)
        working = sum(g.works(now) for g in self.generations)
        if working > self._most:
            self._books.breach(f"{self.id} works on {working} of {self._most}")
        return source

    def crash(self) -> None:
        """Its host is gone: nothing works any more."""
        for generation in self.generations:
            generation.ended = True

    def _script(self, _assignment: AssignmentId, _job: Job) -> Sequence[Step]:
        books, generation = self._books, self._next
        rng = books.rng
        if books.faulty and rng.random() < 0.35:
            generation.kind = rng.choice(sorted(BEHAVIOURS))
        kind, said = generation.kind, _answer(rng, generation)
        books.began(self, generation)
        return said if kind == "fine" else BEHAVIOURS[kind](rng, said)

    def _step(self, source: ScriptedSource, step: Step) -> None:
        generation = next((g for g in self.generations if g.source is source), None)
        was_open = generation is not None and generation.open
        if generation is not None and was_open:
            generation.whole |= isinstance(step, Finish | FinishWithoutUsage)
        super()._step(source, step)
        if generation is not None and was_open and not generation.open:
            generation.ended |= isinstance(step, Finish | Fail)


def _answer(rng: random.Random, generation: Generation) -> list[Step]:
    """Draw what a fault-free engine says."""
    draw = rng.random()
    size = LARGE if draw < 0.09 else 0
    huge = rng.randrange(PIECES) if draw < 0.02 else None
    pause = rng.choice([0.02, 0.05, 0.1])
    # A few go on for longer than anybody may work for a client that is gone.
    least, most = (2.0, 4.0) if 0.09 < draw < 0.16 else (0.0, 2 * pause)
    steps: list[Step] = [Wait(round(rng.expovariate(5), 2)), Head()]
    for n in range(PIECES):
        padding = "." * (HUGE if n == huge else size)
        text = f"{generation.origin}:{n};{padding}"
        generation.largest = max(generation.largest, len(text))
        kind = rng.choices([Kind.TEXT, Kind.REASONING, Kind.TOOL_CALL], [8, 1, 1])[0]
        tool = ToolPart(0, f"c{n}", "f") if kind is Kind.TOOL_CALL else None
        wait = Wait(round(rng.uniform(least, most), 2))
        steps += [wait, Say((text,), kind, tool=tool)]
    last = Finish(usage=Usage(1, PIECES))
    return [*steps, last if rng.random() < 0.9 else FinishWithoutUsage()]
