"""A recording double of ``ports.Delivery``, and a worker served beside it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from router.errors import Fault
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, Job
from router.ports import Source, SourcePhase, Worker

JOB = Job(model="m", target="m", messages=({"role": "user", "content": "Hi"},))


def assignment(number: int = 1, attempt: int = 1) -> AssignmentId:
    return AssignmentId(RequestId(f"r{number}"), attempt)


class RecordingDelivery:
    """Writes down every call in order; a hook may do more inside of one."""

    def __init__(self, hook: Callable[[str], None] | None = None) -> None:
        """*hook* gets the name of each call, after it was written down."""
        self.calls: list[tuple[str, Any]] = []
        #: The assignment that each call named.
        self.stamps: list[AssignmentId] = []
        self.taken: list[Delta] = []
        self.end: Finished | Fault | None = None
        self.hook = hook
        self._changed = trio.Event()

    def accepted(self, assignment: AssignmentId) -> None:
        self._note("accepted", assignment, None)

    def deltas(self, assignment: AssignmentId, deltas: Sequence[Delta]) -> None:
        self.taken += deltas
        self._note("deltas", assignment, [delta.text for delta in deltas])

    def finished(self, finished: Finished) -> None:
        self.end = finished
        self._note("finished", finished.assignment, finished)

    def failed(self, assignment: AssignmentId, fault: Fault) -> None:
        self.end = fault
        self._note("failed", assignment, fault)

    def progress(self, assignment: AssignmentId) -> None:
        self._note("progress", assignment, None)

    @property
    def names(self) -> list[str]:
        """Names of the calls so far, progress left out."""
        return [name for name, _ in self.calls if name != "progress"]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.taken)

    async def until(self, name: str, times: int = 1) -> Any:
        """Wait for the call *name*; give its argument. A checkpoint."""
        while True:
            found = [argument for called, argument in self.calls if called == name]
            if len(found) >= times:
                await trio.lowlevel.checkpoint()
                return found[times - 1]
            await self._changed.wait()

    async def ended(self) -> Finished | Fault:
        """Wait for the end. A checkpoint."""
        while self.end is None:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()
        return self.end

    async def finish(self) -> Finished:
        end = await self.ended()
        assert isinstance(end, Finished), end
        return end

    async def fault(self) -> Fault:
        end = await self.ended()
        assert isinstance(end, Fault), end
        return end

    async def reach(self, source: Source, phase: SourcePhase) -> None:
        """Wait until *source* is in *phase*. A checkpoint."""
        while source.phase is not phase:
            await self._changed.wait()
        await trio.lowlevel.checkpoint()

    def _note(self, name: str, stamp: AssignmentId, argument: Any) -> None:
        self.calls.append((name, argument))
        self.stamps.append(stamp)
        self._changed.set()
        self._changed = trio.Event()
        if self.hook is not None:
            self.hook(name)


@asynccontextmanager
async def served(worker: Worker) -> AsyncIterator[None]:
    """Run *worker* for the length of the block."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        # Its poll is there after its first step.
        await trio.testing.wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()
