"""One router's connection to an agent: who it is, and what it has here.

Rule 1: admission is a fixed order of questions, each with a word for no, and
the permit is taken before yes is said (P3). Rule 2: when the connection is
over, so is all that it had begun, at once (P5).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import attrs
import trio

from router.engine.flight import Flight
from router.engine.router import Router
from router.errors import Fault, FaultKind, LocalError
from router.messages import Job
from workers.agent.observing import (
    COMES,
    SERVES,
    context_of,
    hosts_of,
    lacks_of,
    slots_of,
    state_of,
)
from workers.agent.receiver import WireReceiver
from workers.link import Link
from workers.shares import Guest, Shares
from workers.wire.faults import Decline
from workers.wire.frames import HEARTBEAT_S, Draining, Host, Observation
from workers.wire.hosting import AgentEnd, Memory, Refusal
from workers.wire.inbound import Inbound, State
from workers.wire.jobs import known_tokens
from workers.wire.shapes import fits

log: Final = logging.getLogger("fencepost.workers")

#: Seconds between two looks at what silence means.
LOOK_S: Final = 0.5

#: What a fault is that came before anything had begun.
_REFUSALS: Final[Mapping[FaultKind, Decline]] = {
    FaultKind.NO_SLOT: Decline.NO_SLOT,
    FaultKind.LOADING: Decline.LOADING,
    FaultKind.SHUTTING_DOWN: Decline.DRAINING,
}
BUG: Final = Fault(FaultKind.INTERNAL, "The worker failed on this request.")
#: Of a router that is told so, what it was told before is not so any more.
_MISLED: Final = frozenset({Decline.NO_SLOT, Decline.LOADING, Decline.NO_ENGINE})
_FULL: Final = Refusal(Decline.NO_SLOT, "All slots of the worker are taken.")


class House(Protocol):
    """The agent, as one connection needs it."""

    router: Router
    shares: Shares
    memory: Memory
    epoch: int
    draining: bool

    def next_sequence(self) -> int:
        """Number one more observation."""

    def changed(self) -> None:
        """Somebody's part of the slots may be another one now."""

    def run(self, flight: Flight, receiver: WireReceiver) -> None:
        """See *flight*, whose receiver this is, to its end in a task of its own."""

    def count(self, inbound: Inbound, job: Job) -> None:
        """Answer *inbound* with the tokens of *job*, in a task of its own."""


@attrs.define
class _Told:
    """What the router was told last."""

    at: float = -float("inf")
    sequence: int = 0
    models: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    hosts: list[Host] | None = None
    hosts_at: float = -float("inf")
    """When they were looked at last."""


