"""One attempt on an agent, at the router's end of the wire (F8, P6).

Rule 1: every change of its phase is a row of ``TRANSITIONS``; a message that
has no row ends this attempt and no other. Rule 2: while it is paused, all that
comes is held in order: no more than its credit, and one delta that overdrew it,
and one each of what costs nothing. Rule 3: its clock moves with what moves it: a
new phase, a delta or piece that is new, bytes that its engine sent (W6). Pure.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Final, Protocol

from router.errors import Fault, FaultKind, LocalError
from router.ids import AssignmentId
from router.messages import Delta, FinishReason, Kind, ToolPart, Usage
from router.messages import Finished as WholeAnswer
from router.ports import Delivery, SourcePhase
from router.waiting import WaitState
from router.words import Word
from workers.wire.faults import fault_of, fault_of_decline
from workers.wire.frames import (
    DELTA_COST,
    FRAME_MAX,
    PART_MAX,
    TEXT_MAX,
    Accepted,
    Cancel,
    Credit,
    Declined,
    Failed,
    Finished,
    Finishing,
    Message,
    Part,
    Piece,
    RichDelta,
    Waiting,
    pack,
)
from workers.wire.holding import Coming, Held, Pieces

#: What an agent may send beyond its credit: the delta that used it up.
OVERDRAFT_MAX: Final = DELTA_COST + 4 * TEXT_MAX
#: What the pieces of one delta may cost: an engine's line of 1 MiB fits. The
#: document of an embedding may cost as much more as it is long.
PIECES_MAX: Final = FRAME_MAX


class Event(Word):
    """What moves an assignment at the router's end."""

    #: The last part of the job is with the kernel.
    WRITTEN = "written"
    ACCEPTED = "accepted"
    DECLINED = "declined"
    #: The agent tells what the silence means, that the head is here, or that
    #: bytes came behind it.
    WAITING = "waiting"
    HEAD = "head"
    MOVES = "moves"
    DELTA = "delta"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"


_P: Final = SourcePhase
TRANSITIONS: Final[Mapping[SourcePhase, Mapping[Event, SourcePhase]]] = {
    # An agent that is sure to decline need not read the job first.
    _P.SENDING: {
        Event.WRITTEN: _P.OFFERED,
        Event.DECLINED: _P.CLOSED,
        # A job is read as soon as it is here, which may be before the kernel's
        # word that it is gone from here.
        Event.ACCEPTED: _P.AWAITING_HEAD,
    },
    _P.OFFERED: {
        Event.ACCEPTED: _P.AWAITING_HEAD,
        Event.DECLINED: _P.CLOSED,
    },
    _P.AWAITING_HEAD: {
        # A duplicate offer is acknowledged again (F8).
        Event.ACCEPTED: _P.AWAITING_HEAD,
        Event.WAITING: _P.AWAITING_HEAD,
        Event.HEAD: _P.STREAMING,
        Event.DELTA: _P.STREAMING,
        Event.FINISHING: _P.FINISHING,
        Event.FINISHED: _P.CLOSED,
        Event.FAILED: _P.CLOSED,
    },
    _P.STREAMING: {
        Event.ACCEPTED: _P.STREAMING,
        # The engine of that head was lost, and another has the job now. Only
        # while nothing of an answer came: see `RemoteSource._wait`.
        Event.WAITING: _P.AWAITING_HEAD,
        Event.MOVES: _P.STREAMING,
        Event.DELTA: _P.STREAMING,
        Event.FINISHING: _P.FINISHING,
        Event.FINISHED: _P.CLOSED,
        Event.FAILED: _P.CLOSED,
    },
    _P.FINISHING: {
        Event.ACCEPTED: _P.FINISHING,
        # An engine that says a last word behind its finish reason.
        Event.DELTA: _P.FINISHING,
        Event.FINISHING: _P.FINISHING,
        Event.FINISHED: _P.CLOSED,
        Event.FAILED: _P.CLOSED,
    },
    _P.CLOSED: {},
}

