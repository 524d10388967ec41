"""Choose a worker for a job: least loaded, ties spread.

A policy, not a machine: it reads the members it is shown and changes nothing.
Rules S6, S7, A3 of the contract.
"""

from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from router.ids import WorkerId


class Candidate(Protocol):
    """What placement reads of a worker."""

    id: WorkerId
    rest_until: float
    """Seconds; it takes nothing before."""
    last_grant: int
    """Rises with each grant of the fleet."""

    @property
    def busy(self) -> int:
        """Permits that are out."""

    @property
    def limit(self) -> int:
        """Permits that may be out; 0: it is not offered work."""


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def choose(
    members: Iterable[AnyCandidate], tried: Collection[WorkerId], now: float
) -> AnyCandidate | None:
    """Choose among *members* with room that are not in *tried*.

    Least loaded is the smallest share of its limit that is out, so that a big
    worker takes more than a small one; settling permits and ghosts weigh as
    much as running ones. Ties go to whoever was chosen longest ago.
    """
    best: AnyCandidate | None = None
    best_load = 0.0
    for member in members:
        limit = member.limit
        busy = member.busy
        if busy >= limit or member.rest_until > now or member.id in tried:
            continue
        load = busy / limit
        if (
            best is None
            or load < best_load
            or (load == best_load and member.last_grant < best.last_grant)
        ):
            best, best_load = member, load
    return best
