"""Jobs on their way to an agent: the room that they take, and their time (P3).

Rule 1: a job that is let in has room for all of its bytes, so none is turned away
half-way for want of it. Rule 2: nobody shuts others out: a connection may not have
more on its way than it leaves free, and what stands still gives its room back. Pure.
"""

from typing import Final

import attrs

from workers.wire.inbound import Inbound

#: Jobs of one connection that may be on their way at once.
GATHERING_MAX: Final = 1024
#: Seconds for each next so many bytes of a job, as for a client's body (H1).
GATHER_S: Final = 30.0
GATHER_STEP: Final = 1024


@attrs.define
class Room:
    """What all connections of an agent share."""

    taken: int = 0
    """Bytes of all jobs that are on their way, whether they came or not."""


@attrs.define
class _Coming:
    """How a job comes."""

    inbound: Inbound
    moved_at: float | None = None
    """When so much was seen first; None: not looked at yet."""
    seen: int = 0
    """Bytes of it that were there then."""


class Gathering:
    """The jobs that are on their way on one connection."""

    def __init__(self, room: Room, *, body_max: int, bodies_max: int) -> None:
        """Take of *room*.

        Args:
            room: the agent's, shared by all its connections.
            body_max: bytes of one job.
            bodies_max: bytes of all jobs, on whatever connection.
        """
        self._room = room
        self._body_max = body_max
        self._bodies_max = bodies_max
        #: Bytes that this connection has of the room.
        self._taken = 0
        self._coming: dict[int, _Coming] = {}

    def __len__(self) -> int:
        """Count the jobs."""
        return len(self._coming)

    def fits(self, size: int) -> bool:
        """Say whether a job of *size* bytes may come.

        The only one of a connection may take all that is free: an agent whose room
        is no more than a job's is of use too.
        """
        free = self._bodies_max - self._room.taken - size
        return (
            0 < size <= self._body_max
            and free >= 0
            and (not self._coming or self._taken + size <= free)
            and len(self._coming) < GATHERING_MAX
        )

    def add(self, inbound: Inbound) -> None:
        """Keep room for the job of *inbound*."""
        self._coming[inbound.number] = _Coming(inbound)
        self._take(inbound.offer.size)

    def remove(self, inbound: Inbound) -> None:
        """Its job is whole, or not wanted any more. Idempotent."""
        if self._coming.pop(inbound.number, None) is not None:
            self._take(-inbound.offer.size)

    def overdue(self, now: float) -> list[Inbound]:
        """Give those whose job stands still; call it more often than `GATHER_S`."""
        found = []
        for coming in self._coming.values():
            got = coming.inbound.got
            if coming.moved_at is None or got >= coming.seen + GATHER_STEP:
                coming.moved_at, coming.seen = now, got
            elif now - coming.moved_at > GATHER_S:
                found.append(coming.inbound)
        return found

    def _take(self, size: int) -> None:
        self._taken += size
        self._room.taken += size
