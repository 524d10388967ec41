"""The workers together: who serves which model, and who is trusted how far.

Rule 1: a worker's record changes only here and in its ``Member``. Rule 2: no
HTTP, no Trio, no clock of its own. Rules S5-S7, L2-L4, L9, A4 of the contract.
"""

import random
from typing import Final

from router.crew.member import Member
from router.errors import Fault, FaultKind, LocalError
from router.ids import WorkerId
from router.lifecycle import SERVING, Event, Lifecycle, State
from router.messages import Discovery

#: Longest rest that a worker's Retry-After can ask for, in seconds (A8).
REST_MAX_S: Final = 60.0
#: How long a worker that declined rests at least, in seconds: drawn anew each time.
#: What asks for less, as ``Retry-After: 0`` does, would have it take and refuse the
#: whole line in a moment.
DECLINED_S: Final = (0.25, 0.75)
#: Longest pause between two trials of a suspect worker, in seconds.
TRIAL_MAX_S: Final = 30.0
#: How often in a row a worker may have no slot for a model that it has just shown
#: room for, before it rests from that model; and the seconds of the first and of the
#: longest such rest (P3). The longest is within the time for which an agent keeps a
#: slot for a router that it told of it (``shares.CLAIM_S``).
TURNS_MAX: Final = 3
TURNED_S: Final = (0.05, 0.2)
#: Seconds of the first and of the longest rest of a worker from a model that it names
#: and answers 404 to: they double while that goes on (A4).
LACKING_S: Final = (0.5, 30.0)
#: A worker that becomes ready out of these comes back, and is ramped (S7).
_RETURNS_FROM: Final = frozenset(
    {State.STARTING, State.LOADING, State.LOST, State.FAILED}
)
#: A wait that was spent without one delta (L4).
_SPENT_WAITS: Final = frozenset(
    {FaultKind.WAIT_TIMEOUT, FaultKind.LOAD_TIMEOUT, FaultKind.STALLED}
)
#: Two process starts closer than this are one: engines round (L9).
SAME_START_S: Final = 1.0


