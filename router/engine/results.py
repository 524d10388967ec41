"""What a submitted job is at one moment, and what became of it (J1, J7)."""

from typing import Final

import attrs

from router.assignment import Phase
from router.engine.flight import Flight
from router.engine.queue import CompletionReceiver, ToolCall, put_together
from router.errors import Fault, FaultKind, RouterError
from router.ids import RequestId, WorkerId
from router.messages import Delta, FinishReason, Signal, Usage
from router.words import Word


class JobState(Word):
    """Where a job is; the last three are for good."""

    #: It waits for a worker's slot, or for its next attempt.
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS: Final = {
    "completed": JobState.COMPLETED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}
_WAITS: Final = frozenset({Phase.RECEIVED, Phase.QUEUED})


class JobUnknown(RouterError):
    """There is no such job: never submitted here, or taken, or released."""

    def __init__(self, job: str) -> None:
        """Name the *job*."""
        super().__init__(f"no job {job}: it was taken or released, or never was")
        self.job = job


@attrs.frozen
class JobStatus:
    """One job at one moment."""

    id: RequestId
    state: JobState
    phase: str
    """Finer than the state: a phase of A1, or of its connection."""
    worker: WorkerId | None
    """Where it is or was last; None: nowhere yet."""
    attempts: int
    deltas: int
    """Pieces of output so far, those of attempts that were lost included."""
    age_s: float
    """Seconds since it was submitted; of an ended job, until its end."""
    reason: str | None
    """Why it failed, of the stable words of J7; None: it did not."""
    signals: tuple[Signal, ...]
    """What was said out of band so far, in order (J5)."""


@attrs.frozen
class JobResult:
    """What became of one job; of a failed one, all that there was."""

    id: RequestId
    state: JobState
    """COMPLETED, FAILED or CANCELLED."""
    text: str
    """Of an embeddings job, its whole JSON document."""
    reasoning: str
    refusal: str
    """What the model said instead of an answer, where its engine tells it apart."""
    tool_calls: tuple[ToolCall, ...]
    """In order; of a failed job the last may be cut short."""
    finish_reason: FinishReason | None
    """None: the answer is not whole (F7)."""
    usage: Usage | None
    """None: the engine did not say, or the router ended the answer."""
    signals: tuple[Signal, ...]
    """What was said out of band, in order (J5)."""
    reason: str | None
    """Why it failed, of the stable words of J7; None: it did not."""
    message: str | None
    """The same for people; None: it did not fail."""
    fault: Fault | None
    """The same in full; None: it did not fail."""
    unsupported: tuple[str, ...]
    """Sampling parameters that the engine lacks: it answered without (J3)."""
    worker: WorkerId | None
    """Where it was last; None: nowhere."""
    attempts: int
    total_s: float
    """Seconds from submission to the end."""

    @property
    def ok(self) -> bool:
        """Say whether the answer is whole."""
        return self.state is JobState.COMPLETED


class JobReceiver(CompletionReceiver):
    """Gathers a whole answer, and what there was of one that failed."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._before: list[Delta] = []

    def restart(self) -> None:
        """See ``ports.Receiver``. What the last attempt said is kept aside: it
        may be all there will be."""
        if self._deltas:
            self._before, self._deltas = self._deltas, []
        self._gathered.clear()

    def said(self, *, whole: bool) -> list[Delta]:
        """Give the deltas of the answer, or the last that came of one that
        failed."""
        return self._deltas if whole else self._deltas or self._before


def status_of(flight: Flight, now: float) -> JobStatus:
    """Show the job of *flight* at *now* (on Trio's clock)."""
    end = flight.ended_at
    trail = flight.attempts.trail
    return JobStatus(
        id=flight.request,
        state=_state(flight),
        phase=flight.phase_name(),
        worker=trail[-1].worker if trail else None,
        attempts=len(trail),
        deltas=flight.delta_count,
        age_s=(now if end is None else end) - flight.received_at,
        reason=None if flight.fault is None else flight.fault.row.reason,
        signals=flight.signals,
    )


def last_status(result: JobResult) -> JobStatus:
    """Show a job of which there is nothing but its result."""
    return JobStatus(
        id=result.id,
        state=result.state,
        phase=result.state.value,
        worker=result.worker,
        attempts=result.attempts,
        deltas=0,
        age_s=result.total_s,
        reason=result.reason,
        signals=result.signals,
    )


def result_of(
    flight: Flight,
    receiver: JobReceiver,
    bug: Fault | None,
    unsupported: tuple[str, ...],
    now: float,
) -> JobResult:
    """Put together what became of a job whose *flight* has ended.

    Args:
        flight: as it ended.
        receiver: what it was told.
        bug: our own, where that ended it (L1).
        unsupported: sampling parameters that its engine lacks.
        now: on Trio's clock.
    """
    finished = receiver.finished
    fault = bug or flight.fault
    state = JobState.FAILED if bug else _state(flight)
    if state is JobState.CANCELLED and fault is None:
        fault = Fault(FaultKind.CANCELLED, "The job was cancelled.")
    whole = state is JobState.COMPLETED
    said = put_together(receiver.said(whole=whole))
    return JobResult(
        id=flight.request,
        state=state,
        text=said.text,
        reasoning=said.reasoning,
        refusal=said.refusal,
        tool_calls=said.tool_calls,
        finish_reason=finished.reason if whole and finished else None,
        usage=finished.usage if whole and finished else None,
        signals=flight.signals,
        reason=None if fault is None else fault.row.reason,
        message=None if fault is None else fault.message,
        fault=fault,
        unsupported=unsupported,
        worker=receiver.worker,
        attempts=len(flight.attempts.trail),
        total_s=(flight.ended_at or now) - flight.received_at,
    )


def _state(flight: Flight) -> JobState:
    if flight.outcome is not None:
        return _ENDS[flight.outcome]
    return JobState.QUEUED if flight.attempts.phase in _WAITS else JobState.RUNNING
