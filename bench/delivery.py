"""What one delta costs between its source and its receiver, in nanoseconds.

``python -m bench.delivery`` runs the engine's part of the chain alone: judge,
hand over, count. No socket, no JSON. A job that asks for no limit, no tools by
convention and no signals has no sieve, and must cost what it would cost if there
were none; what those who ask pay is in the other rows.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import attrs
import trio
import trio.testing

from router.engine import Router, open_router
from router.engine.sieving import Sieving
from router.errors import Fault
from router.ids import AssignmentId, WorkerId
from router.messages import Delta, Finished, GenerationParams, Job, Kind
from router.ports import Taken
from router.settings import ModelSettings, Settings
from workers.scripted import Head, ScriptedWorker, hangs

DELTAS: Final = 20_000
ROUNDS: Final = 15
PLAIN: Final = Job("m", ({"role": "user", "content": "hi"},), target="m")
#: With opt-ins for another model than that of plain jobs.
TOLD: Final = Settings(
    models={
        "told": ModelSettings(
            bios='{tools}: {"tool_calls": [{"name": "f", "arguments": {}}]}'
        )
    }
)


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


async def measure(
    job: Job, text: Callable[[int], str], batch: int, kind: Kind = Kind.TEXT
) -> float:
    """Give the median of nanoseconds a delta, *batch* of them in each call."""
    worker = ScriptedWorker("w", hangs(Head()), models=("m", "told"))
    async with open_router(TOLD, workers=[worker]) as router:
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(router.serve, job, Nobody(), request=router.new_request_id())
            )
            await trio.testing.wait_all_tasks_blocked()
            found = _rounds(router, text, batch, kind)
            nursery.cancel_scope.cancel()
    return statistics.median(found)


def _rounds(
    router: Router, text: Callable[[int], str], batch: int, kind: Kind
) -> list[float]:
    (flight,) = router.flights.values()
    assignment = AssignmentId(flight.request, 1)
    index = 0
    found = []
    for _ in range(ROUNDS):
        calls = []
        for _ in range(DELTAS // batch):
            calls.append(
                [
                    Delta(assignment, index + n, kind, text(index + n))
                    for n in range(batch)
                ]
            )
            index += batch
        start = time.perf_counter_ns()
        for deltas in calls:
            flight.deltas(assignment, deltas)
        found.append((time.perf_counter_ns() - start) / DELTAS)
    return found


def request_ns(job: Job) -> float:
    """Give the nanoseconds that one request pays for being asked what it wants."""
    sieving = Sieving(TOLD)
    receiver = Nobody()
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(DELTAS):
            sieving.prepare(job, receiver)
        found.append((time.perf_counter_ns() - start) / DELTAS)
    return statistics.median(found)


def main() -> None:
    """Print the figures."""
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    told = attrs.evolve(PLAIN, target="m", extras=tools)
    thinks = attrs.evolve(PLAIN, params=GenerationParams(thinking_max_tokens=10**9))
    rows = [
        ("plain", PLAIN, Kind.TEXT),
        ("text behind a bios", attrs.evolve(told, target="told"), Kind.TEXT),
        ("limit of reasoning", thinks, Kind.REASONING),
        ("loop detection", attrs.evolve(PLAIN, loop_repeats_max=20), Kind.TEXT),
    ]
    for name, job, kind in rows:
        for batch in (1, 8):
            taken = trio.run(measure, job, _word, batch, kind)
            print(f"{name:20} {batch} a read: {taken:6.0f} ns a delta")
    print(f"{'plain':20} once:     {request_ns(PLAIN):6.0f} ns a request")


def _word(n: int) -> str:
    return f"word{n * 7919 % 10_007} "


if __name__ == "__main__":
    main()
