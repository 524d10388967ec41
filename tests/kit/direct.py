"""A direct worker on a fake engine, over real sockets."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs

from router.settings import WaitSettings, WorkerSettings
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.engine import FakeEngine, Script, open_engine
from workers.direct import DirectWorker
from workers.source import DirectSource


class Bench:
    """One engine, one worker on it, and what they said."""

    def __init__(
        self,
        engine: FakeEngine,
        worker: DirectWorker,
        bugs: list[tuple[str, Exception]],
    ) -> None:
        self.engine = engine
        self.worker = worker
        self.bugs = bugs

    def send(
        self, number: int = 1, hook: Callable[[str], None] | None = None, **job: Any
    ) -> tuple[DirectSource, RecordingDelivery]:
        delivery = RecordingDelivery(hook)
        source = self.worker.open(
            assignment(number), attrs.evolve(JOB, **job), delivery
        )
        return source, delivery


@asynccontextmanager
async def bench(
    script: Script | None = None, *, settings: Any = None, **engine: Any
) -> AsyncIterator[Bench]:
    async with open_engine(script, **engine) as fake:
        bugs: list[tuple[str, Exception]] = []
        worker = DirectWorker(
            WorkerSettings(name="w", url=fake.url, **(settings or {})),
            WaitSettings(),
            environ={"KEY": "sk-1"},
            report_bug=lambda where, bug: bugs.append((where, bug)),
        )
        async with served(worker):
            yield Bench(fake, worker, bugs)
        assert worker._all == set()
