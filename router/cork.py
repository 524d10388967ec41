"""What one turn of a worker's loop writes, gathered to go out together.

A read of a worker brings deltas for many clients. To send each one's bytes
between the parsing of two deltas costs more than the sends themselves: kernel
and interpreter take turns in the processor's caches. So whoever reads corks
first, and all that was written meanwhile leaves in one run behind it. Two
rules: a turn has no ``await`` in it; and one client's fault stays its own (L1).
"""

from collections.abc import Callable
from typing import Protocol

from router.errors import LocalError


class Corked(Protocol):
    """Somebody who keeps what it is given while a turn lasts."""

    def uncork(self) -> None:
        """Send what was kept. The turn is over: what follows goes out at once."""

    def crash(self) -> None:
        """End, for a bug in ``uncork``."""


class Cork:
    """The turns of all workers of one router; one at a time, as they never wait."""

    __slots__ = ("_keepers", "held", "keep", "now", "on_bug")

    def __init__(self, on_bug: Callable[[str, Exception], None]) -> None:
        """*on_bug*: told of an exception in one client's chain, by its place."""
        #: A turn is under way: keep what you would send, and say so in ``keep``.
        self.held = False
        #: When this turn began, on Trio's clock: no clock is read per delta.
        self.now = 0.0
        self._keepers: list[Corked] = []
        #: Has somebody uncorked at the end of this turn; to be called once a turn.
        self.keep: Callable[[Corked], None] = self._keepers.append
        #: Told of what was kept to one client, or to one connection (L1).
        self.on_bug = on_bug

    def hold(self, now: float) -> None:
        """Begin a turn at *now*; ``release`` must follow, whatever happens."""
        self.held = True
        self.now = now

    def release(self) -> None:
        """End the turn: everybody sends. Idempotent; not a checkpoint.

        Raises:
            LocalError: an invariant is broken; the process should end.
        """
        self.held = False
        keepers = self._keepers[:]
        # Emptied first, and never replaced: ``keep`` is bound to it.
        self._keepers.clear()
        for keeper in keepers:
            try:
                keeper.uncork()
            except LocalError:
                raise
            except Exception as bug:  # noqa: BLE001 - one client's bug is its own (L1)
                self.on_bug("cork", bug)
                self._crash(keeper)

    def _crash(self, keeper: Corked) -> None:
        """End *keeper*; those behind it are still to be sent for."""
        try:
            keeper.crash()
        except LocalError:
            raise
        except Exception as worse:  # noqa: BLE001 - a bug in telling of a bug
            self.on_bug("cork.crash", worse)
