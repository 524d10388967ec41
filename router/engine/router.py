"""The router itself: fleet, workers and flights of one Trio run.

Its calls are synchronous unless they say otherwise, and belong to the Trio run
that opened it. Rules E1, E3, L1, O6, X3 of the contract.
"""

import logging
import os
import random
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from functools import cached_property
from math import inf
from typing import Any, Final

import attrs
import trio

from router.catalog import Catalog
from router.commands import (
    Check,
    Command,
    Empty,
    Grant,
    Lose,
    Refuse,
    Rest,
    Settle,
)
from router.cork import Cork
from router.engine.arguments import check_job
from router.engine.flight import Flight, Limits
from router.engine.jobs import Jobs
from router.engine.queue import Completion, CompletionReceiver, DeltaQueue
from router.engine.records import (
    Receipts,
    flight_record,
    member_status,
    with_signals,
)
from router.engine.results import JobResult, JobStatus
from router.engine.sieving import Sieving
from router.errors import Fault, FaultKind, LocalError, RequestFailed
from router.fleet import Fleet
from router.ids import AssignmentId, RequestId, WorkerId
from router.lifecycle import Event, State
from router.messages import Job
from router.openai.fields import OWNED
from router.ports import (
    KnowsParams,
    Process,
    Receiver,
    Source,
    SourcePhase,
    Worker,
)
from router.settings import Settings, WorkerSettings
from router.supervise import Keeper
from router.tally import Tally
from router.waiting import Budgets
from workers.access import Access, router_access

log: Final = logging.getLogger("fencepost")

#: Receipts of finished requests that are kept for ``/status/requests`` (X3).
RECEIPTS_MAX: Final = 1_000
#: Random part of a request id: 80 bits, as many as a UUIDv7 has.
RANDOM_BYTES: Final = 10
#: Seconds that one worker has to count a prompt, and workers that are asked.
COUNT_S: Final = 3.0
COUNTERS_MAX: Final = 2
#: What a caller's block may raise; it comes out as it is, in no group (B126).
#: Trio's Cancelled is none of it.
CALLERS: Final = (Exception, KeyboardInterrupt, SystemExit)
_BUG: Final = Fault(FaultKind.INTERNAL, "The router failed on this request.")
#: Phases of a source in which its engine owes us work: it has all of the request,
#: and we have not the end of the answer.
_AT_WORK: Final = frozenset({SourcePhase.AWAITING_HEAD, SourcePhase.STREAMING})
#: Models with a counter of their own; those beyond share "other" (X1).
MODEL_LABELS_MAX: Final = 100


@attrs.frozen
class ModelCard:
    """One entry of the list of models (O2)."""

    id: str
    created: int
    """Unix seconds: when this router began to serve."""
    owned_by: str = "fencepost"