_STATES: Final[Mapping[str, WaitState]] = {state.value: state for state in WaitState}
#: What an agent says of an engine's silence. Other words mean nothing.
_WORDS: Final[Mapping[str, Event]] = {
    **dict.fromkeys(_STATES, Event.WAITING),
    "head": Event.HEAD,
    "moves": Event.MOVES,
}
_EVENTS: Final[Mapping[type[Message], Event]] = {
    Accepted: Event.ACCEPTED,
    Declined: Event.DECLINED,
    RichDelta: Event.DELTA,
    Piece: Event.DELTA,
    Finishing: Event.FINISHING,
    Finished: Event.FINISHED,
    Failed: Event.FAILED,
}
_STREAMING: Final[SourcePhase] = SourcePhase.STREAMING
# Typed wide: the engine may close a source in any call into it.
_CLOSED: Final[SourcePhase] = SourcePhase.CLOSED


class End(Protocol):
    """The connection, as one attempt on it needs it."""

    #: Messages that came for nothing (F4).
    late: int

    def now(self) -> float:
        """Give the time, in seconds."""

    def put(self, message: Message) -> None:
        """Queue *message*, if the connection is still there."""

    def forget(self, source: "RemoteSource") -> None:
        """*source* is over."""

    def crash(self, source: "RemoteSource", bug: Exception) -> None:
        """End *source*, and nothing else, for a bug of ours (L1)."""

    def catch_up(self) -> None:
        """Read what has arrived on this connection."""

    def end_reasoning(self, source: "RemoteSource") -> int:
        """See ``ports.EndsReasoning``."""


