"""The fence: which delta may reach the client next.

One fence guards one request over all its attempts. Rule 1: every change of
state is a row of ``TRANSITIONS``. Rule 2: this file knows no HTTP, no JSON, no
clock and no Trio. Rules F1-F6 of the contract.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from router.errors import LocalError
from router.ids import AssignmentId, Index
from router.messages import Delta
from router.words import Word


class State(Word):
    """Who may send."""

    #: Nobody: not placed yet, or between two attempts.
    IDLE = "idle"
    #: One assignment, and the client has seen nothing of it.
    OPEN = "open"
    #: One assignment, for good: the client has seen its first delta.
    COMMITTED = "committed"
    #: Nobody ever again.
    CLOSED = "closed"


class Event(Word):
    """What moves a fence."""

    ASSIGN = "assign"
    #: A delta went into an aggregate that the client does not see yet.
    KEPT = "kept"
    #: A delta went to the client.
    SENT = "sent"
    REVOKE = "revoke"
    CLOSE = "close"


class Verdict(Word):
    """What a delta is to its fence. A value: all but a bug can happen (F3)."""

    NEXT = "next"
    #: Its index was already handed over.
    REPEAT = "repeat"
    #: Another assignment owns the fence.
    STALE = "stale"
    #: Nobody owns it: revoked, or the request is over.
    LATE = "late"
    #: The owner skipped an index: the worker's fault (F5).
    GAP = "gap"


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.IDLE: {
        Event.ASSIGN: State.OPEN,
        Event.CLOSE: State.CLOSED,
    },
    State.OPEN: {
        Event.KEPT: State.OPEN,
        Event.SENT: State.COMMITTED,
        Event.REVOKE: State.IDLE,
        Event.CLOSE: State.CLOSED,
    },
    # No way back to IDLE: after commit there is no failover (A2).
    State.COMMITTED: {
        Event.SENT: State.COMMITTED,
        Event.REVOKE: State.CLOSED,
        Event.CLOSE: State.CLOSED,
    },
    State.CLOSED: {},
}


@attrs.define(eq=False)
class Fence:
    """Order and ownership of one request's deltas.

    Invariants: ``owner`` is set exactly while OPEN or COMMITTED;
    ``next_index`` counts the owner's deltas that were handed over (F1);
    attempts only grow (F2).
    """

    state: State = attrs.field(default=State.IDLE, init=False)
    owner: AssignmentId | None = attrs.field(default=None, init=False)
    newest: int = attrs.field(default=0, init=False)
    next_index: Index = attrs.field(default=0, init=False)

    def assign(self, assignment: AssignmentId) -> None:
        """Open the fence to *assignment*, from index 0.

        Raises:
            LocalError: not IDLE, or the attempt is not newer than every one
                before it (F2). Nothing has changed.
        """
        if assignment.attempt <= self.newest:
            raise LocalError(f"attempt {assignment} after attempt {self.newest}")
        self._fire(Event.ASSIGN)
        self.owner = assignment
        self.newest = assignment.attempt
        self.next_index = 0

    def judge(self, assignment: AssignmentId, index: Index, ahead: int = 0) -> Verdict:
        """Say what to do with a delta, and change nothing (F3, F6).

        Args:
            assignment: the attempt that the delta is stamped with.
            index: its position there, from 0.
            ahead: deltas of the same batch already judged NEXT and not yet
                counted by ``sent`` or ``kept``.
        """
        if assignment != self.owner:
            return Verdict.LATE if self.owner is None else Verdict.STALE
        wanted = self.next_index + ahead
        if index == wanted:
            return Verdict.NEXT
        return Verdict.GAP if index > wanted else Verdict.REPEAT

    def all_next(self, deltas: Sequence[Delta]) -> bool:
        """Say whether ``judge`` would find each of *deltas*, in order, NEXT.

        What nearly every delta pays, at once for all that came together; False
        for none at all.
        """
        owner = self.owner
        index = self.next_index
        for delta in deltas:
            if delta.index != index or delta.assignment != owner:
                return False
            index += 1
        return index != self.next_index

    def sent(self, count: int = 1) -> None:
        """Count deltas judged NEXT that the client's sink has now taken (F6)."""
        if self.state is not State.COMMITTED:
            self._fire(Event.SENT)
        self.next_index += count

    def kept(self, count: int = 1) -> None:
        """Count deltas judged NEXT that went into an aggregate (A5)."""
        self._fire(Event.KEPT)
        self.next_index += count

    def revoke(self) -> None:
        """Shut out the owner: what it still has in flight is LATE or STALE."""
        self._fire(Event.REVOKE)
        self.owner = None

    def close(self) -> None:
        """Close for good: the request is over."""
        self._fire(Event.CLOSE)
        self.owner = None

    def _fire(self, event: Event) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise LocalError(f"fence: {event.name} while {self.state.name}") from None