class Router:
    """What ``open_router`` gives: serve jobs, ask how things are, steer workers."""

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        """Build the machine; ``open_router`` brings it to life."""
        waits = settings.waits
        self.settings = settings
        self.tally = Tally()
        #: The turns of its workers' loops: what they write goes out together.
        self.cork = Cork(self.report_bug)
        self.fleet = Fleet(settings.router, waits, rng)
        self.workers: dict[WorkerId, Worker] = {}
        self.flights: dict[RequestId, Flight] = {}
        self.limits = Limits(
            waits.connect_ms / 1000,
            waits.liveness_ms / 1000,
            waits.first_delta_ms / 1000 or inf,
            waits.usage_wait_ms / 1000,
            Budgets(
                waits.poll_ms / 1000,
                waits.busy_wait_ms / 1000,
                waits.idle_grace_ms / 1000,
                waits.load_wait_ms / 1000,
            ),
            waits.offer_timeout_ms / 1000,
        )
        #: Called once per request with its flat record (X2).
        self.on_request_end: Callable[[Mapping[str, object]], None] | None = None
        #: More of ``status``, from what stands around this router.
        self.also: Callable[[], Mapping[str, object]] | None = None
        self.rng = rng
        self._catalog = Catalog(settings.models)
        self._sieving = Sieving(settings)
        #: The owner of submitted jobs; ``open_router`` runs it.
        self.jobs = Jobs(self, settings.router.result_ttl_ms / 1000 or inf)
        self._keepers: dict[WorkerId, Keeper] = {}
        self._processes: dict[WorkerId, Process] = {}
        self._receipts = Receipts(RECEIPTS_MAX)
        self._refusal: Fault | None = None
        self._created = time.time_ns() // 1_000_000_000
        self._labels: set[str] = set()
        self._news = trio.Event()
        #: Workers to be forgotten when their last permit is back.
        self._leaving: set[WorkerId] = set()
        #: ``open_router``'s: takes one more worker in, and keeps it.
        self.hire: Callable[[str | WorkerSettings | Worker], Awaitable[None]]
        self._born = 0
        self._random = b""
        self._random_at = 0

    @cached_property
    def access(self) -> Access:
        """Who this router is to agents.

        Raises:
            ValueError: its certificates are of no use.
        """
        return router_access(self.settings.agents)

    # --- requests ----------------------------------------------------------

    async def serve(
        self,
        job: Job,
        receiver: Receiver,
        *,
        request: RequestId,
        client_ref: str | None = None,
    ) -> None:
        """See one request to its end; *receiver* has been told how it ended.

        A checkpoint, unless it is refused at once. Cancelled: the client
        counts as gone; fence, upstream and permit are let go at once (A7).

        Args:
            job: with its ``target`` resolved.
            receiver: new, and used for this request alone.
            request: from ``new_request_id``.
            client_ref: the client's own name for it, for the records.
        """
        flight = self._flight(job, receiver, request, client_ref)
        if self._refusal is not None:
            flight.refused(self._refusal)
            self.record(flight)
            return
        await flight.run()

    def _flight(
        self, job: Job, receiver: Receiver, request: RequestId, client_ref: str | None
    ) -> Flight:
        """Make the flight of a request, with the sieve that it asks for."""
        for name in job.ignored:
            # Names that clients make up are no labels (X1).
            self.tally.ignored_fields[name if name in OWNED else "other"] += 1
        job, receiver = self._sieving.prepare(job, receiver)
        return Flight(self, request, job, receiver, client_ref, trio.current_time())

    def depart(self, job: Job, receiver: Receiver) -> Flight:
        """Submit a request whose flight the caller runs. Not a checkpoint.

        Raises:
            RequestFailed: it is refused at once; nothing is left of it.
        """
        job = self._resolved(job)
        refusal = self._refusal
        if refusal is None:
            flight = self._flight(job, receiver, self.new_request_id(), None)
            flight.begin()
            if flight.outcome is None:
                return flight
            flight.retire()
            refusal = flight.fault
        raise RequestFailed(refusal or Fault(FaultKind.INTERNAL, "Refused."))

    def admit(self, job: Job, receiver: Receiver, client_ref: str) -> Flight | Fault:
        """Take another router's *job* if it can begin at once (P3).

        Not a checkpoint. It never waits here, and is done as it is: signals and
        conventions are that router's. Refused: nothing was begun, and *receiver*
        may have been told so.

        Returns: a flight that has its permit, and whose ``run`` must follow.
        """
        if self._refusal is not None:
            return self._refusal
        flight = Flight(
            self,
            self.new_request_id(),
            job,
            receiver,
            client_ref,
            trio.current_time(),
        )
        flight.begin(once=True)
        if flight.outcome is None:
            return flight
        flight.retire()
        return flight.fault or Fault(FaultKind.NO_SLOT, "Nothing could be begun.")

    @asynccontextmanager
    async def stream(self, job: Job) -> AsyncIterator[DeltaQueue]:
        """Stream *job*: ``async with router.stream(job) as deltas``.

        Iterate what it yields: deltas in order, no gaps; ``finished`` is set
        after the last. Leaving the block early is the disconnect.

        Raises:
            RequestFailed: from the iteration: the answer is not whole.
        """
        job = self._resolved(job)
        queue = DeltaQueue()
        failure: BaseException | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve_queue, job, queue)
            try:
                yield queue
            except CALLERS as raised:
                failure = raised
            finally:
                queue.close()
                nursery.cancel_scope.cancel()
        if failure is not None:
            # Outside of the nursery: callers see their own exception, not a
            # group of our internals (B126).
            raise failure

    async def _serve_queue(self, job: Job, queue: DeltaQueue) -> None:
        """Serve one stream; what stops that comes out of its iteration (L1)."""
        try:
            await self.serve(job, queue, request=self.new_request_id())
        except RequestFailed as failed:
            queue.fail(failed.fault)
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: it ends this request only
            self.report_bug("stream", bug)
            queue.fail(_BUG)

    async def complete(self, job: Job) -> Completion:
        """Answer *job* whole. A checkpoint. Cancelled: the client is gone.

        Raises:
            RequestFailed: no whole answer could be had.
        """
        job = self._resolved(job)
        receiver = CompletionReceiver()
        await self.serve(job, receiver, request=self.new_request_id())
        completion = receiver.completion()
        lacks = self.unsupported(job, receiver.worker)
        return attrs.evolve(completion, unsupported=lacks) if lacks else completion

    async def count_tokens(self, job: Job) -> int | None:
        """Count the prompt tokens of a chat *job*, images left out, as it would
        be sent: with the tools that its model is told (M8).

        A checkpoint that takes no slot, and no longer than ``COUNT_S`` for each
        of the workers that are asked; None: none of them said.

        Raises:
            RequestFailed: there is no such model.
        """
        job = self.as_sent(job)
        ready = [m for m in self.fleet.models.get(job.target, ()) if m.serving]
        for member in sorted(ready, key=lambda m: m.busy)[:COUNTERS_MAX]:
            worker = self.workers.get(member.id)
            if worker is None:
                # Removed while another was asked.
                continue
            with trio.move_on_after(COUNT_S):
                found = await worker.count_tokens(job)
                if found is not None:
                    return found
        await trio.lowlevel.checkpoint()
        return None

    def as_sent(self, job: Job) -> Job:
        """Give *job* as workers get it: with the tools that its model is told (M8).

        Not a checkpoint.

        Raises:
            RequestFailed: there is no such model, or it gives no such signal.
        """
        return self._sieving.sent(self._resolved(job))

    def unsupported(self, job: Job, worker: WorkerId | None) -> tuple[str, ...]:
        """Name the sampling parameters of *job* that *worker*'s engine lacks (J3).

        Not a checkpoint. None where nothing is known of the engine.
        """
        known: object = None if worker is None else self.workers.get(worker)
        return known.unsupported(job) if isinstance(known, KnowsParams) else ()

    # --- jobs that are handed in (J1) --------------------------------------

    def submit(self, job: Job) -> RequestId:
        """Hand *job* in: it is live from here, and ends with this router.

        Not a checkpoint. What became of it is kept until it is taken, released,
        or as old as ``result_ttl_ms`` says.

        Returns: its id. Ids of one router sort by submission.

        Raises:
            RequestFailed: it is refused, and nothing is kept of it: no such
                model, no worker, a full queue, or a router that stops.
        """
        return self.jobs.submit(job)

    def get_status(self, job: RequestId) -> JobStatus:
        """Show one submitted job. Not a checkpoint.

        Raises:
            JobUnknown: there is no such job.
        """
        return self.jobs.status(job)

    async def get_result(self, job: RequestId) -> JobResult:
        """Wait for the end of a submitted job, and take what became of it.

        A checkpoint. Cancelled: nothing was taken, and the job goes on.

        Raises:
            JobUnknown: there is no such job, or another took its result.
        """
        return await self.jobs.result(job)

    def get_result_nowait(self, job: RequestId) -> JobResult:
        """Take what became of a submitted job that has ended. Not a checkpoint.

        Raises:
            trio.WouldBlock: it has not ended.
            JobUnknown: there is no such job.
        """
        return self.jobs.result_nowait(job)

    def release(self, job: RequestId) -> bool:
        """Forget a submitted job and its result; cancel it if it is live.

        Not a checkpoint. False: there is no such job.
        """
        return self.jobs.release(job)

    def _resolved(self, job: Job) -> Job:
        """Give a program's *job* with its target; what can't be sent is refused."""
        check_job(job)
        if job.target:
            return job
        target = self.resolve(job.model)
        if target is None:
            raise RequestFailed(
                Fault(FaultKind.MODEL_NOT_FOUND, "No worker serves this model.")
            )
        return attrs.evolve(job, target=target)

    def new_request_id(self) -> RequestId:
        """Make an id that sorts by birth and no other router will make (F2)."""
        at = self._random_at
        if at == len(self._random):
            # One system call for many ids: it costs more than all the rest.
            self._random, at = os.urandom(RANDOM_BYTES * 256), 0
        self._random_at = end = at + RANDOM_BYTES
        # Microseconds, and never the same twice: those of one router sort.
        self._born = born = max(self._born + 1, time.time_ns() // 1_000)
        return RequestId(f"req_{born:014x}{self._random[at:end].hex()}")

    def cancel(self, request: str) -> bool:
        """End a live request, a submitted job too; False: there is none.

        Not a checkpoint. The result of a job is kept, with what there was.
        """
        flight = self.flights.get(RequestId(request))
        if flight is None:
            return False
        flight.cancel(Fault(FaultKind.CANCELLED, "The request was cancelled."))
        return True

    # --- models ------------------------------------------------------------

    def resolve(self, model: str) -> str | None:
        """Find the name that workers are asked for; None: no such model (O6).

        Raises:
            RequestFailed: a worker that was never seen may yet name it.
        """
        fleet = self.fleet
        target = self._catalog.target(model, fleet.models)
        if target is None or target not in fleet.models:
            if fleet.still_unknown(trio.current_time()):
                raise RequestFailed(
                    Fault(
                        FaultKind.MODEL_LOADING,
                        "A worker that may serve this model is still coming up.",
                        retry_after=1.0,
                    )
                )
            return None
        if not fleet.ready_for(target):
            fallback = self._catalog.fallback(target)
            if fallback is not None and fleet.ready_for(fallback):
                return fallback
        return target

    def model_cards(self) -> list[ModelCard]:
        """List the models of ready workers, and their aliases, by name (O2)."""
        names = {m for m in self.fleet.models if self.fleet.ready_for(m)}
        names |= {a for a, target in self._catalog.aliases().items() if target in names}
        return [ModelCard(name, self._created) for name in sorted(names)]

    # --- state -------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """A worker serves, and the router is not stopping (D4)."""
        return self._refusal is None and any(
            m.serving for m in self.fleet.members.values()
        )

    async def wait_ready(self) -> None:
        """Wait until ``ready``. A checkpoint; cancelled, nothing has changed."""
        await trio.lowlevel.checkpoint()
        while not self.ready:
            await self._news.wait()

    def changed(self) -> None:
        """See ``supervise.Shell``."""
        self._news.set()
        self._news = trio.Event()

    @property
    def active(self) -> int:
        """Requests under way, waiting ones included."""
        return len(self.flights)

    def status(self) -> dict[str, Any]:
        """Show everything at one moment, fit for JSON."""
        now = trio.current_time()
        return {
            "ready": self.ready,
            "stopping": self._refusal is not None,
            "workers": self.workers_status(),
            "queues": self.fleet.room.depths(),
            "requests": [flight_record(f, now) for f in self.flights.values()],
            "verdicts": dict(self.tally.verdicts),
            **({} if self.also is None else self.also()),
        }

    def workers_status(self) -> list[dict[str, Any]]:
        """Show each worker at this moment, fit for JSON."""
        now = trio.current_time()
        return [
            member_status(m, self._keepers.get(m.id), self._processes.get(m.id), now)
            for m in self.fleet.members.values()
        ]

    def receipt(self, request: str) -> Mapping[str, object] | None:
        """Show one request, live or among the last that ended (X3)."""
        flight = self.flights.get(RequestId(request))
        if flight is not None:
            record = flight_record(flight, trio.current_time())
            return with_signals(record, flight)
        return self._receipts.get(request)

    def record(self, flight: Flight) -> None:
        """Keep what is known of a request that has ended."""
        now = trio.current_time()
        model = flight.job.target
        if model not in self._labels:
            if len(self._labels) < MODEL_LABELS_MAX:
                self._labels.add(model)
            else:
                model = "other"
        self.tally.requests[model, flight.outcome or "failed"] += 1
        self.tally.duration.observe(now - flight.received_at)
        for signal in flight.signals:
            self.tally.signals[signal.code.value] += 1
        record = flight_record(flight, now)
        self._receipts.add(flight.request, with_signals(record, flight))
        if self.on_request_end is not None:
            try:
                self.on_request_end(record)
            except LocalError:
                raise
            except Exception as bug:  # noqa: BLE001 - who looks on fails no answer
                self.report_bug("on_request_end", bug)

    # --- steering ----------------------------------------------------------

    async def add_worker(self, worker: str | WorkerSettings | Worker) -> None:
        """Take one more worker in: a URL, its settings, or an adapter (L5).

        A checkpoint. Cancelled: it may have been taken in or not. It serves
        once a probe answers.

        Raises:
            LocalError: a worker has its name already.
        """
        await self.hire(worker)

    def remove_worker(self, worker: str, *, within_s: float = inf) -> bool:
        """Drain *worker*, and forget it when nothing runs there any more (L5).

        Not a checkpoint. False: no such. What still runs after *within_s*
        seconds is cut.
        """
        self._leaving.add(WorkerId(worker))
        if self.drain(worker, within_s=within_s):
            return True
        self._leaving.discard(WorkerId(worker))
        return False

    def drain(self, worker: str, *, within_s: float = inf) -> bool:
        """Give *worker* no new work; what runs may finish (L5). False: no such.

        What still runs after *within_s* seconds is cut.
        """
        keeper = self._keepers.get(WorkerId(worker))
        if keeper is None:
            return False
        keeper.cut_at(trio.current_time() + within_s)
        return self._steer(worker, Event.DRAIN)

    def undrain(self, worker: str) -> bool:
        """Take a drained worker back, once a probe answers. False: not drained."""
        member = self.fleet.members.get(WorkerId(worker))
        if member is None or member.life.state is not State.DRAINING:
            return False
        process = self._processes.get(member.id)
        if process is not None:
            process.retry()
        self._leaving.discard(member.id)
        self._keepers[member.id].cut_at(inf)
        return self._steer(worker, Event.UNDRAIN)

    def _dismiss(self, worker: WorkerId) -> None:
        """Forget a worker that was to leave and has nothing to do any more."""
        self._leaving.discard(worker)
        self.apply(self.fleet.learned(worker, Event.REMOVE, trio.current_time()))
        self._keepers.pop(worker).dismiss()
        del self.workers[worker]
        self._processes.pop(worker, None)

    def cut(self, worker: str) -> bool:
        """End what still runs on *worker*: its drain has lasted long enough."""
        member = self.fleet.members.get(WorkerId(worker))
        if member is None:
            return False
        fault = Fault(FaultKind.DRAINED, "The worker was drained.")
        self.apply(self.fleet.cut(member.id, fault, trio.current_time()))
        return True

    def _steer(self, worker: str, event: Event) -> bool:
        member = self.fleet.members.get(WorkerId(worker))
        if member is None or member.life.state is State.GONE:
            return False
        self.apply(self.fleet.learned(member.id, event, trio.current_time()))
        keeper = self._keepers.get(member.id)
        if keeper is not None:
            keeper.check()
        return True

    def refuse_new(self, fault: Fault) -> None:
        """Refuse all that waits, and all that comes from now on (D3)."""
        self._refusal = fault
        self.apply(self.fleet.refuse_waiting(fault, trio.current_time()))

    def cut_all(self, fault: Fault) -> None:
        """End every live request with *fault*: the drain is over (D3)."""
        for flight in list(self.flights.values()):
            flight.cancel(fault)

    def hurry(self) -> None:
        """Give no process of ours more time to end by itself, now and later."""
        for process in self._processes.values():
            process.hurry()

    # --- workers -----------------------------------------------------------

    def add(
        self,
        worker: Worker,
        *,
        slots: int | None,
        models: tuple[str, ...],
        pin_slots: bool = False,
        process: Process | None = None,
    ) -> Keeper:
        """Take *worker* into the fleet; its keeper must then be run.

        Args:
            worker: the adapter.
            slots: as configured; None: what the engine says.
            models: as configured; empty: what the engine says.
            pin_slots: each request is pinned to one slot of the engine (W2).
            process: what runs the worker, where that is us.
        """
        self.fleet.add_worker(
            worker.id,
            trio.current_time(),
            slots=slots,
            models=models,
            settle_s=worker.settle_s,
            pin_slots=pin_slots,
        )
        self.workers[worker.id] = worker
        if process is not None:
            self._processes[worker.id] = process
        keeper = Keeper(worker, self, self.settings.waits, self.rng)
        self._keepers[worker.id] = keeper
        return keeper

    def silent(self, worker: WorkerId) -> list[Flight]:
        """See ``supervise.Shell``."""
        return [
            flight
            for _, flight, source in self._sources(worker)
            if source.phase is SourcePhase.AWAITING_HEAD
        ]

    def at_work(self, worker: WorkerId) -> set[AssignmentId]:
        """See ``supervise.Shell``."""
        return {
            assignment
            for assignment, _, source in self._sources(worker)
            if source.phase in _AT_WORK and not source.paused
        }

    def heard_at(self, worker: WorkerId) -> float:
        """See ``supervise.Shell``."""
        return max(
            (
                source.last_byte_at
                for _, _, source in self._sources(worker)
                if source.phase is SourcePhase.STREAMING
            ),
            default=-inf,
        )

    def _sources(
        self, worker: WorkerId
    ) -> Iterator[tuple[AssignmentId, Flight, Source]]:
        """Go through what has begun on *worker* and has not ended."""
        member = self.fleet.members.get(worker)
        for assignment in () if member is None else member.held:
            flight = self.flights.get(assignment.request)
            if flight is not None and flight.source is not None:
                yield assignment, flight, flight.source

    def apply(self, commands: Sequence[Command]) -> None:
        """Carry out what the fleet asks for, in order."""
        for command in commands:
            match command:
                case Grant(assignment=assignment, worker=worker):
                    self.tally.attempts[worker] += 1
                    self.flights[assignment.request].granted(command)
                case Refuse(request=request, fault=fault):
                    self.flights[request].refused(fault)
                case Lose(assignment=assignment, fault=fault):
                    self.flights[assignment.request].lost(assignment, fault)
                case Settle(worker=worker):
                    self._keepers[worker].settle()
                case Check(worker=worker):
                    self._keepers[worker].check()
                case Rest(worker=worker, until=until):
                    self._keepers[worker].rest(until)
                case Empty(worker=worker):
                    if worker in self._leaving:
                        self._dismiss(worker)

    def report_bug(self, where: str, bug: Exception) -> None:
        """Log and count an exception that is kept to one request (L1)."""
        self.tally.bugs[where] += 1
        log.error("a bug, kept to one request (%s)", where, exc_info=bug)
