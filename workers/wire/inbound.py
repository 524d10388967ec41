"""One assignment at the agent's end of the wire (F8, P6).

Rule 1: every change of its state is a row of ``TRANSITIONS``. Rule 2: it emits
only the next index, and nothing beyond its credit: what does not fit waits
here, in order, while its engine is paused. Pure.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from router.errors import Fault, LocalError
from router.messages import Delta, FinishReason, Kind
from router.messages import Finished as WholeAnswer
from router.words import Word
from workers.wire.faults import WORDS_MAX, Decline, failed_of
from workers.wire.frames import (
    DELTA_COST,
    TEXT_MAX,
    Accepted,
    Counted,
    Declined,
    Finished,
    Finishing,
    Message,
    Offer,
    Piece,
    RichDelta,
    Tool,
    Waiting,
    cost_of,
)
from workers.wire.outbox import HIGH, Outbox
from workers.wire.shapes import milliseconds, number_of, tokens_of


class State(Word):
    """How far an assignment has come."""

    #: Its job is on the way.
    GATHERING = "gathering"
    #: A slot is its own; the router was told so.
    RUNNING = "running"
    #: Its finish reason is known.
    FINISHING = "finishing"
    #: Its end is told, or was not wanted any more.
    ENDED = "ended"


class Event(Word):
    """What moves an assignment at the agent's end."""

    #: Its offer once more.
    OFFER = "offer"
    ACCEPT = "accept"
    DECLINE = "decline"
    DELTA = "delta"
    FINISHING = "finishing"
    FINISH = "finish"
    FAIL = "fail"
    #: The router wants it no more, or is gone (P5).
    CANCEL = "cancel"


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.GATHERING: {
        Event.OFFER: State.GATHERING,
        Event.ACCEPT: State.RUNNING,
        Event.DECLINE: State.ENDED,
        # A count is whole without having begun.
        Event.FINISH: State.ENDED,
        Event.CANCEL: State.ENDED,
    },
    State.RUNNING: {
        Event.OFFER: State.RUNNING,
        Event.DELTA: State.RUNNING,
        Event.FINISHING: State.FINISHING,
        Event.FINISH: State.ENDED,
        Event.FAIL: State.ENDED,
        Event.CANCEL: State.ENDED,
    },
    State.FINISHING: {
        Event.OFFER: State.FINISHING,
        # An engine that says a last word behind its finish reason.
        Event.DELTA: State.FINISHING,
        Event.FINISH: State.ENDED,
        Event.FAIL: State.ENDED,
        Event.CANCEL: State.ENDED,
    },
    State.ENDED: {},
}

#: Number of each kind that has a text and nothing else.
_PLAIN: Final[Mapping[Kind, int]] = {Kind.TEXT: 0, Kind.REASONING: 1, Kind.REFUSAL: 2}
_TEXT: Final = Kind.TEXT
_ENDED: Final[State] = State.ENDED


class End(Protocol):
    """The connection, as one assignment on it needs it."""

    outbox: Outbox

    def over(self, inbound: "Inbound", last: Message | None) -> None:
        """It has ended; *last* is its last word, for a duplicate offer."""

    def lingers(self, inbound: "Inbound") -> None:
        """Its engine is done with it, and its end waits here for credit."""


