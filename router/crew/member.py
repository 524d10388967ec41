"""What the fleet knows of one worker: its life, its permits, its record.

Rule 1: a permit is in exactly one of ``held`` and ``settling`` until it is
back (S2). Rule 2: no HTTP, no Trio, no clock of its own. Rules S1, S3, S6, S7.
"""

from itertools import count

import attrs

from router.errors import LocalError
from router.ids import AssignmentId, WorkerId
from router.lifecycle import COMING, SERVING, Lifecycle, State
from router.messages import Share

#: Slots of a worker that neither the operator nor the engine numbers (S5).
DEFAULT_SLOTS = 4
#: Longest gap between two requests to a worker that refuses them our key, in seconds.
KEY_GAP_MAX_S = 300.0


@attrs.define(eq=False)
class Turned:
    """How a worker turned us away for one model, again and again (P3, A4)."""

    times: int = 0
    """In a row, without one job taken."""
    at: float = float("-inf")
    """When it last did."""
    until: float = 0.0
    """It is not asked for the model before."""


@attrs.define(eq=False)
class Member:
    """One worker in the fleet.

    Invariants: ``len(held) + len(settling) <= slots`` at every grant (S1);
    ``ghosts`` is a part of ``settling``; no number is in ``pins`` twice, and all
    are below ``slots``.
    """

    id: WorkerId
    life: Lifecycle
    settle_s: float
    """Seconds; 0: a closed request frees its slot at once."""
    wanted_slots: int | None
    """What the operator configured."""
    wanted_models: tuple[str, ...]
    added_at: float
    pin_slots: bool = False
    """Each permit names a slot of the engine (W2)."""
    slots: int = attrs.field(init=False)
    models: dict[str, None] = attrs.field(init=False)
    """Names it serves, its own id first; kept while it is lost (O6)."""
    context: int | None = attrs.field(default=None, init=False)
    seen: bool = attrs.field(default=False, init=False)
    """It was ready at least once."""
    started_at: float | None = attrs.field(default=None, init=False)
    held: dict[AssignmentId, str] = attrs.field(factory=dict, init=False)
    """Assignment to the model that it is for; oldest first."""
    held_for: dict[str, int] = attrs.field(factory=dict, init=False)
    """Model to how many of ``held`` are for it."""
    shares: dict[str, Share] | None = attrs.field(default=None, init=False)
    """Model to our part, where the worker has the say over its slots (P3)."""
    turned: dict[str, Turned] = attrs.field(factory=dict, init=False)
    """Model to how often it had no slot for us, since it last took a job."""
    lacking: dict[str, Turned] = attrs.field(factory=dict, init=False)
    """Model of our table to how often it didn't know it, since it last did (A4)."""
    settling: dict[AssignmentId, float] = attrs.field(factory=dict, init=False)
    """Assignment to the time its upstream was let go; oldest first."""
    pins: dict[AssignmentId, int] = attrs.field(factory=dict, init=False)
    """Engine slot of each permit that is out, settling ones included."""
    ghosts: set[AssignmentId] = attrs.field(factory=set, init=False)
    ramp: int | None = attrs.field(default=None, init=False)
    """Limit while it wins trust back (S7); None: full trust."""
    faults: int = attrs.field(default=0, init=False)
    """Worker faults in a row (S6)."""
    key_refusals: int = attrs.field(default=0, init=False)
    """Times in a row that it took our key from a probe and not from a request."""
    barred_until: float = attrs.field(default=0.0, init=False)
    """A probe that it answers proves nothing of our key before (A4), unless another
    that it did not was between."""
    rest_until: float = attrs.field(default=0.0, init=False)
    asked_until: float = attrs.field(default=0.0, init=False)
    """The part of its rest that it asked for: nothing but a restart ends it (A8)."""
    last_grant: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        """Take what is configured until the worker speaks for itself."""
        self.slots = self.wanted_slots or DEFAULT_SLOTS
        self.models = dict.fromkeys(self.wanted_models)

    @property
    def busy(self) -> int:
        """Permits that are out, settling ones and ghosts included."""
        return len(self.held) + len(self.settling)

    @property
    def limit(self) -> int:
        """Permits that may be out now."""
        state = self.life.state
        if state is State.READY:
            return self.slots if self.ramp is None else min(self.ramp, self.slots)
        return 1 if state is State.SUSPECT else 0

    @property
    def serving(self) -> bool:
        """It is offered work."""
        return self.life.state in SERVING

    def serves(self, target: str) -> bool:
        """Say whether it is offered jobs for *target*, now or when it has room."""
        if self.life.state not in SERVING:
            return False
        if self.shares is None:
            return True
        share = self.shares.get(target)
        return share is not None and share.serves

    def comes(self, target: str) -> bool:
        """Say whether it may soon serve *target*."""
        if self.life.state in COMING:
            return True
        share = None if self.shares is None else self.shares.get(target)
        return self.life.state in SERVING and share is not None and share.coming

    def takes(self, target: str, now: float) -> bool:
        """Say whether our part of its slots has room for one more *target*."""
        if self.rests_from(target) > now:
            return False
        if self.shares is None:
            return True
        share = self.shares.get(target)
        if share is None:
            return False
        return self.held_for.get(target, 0) < share.slots

    def shut(self, target: str) -> None:
        """Others have its slots for *target*: nothing more until it says so."""
        share = None if self.shares is None else self.shares.get(target)
        if share is not None and self.shares is not None:
            ours = self.held_for.get(target, 0)
            self.shares[target] = attrs.evolve(share, slots=min(share.slots, ours))

    def turned_away(self, target: str, granted_at: float, now: float) -> int:
        """It had no slot for an offer of *granted_at*; say how often in a row.

        What was offered before it last said so is of the same time.
        """
        return _again(self.turned, target, granted_at, now)

    def lacks_again(self, target: str, granted_at: float, now: float) -> int:
        """It had no model *target*, as ``turned_away`` has it of slots."""
        return _again(self.lacking, target, granted_at, now)

    def rests_from(self, target: str) -> float:
        """Say until when it takes no job for *target*."""
        until = self.rest_until
        if target in self.turned:
            until = max(until, self.turned[target].until)
        if target in self.lacking:
            until = max(until, self.lacking[target].until)
        return until

    def wakes_at(self, now: float) -> float:
        """Say when the next of its rests that are not over is; inf: it has none."""
        each = (*self.turned.values(), *self.lacking.values())
        rests = (self.rest_until, *(t.until for t in each))
        return min((r for r in rests if r > now), default=float("inf"))

    def has_room(self, now: float) -> bool:
        """Say whether one more job may go to it."""
        return self.busy < self.limit and self.rest_until <= now

    def take(self, assignment: AssignmentId, target: str = "") -> None:
        """Hand out a permit for a job that asks for the model *target*.

        Raises:
            LocalError: none is left (S1), or this one is out already.
        """
        if self.busy >= self.limit or assignment in self.held:
            raise LocalError(f"{self.id}: no permit for {assignment}")
        self.held[assignment] = target
        self.held_for[target] = self.held_for.get(target, 0) + 1
        if self.pin_slots:
            out = set(self.pins.values())
            self.pins[assignment] = next(n for n in count() if n not in out)

    def give_back(self, assignment: AssignmentId) -> None:
        """The engine is done with *assignment*.

        Raises:
            LocalError: its permit is not held (S2).
        """
        if assignment not in self.held:
            raise LocalError(f"{self.id}: permit of {assignment} comes back twice")
        self.held_for[self.held.pop(assignment)] -= 1
        self.pins.pop(assignment, None)

    def let_go(self, assignment: AssignmentId, now: float) -> None:
        """The upstream was closed early: the permit stays out to settle (S3).

        Raises:
            LocalError: its permit is not held (S2).
        """
        pin = self.pins.get(assignment)
        self.give_back(assignment)
        self.settling[assignment] = now
        if pin is not None:
            # Its slot is still at work for it.
            self.pins[assignment] = pin

    def settled(self, assignment: AssignmentId) -> float:
        """The slot is free again; return since when it was settling.

        Raises:
            LocalError: it was not settling.
        """
        if assignment not in self.settling:
            raise LocalError(f"{self.id}: {assignment} is not settling")
        self.ghosts.discard(assignment)
        self.pins.pop(assignment, None)
        return self.settling.pop(assignment)

    def trust(self) -> None:
        """A request succeeded: forget faults, widen the ramp (S7)."""
        self.faults = self.key_refusals = 0
        if self.ramp is not None:
            self.ramp *= 2
            if self.ramp >= self.slots:
                self.ramp = None

    def key_refused(self, now: float) -> None:
        """A request was refused for our key while probes are not (A4).

        The first time its next answer to a probe is believed: it may have been this
        one request. Then one request is tried at gaps that double.
        """
        if self.serving:
            self.key_refusals += 1
            if self.key_refusals > 1:
                gap = 2.0 ** min(self.key_refusals - 2, 16)
                self.barred_until = now + min(KEY_GAP_MAX_S, gap)

    def distrust(self) -> None:
        """It comes back from somewhere: one at a time until one succeeds."""
        self.ramp = 1
        self.faults = 0
        self.rest_until = self.asked_until

    def renew(self) -> None:
        """Its process is another one: nothing that the old one said of itself holds."""
        self.asked_until = 0.0
        self.lacking.clear()


def _again(
    records: dict[str, Turned], target: str, granted_at: float, now: float
) -> int:
    record = records.setdefault(target, Turned())
    if granted_at >= record.at:
        record.times += 1
        record.at = now
    return record.times
