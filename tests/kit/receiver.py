"""A receiver that writes down what it is told."""

from collections.abc import Callable, Sequence
from math import inf

from router.errors import Fault
from router.ids import WorkerId
from router.messages import Delta, Finished
from router.ports import Taken


class Recorder:
    """Implements ``ports.Receiver``; ``reply`` is what it answers to deltas."""

    def __init__(self, *, buffered: bool = False) -> None:
        self.buffered = buffered
        self.reply = Taken.MORE
        self.deltas: list[Delta] = []
        self.finished: Finished | None = None
        self.fault: Fault | None = None
        self.routes: list[tuple[WorkerId, int]] = []
        self.restarts = 0
        self.ticks: list[float] = []
        self.due_at = inf
        self.on_room: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        self.on_room, self.on_gone = on_room, on_gone

    def routed(self, worker: WorkerId, attempts: int) -> None:
        self.routes.append((worker, attempts))

    def take(self, deltas: Sequence[Delta]) -> Taken:
        if self.reply is not Taken.GONE:
            self.deltas += deltas
        return self.reply

    def finish(self, finished: Finished) -> Taken:
        assert self.finished is None
        assert self.fault is None
        self.finished = finished
        return Taken.MORE

    def fail(self, fault: Fault) -> None:
        assert self.finished is None
        assert self.fault is None
        self.fault = fault

    def restart(self) -> None:
        self.restarts += 1
        if self.buffered:
            self.deltas.clear()

    def due(self, now: float) -> float:  # noqa: ARG002 - the port's signature
        return self.due_at

    def tick(self, now: float) -> Taken:
        self.ticks.append(now)
        self.due_at = inf
        return self.reply
