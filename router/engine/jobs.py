"""Jobs that were handed in: one task each, and its result until it is taken (J1).

Rule 1: a job is live from ``submit`` on, and ends with its router at the latest;
its result has one taker. Rule 2: what is live is bounded by the fleet's own queue,
which refuses at ``submit``; results stay until somebody wants them gone.
"""

from math import inf
from typing import Final, NoReturn, Protocol

import attrs
import trio

from router.assignment import Phase
from router.engine.flight import Flight
from router.engine.queue import CompletionReceiver, ToolCall, put_together
from router.errors import Fault, FaultKind, LocalError, RequestFailed, RouterError
from router.ids import RequestId, WorkerId
from router.messages import Delta, FinishReason, Job, Signal, Usage
from router.ports import Receiver
from router.words import Word

STOPPED: Final = Fault(FaultKind.SHUTTING_DOWN, "The router is not running.")
_BUG: Final = Fault(FaultKind.INTERNAL, "The router failed on this job.")


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

    def said(self, *, whole: bool) -> list[Delta]:
        """Give the deltas of the answer, or the last that came of one that
        failed."""
        return self._deltas if whole else self._deltas or self._before


class Shell(Protocol):
    """What the owner of jobs needs of the router around it."""

    def depart(self, job: Job, receiver: Receiver) -> Flight:
        """Submit *job*. Not a checkpoint.

        Raises:
            RequestFailed: it is refused at once.
        """

    def unsupported(self, job: Job, worker: WorkerId | None) -> tuple[str, ...]:
        """Name the sampling parameters of *job* that *worker*'s engine lacks."""

    def report_bug(self, where: str, bug: Exception) -> None:
        """Log and count an exception that is kept to one request (L1)."""


@attrs.define(eq=False)
class _Entry:
    """One job; ``flight`` and ``receiver`` are gone once there is a result."""

    flight: Flight | None
    receiver: JobReceiver | None
    ended: trio.Event = attrs.field(factory=trio.Event)
    status: JobStatus | None = None
    result: JobResult | None = None


class Jobs:
    """The owner of all submitted jobs of one router."""

    def __init__(self, router: Shell, ttl_s: float = inf) -> None:
        """Own none yet; *ttl_s*: how long results are kept."""
        self._router = router
        self._ttl_s = ttl_s
        self._nursery: trio.Nursery | None = None
        self._entries: dict[RequestId, _Entry] = {}
        #: Those with a result, oldest end first, and when they ended.
        self._ended: dict[RequestId, float] = {}
        self._some = trio.Event()

    def __len__(self) -> int:
        """Count the jobs that are live or whose results are kept."""
        return len(self._entries)

    async def run(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run all jobs. Returns only when cancelled; they are cancelled with it."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await self._sweep()
            finally:
                self._nursery = None

    def submit(self, job: Job) -> RequestId:
        """Take *job* in: it is live from here. Not a checkpoint.

        Raises:
            RequestFailed: it is refused, and nothing is kept of it.
        """
        nursery = self._nursery
        if nursery is None:
            raise RequestFailed(STOPPED)
        receiver = JobReceiver()
        flight = self._router.depart(job, receiver)
        entry = _Entry(flight, receiver)
        self._entries[flight.request] = entry
        nursery.start_soon(self._see, entry, flight, name=f"job {flight.request}")
        return flight.request

    def status(self, job: RequestId) -> JobStatus:
        """Show one job. Not a checkpoint.

        Raises:
            JobUnknown: there is no such job.
        """
        entry = self._find(job)
        if entry.flight is not None:
            return _status(entry.flight, trio.current_time())
        if entry.status is None:
            raise LocalError(f"{job} has neither a flight nor a result")
        return entry.status

    async def result(self, job: RequestId) -> JobResult:
        """Wait for the end of a job, and take its result.

        A checkpoint. Cancelled: nothing was taken, and the job goes on.

        Raises:
            JobUnknown: there is no such job, or it was released or taken by
                another while we waited.
        """
        await self._find(job).ended.wait()
        return self._take(job)

    def result_nowait(self, job: RequestId) -> JobResult:
        """Take the result of a job that has ended. Not a checkpoint.

        Raises:
            trio.WouldBlock: it has not ended.
            JobUnknown: there is no such job.
        """
        if not self._find(job).ended.is_set():
            raise trio.WouldBlock
        return self._take(job)

    def put_back(self, result: JobResult) -> None:
        """Keep a result again that was taken and did not arrive."""
        entry = _Entry(None, None, status=_status_of(result), result=result)
        entry.ended.set()
        self._entries[result.id] = entry
        self._keep(result.id)

    def release(self, job: RequestId) -> bool:
        """Forget a job; a live one is cancelled. Not a checkpoint. False: none."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return False
        self._ended.pop(job, None)
        if entry.flight is not None:
            entry.flight.cancel(Fault(FaultKind.CANCELLED, "The job was released."))
        return True

    # --- one job -----------------------------------------------------------

    async def _see(self, entry: _Entry, flight: Flight) -> None:
        """See one job to its end, and keep what became of it."""
        bug: Fault | None = None
        try:
            await flight.run()
        except LocalError:
            raise
        except Exception as error:  # noqa: BLE001 - L1: it ends this job only
            self._router.report_bug("job", error)
            bug = _BUG
        finally:
            self._conclude(entry, flight, bug)

    def _conclude(self, entry: _Entry, flight: Flight, bug: Fault | None) -> None:
        receiver = entry.receiver
        if receiver is None:
            raise LocalError(f"{flight.request} ended twice")
        if flight.request in self._entries:
            entry.result = result = self._result(flight, receiver, bug)
            entry.status = attrs.evolve(
                _status(flight, trio.current_time()),
                state=result.state,
                reason=result.reason,
            )
            self._keep(flight.request)
        entry.flight = entry.receiver = None
        entry.ended.set()

    def _result(
        self, flight: Flight, receiver: JobReceiver, bug: Fault | None
    ) -> JobResult:
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
            unsupported=self._router.unsupported(flight.job, receiver.worker),
            worker=receiver.worker,
            attempts=len(flight.attempts.trail),
            total_s=(flight.ended_at or trio.current_time()) - flight.received_at,
        )

    def _find(self, job: RequestId) -> _Entry:
        entry = self._entries.get(job)
        if entry is None:
            raise JobUnknown(job)
        return entry

    def _take(self, job: RequestId) -> JobResult:
        entry = self._entries.get(job)
        if entry is None or entry.result is None:
            raise JobUnknown(job)
        del self._entries[job]
        del self._ended[job]
        return entry.result

    # --- results that nobody takes -----------------------------------------

    def _keep(self, job: RequestId) -> None:
        self._ended[job] = trio.current_time()
        self._some.set()

    async def _sweep(self) -> NoReturn:
        """Forget results whose time is over. Returns only when cancelled."""
        while True:
            if not self._ended:
                self._some = trio.Event()
                await self._some.wait()
            oldest = next(iter(self._ended.values()), trio.current_time())
            await trio.sleep_until(oldest + self._ttl_s)
            gone = trio.current_time() - self._ttl_s
            for job, ended_at in list(self._ended.items()):
                if ended_at > gone:
                    break
                del self._ended[job]
                del self._entries[job]


def _state(flight: Flight) -> JobState:
    if flight.outcome is not None:
        return _ENDS[flight.outcome]
    return JobState.QUEUED if flight.attempts.phase in _WAITS else JobState.RUNNING


def _status(flight: Flight, now: float) -> JobStatus:
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


def _status_of(result: JobResult) -> JobStatus:
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
