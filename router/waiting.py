"""Silence before the first byte: what it means and how long it may last.

`classify` says what one probe shows (W2, W8, W10); `Wait` adds up the time in one
state without a break and ends it at that state's budget (W3, W4). Both are
pure functions of what they are given: the grid of polls and the probes
themselves are the caller's (W9).
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Final

import attrs

from router.errors import Fault, FaultKind, LocalError
from router.ids import AssignmentId
from router.messages import SlotView

#: Seconds by which a loop that wakes too late was held up itself: stopped, frozen,
#: starved. Then all deadlines pass at once, those of the punctual too.
LATE_S: Final = 0.25


class WaitState(Enum):
    """What the silence of a worker means."""

    #: It works, for us or for others; our turn comes.
    BUSY = "busy"
    #: It could answer and does not.
    IDLE = "idle"
    #: It answers nothing: loading, restarting, gone.
    UNAVAILABLE = "unavailable"


#: What it is to stay in a state beyond its budget (W4).
TIMEOUTS: Final[Mapping[WaitState, tuple[FaultKind, str]]] = {
    WaitState.BUSY: (FaultKind.WAIT_TIMEOUT, "The worker stayed busy"),
    WaitState.IDLE: (FaultKind.STALLED, "The worker had room and did not answer"),
    WaitState.UNAVAILABLE: (FaultKind.LOAD_TIMEOUT, "The worker was not available"),
}


def classify(
    partial_head: bool,
    probe: SlotView | None,
    alive: bool | None,
    ours: int,
    slots: int | None,
    *,
    pinned: int | None = None,
    works: bool | None = None,
) -> WaitState:
    """Tell what one tick of silence is (W2, W8, W10).

    Args:
        partial_head: part of a head has come, so no probe is needed.
        probe: what the engine said of its slots; None: it did not answer.
        alive: for an engine without a slot probe, whether it answered at all;
            None: the slot probe decides.
        ours: our assignments that the engine must be at work on. One too few costs
            time, since the silent are waited for; one too many costs an answer.
        slots: its number of slots, where *probe* does not say it.
        pinned: the number of the engine slot that this request is pinned to.
        works: whether its processes have used CPU time of late; None: nobody
            can tell. Their doing nothing turns busy into idle.
    """
    state = _shown(partial_head, probe, alive, ours, slots, pinned)
    if state is WaitState.BUSY and works is False:
        return WaitState.IDLE
    return state


def _shown(
    partial_head: bool,
    probe: SlotView | None,
    alive: bool | None,
    ours: int,
    slots: int | None,
    pinned: int | None,
) -> WaitState:
    if partial_head:
        return WaitState.IDLE
    if alive is not None:
        # A long prefill can't be told from a hang here, so never idle (W8).
        return WaitState.BUSY if alive else WaitState.UNAVAILABLE
    if probe is None:
        return WaitState.UNAVAILABLE
    if pinned is not None and probe.busy is not None:
        # Whoever has it: an entry that is missing is not at work either.
        return WaitState.BUSY if pinned in probe.busy else WaitState.IDLE
    total = slots if probe.total is None else probe.total
    if total is not None and probe.processing >= total:
        return WaitState.BUSY
    # One of those at work may be ours, in prefill, on builds whose head comes
    # with the first token.
    return WaitState.BUSY if probe.processing >= ours else WaitState.IDLE


@attrs.frozen
class Budgets:
    """Seconds that each state may last without a break, and between polls."""

    poll: float
    busy: float
    idle: float
    unavailable: float

    def polls(self, state: WaitState) -> int:
        """Give the polls in a row, at least 1, that use up *state*'s budget."""
        seconds = {
            WaitState.BUSY: self.busy,
            WaitState.IDLE: self.idle,
            WaitState.UNAVAILABLE: self.unavailable,
        }[state]
        # Just under the quotient: 2.1 s at 0.7 s a poll is 3 polls, not 4.
        return max(1, math.ceil(seconds / self.poll - 1e-9))


@attrs.frozen
class Stretch:
    """One state and the polls in a row that have shown it."""

    state: WaitState
    polls: int


def advance(previous: Stretch | None, seen: WaitState, polls: int = 1) -> Stretch:
    """Add *polls* that showed the same: a state grows, another begins anew (W3)."""
    if previous is None or previous.state is not seen:
        return Stretch(seen, polls)
    return Stretch(seen, previous.polls + polls)


class Grid:
    """Which ticks each silent attempt still owes a verdict on.

    An attempt owes those at which it has been silent for half a poll or more,
    so that a budget ends within half a poll of its time wherever it began. A
    probe that hung until the next tick is the verdict on both.
    """

    def __init__(self, start: float, poll: float) -> None:
        """*start*: seconds at which tick 0 is; then one each *poll* seconds."""
        self._start = start
        self._poll = poll
        self._asked = 0
        #: The last tick of each attempt that a verdict was given on.
        self._judged: dict[AssignmentId, int] = {}

    def _tick(self, now: float) -> int:
        return math.floor((now - self._start) / self._poll + 1e-6)

    def next(self, now: float) -> float:
        """Give the time of the next tick to ask at: another at each call, and one
        that is just over rather than one that is to come."""
        self._asked = max(self._asked + 1, self._tick(now))
        return self._start + self._asked * self._poll

    def owed(
        self, silent: Mapping[AssignmentId, float], now: float
    ) -> dict[AssignmentId, int]:
        """Give the ticks that each attempt owes at *now*, if any; they are then
        settled.

        Args:
            silent: each attempt, and the seconds since when it is silent.
            now: seconds.
        """
        present = self._tick(now)
        owed: dict[AssignmentId, int] = {}
        judged: dict[AssignmentId, int] = {}
        for assignment, since in silent.items():
            late = self._tick(since + self._poll / 2)
            before = max(late, self._judged.get(assignment, late))
            judged[assignment] = max(before, present)
            if present > before:
                owed[assignment] = present - before
        self._judged = judged
        return owed


class Wait:
    """The silence of one attempt, from the sent request to the first byte."""

    __slots__ = ("_budgets", "_limits", "stretch")

    def __init__(self, budgets: Budgets) -> None:
        """Begin with no poll made.

        Raises:
            LocalError: the time between polls is not positive.
        """
        if budgets.poll <= 0:
            raise LocalError(f"a poll every {budgets.poll} s is no grid")
        self._budgets = budgets
        self._limits = {state: budgets.polls(state) for state in WaitState}
        self.stretch: Stretch | None = None

    @property
    def state(self) -> WaitState | None:
        """What the last poll showed; None before the first."""
        return None if self.stretch is None else self.stretch.state

    @property
    def lasted(self) -> float:
        """Seconds in the present state without a break (W3)."""
        return 0.0 if self.stretch is None else self.stretch.polls * self._budgets.poll

    def poll(self, seen: WaitState, polls: int = 1) -> WaitState | Fault:
        """Take what one tick showed, or the *polls* that a probe without an
        answer lasted: the state, or the fault it has become.

        A fault stays one for as long as the state repeats.
        """
        self.stretch = advance(self.stretch, seen, polls)
        if self.stretch.polls < self._limits[seen]:
            return seen
        kind, what = TIMEOUTS[seen]
        return Fault(kind, f"{what} for {self.lasted:g} s.")
