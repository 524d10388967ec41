"""The agent's end of an open wire: offers in, deltas out (P2, P3, F8).

Rule 1: an assignment is begun at most once, whatever comes twice: a duplicate
offer is acknowledged again, one that is not newer is declined. Rule 2: whether
there is a slot is the gate's to say; nothing waits for one here. Pure.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import attrs

from router.messages import Job
from workers.wire.faults import Decline
from workers.wire.frames import (
    Bye,
    Cancel,
    Credit,
    EndReasoning,
    Failed,
    Message,
    Observation,
    Offer,
    Part,
    Reader,
    Reason,
    Seen,
    WireError,
)
from workers.wire.gathering import Gathering, Room
from workers.wire.inbound import Inbound, State
from workers.wire.jobs import JobUnreadable, decode_job
from workers.wire.opening import heard
from workers.wire.outbox import Outbox
from workers.wire.shapes import fit

#: Ends that are kept for duplicate offers, and requests whose attempts are.
ENDED_MAX: Final = 256
REQUESTS_MAX: Final = 4096
#: Bytes of an error body that is kept with an end.
LAST_MAX: Final = 1024
#: Answers of one connection whose end may wait for credit when their slots are long
#: free.
LINGERING_MAX: Final = 1024


@attrs.frozen
class Refusal:
    """Why a job is not begun."""

    reason: Decline
    words: str = ""
    retry_after: float | None = None


class Gate(Protocol):
    """Who decides, and runs what was accepted: the agent."""

    def look(self, inbound: Inbound) -> Refusal | None:
        """Say what is against an offer before its job is here."""

    def begin(self, inbound: Inbound, job: Job) -> Refusal | None:
        """Reserve a slot and begin, or say why not.

        None: it has a slot, and will begin when this has returned.
        """

    def count(self, inbound: Inbound, job: Job) -> None:
        """Count a prompt; the answer goes to ``inbound.counted``."""

    def refused(self, reason: Decline) -> None:
        """Take note of a decline that is the wire's own, not the gate's."""

    def cancelled(self, inbound: Inbound) -> None:
        """Its router wants it no more."""

    def has_room(self, inbound: Inbound) -> None:
        """It may emit again, after it might not."""

    def end_reasoning(self, inbound: Inbound) -> None:
        """Have its engine reason no longer."""


class Memory:
    """What all connections of an agent share: what was offered, what is coming.

    It knows the newest attempt of each request that was ever offered: whoever
    offers an old one gets no second generation (F8). Bounded; what is forgotten is
    older than any router's try.
    """

    def __init__(self, most: int = REQUESTS_MAX) -> None:
        """Remember *most* requests, the newest."""
        self._most = most
        self._newest: OrderedDict[str, int] = OrderedDict()
        #: For the jobs that are on their way.
        self.room = Room()

    def admit(self, request: str, attempt: int) -> bool:
        """Take note of *attempt*; False: one that is not older was offered."""
        if attempt <= self._newest.get(request, 0):
            return False
        self._newest[request] = attempt
        self._newest.move_to_end(request)
        if len(self._newest) > self._most:
            self._newest.popitem(last=False)
        return True


class AgentEnd:
    """All that one open connection carries, seen from its agent."""

    def __init__(
        self,
        gate: Gate,
        memory: Memory,
        reader: Reader,
        epoch: int,
        ring: Callable[[], None],
        *,
        body_max: int,
        bodies_max: int,
    ) -> None:
        """Open for offers.

        Args:
            gate: the agent.
            memory: the agent's, shared by all its connections.
            reader: the opening's.
            epoch: the agent's own.
            ring: see `Outbox`.
            body_max: bytes of one job.
            bodies_max: bytes of all jobs that are on their way to this agent,
                on whatever connection.
        """
        self.outbox = Outbox(ring)
        self.inbounds: dict[int, Inbound] = {}
        #: Messages for assignments that are over (F4).
        self.late = 0
        #: The newest observation that the router has answered.
        self.seen = 0
        #: The greatest number that was offered: they only grow.
        self._newest = 0
        self._gate = gate
        self._memory = memory
        self._reader = reader
        self._epoch = epoch
        self._gathering = Gathering(
            memory.room, body_max=body_max, bodies_max=bodies_max
        )
        self._lingering: set[int] = set()
        self._ended: OrderedDict[int, Message | None] = OrderedDict()

    # ---- bytes from the router ----

    def received(self, octets: bytes, now: float) -> None:
        """Take one read.

        Raises:
            WireError: the connection is of no more use.
            ByeHeard: the router closes it.
        """
        del now
        decode = self._reader.decode
        for frame in self._reader.split(octets):
            self.take(decode(frame))

    def take(self, message: Message) -> None:
        """Take one message. Raises as ``received``."""
        match message:
            case Offer():
                self._offer(message)
            case Part():
                self._part(message)
            case Cancel(stream=number):
                inbound = self._find(number)
                if inbound is not None:
                    self._drop(inbound)
            case Credit(stream=number, total=total):
                inbound = self._find(number)
                if inbound is not None and inbound.grant(total):
                    self._gate.has_room(inbound)
            case Seen(sequence=sequence):
                self.seen = max(self.seen, sequence)
            case EndReasoning(stream=number):
                inbound = self._find(number)
                if inbound is not None:
                    self._gate.end_reasoning(inbound)
            case Bye():
                raise heard(message)
            case _:
                raise WireError(
                    Reason.OUT_OF_ORDER,
                    f"{type(message).__name__} on an open connection",
                )

    # ---- calls from the agent ----

    def observe(self, observation: Observation) -> None:
        """Tell the router what the agent is, as far as a frame has it."""
        self.outbox.put(fit(observation))

    def tick(self, now: float) -> None:
        """Decline what comes no more (P3). Call it every second, or more often."""
        for inbound in self._gathering.overdue(now):
            self._gathering.remove(inbound)
            self._refuse(inbound, Decline.TOO_LARGE, "The request does not come.")

    def end(self) -> None:
        """The connection is gone: so is all that it had begun, at once (P5)."""
        for inbound in list(self.inbounds.values()):
            self._drop(inbound)

    def over(self, inbound: Inbound, last: Message | None) -> None:
        """See ``inbound.End``."""
        number = inbound.number
        if self.inbounds.pop(number, None) is not None:
            # What is long is not worth keeping for what never happens on TCP.
            long = isinstance(last, Failed) and len(last.body) > LAST_MAX
            self._ended[number] = None if long else last
            if len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
            self._lingering.discard(number)

    def lingers(self, inbound: Inbound) -> None:
        """See ``inbound.End``."""
        self._lingering.add(inbound.number)

    # ---- inner parts ----

    def _find(self, number: int) -> Inbound | None:
        inbound = self.inbounds.get(number)
        if inbound is None:
            self.late += 1
        return inbound

    def _offer(self, offer: Offer) -> None:
        known = self.inbounds.get(offer.stream)
        if known is not None:
            if known.offer != offer:
                raise WireError(Reason.OUT_OF_ORDER, "one number for two assignments")
            if known.state is not State.ENDED:
                known.again()
            return
        if offer.stream <= self._newest:
            # It is over, be that long ago.
            self.late += 1
            last = self._ended.get(offer.stream)
            if last is not None:
                self.outbox.put(last)
            return
        self._newest = offer.stream
        inbound = Inbound(self, offer)
        self.inbounds[offer.stream] = inbound
        if self._refused(inbound):
            return
        refusal = self._gate.look(inbound)
        if refusal is None:
            self._gathering.add(inbound)
        else:
            self._decline(inbound, refusal)

    def _refused(self, inbound: Inbound) -> bool:
        """Ask what the gate need not be asked; True: it is declined."""
        offer = inbound.offer
        if not inbound.counts and not self._memory.admit(offer.request, offer.attempt):
            words = "This attempt is not newer than the last."
            self._refuse(inbound, Decline.STALE, words)
        elif offer.epoch != self._epoch:
            self._refuse(inbound, Decline.WRONG_EPOCH, "The worker was restarted.")
        elif (
            not self._gathering.fits(offer.size)
            or len(self._lingering) >= LINGERING_MAX
        ):
            words = "The worker has no room for the request."
            self._refuse(inbound, Decline.TOO_LARGE, words)
        else:
            return False
        return True

    def _part(self, part: Part) -> None:
        inbound = self._find(part.stream)
        if inbound is None or inbound.state is not State.GATHERING:
            return
        if part.offset != inbound.got:
            # Only what is next is taken: a repeat is nothing new, and after a
            # gap the job never gets whole.
            self.late += 1
            return
        if inbound.got + len(part.octets) > inbound.offer.size:
            raise WireError(Reason.OUT_OF_ORDER, "a job longer than it was offered")
        inbound.octets += part.octets
        inbound.got += len(part.octets)
        if inbound.got == inbound.offer.size:
            self._begin(inbound)

    def _begin(self, inbound: Inbound) -> None:
        self._gathering.remove(inbound)
        octets = bytes(inbound.octets)
        inbound.octets.clear()
        try:
            job = decode_job(octets)
        except JobUnreadable:
            self._refuse(inbound, Decline.BAD_JOB, "No job can be read.")
            return
        if inbound.counts:
            self._gate.count(inbound, job)
            return
        refusal = self._gate.begin(inbound, job)
        if refusal is None:
            inbound.accept()
        else:
            self._decline(inbound, refusal)

    def _refuse(self, inbound: Inbound, reason: Decline, words: str) -> None:
        """Decline for a reason of our own."""
        self._gate.refused(reason)
        inbound.decline(reason, words)

    def _decline(self, inbound: Inbound, refusal: Refusal) -> None:
        """Decline for a reason of the gate's, which knows of it."""
        inbound.decline(refusal.reason, refusal.words, refusal.retry_after)

    def _drop(self, inbound: Inbound) -> None:
        if inbound.state is State.ENDED:
            # Its end waits for credit that will not come.
            self.over(inbound, None)
            return
        self._gathering.remove(inbound)
        inbound.cancel()
        self._gate.cancelled(inbound)