class Crew:
    """All workers of a fleet."""

    def __init__(self, suspect_after: int, rng: random.Random) -> None:
        """*suspect_after*: faults in a row (S6). *rng* spreads rests."""
        self._suspect_after = suspect_after
        self._rng = rng
        self.members: dict[WorkerId, Member] = {}
        #: Model to the workers that name it, in the order they were added.
        self.serving: dict[str, list[Member]] = {}

    def add(
        self,
        worker: WorkerId,
        now: float,
        *,
        slots: int | None,
        models: tuple[str, ...],
        settle_s: float,
        pin_slots: bool = False,
    ) -> None:
        """Take *worker* in.

        Raises:
            LocalError: the name is taken.
        """
        if worker in self.members:
            raise LocalError(f"worker {worker} added twice")
        self.members[worker] = Member(
            worker, Lifecycle(now), settle_s, slots, models, now, pin_slots
        )
        self._reindex()

    def retire(self, member: Member) -> None:
        """Take a worker that is GONE out of the table, and forget it once it
        holds no permit any more. Idempotent."""
        if not member.busy:
            self.members.pop(member.id, None)
        self._reindex()

    def restarted(self, member: Member, found: Discovery) -> bool:
        """Say whether *found* is another process than the one known (L9)."""
        return (
            found.started_at is not None
            and member.started_at is not None
            and abs(found.started_at - member.started_at) > SAME_START_S
        )

    def discover(self, member: Member, found: Discovery, now: float) -> None:
        """Take over what a ready worker said of itself."""
        restarted = self.restarted(member, found)
        if found.started_at is not None:
            # A probe that missed it once says nothing of a restart.
            member.started_at = found.started_at
        member.context = found.context
        member.shares = None if found.shares is None else dict(found.shares)
        for model in member.turned.keys() - (found.shares or {}).keys():
            del member.turned[model]
        if not member.wanted_models and tuple(member.models) != found.models:
            member.models = dict.fromkeys(found.models)
            self._reindex()
        for model in member.lacking.keys() - member.models.keys():
            del member.lacking[model]
        if not self._fit_slots(member, found, now):
            return
        if restarted:
            member.key_refusals = 0
            member.renew()
        elif member.life.state is State.FAILED and now < member.barred_until:
            # Not every server asks for a key where it is probed.
            return
        if restarted or (member.seen and member.life.state in _RETURNS_FROM):
            member.distrust()
        member.life.fire(Event.ANSWERED, now)
        member.seen = True

    def _fit_slots(self, member: Member, found: Discovery, now: float) -> bool:
        """Take over the slots of *found*; False: ours do not fit it (S5)."""
        wanted, has = member.wanted_slots, found.slots
        if has is None:
            return True
        if wanted is None:
            member.slots = max(1, has)
        elif found.shares is not None:
            # Some of its engines may be out: ours is a bound, and no mistake.
            member.slots = min(wanted, max(1, has))
        elif wanted > has:
            detail = f"slots is set to {wanted}, the engine has {has}"
            member.life.fire(
                Event.UNFIT, now, reason="slots_exceed_engine", detail=detail
            )
            return False
        return True

    def note(self, member: Member, fault: Fault, now: float, *, silent: bool) -> bool:
        """Draw what *fault* says about *member*; say whether it now rests.

        500 is not for here: its blame waits for a second opinion (A4).
        *silent*: the attempt had given no delta.
        """
        kind = fault.kind
        if silent and kind in _SPENT_WAITS:
            # Its probes are fine and it says nothing: one such is enough (L4).
            member.faults = max(member.faults, self._suspect_after - 1)
            return self.blame(member, now)
        if fault.row.counts:
            return self.blame(member, now)
        if member.life.state is State.GONE:
            return False
        if kind is FaultKind.DECLINED:
            least = self._rng.uniform(*DECLINED_S)
            asked = min(fault.retry_after or 0.0, REST_MAX_S)
            if asked > 0:
                member.asked_until = max(member.asked_until, now + asked)
            _rest(member, now + max(least, asked))
            return True
        if kind is FaultKind.LOADING:
            member.life.fire(Event.LOADS, now)
        elif kind is FaultKind.UNAUTHORIZED:
            member.key_refused(now)
            member.life.fire(
                Event.UNFIT,
                now,
                reason="unauthorized",
                detail="the worker refuses our key; set api_key_env for it",
            )
        return False

    def model_gone(
        self, member: Member, target: str, granted_at: float, now: float
    ) -> bool:
        """*member* answered an offer of *granted_at* that it has no model *target*,
        which our table gives to it (A4); say whether it now rests from it.

        The model leaves the table until a probe names it again. One that is named all
        the same, or configured, would draw every job there and fail it at once: the
        worker rests from it, and from no other.
        """
        if member.life.state is State.GONE:
            return False
        pause = _pause(LACKING_S, member.lacks_again(target, granted_at, now) - 1)
        until = now + pause * self._rng.uniform(0.75, 1.25)
        member.lacking[target].until = max(member.lacking[target].until, until)
        if not member.wanted_models:
            member.models.pop(target, None)
            self._reindex()
        return True

    def no_slot(
        self, member: Member, target: str, granted_at: float, now: float
    ) -> bool:
        """*member* had no slot for an offer of *granted_at* (P3); say whether it
        now rests from *target*."""
        member.shut(target)
        times = member.turned_away(target, granted_at, now)
        if times < TURNS_MAX:
            return False
        pause = _pause(TURNED_S, times - TURNS_MAX)
        member.turned[target].until = now + pause * self._rng.uniform(0.75, 1.0)
        return True

    def blame(self, member: Member, now: float) -> bool:
        """Count one fault of *member*; say whether it now rests (S6).

        A suspect is tried again after a pause that doubles with each fault,
        so that a worker which fails fast is not where every job goes first. What
        fails while it rests was begun before, and is no trial: a worker that
        loses all its streams at once rests no longer than one that loses three.
        """
        if member.life.state is State.GONE:
            return False
        if member.life.state is State.SUSPECT and now < member.rest_until:
            return False
        member.faults += 1
        if member.ramp is not None:
            member.ramp = 1
        if member.faults < self._suspect_after:
            return False
        member.life.fire(Event.FAULTED, now)
        if member.life.state is not State.SUSPECT:
            return False
        pause = min(TRIAL_MAX_S, 0.5 * 2.0 ** (member.faults - self._suspect_after))
        _rest(member, now + pause * self._rng.uniform(0.75, 1.25))
        return True

    def praise(self, member: Member, now: float) -> None:
        """A request succeeded on *member*: widen its ramp (S7, L4)."""
        state = member.life.state
        if state is State.GONE:
            return
        if state is State.SUSPECT:
            member.distrust()
        member.trust()
        member.life.fire(Event.SUCCEEDED, now)

    def has_wider(self, than: WorkerId, target: str) -> bool:
        """Say whether a serving worker of *target* has a larger context (A4)."""
        had = self.members[than].context
        return had is not None and any(
            m.life.state in SERVING and m.context is not None and m.context > had
            for m in self.serving.get(target, ())
        )

    def narrower(self, than: WorkerId, target: str) -> set[WorkerId]:
        """Name the workers of *target* without a known larger context (A4)."""
        had = self.members[than].context or 0
        return {
            m.id
            for m in self.serving.get(target, ())
            if m.context is None or m.context <= had
        }

    def _reindex(self) -> None:
        self.serving = {}
        for member in self.members.values():
            if member.life.state is State.GONE:
                continue
            for model in member.models:
                self.serving.setdefault(model, []).append(member)


def _pause(bounds: tuple[float, float], doubled: int) -> float:
    """Double the first of *bounds* so many times, to the second at most."""
    return min(bounds[1], bounds[0] * 2.0 ** min(doubled, 16))


def _rest(member: Member, until: float) -> None:
    """Have *member* take no job before *until*. A longer rest that it has already
    stays as it is."""
    member.rest_until = max(member.rest_until, until)
