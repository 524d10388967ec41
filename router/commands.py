"""What the fleet asks of its shell, as values.

The counterpart of the fleet's events. The shell carries them out in order;
none of them is ever answered, except by another event.
"""

import attrs

from router.errors import Fault
from router.ids import AssignmentId, RequestId, WorkerId


@attrs.frozen
class Grant:
    """Start *assignment* on *worker*: its permit is out."""

    assignment: AssignmentId
    worker: WorkerId
    slot: int | None = None
    """The engine's slot that it is pinned to; None: the engine chooses (W2)."""


@attrs.frozen
class Refuse:
    """The request is over without a whole answer; tell its client *fault*."""

    request: RequestId
    fault: Fault


@attrs.frozen
class Settle:
    """A permit of *worker* is settling: time it or probe for it (S3)."""

    worker: WorkerId


@attrs.frozen
class Check:
    """Probe *worker* now; do not wait for the next round."""

    worker: WorkerId


@attrs.frozen
class Rest:
    """*worker* rests until *until*; call ``dispatch`` then."""

    worker: WorkerId
    until: float


@attrs.frozen
class Lose:
    """Close the upstream of *assignment*: its worker is lost to it."""

    assignment: AssignmentId
    fault: Fault


@attrs.frozen
class Empty:
    """*worker* drains, and its last permit is back (L5)."""

    worker: WorkerId


Command = Grant | Refuse | Settle | Check | Rest | Lose | Empty
