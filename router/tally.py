"""Counts that cost one dictionary store, read by metrics and status.

Metrics read snapshots; nothing on a path of tokens knows Prometheus (X1).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

#: Seconds. From a fast local engine's step to a long prefill.
SECONDS: Final[tuple[float, ...]] = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)


class Histogram:
    """Counts by upper bound, as Prometheus wants them, without its cost."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """*bounds*: upper bounds, rising; one more bucket catches the rest."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count *value*, *times* over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Tally:
    """All counters of one router. Label values are bounded sets (X1)."""

    def __init__(self) -> None:
        """Start at zero."""
        #: (model or "other", outcome)
        self.requests: Counter[tuple[str, str]] = Counter()
        #: fault kind that ended an attempt which then moved
        self.failovers: Counter[str] = Counter()
        #: worker
        self.attempts: Counter[str] = Counter()
        #: next, repeat, stale, late, gap
        self.verdicts: Counter[str] = Counter()
        #: phase the request was in when its client left
        self.disconnects: Counter[str] = Counter()
        #: names of request fields that were dropped (O1)
        self.ignored_fields: Counter[str] = Counter()
        #: code of a control signal
        self.signals: Counter[str] = Counter()
        #: worker: ghosts seen
        self.ghosts: Counter[str] = Counter()
        #: worker: restarts noticed (L9)
        self.restarts: Counter[str] = Counter()
        #: place in the code: exceptions kept to one request (L1)
        self.bugs: Counter[str] = Counter()
        #: W state seen at a poll
        self.waits: Counter[str] = Counter()
        #: HTTP requests refused by the edge before any route, by status
        self.refused: Counter[str] = Counter()
        #: connections between routers and agents that ended: (who said why, why)
        self.wire: Counter[tuple[str, str]] = Counter()
        #: offers of routers that an agent did not take, by its reason
        self.declines: Counter[str] = Counter()
        self.first_delta = Histogram()
        self.between_deltas = Histogram()
        self.queue_wait = Histogram()
        self.duration = Histogram()
        self.cancel_latency = Histogram()
        self.settle = Histogram()
        self.loop_lag = Histogram()
        #: largest number of bytes ever held for one client
        self.buffer_high_water = 0
