"""A stream for threads: a blocking iterator, and its side in the router's run (J2)."""

import threading
import weakref
from collections import deque
from types import TracebackType
from typing import Final, Self

import trio

from router.engine.background import BackgroundRun, RouterClosed
from router.engine.queue import DeltaQueue
from router.errors import Fault, FaultKind, RequestFailed
from router.messages import Delta, Finished, Job

_CLOSED: Final = Fault(FaultKind.CANCELLED, "The stream was closed.")


class SyncStream:
    """A blocking iterator over the deltas of one request, and its ``with`` block.

    One thread at a time iterates. Leaving the block, ``close``, or dropping it
    early is the disconnect; ``finished`` is set after the last delta.
    """

    def __init__(self, run: BackgroundRun, job: Job) -> None:
        """Not for users: see ``SyncRouter.stream``."""
        self.finished: Finished | None = None
        self._failure: RequestFailed | None = None
        self._host = host = _StreamHost(run, job)
        self._reading = threading.Lock()
        self._run = run
        self._closer = weakref.finalize(self, run.soon, host.leave)
        run.wait(host.open, lambda _: host.leave())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        """Iterate over the deltas."""
        return self

    def __next__(self) -> Delta:
        """Wait for the next delta. Blocks if none has come.

        Interrupted: no delta is lost; iterate on, or close.

        Raises:
            StopIteration: the answer was whole; see ``finished``.
            RequestFailed: it was not (F7), or this was closed before its end.
            RuntimeError: another thread is iterating.
        """
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("another thread is iterating over this stream")
        try:
            return self._next()
        finally:
            self._reading.release()

    def _next(self) -> Delta:
        come = self._host.come
        if not come and self._failure is None and self.finished is None:
            try:
                self._run.wait(self._host.fetch)
            except RequestFailed as failed:
                self._failure = failed
        if come:
            return come.popleft()
        # There is no more: the request's task need not wait for our leaving.
        self._closer()
        if self._failure is not None:
            raise self._failure
        self.finished = self._host.finished
        raise StopIteration

    def close(self) -> None:
        """Leave: the client is gone, and its work ends (A7). Blocks until it has.

        Idempotent, from any thread.
        """
        if self._closer.detach() is not None:
            try:
                self._run.wait(self._host.close)
            except RouterClosed:
                return  # and so is this


class _StreamHost:
    """A stream's side in the run's thread; ``come`` alone is shared."""

    def __init__(self, run: BackgroundRun, job: Job) -> None:
        self._run = run
        self._job = job
        self._leaving = trio.Event()
        self._left = trio.Event()
        self._queue: DeltaQueue | None = None
        self.finished: Finished | None = None
        #: Deltas for the iterating thread; the run's thread appends.
        self.come: deque[Delta] = deque()

    async def open(self) -> None:
        """Begin the request. A checkpoint. Cancelled: it has not begun."""
        await self._run.nursery.start(self._hold)

    async def _hold(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Be the client of the request, until it leaves."""
        try:
            async with self._run.router.stream(self._job) as queue:
                self._queue = queue
                task_status.started()
                await self._leaving.wait()
        finally:
            self._left.set()

    def leave(self) -> None:
        """Let the client go. Not a checkpoint."""
        self._leaving.set()

    async def close(self) -> None:
        """Let the client go, and wait until it has gone. A checkpoint."""
        self.leave()
        await self._left.wait()

    async def fetch(self) -> None:
        """Wait for a delta, and take all that have come. A checkpoint.

        Nothing is taken at the end of the answer. Cancelled: nothing is lost.

        Raises:
            RequestFailed: the answer is not whole.
        """
        queue = self._queue
        if queue is None or self._leaving.is_set():
            raise RequestFailed(_CLOSED)
        async for delta in queue:
            self.come.append(delta)
            self.come.extend(queue.take_nowait())
            return
        self.finished = queue.finished
