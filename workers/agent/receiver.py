"""Where the answer of one assignment goes at an agent: onto its router's wire."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from router.engine.flight import Flight
from router.errors import Fault
from router.ids import WorkerId
from router.messages import Delta, Finished
from router.ports import EndsReasoning, SourcePhase, Taken
from workers.wire.inbound import Inbound, State

#: What is told when the head is here, as it is or was just now.
_BEHIND_HEAD: Final = frozenset({"head", "moves"})


def _nothing() -> None:
    """Stand in until ``attach``."""


class WireReceiver:
    """Implements ``ports.Receiver`` over one `Inbound`."""

    __slots__ = (
        "_moved_at",
        "_on_gone",
        "_on_over",
        "_on_room",
        "buffered",
        "flight",
        "inbound",
        "stopped",
    )

    def __init__(self, inbound: Inbound, on_over: Callable[[], None]) -> None:
        """*on_over*: called once, when nothing more is owed to the router."""
        self.buffered = False
        self.inbound = inbound
        #: Set when it has begun; until then nothing is told to the router.
        self.flight: Flight | None = None
        #: Its source is paused, for want of credit or of room.
        self.stopped = False
        self._moved_at = 0.0
        self._on_over: Callable[[], None] | None = on_over
        self._on_room: Callable[[], None] = _nothing
        self._on_gone: Callable[[], None] = _nothing

    # ---- ports.Receiver ----

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """See ``ports.Receiver``."""
        self._on_room = on_room
        self._on_gone = on_gone

    def routed(self, worker: WorkerId, attempts: int) -> None:
        """See ``ports.Receiver``; which engine it is concerns no router."""

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """See ``ports.Receiver``."""
        inbound = self.inbound
        if inbound.state is State.ENDED:
            return Taken.GONE
        inbound.deltas(deltas)
        if inbound.full:
            self.stopped = True
            return Taken.FULL
        return Taken.MORE

    def finish(self, finished: Finished) -> Taken:
        """See ``ports.Receiver``."""
        if self.inbound.state is State.ENDED:
            return Taken.GONE
        self.inbound.finish(finished)
        self.over()
        return Taken.MORE

    def fail(self, fault: Fault) -> None:
        """See ``ports.Receiver``."""
        if self.flight is not None and self.inbound.state is not State.ENDED:
            self.inbound.fail(fault)
        self.over()

    def restart(self) -> None:
        """See ``ports.Receiver``: nothing was emitted yet.

        But a head may have been told, which is no more: another engine, in which
        a slot is taken, has the job now. What its silence means is told when it
        was looked at.
        """
        self._tell("busy")

    def due(self, now: float) -> float:
        """See ``ports.Receiver``: a finish reason is told at once."""
        source = None if self.flight is None else self.flight.source
        if (
            source is not None
            and source.phase is SourcePhase.FINISHING
            and self.inbound.state is State.RUNNING
        ):
            return now
        return inf

    def tick(self, now: float) -> Taken:
        """See ``ports.Receiver``."""
        del now
        source = None if self.flight is None else self.flight.source
        if source is not None and source.reason is not None:
            self.inbound.finishing(source.reason)
        return Taken.MORE

    # ---- calls from its connection ----

    def resume(self) -> None:
        """Let its source go on, if it may. Not a checkpoint."""
        if self.stopped and not self.inbound.full:
            self.stopped = False
            self._on_room()

    def gone(self) -> None:
        """Its router wants it no more. Not a checkpoint."""
        try:
            self._on_gone()
        finally:
            self.over()

    def end_reasoning(self) -> None:
        """Have its engine reason no longer, if it can. Not a checkpoint."""
        source: object = None if self.flight is None else self.flight.source
        if isinstance(source, EndsReasoning):
            source.end_reasoning()

    def over(self) -> None:
        """Nothing more is owed. Idempotent."""
        on_over, self._on_over = self._on_over, None
        if on_over is not None:
            on_over()

    def tell_silence(self) -> None:
        """Tell the router what the silence of its engine means, if that is new."""
        flight, inbound = self.flight, self.inbound
        source = None if flight is None else flight.source
        if flight is None or source is None:
            return
        state = ""
        if source.phase is SourcePhase.STREAMING:
            moved_at = source.last_byte_at
            if inbound.told not in _BEHIND_HEAD and inbound.next_index == 0:
                state = "head"
            elif moved_at > max(self._moved_at, flight.last_delta_at):
                # Bytes without a delta: progress all the same (W6).
                state = "moves"
            self._moved_at = moved_at
        elif flight.wait_state is not None:
            state = flight.wait_state.value
        if state and (state != inbound.told or state == "moves"):
            self._tell(state)

    def _tell(self, state: str) -> None:
        self.inbound.told = state
        self.inbound.wait(state)
