"""What a router's end keeps of one assignment for later, and how much (P6). Pure."""

from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias

from router.messages import Delta
from workers.wire.faults import failed_of, fault_of
from workers.wire.frames import (
    Declined,
    Failed,
    Finished,
    Message,
    Piece,
    RichDelta,
    cost_of,
)

#: Deltas that are handed over in one go when a paused source goes on.
RESUME_BATCH: Final = 64

#: What comes of an assignment, but for what it says of its silence.
Coming: TypeAlias = Delta | Message

#: Behind one of these nothing counts.
_LAST_WORDS: Final = frozenset({Declined, Failed, Finished})


class Held:
    """What came while the client had no room, in order.

    What costs credit is bounded by that; of what costs none, one of each kind is
    kept, and nothing behind a last word.
    """

    __slots__ = ("_coming", "_once")

    def __init__(self) -> None:
        """Hold nothing."""
        self._coming: deque[Coming] = deque()
        #: Kinds of messages that cost nothing, of which one was held.
        self._once: frozenset[type[Message]] = frozenset()

    def __len__(self) -> int:
        return len(self._coming)

    def __iter__(self) -> Iterator[Coming]:
        return iter(self._coming)

    @property
    def whole(self) -> bool:
        """The end of a whole answer is held."""
        return bool(self._coming) and Finished in self._once

    def means_nothing(self, what: Coming) -> bool:
        """Say whether *what* is too late, or twice: it would change nothing either
        if there were room."""
        return not self._once.isdisjoint(_LAST_WORDS) or type(what) in self._once

    def keep(self, what: Coming) -> None:
        """Hold *what* behind all else."""
        if not isinstance(what, Delta | RichDelta | Piece):
            self._once |= {type(what)}
            if isinstance(what, Failed):
                # It may be as long as a frame, and no more than this is told.
                what = failed_of(what.stream, fault_of(what))
        self._coming.append(what)

    def popleft(self) -> Coming:
        """Take what is first."""
        return self._coming.popleft()

    def run_of(self, first: Delta) -> list[Delta]:
        """Take the plain deltas that follow *first*, some; give them behind it."""
        run = [first]
        coming = self._coming
        while coming and len(run) < RESUME_BATCH and isinstance(coming[0], Delta):
            run.append(coming.popleft())  # type: ignore[arg-type]
        return run

    def clear(self) -> None:
        """Let go of everything."""
        self._coming.clear()


class Pieces:
    """Texts that belong in front of that of one delta."""

    __slots__ = ("_cost", "_texts")

    def __init__(self) -> None:
        """Have none."""
        self._texts: list[str] = []
        self._cost = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, piece: Piece) -> int:
        """Keep the next one; give what all of them cost, in bytes of credit."""
        self._texts.append(piece.text)
        self._cost += cost_of(piece)
        return self._cost

    def before(self, text: str) -> str:
        """Give them with *text* behind them."""
        return "".join(self._texts) + text
