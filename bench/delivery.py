"""What one delta costs between its source and its receiver, in nanoseconds.

``python -m bench.delivery`` runs the engine's part of the chain alone: judge,
hand over, count. No socket, no JSON. Jobs that ask for nothing must cost what
they did before there was anything to ask for.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import trio
import trio.testing

from router.engine import Router, open_router
from router.errors import Fault
from router.ids import AssignmentId, WorkerId
from router.messages import Delta, Finished, Job, Kind
from router.ports import Taken
from workers.scripted import Head, ScriptedWorker, hangs

DELTAS: Final = 20_000
ROUNDS: Final = 15
PLAIN: Final = Job("m", ({"role": "user", "content": "hi"},), target="m")


class Nobody:
    """A receiver that takes all and keeps nothing."""

    buffered = False

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """Keep neither."""

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """Take them."""
        del deltas
        return Taken.MORE

    def finish(self, finished: Finished) -> Taken:
        """Take it."""
        del finished
        return Taken.MORE

    def routed(self, worker: WorkerId, attempts: int) -> None:
        """Keep neither."""

    def fail(self, fault: Fault) -> None:
        """Take it."""

    def restart(self) -> None:
        """Keep nothing, as ever."""

    def due(self, now: float) -> float:
        """Never."""
        del now
        return float("inf")

    def tick(self, now: float) -> Taken:
        """Never."""
        del now
        return Taken.MORE


async def measure(job: Job, text: Callable[[int], str], batch: int) -> float:
    """Give the median of nanoseconds a delta, *batch* of them in each call."""
    async with open_router(workers=[ScriptedWorker("w", hangs(Head()))]) as router:
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(router.serve, job, Nobody(), request=router.new_request_id())
            )
            await trio.testing.wait_all_tasks_blocked()
            found = _rounds(router, text, batch)
            nursery.cancel_scope.cancel()
    return statistics.median(found)


def _rounds(router: Router, text: Callable[[int], str], batch: int) -> list[float]:
    (flight,) = router.flights.values()
    assignment = AssignmentId(flight.request, 1)
    index = 0
    found = []
    for _ in range(ROUNDS):
        calls = []
        for _ in range(DELTAS // batch):
            calls.append(
                [
                    Delta(assignment, index + n, Kind.TEXT, text(index + n))
                    for n in range(batch)
                ]
            )
            index += batch
        start = time.perf_counter_ns()
        for deltas in calls:
            flight.deltas(assignment, deltas)
        found.append((time.perf_counter_ns() - start) / DELTAS)
    return found


def main() -> None:
    """Print the figures."""
    for batch in (1, 8):
        taken = trio.run(measure, PLAIN, lambda _: "word ", batch)
        print(f"plain job, {batch} a read: {taken:6.0f} ns a delta")


if __name__ == "__main__":
    main()
