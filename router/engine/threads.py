"""The router for threads and plain scripts: the same methods, blocking (J2).

One background thread holds one Trio run for the whole life of a ``SyncRouter``;
any number of threads call it at once. Nothing here waits on a lock while another
thread's call is under way.
"""

import random
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Any, Final, Self

import trio

from router.engine.background import BackgroundRun, RouterClosed
from router.engine.queue import Completion
from router.engine.results import JobResult, JobStatus
from router.engine.router import ModelCard
from router.engine.thread_stream import SyncStream
from router.ids import RequestId, WorkerId
from router.messages import Job
from router.ports import Worker
from router.settings import Settings, WorkerSettings

__all__ = ["RouterClosed", "SyncRouter", "SyncStream"]

#: Seconds that the end of the interpreter waits for the router's.
_EXIT_S: Final = 10.0


class SyncRouter:
    """A router in a thread of its own. Every method may be called from any thread.

    A call that blocks ends early on KeyboardInterrupt or any other exception that
    is raised into it, and leaves nothing running then. After ``close``, and from
    calls that it found under way, ``RouterClosed`` is raised. Not for use inside of
    an event loop, which would stand still: there, use ``open_router``.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        workers: Sequence[str | WorkerSettings | Worker] = (),
        rng: random.Random | None = None,
    ) -> None:
        """Open a router. Blocks until it is; its workers may come up later.

        The arguments are those of ``open_router``.

        Raises:
            ValueError: a setting is of no use.
        """
        self._run = run = BackgroundRun(settings, workers, rng)
        # Also where nobody closes it, and at the end of the interpreter.
        self._finalizer = weakref.finalize(self, run.stop, _EXIT_S)
        try:
            run.start()
        except BaseException:
            self._finalizer()
            raise

    def close(self) -> None:
        """End all that runs, and the thread. Blocks until it has ended.

        Idempotent, from any thread. Calls under way raise ``RouterClosed``.
        """
        self._finalizer.detach()
        self._run.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- jobs --------------------------------------------------------------

    def submit(self, job: Job) -> RequestId:
        """Hand *job* in; see ``Router.submit``. Blocks for a moment.

        Interrupted: the job is released again.

        Raises:
            RequestFailed: it is refused, and nothing is kept of it.
        """
        router = self._run.router
        return self._run.now(lambda: router.submit(job), router.release)

    def get_status(self, job: RequestId) -> JobStatus:
        """Show one submitted job. Blocks for a moment.

        Raises:
            JobUnknown: there is no such job.
        """
        router = self._run.router
        return self._run.now(lambda: router.get_status(job), None)

    def get_result(self, job: RequestId, *, within_s: float | None = None) -> JobResult:
        """Wait for the end of a job, and take what became of it. Blocks.

        Interrupted, or out of time: nothing was taken, and the job goes on.
        One that has ended is taken whatever *within_s* is, 0 too.

        Raises:
            JobUnknown: there is no such job, or another took its result.
            TimeoutError: it has not ended *within_s*.
        """
        if within_s is not None:
            with suppress(trio.WouldBlock):
                return self.get_result_nowait(job)
        router = self._run.router
        return self._run.wait(
            lambda: router.get_result(job), router.jobs.put_back, within_s
        )

    def get_result_nowait(self, job: RequestId) -> JobResult:
        """Take what became of a job that has ended. Blocks for a moment.

        Interrupted: nothing was taken.

        Raises:
            trio.WouldBlock: it has not ended.
            JobUnknown: there is no such job.
        """
        router = self._run.router
        return self._run.now(
            lambda: router.get_result_nowait(job), router.jobs.put_back
        )

    def release(self, job: RequestId) -> bool:
        """Forget a job and its result; cancel it if it is live. Blocks for a moment.

        False: there is no such job.
        """
        router = self._run.router
        return self._run.now(lambda: router.release(job), None)

    def cancel(self, request: str) -> bool:
        """End a live request or job; see ``Router.cancel``. Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.cancel(request), None)

    # --- answers -----------------------------------------------------------

    def complete(self, job: Job, *, within_s: float | None = None) -> Completion:
        """Answer *job* whole. Blocks.

        Interrupted, or out of time: the client is gone, and its work ends (A7).

        Raises:
            RequestFailed: no whole answer could be had.
            TimeoutError: there is none *within_s*.
        """
        router = self._run.router
        return self._run.wait(lambda: router.complete(job), None, within_s)

    def stream(self, job: Job) -> SyncStream:
        """Stream *job*: ``with router.stream(job) as deltas: for delta in deltas``.

        Blocks for a moment. Interrupted: nothing runs.

        Raises:
            RequestFailed: there is no such model.
        """
        return SyncStream(self._run, job)

    def count_tokens(self, job: Job) -> int | None:
        """Count the prompt tokens of *job*; see ``Router.count_tokens``. Blocks.

        Interrupted: nothing is left behind.

        Raises:
            RequestFailed: there is no such model.
        """
        router = self._run.router
        return self._run.wait(lambda: router.count_tokens(job))

    def as_sent(self, job: Job) -> Job:
        """Give *job* as workers get it; see ``Router.as_sent``. Blocks for a moment.

        Raises:
            RequestFailed: there is no such model, or it gives no such signal.
        """
        router = self._run.router
        return self._run.now(lambda: router.as_sent(job), None)

    def unsupported(self, job: Job, worker: WorkerId | None) -> tuple[str, ...]:
        """Name the sampling parameters of *job* that *worker*'s engine lacks (J3).

        Blocks for a moment.
        """
        router = self._run.router
        return self._run.now(lambda: router.unsupported(job, worker), None)

    # --- state and steering ------------------------------------------------

    def wait_ready(self, *, within_s: float | None = None) -> None:
        """Wait until a worker is ready. Blocks. Interrupted: nothing has changed.

        Where one is it returns whatever *within_s* is, 0 too.

        Raises:
            TimeoutError: none is *within_s*.
        """
        if within_s is not None and self.ready:
            return
        self._run.wait(self._run.router.wait_ready, None, within_s)

    @property
    def ready(self) -> bool:
        """A worker serves. Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.ready, None)

    @property
    def active(self) -> int:
        """Requests and jobs under way. Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.active, None)

    def resolve(self, model: str) -> str | None:
        """Find the name that workers are asked for; None: no such model (O6).

        Blocks for a moment.

        Raises:
            RequestFailed: a worker that was never seen may yet name it.
        """
        router = self._run.router
        return self._run.now(lambda: router.resolve(model), None)

    def model_cards(self) -> list[ModelCard]:
        """List the models of ready workers. Blocks for a moment."""
        return self._run.now(self._run.router.model_cards, None)

    def status(self) -> dict[str, Any]:
        """Show everything at one moment, fit for JSON. Blocks for a moment."""
        return self._run.now(self._run.router.status, None)

    def receipt(self, request: str) -> Mapping[str, object] | None:
        """Show one request, live or among the last (X3). Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.receipt(request), None)

    def add_worker(self, worker: str | WorkerSettings | Worker) -> None:
        """Take one more worker in; see ``Router.add_worker``. Blocks for a moment.

        Interrupted: it may have been taken in or not.

        Raises:
            LocalError: a worker has its name already.
        """
        router = self._run.router
        self._run.wait(lambda: router.add_worker(worker))

    def remove_worker(self, worker: str, *, within_s: float = inf) -> bool:
        """Drain *worker* and forget it; see ``Router.remove_worker``.

        Blocks for a moment.
        """
        router = self._run.router
        return self._run.now(
            lambda: router.remove_worker(worker, within_s=within_s), None
        )

    def drain(self, worker: str, *, within_s: float = inf) -> bool:
        """Give *worker* no new work; see ``Router.drain``. Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.drain(worker, within_s=within_s), None)

    def undrain(self, worker: str) -> bool:
        """Take a drained worker back. Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.undrain(worker), None)

    def cut(self, worker: str) -> bool:
        """End what still runs on *worker*; see ``Router.cut``. Blocks for a moment."""
        router = self._run.router
        return self._run.now(lambda: router.cut(worker), None)
