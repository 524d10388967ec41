"""Jobs that were handed in: one task each, and its result until it is taken (J1).

Rule 1: a job is live from ``submit`` on, and ends with its router at the latest;
its result has one taker. Rule 2: what is live is bounded by the fleet's own queue,
which refuses at ``submit``; results stay until somebody wants them gone.
"""

from math import inf
from typing import Final, NoReturn, Protocol

import attrs
import trio

from router.engine.flight import Flight
from router.engine.results import (
    JobReceiver,
    JobResult,
    JobStatus,
    JobUnknown,
    last_status,
    result_of,
    status_of,
)
from router.errors import Fault, FaultKind, LocalError, RequestFailed
from router.ids import RequestId, WorkerId
from router.messages import Job
from router.ports import Receiver

STOPPED: Final = Fault(FaultKind.SHUTTING_DOWN, "The router is not running.")
_BUG: Final = Fault(FaultKind.INTERNAL, "The router failed on this job.")


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
            return status_of(entry.flight, trio.current_time())
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
        entry = _Entry(None, None, status=last_status(result), result=result)
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
            now = trio.current_time()
            lacks = self._router.unsupported(flight.job, receiver.worker)
            entry.result = result = result_of(flight, receiver, bug, lacks, now)
            entry.status = attrs.evolve(
                status_of(flight, now), state=result.state, reason=result.reason
            )
            self._keep(flight.request)
        entry.flight = entry.receiver = None
        entry.ended.set()

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
            now = trio.current_time()
            while self._ended:
                job, ended_at = next(iter(self._ended.items()))
                # The sum that was slept until: a difference may round to earlier,
                # and this would go round without an end on a clock of a test's.
                if ended_at + self._ttl_s > now:
                    break
                del self._ended[job]
                del self._entries[job]
