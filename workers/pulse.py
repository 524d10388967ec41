"""Is a silent server at work? CPU time of its process tree as evidence (W10)."""

from collections import deque
from collections.abc import Mapping
from typing import Final

#: Seconds over which its work is added up. The engines that wait for a GPU without
#: spinning wake up a few times in it.
WINDOW_S: Final = 5.0
#: Ticks of CPU time (10 ms) in a window that are work; one may be rounding.
TICKS: Final = 2


class Pulse:
    """What a tree has used in the last seconds, our own questions left out.

    A pure function of what it is told: the reading of ``/proc`` is the caller's.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._ticks: Mapping[int, int] | None = None
        self._begun_at = 0.0
        self._looked_at = 0.0
        #: (when, ticks used since the look before), within the window.
        self._used: deque[tuple[float, int]] = deque()

    def look(self, now: float, ticks: Mapping[int, int]) -> None:
        """See what each process has used by now; call before asking the server."""
        before = self._ticks
        if before is None or now - self._looked_at > WINDOW_S:
            # Between two silences nobody looked: a new window begins.
            self._begun_at = now
            self._used.clear()
        else:
            used = sum(max(0, n - before.get(pid, 0)) for pid, n in ticks.items())
            self._used.append((now, used))
        while self._used and self._used[0][0] <= now - WINDOW_S:
            self._used.popleft()
        self._looked_at = now
        self._ticks = ticks

    def leave_out(self, now: float, ticks: Mapping[int, int]) -> None:
        """Take *ticks* as they are now: what came since is our question's."""
        self._looked_at = now
        self._ticks = ticks

    @property
    def works(self) -> bool | None:
        """Whether it has used CPU time; None: it was not looked at for long enough."""
        if sum(used for _, used in self._used) >= TICKS:
            return True
        whole = self._ticks is not None and (
            self._looked_at - self._begun_at >= WINDOW_S
        )
        return False if whole else None
