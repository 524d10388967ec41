"""Bring a router to life, and to its end."""

import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import trio

from router.engine.router import Router
from router.errors import Fault, FaultKind
from router.ports import Worker
from router.settings import Settings, WorkerSettings
from router.supervise import Keeper
from workers.direct import DirectWorker

#: Seconds between two measurements of how late the loop runs (X1).
LAG_EVERY_S = 1.0


@asynccontextmanager
async def open_router(
    settings: Settings | None = None,
    *,
    workers: Sequence[str | WorkerSettings | Worker] = (),
    rng: random.Random | None = None,
) -> AsyncIterator[Router]:
    """Open a router for the length of an ``async with`` block.

    Leaving the block ends every request and leaves no task and no socket
    behind. Workers that do not answer yet are taken in when they do.

    Args:
        settings: a whole configuration; its workers come first.
        workers: more workers: a URL, its settings, or an adapter of your own.
        rng: for jitter and ties; pass a seeded one to repeat a run.
    """
    settings = settings or Settings()
    router = Router(settings, rng or random.Random())  # noqa: S311 - jitter only
    async with trio.open_nursery() as nursery:
        for worker in (*settings.workers, *workers):
            keeper = _hire(router, worker)
            nursery.start_soon(keeper.run, name=f"worker {keeper.worker.id}")
        nursery.start_soon(_measure_lag, router)
        try:
            yield router
        finally:
            # Requests of other tasks hear of it before their workers go.
            leaving = Fault(FaultKind.SHUTTING_DOWN, "The router is closing.")
            router.refuse_new(leaving)
            router.cut_all(leaving)
            nursery.cancel_scope.cancel()


def _hire(router: Router, worker: str | WorkerSettings | Worker) -> Keeper:
    if isinstance(worker, str):
        worker = WorkerSettings(name=_name(worker), url=worker)
    if isinstance(worker, WorkerSettings):
        adapter: Worker = DirectWorker(
            worker,
            router.settings.waits,
            environ=os.environ,
            report_bug=router.report_bug,
        )
        return router.add(adapter, slots=worker.slots, models=worker.models)
    return router.add(worker, slots=None, models=())


def _name(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or url


async def _measure_lag(router: Router) -> None:
    """Observe how much later than asked the loop wakes this task."""
    while True:
        due = trio.current_time() + LAG_EVERY_S
        await trio.sleep_until(due)
        router.tally.loop_lag.observe(trio.current_time() - due)