class Inbound:
    """An assignment that some router has offered.

    Invariants: ``next_index`` counts the deltas that were emitted or wait here;
    ``backlog`` is empty while ``spent`` is below ``credit``. A delta in it becomes
    messages when they may go: a document of 60 MiB is never cut all at once.
    """

    __slots__ = (
        "_backlog",
        "_cut_at",
        "_end",
        "_outbox",
        "_put_delta",
        "credit",
        "finishing_told",
        "got",
        "next_index",
        "octets",
        "offer",
        "spent",
        "state",
        "told",
    )

    def __init__(self, end: End, offer: Offer) -> None:
        """Wait for the parts of *offer*'s job."""
        self.offer = offer
        self.state = State.GATHERING
        #: The job as far as it has come: one run of bytes, however it is cut.
        self.octets = bytearray()
        #: Bytes of the job that came; kept when the job itself is not any more.
        self.got = 0
        self.credit = offer.credit
        self.spent = 0
        self.next_index = 0
        #: What the router was told last of its engine's silence.
        self.told = ""
        self._end = end
        self._outbox = end.outbox
        self._put_delta = end.outbox.put_delta
        self._backlog: deque[Delta | Message] = deque()
        #: Characters of its first delta that went in pieces.
        self._cut_at = 0

    @property
    def number(self) -> int:
        """Its name on this connection."""
        return self.offer.stream

    @property
    def counts(self) -> bool:
        """It asks for a number of tokens, and for no answer."""
        return self.offer.purpose == 1

    @property
    def full(self) -> bool:
        """Nothing more is to come from its engine: no credit, or a full outbox."""
        return bool(self._backlog) or self._outbox.size > HIGH

    # ---- what the agent does with it ----

    def accept(self) -> None:
        """A slot is its own: say so.

        Raises:
            LocalError: it is not waiting for that (F8).
        """
        self._fire(Event.ACCEPT)
        self.octets.clear()
        self._outbox.put(Accepted(self.number))

    def decline(
        self, reason: Decline, words: str = "", retry_after: float | None = None
    ) -> None:
        """Do not begin it."""
        self._fire(Event.DECLINE)
        after = milliseconds(retry_after)
        self._last(Declined(self.number, reason.value, words[:WORDS_MAX], after))

    def wait(self, state: str) -> None:
        """Tell what its engine's silence means; see ``frames.Waiting``."""
        if self.state is State.RUNNING:
            self._outbox.put(Waiting(self.number, state))

    def deltas(self, deltas: Sequence[Delta]) -> None:
        """Emit *deltas*, or let them wait for credit (P6). The hot path.

        Raises:
            LocalError: one is not the next (F8), or the end was told.
        """
        if self.state is not State.RUNNING:
            self._fire(Event.DELTA)
        index = self.next_index
        number = self.offer.stream
        for delta in deltas:
            if delta.index != index:
                raise LocalError(f"delta {delta.index} where {index} is next")
            index += 1
            kind = 0 if delta.kind is _TEXT else _PLAIN.get(delta.kind)
            text = delta.text
            if (
                kind is None
                or delta.logprobs is not None
                or len(text) > TEXT_MAX
                or self._backlog
                or self.spent >= self.credit
            ):
                self._send(delta)
                continue
            cost = DELTA_COST + (len(text) if text.isascii() else len(text.encode()))
            self.spent += cost
            self._put_delta((number, delta.index, kind, text), cost)
        self.next_index = index

    def finishing(self, reason: FinishReason) -> None:
        """The finish reason is known; usage may follow. Idempotent."""
        if self.state is State.RUNNING:
            self._fire(Event.FINISHING)
            self._send(Finishing(self.number, self.next_index, reason.value))

    def finish(self, finished: WholeAnswer) -> None:
        """The answer is whole; what waits for credit goes before its end."""
        self._fire(Event.FINISH)
        self._last(
            Finished(
                self.number,
                self.next_index,
                finished.reason.value,
                tokens_of(finished.usage),
                finished.stop_sequence,
            )
        )

    def fail(self, fault: Fault) -> None:
        """The attempt is over without its end; what waits for credit is dropped."""
        self._fire(Event.FAIL)
        self._drop()
        self._last(failed_of(self.number, fault))

    def counted(self, tokens: int | None) -> None:
        """Answer a question for a number of tokens."""
        if self.state is not _ENDED:
            self._fire(Event.FINISH)
            self._last(Counted(self.number, number_of(tokens)))

    # ---- what its router does with it ----

    def cancel(self) -> None:
        """The router wants it no more: nothing is emitted from here on."""
        self._fire(Event.CANCEL)
        self._drop()
        self.octets.clear()
        self._end.over(self, None)

    def grant(self, total: int) -> bool:
        """Take credit; True: it has room again, after it had none.

        Credit that came out of turn is no less than it was.
        """
        self.credit = max(self.credit, total)
        if not self._backlog:
            return False
        self._flush()
        return not self._backlog

    def again(self) -> None:
        """Its offer came once more: acknowledge it, and begin nothing (F8)."""
        self._fire(Event.OFFER)
        if self.state is not State.GATHERING:
            self._outbox.put(Accepted(self.number))

    # ---- inner parts ----

    def _fire(self, event: Event) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise LocalError(
                f"{self.offer.request}/{self.offer.attempt}: "
                f"{event.value} while {self.state.value}"
            ) from None

    def _send(self, what: Delta | Message) -> None:
        """Send what belongs behind the deltas so far.

        A delta comes here that is not plain, too long, or beyond the credit.
        """
        self._backlog.append(what)
        self._flush()

    def _last(self, message: Message) -> None:
        """Send the last word."""
        self.octets.clear()
        self._send(message)
        if self._backlog:
            self._end.lingers(self)

    def _drop(self) -> None:
        """What waits for credit is not wanted any more."""
        self._backlog.clear()
        self._cut_at = 0

    def _flush(self) -> None:
        backlog = self._backlog
        message: Message | None = None
        while backlog:
            first = backlog[0]
            if isinstance(first, Delta):
                if self.spent >= self.credit:
                    return
                message = self._cut(first)
                self.spent += cost_of(message)
            else:
                message = first
            if not self._cut_at:
                backlog.popleft()
            self._outbox.put(message)
        if self.state is _ENDED:
            self._end.over(self, message)

    def _cut(self, delta: Delta) -> Piece | RichDelta:
        """Give what goes next of *delta*: one piece, or all that is left of it."""
        at = self._cut_at
        place, text = at // TEXT_MAX, delta.text[at : at + TEXT_MAX]
        if at + TEXT_MAX < len(delta.text):
            self._cut_at = at + TEXT_MAX
            return Piece(self.number, delta.index, place, text)
        self._cut_at = 0
        tool = delta.tool
        return RichDelta(
            self.number,
            delta.index,
            delta.kind.value,
            text,
            None if tool is None else Tool(tool.index, tool.id, tool.name),
            delta.logprobs,
            place,
        )
