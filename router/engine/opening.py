"""Bring a router to life, and to its end."""

import logging
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio

from router.engine.arguments import check_worker
from router.engine.router import CALLERS, Router
from router.errors import Fault, FaultKind
from router.ports import Worker
from router.settings import Settings, WorkerSettings
from router.supervise import Keeper
from workers.access import site_of, with_token
from workers.direct import DirectWorker
from workers.leftovers import sweep
from workers.remote import RemoteWorker
from workers.supervised import SupervisedWorker

log: Final = logging.getLogger("fencepost.workers")

#: Seconds between two measurements of how late the loop runs (X1).
LAG_EVERY_S = 1.0
#: Seconds in which a new worker's keeper begins; it takes a turn of the loop.
HIRE_S: Final = 1.0


@asynccontextmanager
async def open_router(
    settings: Settings | None = None,
    *,
    workers: Sequence[str | WorkerSettings | Worker] = (),
    rng: random.Random | None = None,
) -> AsyncIterator[Router]:
    """Open a router for the length of an ``async with`` block.

    Leaving the block ends every request and leaves no task, no socket and no
    process behind. Workers that do not answer yet are taken in when they do;
    those with a command are run, and started again when they end.

    Args:
        settings: a whole configuration; its workers come first. With a
            ``state_dir``, which must be there, the logs of workers that are run
            go to it, and what a dead router has left of them is ended first.
        workers: more workers: a URL, its settings, or an adapter of your own.
        rng: for jitter and ties; pass a seeded one to repeat a run.

    Raises:
        ValueError: a setting is of no use, or a worker is none.
    """
    if isinstance(workers, str):
        raise ValueError("workers is a list: write [url]")  # noqa: TRY004 - as others
    settings = settings or Settings()
    router = Router(settings, rng or random.Random())  # noqa: S311 - jitter only
    everybody = (*settings.workers, *workers)
    folder = await trio.to_thread.run_sync(_workers_folder, settings)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        send, receive = trio.open_memory_channel[Keeper](0)
        nursery.start_soon(_keep, receive)

        async def hire(worker: str | WorkerSettings | Worker) -> None:
            await trio.lowlevel.checkpoint()
            keeper = _hire(router, worker, folder)
            # One that is in the fleet and not kept would be starting for ever.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + HIRE_S):
                await send.send(keeper)

        router.hire = hire
        try:
            for worker in everybody:
                await hire(worker)
            nursery.start_soon(_measure_lag, router)
            await nursery.start(router.jobs.run)
            yield router
        except CALLERS as raised:
            failure = raised
        finally:
            # Requests of other tasks hear of it before their workers go.
            leaving = Fault(FaultKind.SHUTTING_DOWN, "The router is closing.")
            router.refuse_new(leaving)
            router.cut_all(leaving)
            nursery.cancel_scope.cancel()
    if failure is not None:
        # Outside of the nursery: callers see their own exception, not a group
        # of our internals (B126).
        raise failure


async def _keep(hired: trio.MemoryReceiveChannel[Keeper]) -> None:
    """Run each keeper that comes, in a task of its own. A checkpoint."""
    async with trio.open_nursery() as nursery:
        async for keeper in hired:
            nursery.start_soon(keeper.run, name=f"worker {keeper.worker.id}")


def _workers_folder(settings: Settings) -> Path | None:
    """Say where workers that are run have their files; end what is left over there.

    Blocking: for a thread.
    """
    if settings.server.state_dir is None:
        return None
    folder = Path(settings.server.state_dir, "workers")
    for left in sweep(folder):
        log.warning("ended what a router that is gone had left: %s", left)
    return folder


def _hire(
    router: Router, worker: str | WorkerSettings | Worker, folder: Path | None
) -> Keeper:
    check_worker(worker)
    if isinstance(worker, str):
        worker = WorkerSettings(name=_name(worker), url=worker)
    if isinstance(worker, WorkerSettings) and worker.command is not None:
        return _run(router, worker, folder)
    if isinstance(worker, WorkerSettings) and worker.agent is not None:
        return _meet(router, worker)
    if isinstance(worker, WorkerSettings):
        adapter: Worker = DirectWorker(
            worker,
            router.settings.waits,
            environ=os.environ,
            report_bug=router.report_bug,
            cork=router.cork,
        )
        return router.add(
            adapter,
            slots=worker.slots,
            models=worker.models,
            pin_slots=worker.pin_slots,
        )
    keeper = router.add(worker, slots=None, models=())
    if isinstance(worker, RemoteWorker):
        worker.told = keeper.told
    return keeper


def _run(router: Router, worker: WorkerSettings, folder: Path | None) -> Keeper:
    if folder is not None:
        folder.mkdir(mode=0o700, exist_ok=True)
    adapter = SupervisedWorker(
        worker,
        router.settings.waits,
        environ=os.environ,
        report_bug=router.report_bug,
        cork=router.cork,
        folder=folder,
    )
    keeper = router.add(
        adapter,
        slots=worker.slots,
        models=worker.models,
        pin_slots=worker.pin_slots,
        process=adapter.process,
    )
    restarts = router.tally.restarts
    adapter.told = keeper.told
    adapter.process.on_restart = lambda: restarts.update([worker.name])
    return keeper


def _meet(router: Router, worker: WorkerSettings) -> Keeper:
    """Take in the agent of another host."""
    access = with_token(router.access, worker.api_key_env, os.environ)
    site = site_of(worker.agent or "", secure=access.outward is not None)
    adapter = RemoteWorker(
        worker.name,
        site,
        access,
        tally=router.tally,
        report_bug=router.report_bug,
        rng=router.rng,
        waiting=router.fleet.room.depth,
        cork=router.cork,
    )
    keeper = router.add(adapter, slots=worker.slots, models=worker.models)
    adapter.told = keeper.told
    return keeper


def _name(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or url


async def _measure_lag(router: Router) -> None:
    """Observe how much later than asked the loop wakes this task."""
    while True:
        due = trio.current_time() + LAG_EVERY_S
        await trio.sleep_until(due)
        router.tally.loop_lag.observe(trio.current_time() - due)
