"""The bounded, ordered, cancellable queue in front of the slots.

Rule 1: whoever waits is in exactly one line of one model. Rule 2: this file
knows no HTTP, no clock and no Trio. Rules S4, A3 of the contract.
"""

from collections.abc import Callable, Iterable, Iterator

import attrs

from router.errors import LocalError
from router.ids import RequestId


@attrs.define(eq=False)
class _Line:
    """One model's waiters: moved jobs first, then the others, each FIFO.

    A dict keeps the order and forgets a leaver in one step (B86).
    """

    moved: dict[RequestId, int] = attrs.field(factory=dict)
    fresh: dict[RequestId, int] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self.moved) + len(self.fresh)

    def __iter__(self) -> Iterator[tuple[bool, int, RequestId]]:
        for request, ticket in self.moved.items():
            yield False, ticket, request
        for request, ticket in self.fresh.items():
            yield True, ticket, request


@attrs.define(eq=False)
class WaitingRoom:
    """All lines. ``limit`` bounds each model's, moved jobs excepted."""

    limit: int
    _lines: dict[str, _Line] = attrs.field(factory=dict, init=False)
    _where: dict[RequestId, str] = attrs.field(factory=dict, init=False)
    _tickets: int = attrs.field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: object) -> bool:
        return request in self._where

    def depth(self, model: str) -> int:
        """Count the waiters of *model*."""
        line = self._lines.get(model)
        return len(line) if line else 0

    def depths(self) -> dict[str, int]:
        """Count the waiters by model; models nobody waits for are left out."""
        return {model: len(line) for model, line in self._lines.items()}

    def full(self, model: str) -> bool:
        """Say whether a fresh job for *model* must be refused (S4)."""
        return self.depth(model) >= self.limit

    def enter(self, request: RequestId, model: str, *, moved: bool) -> None:
        """Let *request* wait: at the end, or before all fresh ones if *moved*.

        Raises:
            LocalError: it waits already.
        """
        if request in self._where:
            raise LocalError(f"{request} waits twice")
        line = self._lines.setdefault(model, _Line())
        self._tickets += 1
        (line.moved if moved else line.fresh)[request] = self._tickets
        self._where[request] = model

    def leave(self, request: RequestId) -> None:
        """Take *request* out, wherever it stands; its place is free at once.

        Raises:
            LocalError: it does not wait.
        """
        model = self._where.pop(request, None)
        if model is None:
            raise LocalError(f"{request} does not wait")
        line = self._lines[model]
        if line.moved.pop(request, None) is None:
            del line.fresh[request]
        if not line:
            del self._lines[model]

    def first(
        self, models: Iterable[str], fits: Callable[[RequestId], bool]
    ) -> RequestId | None:
        """Find who is next among *models*: moved jobs, then by arrival.

        A waiter for whom *fits* is false (it has tried that worker) does not
        hold up those behind it.
        """
        best: tuple[bool, int, RequestId] | None = None
        for model in models:
            line = self._lines.get(model)
            if line is None:
                continue
            found = next((place for place in line if fits(place[2])), None)
            if found is not None and (best is None or found < best):
                best = found
        return best[2] if best else None

    def waiting(self, model: str) -> list[RequestId]:
        """List the waiters of *model*, next first."""
        line = self._lines.get(model)
        return [request for _, _, request in line] if line else []

    def everybody(self) -> list[RequestId]:
        """List all waiters, in no promised order."""
        return list(self._where)
