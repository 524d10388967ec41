"""When a server that has ended may start again: a pure rule (L8)."""

from collections import deque
from typing import Final

#: Seconds before the first restart of a window, and the most there are.
BACKOFF_S: Final = (0.5, 30.0)


class Restarts:
    """Counts restarts within a sliding window; backs off with each."""

    def __init__(self, most: int, window_s: float) -> None:
        """*most* restarts in any *window_s* seconds; one more is a crash loop."""
        self._most = most
        self._window_s = window_s
        self._at: deque[float] = deque()
        #: All that ever were.
        self.total = 0

    def ended(self, now: float) -> float | None:
        """Its server has ended at *now*: give the seconds to wait; None: no more."""
        while self._at and self._at[0] <= now - self._window_s:
            self._at.popleft()
        if len(self._at) >= self._most:
            return None
        self._at.append(now)
        self.total += 1
        first, longest = BACKOFF_S
        return min(longest, first * 2.0 ** min(len(self._at) - 1, 30))

    def forgive(self) -> None:
        """Start to count anew: somebody has looked into it."""
        self._at.clear()
