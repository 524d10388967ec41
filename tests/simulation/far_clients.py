"""Clients that check all that they get, and the books of breaches."""

from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from router.errors import Fault, FaultKind
from router.ids import RequestId
from router.messages import Delta, Finished
from router.ports import Taken
from tests.kit.receiver import Recorder
from tests.simulation import world
from tests.simulation.far_engines import Generation
from tests.simulation.world import PIECES

#: What only an end that breaks the wire brings about; agents here are honest.
_AWRY: Final = frozenset(
    {
        "The worker's messages came awry.",
        "The worker overran its credit.",
        "The worker left out a delta.",
        "The worker sent an unknown kind.",
        "The worker sent half a tool call.",
    }
)


@attrs.define
class Books(world.Books):
    """Those of the near world, and what agents add to them."""

    waited: dict[str, float] = attrs.field(factory=dict)
    """Longest wait for a first delta, in seconds, by router."""
    tell: Callable[[str], None] | None = None
    """Gets each line of the trace."""
    on_breach: Callable[[], None] | None = None
    generations: dict[str, Generation] = attrs.field(factory=dict)
    """By ``request/attempt#attempt at the agent``."""

    def note(self, what: str) -> None:
        """Add *what* to the trace, at its time."""
        super().note(what)
        if self.tell is not None:
            self.tell(f"{trio.current_time():.6f} {what}")

    def breach(self, what: str) -> None:
        """Write down a broken promise."""
        self.breaches.append(f"{trio.current_time():.3f} {what}")
        self.note(f"BREACH {what}")
        if self.on_breach is not None:
            self.on_breach()


class FarClient(Recorder):
    """A client of one router; each delta tells it whose it is."""

    def __init__(self, books: Books, request: RequestId, *, buffered: bool) -> None:
        """*request* names it in the trace."""
        super().__init__(buffered=buffered)
        self.request = request
        self.ended = False
        #: It was given all that it took, and said that it takes no more.
        self.full = False
        #: Deltas after which it leaves, and how: it is found gone at the next.
        self.appetite = PIECES + 1
        self.leave: Callable[[], None] = self._vanish
        self._books = books
        self._gone = False
        self._came_at = trio.current_time()
        self._attempt = 0
        self._origin = ""

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """Take *deltas*; each must be the next of one assignment (F1, F3)."""
        if self.ended or self.fault or self.finished:
            self.breach("a delivery after the end")
        if self.full:
            self.breach("a delivery to a client that does not read")
        if self.is_gone:
            return Taken.GONE
        answer = super().take(deltas)
        if self.deltas and self.deltas[0] is deltas[0]:
            waited, router = self._books.waited, self.request.partition(".")[0]
            wait = trio.current_time() - self._came_at
            waited[router] = max(waited.get(router, 0.0), wait)
        for at, delta in enumerate(deltas, len(self.deltas) - len(deltas)):
            self._check(at, delta)
        self.full = answer is Taken.FULL
        if len(self.deltas) >= self.appetite:
            self.leave()
        return answer

    @property
    def is_gone(self) -> bool:
        """Whether it will be found gone, should anything more come."""
        return self._gone and self.finished is None and self.fault is None

    def _vanish(self) -> None:
        self._gone = True

    def _check(self, at: int, delta: Delta) -> None:
        assignment = delta.assignment
        name = f"{assignment.request}/{assignment.attempt}"
        self._books.note(f"{name} {delta.index}")
        origin, _, rest = delta.text.partition(":")
        self._origin = self._origin or origin
        if delta.index != at:
            self.breach(f"index {delta.index} at {at}")
        if (assignment.request, assignment.attempt) != (self.request, self._attempt):
            self.breach(f"a delta of {name} in attempt {self._attempt}")
        if origin != self._origin or origin.partition("#")[0] != name:
            self.breach(f"a delta of {origin}, after {self._origin}, as one of {name}")
        if rest.partition(";")[0] != str(at):
            self.breach(f"{rest[:20]} at {at}")

    def routed(self, worker: object, attempts: int) -> None:
        """Note an attempt; there is none after commit (A2)."""
        self._books.note(f"{self.request}/{attempts} to {worker}")
        if self.deltas and not self.buffered:
            self.breach("a failover after commit")
        if attempts <= self._attempt:
            self.breach(f"attempt {attempts} after {self._attempt}")
        self._attempt, self._origin = attempts, ""
        # Another attempt's source has to be told anew.
        self.full = False
        super().routed(worker, attempts)  # type: ignore[arg-type]

    def finish(self, finished: Finished) -> Taken:
        """Check that a whole answer is one (F7)."""
        if self.ended:
            self.breach("a finish after the end")
        generation = self._books.generations.get(self._origin)
        if generation is None or not generation.whole:
            self.breach(f"finished, and {self._origin} was not")
        said = PIECES if finished.usage is None else finished.usage.completion_tokens
        if not len(self.deltas) == said == PIECES:
            self.breach(f"finished with {len(self.deltas)} of {said}")
        return super().finish(finished)

    def fail(self, fault: Fault) -> None:
        """Check that no honest agent is blamed for the wire."""
        if self.ended:
            self.breach("a fault after the end")
        if fault.kind is FaultKind.INTERNAL or fault.message in _AWRY:
            # The same words come from an agent whose engine left out one.
            mine = self._books.generations.items()
            kinds = {g.kind for o, g in mine if o.startswith(f"{self.request}/")}
            if "skip" not in kinds:
                self.breach(f"{fault.kind.value}: {fault.message}")
        super().fail(fault)

    def breach(self, what: str) -> None:
        """Write down a broken promise."""
        self._books.breach(f"{self.request}: {what}")
