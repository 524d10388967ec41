"""The retry budget: extra work is a bounded share of the work there is.

Rule A8: over any ``WINDOW_S`` seconds, retries are at most ``SHARE`` of the
requests, with a floor. Pure; the caller brings the clock.
"""

from collections import deque
from typing import Final

#: Seconds; Linkerd's retry budget uses the same.
WINDOW_S: Final = 10.0
SHARE: Final = 0.2
FLOOR: Final = 10


class RetryBudget:
    """Counts requests in slices of a second and retries one by one.

    Only whole slices inside the window count as requests, so the share is
    kept over *any* window, not just on average.
    """

    __slots__ = ("_requests", "_retries")

    def __init__(self) -> None:
        """Start with nothing spent."""
        #: [second, requests in it], oldest first; at most WINDOW_S + 1 long.
        self._requests: deque[list[int]] = deque()
        self._retries: deque[float] = deque()

    def request(self, now: float) -> None:
        """Count one request that was received at *now* (seconds)."""
        second = int(now)
        if self._requests and self._requests[-1][0] == second:
            self._requests[-1][1] += 1
            return
        self._requests.append([second, 1])
        while self._requests[0][0] < second - WINDOW_S:
            self._requests.popleft()

    def take(self, now: float) -> bool:
        """Spend one retry at *now*, if there is one."""
        while self._retries and self._retries[0] <= now - WINDOW_S:
            self._retries.popleft()
        since = now - WINDOW_S
        requests = sum(count for second, count in self._requests if second >= since)
        if len(self._retries) >= max(FLOOR, int(SHARE * requests)):
            return False
        self._retries.append(now)
        return True
