"""A worker that follows a script, inside the process and on Trio's clock.

For tests under virtual time, for simulation, and to try an embedding without
an engine. It implements ``ports.Worker`` as a real one does, stamps its deltas
itself, and can be told to misbehave: to repeat, skip, be late, or to go on
after its request was closed.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn

import attrs
import trio

from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.ids import AssignmentId, WorkerId
from router.messages import (
    Delta,
    Discovery,
    Finished,
    FinishReason,
    Job,
    Kind,
    Probe,
    ProbeResult,
    SlotView,
    ToolPart,
    Usage,
)
from router.ports import Delivery, SourcePhase
from router.waiting import WaitState


@attrs.frozen
class Wait:
    """Do nothing for *seconds*."""

    seconds: float


@attrs.frozen
class Connect:
    """Take *seconds* to connect; only as the first step."""

    seconds: float


@attrs.frozen
class Head:
    """Answer with a 200 head."""


@attrs.frozen
class PartialHead:
    """Send a part of a head (W2)."""


@attrs.frozen
class Say:
    """Deliver *pieces* as deltas of one read.

    ``skip`` leaves out as many indices before the first (F5); ``repeat``
    stamps the pieces with indices that were used before (F3). ``tool`` says
    whose arguments they are, where they are a tool call's.
    """

    pieces: tuple[str, ...]
    kind: Kind = Kind.TEXT
    skip: int = 0
    repeat: int = 0
    tool: ToolPart | None = None


@attrs.frozen
class Comment:
    """Send bytes that carry nothing: progress all the same (W6)."""


@attrs.frozen
class Finish:
    """End the answer as a whole one."""

    reason: FinishReason = FinishReason.STOP
    usage: Usage | None = None


@attrs.frozen
class FinishWithoutUsage:
    """Give the finish reason, and let usage be waited for (M3)."""


@attrs.frozen
class Fail:
    """End the attempt with *fault*."""

    fault: Fault


@attrs.frozen
class Refuse:
    """Refuse the connection; only as the first step."""


@attrs.frozen
class Stubborn:
    """Go on with the steps that follow though the request was closed."""


Step = (
    Wait
    | Connect
    | Head
    | PartialHead
    | Say
    | Comment
    | Finish
    | FinishWithoutUsage
    | Fail
    | Refuse
    | Stubborn
)
Script = Callable[[AssignmentId, Job], Sequence[Step]]


def answers(*pieces: str, every: float = 0.0) -> Script:
    """Make a script that says *pieces*, *every* seconds one, and finishes."""
    said = [step for piece in pieces for step in (Wait(every), Say((piece,)))]
    steps = (Head(), *said, Finish(usage=Usage(1, len(pieces))))
    return lambda _assignment, _job: steps


def hangs(*first: Step) -> Script:
    """Make a script that takes *first* and is then silent for ever."""
    return lambda _assignment, _job: (*first, Wait(float("inf")))


@attrs.define(eq=False)
class ScriptedSource:
    """One attempt under way. Implements ``ports.Source``."""

    assignment: AssignmentId
    delivery: Delivery
    steps: Sequence[Step]
    since: float
    last_byte_at: float
    phase: SourcePhase = SourcePhase.AWAITING_HEAD
    partial_head: bool = False
    paused: bool = False
    index: int = 0
    closed_at: float | None = None
    slot: int | None = None
    said: WaitState | None = None
    reason: FinishReason | None = None
    grace: int = 0
    asked: int = 0
    """How often it was asked to end its reasoning."""
    _room: trio.Event = attrs.field(factory=trio.Event)

    def pause(self) -> None:
        """Stop before the next step."""
        self.paused = True
        self._room = trio.Event()

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self.last_byte_at = trio.current_time()
        self._room.set()

    def catch_up(self) -> None:
        """See ``ports.Source``: nothing waits to be read."""

    def end_reasoning(self) -> int:
        """See ``ports.EndsReasoning``: it changes nothing in the script."""
        self.asked += 1
        return self.grace if self.asked == 1 else 0

    def finish_now(self) -> None:
        """Report Finished without usage.

        Raises:
            LocalError: not FINISHING.
        """
        if self.phase is not SourcePhase.FINISHING:
            raise LocalError(f"{self.assignment} is {self.phase.value}")
        self.close()
        self.delivery.finished(Finished(self.assignment, FinishReason.STOP))

    def close(self) -> None:
        """Abandon the attempt. Idempotent."""
        if self.phase is not SourcePhase.CLOSED:
            self.phase = SourcePhase.CLOSED
            self.closed_at = trio.current_time()
            self._room.set()

    async def room(self) -> None:
        """Wait while paused and not closed. A checkpoint only then."""
        while self.paused and self.phase is not SourcePhase.CLOSED:
            await self._room.wait()


class ScriptedWorker:
    """Implements ``ports.Worker``. Its public attributes may be changed at any
    time: what the next probe finds, what the next request is answered with."""

    def __init__(
        self,
        name: str,
        script: Script,
        *,
        slots: int = 4,
        models: tuple[str, ...] = ("m",),
        settle_s: float = 0.0,
        settles_by_probe: bool = False,
    ) -> None:
        """*script* gives the steps of each attempt."""
        self.id = WorkerId(name)
        self.settle_s = settle_s
        self.settles_by_probe = settles_by_probe
        self.script = script
        self.result = ProbeResult.ANSWERED
        self.discovery = Discovery(models, slots, 4096, "scripted")
        self.slots_shown: SlotView | None = None
        self.lives = True
        self.works: bool | None = None
        self.counts: int | None = None
        self.dead = False
        self.probes = 0
        #: Deltas of reasoning that it wants to be borne with when it is asked.
        self.grace = 0
        self.sources: list[ScriptedSource] = []
        self._nursery: trio.Nursery | None = None

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> ScriptedSource:
        """See ``ports.Worker``. Not a checkpoint."""
        steps = self.script(assignment, job)
        refused = bool(steps) and isinstance(steps[0], Refuse)
        if refused or self.dead or self._nursery is None:
            raise WorkerFailed(Fault(FaultKind.CONNECT, "connection refused"))
        now = trio.current_time()
        source = ScriptedSource(assignment, delivery, steps, now, now, slot=slot)
        source.grace = self.grace
        if steps and isinstance(steps[0], Connect):
            source.phase = SourcePhase.CONNECTING
        self.sources.append(source)
        self._nursery.start_soon(self._play, source)
        return source

    def die(self) -> None:
        """Lose every attempt under way at once, and refuse until ``revive``.

        Not a checkpoint.
        """
        self.dead = True
        self.lives = False
        self.result = ProbeResult.REFUSED
        for source in self.sources:
            if source.phase is not SourcePhase.CLOSED:
                source.close()
                source.delivery.failed(
                    source.assignment,
                    Fault(FaultKind.STREAM_CLOSED_EARLY, "the worker died"),
                )

    def revive(self) -> None:
        """Answer again, as a process that was just started. Not a checkpoint."""
        self.dead = False
        self.lives = True
        self.result = ProbeResult.ANSWERED
        started = (self.discovery.started_at or 0.0) + 1.0
        self.discovery = attrs.evolve(self.discovery, started_at=started)

    async def run(self) -> NoReturn:
        """See ``ports.Worker``. Returns only when cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None
        raise AssertionError

    async def probe(self) -> Probe:
        """See ``ports.Worker``. A checkpoint."""
        self.probes += 1
        await trio.lowlevel.checkpoint()
        found = self.discovery if self.result is ProbeResult.ANSWERED else None
        return Probe(self.result, discovery=found)

    async def slot_view(self) -> SlotView | None:
        """See ``ports.Worker``. A checkpoint."""
        await trio.lowlevel.checkpoint()
        return self.slots_shown

    async def alive(self) -> bool:
        """See ``ports.Worker``. A checkpoint."""
        await trio.lowlevel.checkpoint()
        return self.lives

    async def count_tokens(self, job: Job) -> int | None:
        """See ``ports.Worker``. A checkpoint."""
        del job
        await trio.lowlevel.checkpoint()
        return self.counts

    async def _play(self, source: ScriptedSource) -> None:
        stubborn = False
        for step in source.steps:
            if isinstance(step, Wait | Connect):
                await trio.sleep(step.seconds)
            await source.room()
            if source.phase is SourcePhase.CLOSED and not stubborn:
                return
            stubborn = stubborn or isinstance(step, Stubborn)
            self._step(source, step)

    def _step(self, source: ScriptedSource, step: Step) -> None:
        now = trio.current_time()
        assignment, delivery = source.assignment, source.delivery
        match step:
            case Connect():
                source.last_byte_at = now
                self._enter(source, SourcePhase.AWAITING_HEAD)
            case Head():
                source.last_byte_at = now
                self._enter(source, SourcePhase.STREAMING)
                delivery.accepted(assignment)
            case PartialHead():
                source.partial_head = True
            case Comment():
                source.last_byte_at = now
            case Say():
                source.last_byte_at = now
                delivery.deltas(assignment, _stamp(source, step))
            case Finish():
                source.close()
                delivery.finished(Finished(assignment, step.reason, step.usage))
            case FinishWithoutUsage():
                source.reason = FinishReason.STOP
                self._enter(source, SourcePhase.FINISHING)
                delivery.progress(assignment)
            case Fail():
                source.close()
                delivery.failed(assignment, step.fault)
            case _:
                pass

    def _enter(self, source: ScriptedSource, phase: SourcePhase) -> None:
        if source.phase is not SourcePhase.CLOSED:
            source.phase = phase
            source.since = trio.current_time()


def _stamp(source: ScriptedSource, step: Say) -> list[Delta]:
    first = source.index + step.skip - step.repeat
    deltas = [
        Delta(source.assignment, first + n, step.kind, piece, step.tool)
        for n, piece in enumerate(step.pieces)
    ]
    source.index = first + len(deltas)
    return deltas
