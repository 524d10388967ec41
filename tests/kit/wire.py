"""Both ends of the wire on paper: no socket, no clock but our own."""

from collections.abc import Sequence
from typing import Any

from router.messages import Job
from tests.kit.delivery import JOB, RecordingDelivery, assignment
from workers.wire.attempt import RemoteSource
from workers.wire.faults import Decline
from workers.wire.frames import (
    AGENT_SENDS,
    FRAME_MAX,
    ROUTER_SENDS,
    Message,
    Observation,
    Offer,
    Part,
    Reader,
    pack,
)
from workers.wire.hosting import AgentEnd, Memory, Refusal
from workers.wire.inbound import Inbound
from workers.wire.jobs import encode_job
from workers.wire.outbox import Outbox
from workers.wire.routing import COUNTS, ENDS_REASONING, RouterEnd

EPOCH = 7


def open_reader(sends: Sequence[type[Message]]) -> Reader:
    """A reader behind an opening."""
    reader = Reader(sends)
    reader.most = FRAME_MAX
    return reader


def drain(outbox: Outbox, sends: Sequence[type[Message]]) -> list[Any]:
    """Write all that *outbox* has to nobody; give its messages."""
    octets = []
    while chunk := outbox.pull():
        octets.append(chunk)
        outbox.wrote()
    reader = open_reader(sends)
    return [reader.decode(frame) for frame in reader.split(b"".join(octets))]


class Desk:
    """A router's end, its clock, and what it was told. Implements its port."""

    def __init__(self) -> None:
        self.time = 100.0
        self.observations: list[Observation] = []
        self.drains = 0
        self.catches = 0
        self.bugs: list[Exception] = []
        self.rings = 0
        self.end = RouterEnd(
            self,
            open_reader(AGENT_SENDS),
            EPOCH,
            frozenset({COUNTS, ENDS_REASONING}),
            self._ring,
        )

    def _ring(self) -> None:
        self.rings += 1

    def now(self) -> float:
        return self.time

    def observed(self, observation: Observation) -> None:
        self.observations.append(observation)

    def draining(self) -> None:
        self.drains += 1

    def catch_up(self) -> None:
        self.catches += 1

    def report_bug(self, where: str, bug: Exception) -> None:
        assert where
        self.bugs.append(bug)

    def offer(
        self, number: int = 1, job: Job = JOB, waiting: int = 0
    ) -> tuple[RemoteSource, RecordingDelivery]:
        delivery = RecordingDelivery()
        source = self.end.offer(assignment(number), job, delivery, waiting)
        source.opening = False
        return source, delivery

    def sent(self) -> list[Any]:
        """What went out since the last look."""
        return drain(self.end.outbox, ROUTER_SENDS)

    def hear(self, *messages: Message) -> None:
        """Take *messages* of the agent in one read."""
        self.time += 1.0
        self.end.received(b"".join(map(pack, messages)), self.time)


class Counter:
    """An agent's end and its gate, which says what it is told to say."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.against: Refusal | None = None
        self.looks: list[Inbound] = []
        self.begun: list[tuple[Inbound, Job]] = []
        self.asked: list[Inbound] = []
        self.refusals: list[Decline] = []
        self.left: list[Inbound] = []
        self.roomy: list[Inbound] = []
        self.ended_reasoning: list[Inbound] = []
        self.end = AgentEnd(
            self,
            memory or Memory(),
            open_reader(ROUTER_SENDS),
            EPOCH,
            lambda: None,
            body_max=1_000_000,
            bodies_max=2_000_000,
        )

    def look(self, inbound: Inbound) -> Refusal | None:
        self.looks.append(inbound)
        return self.against

    def begin(self, inbound: Inbound, job: Job) -> Refusal | None:
        if self.against is None:
            self.begun.append((inbound, job))
        return self.against

    def count(self, inbound: Inbound, job: Job) -> None:
        del job
        self.asked.append(inbound)

    def refused(self, reason: Decline) -> None:
        self.refusals.append(reason)

    def cancelled(self, inbound: Inbound) -> None:
        self.left.append(inbound)

    def has_room(self, inbound: Inbound) -> None:
        self.roomy.append(inbound)

    def end_reasoning(self, inbound: Inbound) -> None:
        self.ended_reasoning.append(inbound)

    def sent(self) -> list[Any]:
        return drain(self.end.outbox, AGENT_SENDS)

    def hear(self, *messages: Message) -> None:
        self.end.received(b"".join(map(pack, messages)), 0.0)

    def take_on(
        self, number: int = 1, *, credit: int = 10_000, job: Job = JOB, **offer: Any
    ) -> Inbound:
        """Have an offer accepted; its answer is left out."""
        self.hear(*offered(number, credit=credit, job=job, **offer))
        inbound, _ = self.begun[-1]
        self.sent()
        return inbound


def offered(
    number: int = 1,
    *,
    request: str | None = None,
    attempt: int = 1,
    credit: int = 10_000,
    job: Job = JOB,
    epoch: int = EPOCH,
    purpose: int = 0,
    waiting: int = 0,
) -> list[Message]:
    """An offer and its whole job."""
    octets = encode_job(job)
    offer = Offer(
        number,
        request or f"r{number}",
        attempt,
        epoch,
        job.target,
        len(octets),
        credit,
        waiting,
        purpose,
    )
    return [offer, Part(number, 0, octets)]
