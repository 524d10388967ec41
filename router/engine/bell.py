"""One task's wake-up call.

Cheaper than an event a turn: a request's task waits on its bell for all that
is rare (granted, over, room again), with the one deadline it looks at next.
"""

import math

import trio

from router.waiting import LATE_S


class Bell:
    """Wakes the one task that waits on it; a ring while nobody waits is kept."""

    __slots__ = ("_rung", "_task")

    def __init__(self) -> None:
        """Start silent."""
        self._rung = False
        self._task: trio.lowlevel.Task | None = None

    def ring(self) -> None:
        """Wake the waiter, or the next one at once. Not a checkpoint."""
        self._rung = True
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task)

    async def wait_until(self, deadline: float) -> None:
        """Wait for a ring, or for *deadline* (seconds on Trio's clock).

        A loop that comes `LATE_S` too late to it was held up, and waits as long
        again: what others did in time is still unread in the kernel (W6).

        A checkpoint. Cancelled: a ring that came is kept for the next wait.
        """
        if self._rung:
            self._rung = False
            await trio.lowlevel.checkpoint()
            return
        if deadline == math.inf:
            await self._wait()
            return
        if await self._past(deadline):
            now = trio.current_time()
            if now > deadline + LATE_S and not self._rung:
                await self._past(now + LATE_S)

    async def _past(self, deadline: float) -> bool:
        """Wait; False: the bell rang first."""
        with trio.CancelScope(deadline=deadline) as scope:
            await self._wait()
        return scope.cancelled_caught

    async def _wait(self) -> None:
        self._task = trio.lowlevel.current_task()

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._rung = False