class RemoteSource:
    """One attempt on an agent. Implements ``ports.Source``; an outbox's body.

    Invariant: while ``paused``, all that comes is held, in order, and its cost
    is within the credit that was granted and `OVERDRAFT_MAX` (P6).
    """

    __slots__ = (
        "_end",
        "_granted",
        "_held",
        "_job",
        "_sent",
        "_window",
        "assignment",
        "count",
        "deliver",
        "delivery",
        "last_byte_at",
        "number",
        "opening",
        "paused",
        "phase",
        "pieces",
        "pieces_max",
        "reason",
        "refill_at",
        "said",
        "since",
        "spent",
    )

    partial_head: bool = False

    def __init__(
        self,
        end: End,
        number: int,
        assignment: AssignmentId,
        delivery: Delivery,
        job: bytes,
        window: int,
        now: float,
    ) -> None:
        """Nothing is sent by itself: see `routing.RouterEnd.offer`."""
        self.number = number
        self.assignment = assignment
        self.delivery = delivery
        self.deliver = delivery.deltas
        self.phase = SourcePhase.SENDING
        self.since = now
        self.last_byte_at = now
        self.paused = False
        #: Whoever opens it is not called back.
        self.opening = True
        self.said: WaitState | None = None
        self.reason: FinishReason | None = None
        #: Deltas that came: one more than the last one's index.
        self.count = 0
        #: Credit that deltas have used, and from when on more is granted.
        self.spent = 0
        self.refill_at = window // 2
        self._granted = window
        self._window = window
        self._end = end
        self._job = job
        self._sent = 0
        self._held = Held()
        #: Pieces of the next delta, and what they may cost.
        self.pieces: Pieces | None = None
        self.pieces_max = PIECES_MAX

    # ---- ports.Source ----

    def pause(self) -> None:
        """Hold what comes, and grant no more credit. Not a checkpoint."""
        self.paused = True

    def resume(self) -> None:
        """Hand over what was held, and grant credit. Not a checkpoint.

        A bug on the way ends this attempt; nothing of it is held then (L1).
        """
        if not self.paused:
            return
        try:
            self._go_on()
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: kept to one assignment
            self._end.crash(self, bug)

    def catch_up(self) -> None:
        """Read what has arrived. Not a checkpoint."""
        self._end.catch_up()

    def finish_now(self) -> None:
        """Report Finished without usage. Not a checkpoint.

        Not before all that came is handed over: until then there is nothing to
        wait for, and no time at which to ask again.
        """
        if self.phase is not SourcePhase.FINISHING or self.reason is None:
            return
        if self._held:
            self.since = inf
            return
        reason = self.reason
        self.close()
        self.delivery.finished(WholeAnswer(self.assignment, reason))

    def end_reasoning(self) -> int:
        """See ``ports.EndsReasoning``. Not a checkpoint."""
        return self._end.end_reasoning(self)

    def close(self) -> None:
        """Abandon the attempt: the agent is told. Not a checkpoint."""
        if self.phase is _CLOSED:
            return
        self.let_go()
        self._end.put(Cancel(self.number))

    # ---- an outbox's body ----

    def next_part(self) -> bytes:
        """Give the job's next part."""
        at = self._sent
        if at >= len(self._job):
            return b""
        part = self._job[at : at + PART_MAX]
        self._sent = at + len(part)
        return pack(Part(self.number, at, part))

    def written(self) -> None:
        """Enter OFFERED when the whole job is with the kernel."""
        self.last_byte_at = self._end.now()
        phase = TRANSITIONS[self.phase].get(Event.WRITTEN)
        if phase is not None and self._sent >= len(self._job):
            self._job = b""
            self._enter(phase, self.last_byte_at)
            if not self.opening:
                self.delivery.progress(self.assignment)

    # ---- its end's calls ----

    def take(self, message: Message) -> None:
        """Take any message of this assignment but plain deltas."""
        now = self._end.now()
        if isinstance(message, Waiting):
            self._wait(message, now)
            return
        if self.paused:
            self._hold(message)
            return
        phase = TRANSITIONS[self.phase].get(_EVENTS[type(message)])
        if phase is None:
            self.fail(Fault(FaultKind.PROTOCOL, "The worker's messages came awry."))
            return
        changed = phase is not self.phase
        match message:
            case Piece():
                self._enter(phase, now)
                self._take_piece(message, now)
            case RichDelta():
                self._enter(phase, now)
                self._take_rich(message, now)
            case Accepted():
                if changed:
                    self._job = b""
                    self._enter(phase, now)
                    self.delivery.accepted(self.assignment)
            case Declined():
                self._end_with(fault_of_decline(message))
            case Failed():
                self._end_with(fault_of(message))
            case Finishing():
                if changed and self._is_whole(message.count, message.reason):
                    self._enter(phase, now)
                    self.delivery.progress(self.assignment)
            case Finished() if self._is_whole(message.count, message.reason):
                self._finish(message)

    def begin_deltas(self, deltas: Sequence[Delta], now: float) -> bool:
        """Look at plain deltas that do not simply go on with a stream.

        True: hand them over. False: they are held, or were refused.
        """
        if self.paused:
            for delta in deltas:
                self._hold(delta)
            return False
        if self._passes_over(deltas):
            return False
        phase = TRANSITIONS[self.phase].get(Event.DELTA)
        if phase is None:
            self.fail(Fault(FaultKind.PROTOCOL, "The worker's messages came awry."))
            return False
        self._enter(phase, now)
        return True

    def refill(self) -> None:
        """Grant credit anew, unless the client is behind."""
        if self.paused or self.phase is _CLOSED:
            return
        self._granted = self.spent + self._window
        self.refill_at = self.spent + self._window // 2
        self._end.put(Credit(self.number, self._granted))

    def lose(self, fault: Fault) -> None:
        """The connection is gone. What has come whole is whole all the same."""
        if self._held.whole:
            return
        if self.phase is not _CLOSED:
            self._end_with(fault)

    def fail(self, fault: Fault) -> None:
        """End the attempt for what the agent did to it; tell the agent."""
        self.close()
        self.delivery.failed(self.assignment, fault)

    def let_go(self) -> None:
        """Leave the books: nothing that comes is for this attempt any more."""
        self.phase = _CLOSED
        self._job = b""
        self._held.clear()
        self.pieces = None
        self._end.forget(self)

    def recount(self, deltas: Sequence[Delta], now: float) -> None:
        """Count *deltas*, which are about to be handed over.

        Not where they came: an end that was held counts those before it (F7).
        One that repeats takes nothing back (F4), and is no sign of life (W6).
        """
        count = 1 + max(delta.index for delta in deltas)
        if count > self.count:
            self.count = count
            self.last_byte_at = now

    # ---- inner parts ----

    def _go_on(self) -> None:
        self.paused = False
        now = self.last_byte_at = self._end.now()
        held = self._held
        while held and not self.paused and self.phase is not _CLOSED:
            first = held.popleft()
            if not isinstance(first, Delta):
                self.take(first)
                continue
            batch = held.run_of(first)
            if self.begin_deltas(batch, now):
                self.recount(batch, now)
                self.deliver(self.assignment, batch)
        if self.since == inf and not held:
            # What was asked to finish may: its wait for usage begins here.
            self.since = now
        if self.spent >= self.refill_at:
            self.refill()

    def _hold(self, what: Coming) -> None:
        """Keep *what* until the client has room; nothing comes without a bound."""
        if self.phase is _CLOSED:
            return
        if self._held.means_nothing(what):
            self._end.late += 1
        elif self.spent > self._granted + OVERDRAFT_MAX:
            self.fail(Fault(FaultKind.PROTOCOL, "The worker overran its credit."))
        else:
            self._held.keep(what)

    def _enter(self, phase: SourcePhase, now: float) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.since = now
            self.last_byte_at = now

    def _wait(self, message: Waiting, now: float) -> None:
        """Take a word of the silence; one without a row is left aside."""
        event = _WORDS.get(message.state)
        phase = None if event is None else TRANSITIONS[self.phase].get(event)
        if phase is None:
            return
        if event is Event.WAITING:
            if self.count or self.pieces or self._held:
                # What came of an answer, or may have, is never taken back (F1).
                return
            self.said = _STATES[message.state]
        elif event is Event.MOVES:
            self.last_byte_at = now
        if phase is not self.phase:
            self._enter(phase, now)
            self.delivery.progress(self.assignment)

    def _take_piece(self, piece: Piece, now: float) -> None:
        if self.pieces is None:
            self.pieces = Pieces()
        own = piece.index, piece.place
        expected = self.count, len(self.pieces)
        if own < expected:
            self._end.late += 1
        elif own > expected:
            self._miss()
        else:
            self.last_byte_at = now
            if self.pieces.add(piece) > self.pieces_max:
                self.fail(Fault(FaultKind.PROTOCOL, "The worker's answer is too long."))

    def _passes_over(self, deltas: Sequence[Delta]) -> bool:
        """Find a plain delta in the place of one whose pieces came, and fail."""
        if not self.pieces or max(delta.index for delta in deltas) < self.count:
            return False
        self._miss()
        return True

    def _miss(self) -> None:
        self.fail(Fault(FaultKind.PROTOCOL, "The worker left out a delta."))

    def _take_rich(self, rich: RichDelta, now: float) -> None:
        text = rich.text
        if rich.index == self.count and (self.pieces or rich.pieces):
            pieces, self.pieces = self.pieces or Pieces(), None
            if len(pieces) != rich.pieces:
                self._miss()
                return
            text = pieces.before(text)
        try:
            kind = Kind(rich.kind)
        except ValueError:
            self.fail(Fault(FaultKind.PROTOCOL, "The worker sent an unknown kind."))
            return
        tool = rich.tool
        part = None if tool is None else ToolPart(tool.index, tool.id, tool.name)
        if (kind is Kind.TOOL_CALL) is (part is None):
            self.fail(Fault(FaultKind.PROTOCOL, "The worker sent half a tool call."))
            return
        delta = Delta(self.assignment, rich.index, kind, text, part, rich.logprobs)
        self.recount([delta], now)
        self.deliver(self.assignment, [delta])

    def _is_whole(self, count: int, reason: str) -> bool:
        """Check an end against what came before it (F5, F7)."""
        try:
            self.reason = FinishReason(reason)
        except ValueError:
            self.fail(Fault(FaultKind.PROTOCOL, "The worker ended in an unknown way."))
            return False
        if count != self.count or self.pieces:
            self._miss()
            return False
        return True

    def _finish(self, message: Finished) -> None:
        reason = self.reason
        if reason is None:
            raise LocalError(f"{self.assignment} finishes without a reason")
        tokens = message.usage
        usage = None
        if tokens is not None:
            usage = Usage(
                tokens.prompt, tokens.completion, tokens.cached, tokens.reasoning
            )
        self.let_go()
        self.delivery.finished(
            WholeAnswer(self.assignment, reason, usage, message.stop_sequence)
        )

    def _end_with(self, fault: Fault) -> None:
        self.let_go()
        self.delivery.failed(self.assignment, fault)
