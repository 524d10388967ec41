"""Receivers for programs: a bounded queue of deltas, and a whole completion."""

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple, Self

import attrs

from router.engine.bell import Bell
from router.errors import Fault, FaultKind, RequestFailed
from router.gathered import Gathered
from router.ids import WorkerId
from router.messages import Delta, Finished, FinishReason, Kind, Signal, Usage
from router.ports import Taken

#: Deltas that wait for the program before its worker is paused, and until it
#: is resumed: a few engine steps of a slow reader.
HIGH: Final = 256
LOW: Final = 64


def _nothing() -> None:
    """Stand in until ``attach``."""


class _Untimed:
    """What receivers without a wire have in common: no clocks, no head."""

    _on_room: Callable[[], None] = staticmethod(_nothing)
    _on_gone: Callable[[], None] = staticmethod(_nothing)
    worker: WorkerId | None = None
    """Where the job is or was last; None: nowhere yet."""

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """See ``ports.Receiver``."""
        self._on_room = on_room
        self._on_gone = on_gone

    def routed(self, worker: WorkerId, attempts: int) -> None:
        """See ``ports.Receiver``. A program asks ``receipt`` for more."""
        del attempts
        self.worker = worker

    def due(self, now: float) -> float:  # noqa: ARG002 - the port's signature
        """See ``ports.Receiver``: nothing is due by time."""
        return inf

    def tick(self, now: float) -> Taken:  # noqa: ARG002 - the port's signature
        """See ``ports.Receiver``: never called."""
        return Taken.MORE


class DeltaQueue(_Untimed):
    """An async iterator over the deltas of one request.

    One task reads it. ``finished`` is set once the last delta was read of an
    answer that is whole.
    """

    buffered = False

    def __init__(self) -> None:
        """Start empty."""
        self.finished: Finished | None = None
        self._deltas: deque[Delta] = deque()
        self._end: Finished | Fault | None = None
        self._bell = Bell()
        self._closed = False
        self._any = False

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """See ``ports.Receiver``. Holds ``HIGH`` and the batch that passed it."""
        if self._closed:
            return Taken.GONE
        self._any = True
        self._deltas.extend(deltas)
        self._bell.ring()
        return Taken.FULL if len(self._deltas) >= HIGH else Taken.MORE

    def finish(self, finished: Finished) -> Taken:
        """See ``ports.Receiver``."""
        self._end = finished
        self._bell.ring()
        return Taken.GONE if self._closed else Taken.MORE

    def fail(self, fault: Fault) -> None:
        """See ``ports.Receiver``."""
        self._end = fault
        self._bell.ring()

    def restart(self) -> None:
        """See ``ports.Receiver``: nothing was handed over yet."""

    def close(self) -> None:
        """The reader has left. Not a checkpoint."""
        self._closed = True
        self._deltas.clear()

    def __aiter__(self) -> Self:
        """Iterate over the deltas."""
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next delta. A checkpoint only if it must wait.

        Cancelled: no delta is lost.

        Raises:
            StopAsyncIteration: the answer was whole; see ``finished``.
            RequestFailed: it was not (F7).
        """
        while not self._deltas:
            if isinstance(self._end, Finished):
                self.finished = self._end
                raise StopAsyncIteration
            if self._end is not None:
                raise RequestFailed(self._end, committed=self._any)
            await self._bell.wait_until(inf)
        delta = self._deltas.popleft()
        if len(self._deltas) == LOW:
            self._on_room()
        return delta

    def take_nowait(self) -> list[Delta]:
        """Give all deltas that have come, in order. Not a checkpoint."""
        come = list(self._deltas)
        self._deltas.clear()
        if len(come) > LOW:
            self._on_room()
        return come


@attrs.frozen
class ToolCall:
    """One whole tool call; ``arguments`` is the model's JSON text, unchecked."""

    id: str | None
    name: str | None
    arguments: str


@attrs.frozen
class Completion:
    """A whole answer."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    reason: FinishReason
    usage: Usage | None
    refusal: str = ""
    signals: tuple[Signal, ...] = ()
    """What was said out of band, in order (J5)."""
    unsupported: tuple[str, ...] = ()
    """Sampling parameters that the engine lacks: it answered without (J3)."""


class CompletionReceiver(_Untimed):
    """Gathers one whole answer; a loss on the way starts it over (A5)."""

    buffered = True

    def __init__(self) -> None:
        """Start empty."""
        self._deltas: list[Delta] = []
        self._gathered = Gathered()
        self._end: Finished | Fault | None = None

    def take(self, deltas: Sequence[Delta]) -> Taken | Fault:
        """See ``ports.Receiver``; a fault: there are too many."""
        fault = self._gathered.add(deltas)
        if fault is not None:
            return fault
        self._deltas.extend(deltas)
        return Taken.MORE

    def finish(self, finished: Finished) -> Taken:
        """See ``ports.Receiver``."""
        self._end = finished
        return Taken.MORE

    def fail(self, fault: Fault) -> None:
        """See ``ports.Receiver``."""
        self._end = fault

    def restart(self) -> None:
        """See ``ports.Receiver``."""
        self._deltas.clear()
        self._gathered.clear()

    @property
    def finished(self) -> Finished | None:
        """How the answer ended; None: it did not, or failed."""
        return self._end if isinstance(self._end, Finished) else None

    def completion(self) -> Completion:
        """Put the answer together.

        Raises:
            RequestFailed: there is none.
        """
        if not isinstance(self._end, Finished):
            raise RequestFailed(
                self._end or Fault(FaultKind.CANCELLED, "The request was cancelled.")
            )
        end = self._end
        said = put_together(self._deltas)
        return Completion(
            said.text,
            said.reasoning,
            said.tool_calls,
            end.reason,
            end.usage,
            said.refusal,
            end.signals,
        )


class Said(NamedTuple):
    """What an answer's deltas come to."""

    text: str
    """Of a job that has no stream, its whole JSON document."""
    reasoning: str
    refusal: str
    tool_calls: tuple[ToolCall, ...]


def put_together(deltas: Sequence[Delta]) -> Said:
    """Sort out the *deltas* of one answer, or of a part of one."""
    calls: dict[int, list[Delta]] = {}
    for delta in deltas:
        if delta.tool is not None:
            calls.setdefault(delta.tool.index, []).append(delta)
    texts: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for delta in deltas:
        texts[delta.kind].append(delta.text)
    return Said(
        "".join(texts[Kind.TEXT] or texts[Kind.DOCUMENT]),
        "".join(texts[Kind.REASONING]),
        "".join(texts[Kind.REFUSAL]),
        tuple(_tool_call(parts) for _, parts in sorted(calls.items())),
    )


def _tool_call(parts: list[Delta]) -> ToolCall:
    tools = [p.tool for p in parts if p.tool is not None]
    return ToolCall(
        next((t.id for t in tools if t.id), None),
        next((t.name for t in tools if t.name), None),
        "".join(p.text for p in parts),
    )