class Visit:
    """Implements ``hosting.Gate`` and ``Corked`` for one open connection."""

    def __init__(self, house: House, guest: Guest, link: Link) -> None:
        """Open *link*, whose peer has proven itself, for offers."""
        peer = link.opening.peer
        if peer is None:
            raise LocalError("a visit of nobody")
        server = house.router.settings.server
        self.guest = guest
        self.link = link
        self.router_id = peer.id
        self.router_epoch = peer.epoch
        self.since = trio.current_time()
        #: By number on the wire: what has begun, and is not over.
        self.receivers: dict[int, WireReceiver] = {}
        self._house = house
        self._told = _Told()
        self._left_out = False
        #: In this turn the router was told what there is, before a no; and has
        #: heard a no since.
        self._corrected = False
        self._doubted = False
        self._looked_at = self.since
        #: Of the observation behind all that its router is owed, while that is so.
        self._all_said: int | None = None
        self.end = AgentEnd(
            self,
            house.memory,
            link.opening.reader,
            house.epoch,
            link.ring,
            body_max=2 * server.body_max_bytes,
            bodies_max=server.bodies_max_bytes,
        )
        self.end.outbox.on_room = self._outbox_has_room

    # ---- hosting.Gate ----

    def look(self, inbound: Inbound) -> Refusal | None:
        """See ``hosting.Gate``: all that can be said without the job."""
        return self._ask(inbound, lambda: self._against(inbound))

    def begin(self, inbound: Inbound, job: Job) -> Refusal | None:
        """See ``hosting.Gate``."""
        return self._ask(
            inbound, lambda: self._against(inbound) or self._begin(inbound, job)
        )

    def count(self, inbound: Inbound, job: Job) -> None:
        """See ``hosting.Gate``."""
        if job.target == inbound.offer.target:
            self._house.count(inbound, job)
        else:
            inbound.counted(None)

    def refused(self, reason: Decline) -> None:
        """See ``hosting.Gate``."""
        self._house.router.tally.declines[reason.value] += 1

    def cancelled(self, inbound: Inbound) -> None:
        """See ``hosting.Gate``."""
        self._have(inbound, WireReceiver.gone)

    def has_room(self, inbound: Inbound) -> None:
        """See ``hosting.Gate``."""
        self._have(inbound, WireReceiver.resume)

    def end_reasoning(self, inbound: Inbound) -> None:
        """See ``hosting.Gate``."""
        self._have(inbound, WireReceiver.end_reasoning)

    # ---- cork.Corked ----

    def uncork(self) -> None:
        """A turn with a no is over: say what has changed since the first one."""
        self._corrected = False
        if self._doubted:
            self._doubted = False
            self.observe(trio.current_time(), fresh=False)

    def crash(self) -> None:
        """End for a bug in ``uncork``."""
        self.link.crash()

    # ---- calls from the agent ----

    def drain(self) -> None:
        """Say that no offer is taken any more (L5)."""
        self.end.outbox.put(Draining())

    def at_rest(self) -> bool:
        """Say whether nothing is owed here, and the router has read all of it.

        It has, when it has answered an observation that went out behind the last
        word: what was only written may be in any buffer on the way (L5).
        """
        if self.receivers or self.end.inbounds:
            self._all_said = None
            return False
        if self._all_said is None:
            self.observe(trio.current_time(), fresh=True)
            self._all_said = self._told.sequence
        return self.end.seen >= self._all_said

    def tick(self, now: float) -> None:
        """Observe what is due or new; give up jobs that do not come (P3, P4, W5)."""
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self.end.tick(now)
            for receiver in list(self.receivers.values()):
                self._have(receiver.inbound, WireReceiver.tell_silence)
        self.observe(now, fresh=now - self._told.at >= HEARTBEAT_S)

    def observe(self, now: float, *, fresh: bool) -> None:
        """Tell what there is, *fresh* or only if the router's part has changed."""
        house, told = self._house, self._told
        router, shares = house.router, house.shares
        models = {
            model: (
                shares.view(self.guest, model, router.fleet.free(model, now), now),
                state_of(router, model),
            )
            for model in router.fleet.models
        }
        if not fresh and models == told.models:
            return
        slots, load = slots_of(router)
        hosts, hosts_at = told.hosts, told.hosts_at
        looks = now - hosts_at >= HEARTBEAT_S
        if looks:
            # They are for people, and cost more than all the rest.
            hosts, hosts_at = hosts_of(router), now
        observation = Observation(
            house.epoch,
            house.next_sequence(),
            slots,
            load,
            models,
            context_of(router),
            lacks_of(router),
            None if hosts == told.hosts else hosts,
        )
        if looks:
            self._warn(observation)
        self.end.observe(observation)
        self._told = _Told(now, observation.sequence, models, hosts, hosts_at)

    def leave(self) -> None:
        """The connection is over: so is all that it had begun (P5)."""
        self.end.end()
        self._house.shares.leave(self.guest)
        self._house.changed()

    # ---- inner parts ----

    def _warn(self, seen: Observation) -> None:
        """Log, once, that *seen* has more than its router can be told of."""
        if not self._left_out and not fits(seen):
            self._left_out = True
            log.warning(
                "router %s is not told of all %d models and %d engines here: their"
                " names are too long, or there are too many",
                self.router_id,
                len(seen.models),
                len(self._house.router.workers),
            )

    def _ask(
        self, inbound: Inbound, question: Callable[[], Refusal | None]
    ) -> Refusal | None:
        """Answer an offer; a bug declines this one and no other (L1)."""
        try:
            refusal = question()
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: it ends this offer only
            self._house.router.report_bug("workers.agent", bug)
            refusal = Refusal(Decline.NO_ENGINE, BUG.message)
        if refusal is not None:
            self._note(inbound, refusal)
        return refusal

    def _have(self, inbound: Inbound, act: Callable[[WireReceiver], None]) -> None:
        """Have its receiver *act*; a bug ends this one and no other (L1)."""
        receiver = self.receivers.get(inbound.number)
        if receiver is None:
            return
        try:
            act(receiver)
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: it ends this one only
            self._house.router.report_bug("workers.agent", bug)
            if inbound.state is not State.ENDED:
                inbound.fail(BUG)
            # Not again for the one that failed as it left: it is over.
            self._have(inbound, WireReceiver.gone)

    def _against(self, inbound: Inbound) -> Refusal | None:
        """Ask in a fixed order; the end has asked for age, epoch and size."""
        house, target = self._house, inbound.offer.target
        if inbound.counts:
            return None
        if house.draining:
            return Refusal(Decline.DRAINING, "The worker drains.")
        if target not in house.router.fleet.models:
            return Refusal(Decline.UNKNOWN_MODEL, "The worker has no such model.")
        state = state_of(house.router, target)
        if state == COMES:
            return Refusal(Decline.LOADING, "The model is still loading.")
        if state != SERVES:
            return Refusal(Decline.NO_ENGINE, "No engine of this model is up.")
        free = house.router.fleet.free(target, trio.current_time())
        return None if house.shares.may(self.guest, target, free) else _FULL

    def _begin(self, inbound: Inbound, job: Job) -> Refusal | None:
        house, offer = self._house, inbound.offer
        if job.target != offer.target:
            return Refusal(Decline.BAD_JOB, "The job is for another model.")
        context, tokens = context_of(house.router), known_tokens(job)
        if context is not None and tokens is not None and tokens > context:
            return Refusal(
                Decline.CONTEXT_TOO_LONG, f"{tokens} tokens do not fit in {context}."
            )
        receiver = WireReceiver(inbound, lambda: self._over(inbound))
        begun = house.router.admit(
            # Signals and conventions are the router's, which asked for none here.
            attrs.evolve(job, exit_tools=(), loop_repeats_max=0),
            receiver,
            f"{offer.request}/{offer.attempt}",
        )
        if isinstance(begun, Fault):
            return self._refusal_of(begun)
        receiver.flight = begun
        self.receivers[offer.stream] = receiver
        house.shares.took(
            self.guest, offer.target, trio.current_time(), waiting=offer.waiting
        )
        house.changed()
        house.run(begun, receiver)
        return None

    def _refusal_of(self, fault: Fault) -> Refusal:
        reason = _REFUSALS.get(fault.kind, Decline.NO_ENGINE)
        return Refusal(reason, fault.message, fault.retry_after)

    def _note(self, inbound: Inbound, refusal: Refusal) -> None:
        """Count a no; the router hears first what it may have instead."""
        house, now = self._house, trio.current_time()
        self.refused(refusal.reason)
        if refusal.reason is Decline.NO_SLOT:
            house.shares.missed(self.guest, inbound.offer.target, now)
        if refusal.reason in _MISLED:
            self._correct(now)

    def _correct(self, now: float) -> None:
        """Say what there is, once a turn: one read may bring a thousand offers."""
        cork = self._house.router.cork
        if self._corrected:
            self._doubted = True
            return
        if cork.held:
            self._corrected = True
            cork.keep(self)
        self.observe(now, fresh=True)

    def _over(self, inbound: Inbound) -> None:
        if self.receivers.pop(inbound.number, None) is not None:
            self._house.shares.gave(self.guest, inbound.offer.target)
            self._house.changed()

    def _outbox_has_room(self) -> None:
        for receiver in list(self.receivers.values()):
            self._have(receiver.inbound, WireReceiver.resume)
