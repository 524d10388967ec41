"""A router without workers: a test takes each request and plays its worker.

It keeps the promises that ``router.edge.core.Core`` names, and no more, so
that tests of the edge meet no engine. ``steps`` of a request are written
down in order, for asserting that one thing came before another.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

import attrs
import trio

from router.errors import Fault, RequestFailed
from router.ids import AssignmentId, RequestId, WorkerId
from router.messages import Delta, Finished, FinishReason, Job, Kind, Usage
from router.ports import Receiver, Taken
from router.settings import Settings
from router.tally import Tally
from tests.kit.cork import strict_cork

WORKER = WorkerId("w1")


@attrs.frozen
class StubCard:
    """One model on offer."""

    id: str
    created: int = 7
    owned_by: str = "stub"


class StubRequest:
    """One request that is being served; the test is its worker."""

    def __init__(
        self, job: Job, receiver: Receiver, request: RequestId, client_ref: str | None
    ) -> None:
        self.job = job
        self.receiver = receiver
        self.request = request
        self.client_ref = client_ref
        self.assignment = AssignmentId(request, 1)
        self.steps: list[str] = []
        #: The client was found gone by the edge, and when.
        self.gone = trio.Event()
        self.gone_at: float | None = None
        #: ``serve`` has returned.
        self.over = trio.Event()
        #: The receiver said that there is room again; renewed by ``wait_room``.
        self.room = trio.Event()
        self._next = 0
        self._ended = False
        self._crash: Exception | None = None
        self._bell = trio.Event()
        receiver.attach(self._on_room, self._on_gone)

    def route(self, attempts: int = 1) -> None:
        """Say that the job went to the one worker."""
        self.receiver.routed(WORKER, attempts)

    def text(self, *pieces: str) -> Taken | Fault:
        """Hand over text deltas, as one batch."""
        batch = [
            Delta(self.assignment, self._next + i, Kind.TEXT, piece)
            for i, piece in enumerate(pieces)
        ]
        self._next += len(batch)
        taken = self.receiver.take(batch)
        if taken is Taken.GONE:
            self._end()
        self._bell.set()
        return taken

    def finish(self, usage: Usage | None = None) -> Taken | Fault:
        """End well."""
        taken = self.receiver.finish(
            Finished(self.assignment, FinishReason.STOP, usage)
        )
        self._end()
        return taken

    def fail(self, fault: Fault) -> None:
        """End badly."""
        self.receiver.fail(fault)
        self._end()

    def crash(self, bug: Exception) -> None:
        """Have ``serve`` raise *bug*."""
        self._crash = bug
        self._bell.set()

    async def wait_room(self) -> None:
        """Wait until the receiver has asked for more, once."""
        await self.room.wait()
        self.room = trio.Event()

    async def run(self) -> None:
        """Keep the receiver's clocks until it has ended."""
        try:
            while not self._ended:
                now = trio.current_time()
                due = self.receiver.due(now)
                if due <= now and self.receiver.tick(now) is Taken.GONE:
                    self.steps.append("tick gone")
                    return
                self._bell = trio.Event()
                with trio.move_on_at(self.receiver.due(now)):
                    await self._bell.wait()
                if self._crash is not None:
                    raise self._crash
        except trio.Cancelled:
            self.steps.append("cancelled")
            raise
        finally:
            self.over.set()

    def _end(self) -> None:
        self._ended = True
        self._bell.set()

    def _on_room(self) -> None:
        self.room.set()

    def _on_gone(self) -> None:
        self.steps.append("gone")
        self.gone_at = trio.current_time()
        self.gone.set()
        self._end()


class StubRouter:
    """What the edge needs of a router, under a test's thumb."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = Settings() if settings is None else settings
        self.tally = Tally()
        self.cork = strict_cork()
        self.ready = True
        self.models = {"m": "m", "alias": "m"}
        #: Set: ``resolve`` raises it for unknown models.
        self.unknown: Fault | None = None
        #: Set: ``serve`` raises it instead of serving.
        self.bug: BaseException | None = None
        self.receipts: dict[str, Mapping[str, Any]] = {}
        self.commands: list[tuple[str, str]] = []
        self.drained_within_s = 0.0
        #: What ``count_tokens`` gives, and the jobs that it was asked for.
        self.counts: int | None = None
        self.counted: list[Job] = []
        #: What workers are sent before each job's own messages.
        self.told: tuple[Any, ...] = ()
        self.started = 0
        self._born = 0
        self._in, self._out = trio.open_memory_channel[StubRequest](10_000)

    async def next(self) -> StubRequest:
        """Give the next request that the edge has handed over."""
        return await self._out.receive()

    def new_request_id(self) -> RequestId:
        self._born += 1
        return RequestId(f"req_{self._born}")

    def resolve(self, model: str) -> str | None:
        if model not in self.models and self.unknown is not None:
            raise RequestFailed(self.unknown)
        return self.models.get(model)

    def model_cards(self) -> list[StubCard]:
        return [StubCard(name) for name in self.models]

    async def serve(
        self,
        job: Job,
        receiver: Receiver,
        *,
        request: RequestId,
        client_ref: str | None = None,
    ) -> None:
        self.started += 1
        if self.bug is not None:
            raise self.bug
        served = StubRequest(job, receiver, request, client_ref)
        self._in.send_nowait(served)
        await served.run()

    async def count_tokens(self, job: Job) -> int | None:
        self.counted.append(job)
        await trio.lowlevel.checkpoint()
        return self.counts

    def as_sent(self, job: Job) -> Job:
        return attrs.evolve(job, messages=(*self.told, *job.messages))

    def status(self) -> dict[str, Any]:
        worker = {
            "name": "w1",
            "state": "ready",
            "slots": 4,
            "limit": 4,
            "in_flight": 1,
            "settling": 0,
            "ghosts": 0,
        }
        unseen = {**worker, "name": "w2", "state": "lost", "slots": None}
        return {
            "ready": self.ready,
            "workers": [worker, unseen],
            "queues": {"m": 3},
            "requests": [],
        }

    def receipt(self, request: str) -> Mapping[str, Any] | None:
        return self.receipts.get(request)

    def drain(self, worker: str, *, within_s: float = inf) -> bool:
        self.drained_within_s = within_s
        return self._command("drain", worker, worker == WORKER)

    def undrain(self, worker: str) -> bool:
        return self._command("undrain", worker, worker == WORKER)

    def cancel(self, request: str) -> bool:
        return self._command("cancel", request, request.startswith("req_"))

    def refuse_new(self, fault: Fault) -> None:
        self._command("refuse_new", fault.kind.value, known=True)

    def cut_all(self, fault: Fault) -> None:
        self._command("cut_all", fault.kind.value, known=True)

    def _command(self, verb: str, what: str, known: bool) -> bool:
        self.commands.append((verb, what))
        return known
