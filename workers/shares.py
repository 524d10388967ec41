"""Who may have the slots of an agent that several routers use (P3, S1).

There is no queue: a router that finds no slot is told so, and waits by itself.
So that one with a deep queue does not take every slot the moment it is free, a
router that was turned away has a claim on the next one, the one with the least
first; a claim that is not used in time lapses. Rule: this file decides between
routers only; whether a slot is free is the fleet's to say. Pure.
"""

from collections.abc import Iterator
from typing import Final, NewType

import attrs

#: One router's connection.
Guest = NewType("Guest", int)

#: Seconds for which a free slot is kept for a router that was told of it.
CLAIM_S: Final = 0.25
#: Seconds after its last offer in which a router that was turned away counts as
#: waiting. It may wait longer: then it is shown a slot to try, and asks again.
HUNGER_S: Final = 10.0


@attrs.define(eq=False)
class _Use:
    """What one router has, and wants, of one model."""

    held: int = 0
    hungry_since: float | None = None
    """It was turned away, or said that more waits at it."""
    asked_at: float = 0.0
    """When it said so last."""
    told_at: float | None = None
    """Since when it knows of a slot that it has not taken."""

    @property
    def rank(self) -> tuple[int, float]:
        """The lower, the sooner it gets a slot."""
        since = self.hungry_since
        return self.held, float("inf") if since is None else since


class Shares:
    """The claims of all routers on one agent's slots, model by model."""

    def __init__(self) -> None:
        """Nobody is here."""
        self._uses: dict[str, dict[Guest, _Use]] = {}

    def leave(self, guest: Guest) -> None:
        """*guest* is gone, and all that it held is given back or settles."""
        for uses in self._uses.values():
            uses.pop(guest, None)

    def held(self, guest: Guest, model: str) -> int:
        """Count what *guest* has of *model*."""
        use = self._uses.get(model, {}).get(guest)
        return 0 if use is None else use.held

    @property
    def contested(self) -> bool:
        """Somebody was turned away and still waits."""
        return any(use.hungry_since is not None for use in self._all())

    @property
    def claimed(self) -> bool:
        """A slot is kept for somebody who knows of it, for a moment."""
        return any(use.told_at is not None for use in self._all())

    def may(self, guest: Guest, model: str, free: int) -> bool:
        """Say whether *guest* may take one of *free* slots of *model*."""
        return free > self._claims(guest, model)

    def took(self, guest: Guest, model: str, now: float, *, waiting: int) -> None:
        """*guest* has a slot more; *waiting* more jobs wait at it."""
        use = self._use(guest, model)
        use.held += 1
        use.told_at = None
        use.asked_at = now
        use.hungry_since = now if waiting else None

    def missed(self, guest: Guest, model: str, now: float) -> None:
        """*guest* was turned away for want of a slot."""
        use = self._use(guest, model)
        use.told_at = None
        use.asked_at = now
        if use.hungry_since is None:
            use.hungry_since = now

    def gave(self, guest: Guest, model: str) -> None:
        """*guest* has a slot less."""
        use = self._uses.get(model, {}).get(guest)
        if use is not None and use.held:
            use.held -= 1

    def view(self, guest: Guest, model: str, free: int, now: float) -> int:
        """Count what *guest* may have of *model*, its own included.

        To be asked when it is told to *guest*: a claim begins to run then. One
        that is content may always try one more where others have the slots, so
        that its hunger becomes known.
        """
        use = self._uses.get(model, {}).get(guest)
        room = max(0, free - self._claims(guest, model))
        if use is not None and use.hungry_since is not None:
            use.told_at = (use.told_at or now) if room else None
        elif not room and self._others_hold(guest, model):
            room = 1
        return room + (0 if use is None else use.held)

    def lapse(self, now: float) -> bool:
        """Drop claims that were not used in time, and those of who asks no more.

        Says whether there were any.
        """
        found = False
        for use in self._all():
            unused = use.told_at is not None and now - use.told_at >= CLAIM_S
            silent = use.hungry_since is not None and now - use.asked_at >= HUNGER_S
            if unused or silent:
                use.hungry_since = use.told_at = None
                found = True
        return found

    def _all(self) -> Iterator[_Use]:
        for uses in self._uses.values():
            yield from uses.values()

    def _use(self, guest: Guest, model: str) -> _Use:
        return self._uses.setdefault(model, {}).setdefault(guest, _Use())

    def _claims(self, guest: Guest, model: str) -> int:
        """Count the hungry that come before *guest*."""
        uses = self._uses.get(model)
        if not uses:
            return 0
        own = uses.get(guest)
        rank = (0, float("inf")) if own is None else own.rank
        return sum(
            use.hungry_since is not None and use.rank < rank
            for other, use in uses.items()
            if other != guest
        )

    def _others_hold(self, guest: Guest, model: str) -> bool:
        return any(
            use.held
            for other, use in self._uses.get(model, {}).items()
            if other != guest
        )
