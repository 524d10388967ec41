"""What the wire costs at either end, in nanoseconds: no socket, no clock.

``python -m bench.wire``: for frames of one engine step of so many streams, what a
delta costs to encode, to take apart, and to bring from the wire to a delivery.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from router.errors import Fault
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, Job, Kind
from workers.wire.faults import Decline
from workers.wire.frames import (
    AGENT_SENDS,
    FRAME_MAX,
    ROUTER_SENDS,
    Accepted,
    Credit,
    Deltas,
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
from workers.wire.routing import RouterEnd

STREAMS: Final = (1, 64, 512)
ROUNDS: Final = 200
JOB: Final = Job("m", ({"role": "user", "content": "Tell me of a river."},), "m")


class Nobody:
    """Takes deltas, and everything else that either end may ask of anybody."""

    def accepted(self, assignment: AssignmentId) -> None:
        """Note nothing."""

    def progress(self, assignment: AssignmentId) -> None:
        """Note nothing."""

    def deltas(self, assignment: AssignmentId, deltas: Sequence[Delta]) -> None:
        """Take them."""

    def finished(self, finished: Finished) -> None:
        """Note nothing."""

    def failed(self, assignment: AssignmentId, fault: Fault) -> None:
        """Note nothing."""

    def now(self) -> float:
        """Stand still."""
        return 0.0

    def observed(self, observation: Observation) -> None:
        """Note nothing."""

    def draining(self) -> None:
        """Note nothing."""

    def catch_up(self) -> None:
        """Note nothing."""

    def report_bug(self, where: str, bug: Exception) -> None:
        """Let none pass."""
        raise RuntimeError(where) from bug

    def look(self, inbound: Inbound) -> Refusal | None:
        """Let all in."""
        del inbound
        return None

    def begin(self, inbound: Inbound, job: Job) -> Refusal | None:
        """Take all on."""
        del inbound, job
        return None

    def count(self, inbound: Inbound, job: Job) -> None:
        """Count nothing."""

    def refused(self, reason: Decline) -> None:
        """Let none pass."""
        raise RuntimeError(reason)

    def cancelled(self, inbound: Inbound) -> None:
        """Note nothing."""

    def has_room(self, inbound: Inbound) -> None:
        """Note nothing."""

    def end_reasoning(self, inbound: Inbound) -> None:
        """Note nothing."""


def reader(sends: Sequence[type]) -> Reader:
    """Read behind an opening."""
    made = Reader(sends)
    made.most = FRAME_MAX
    return made


def median_ns(call: Callable[[int], object], parts: int) -> float:
    """Give the median of what one of *parts* costs in a call."""
    found = []
    for number in range(ROUNDS):
        start = time.perf_counter_ns()
        call(number)
        found.append((time.perf_counter_ns() - start) / parts)
    return statistics.median(found)


def router_ns(streams: int) -> float:
    """From the bytes of a step to the call of each delivery."""
    end = RouterEnd(Nobody(), reader(AGENT_SENDS), 1, frozenset(), lambda: None)
    sources = [
        end.offer(AssignmentId(RequestId(f"r{n}"), 1), JOB, Nobody(), 0)
        for n in range(streams)
    ]
    end.received(b"".join(pack(Accepted(s.number)) for s in sources), 0.0)
    steps = [
        pack(Deltas([(s.number, n, 0, f" tok{n % 97}") for s in sources]))
        for n in range(ROUNDS)
    ]
    return median_ns(lambda n: end.received(steps[n], 0.0), streams)


def agent_ns(streams: int) -> float:
    """From deltas of so many streams to the bytes of a step."""
    end = AgentEnd(
        Nobody(),
        Memory(),
        reader(ROUTER_SENDS),
        1,
        lambda: None,
        body_max=10**6,
        bodies_max=10**9,
    )
    octets = encode_job(JOB)
    for number in range(1, streams + 1):
        offer = Offer(number, f"r{number}", 1, 1, "m", len(octets), 10**9)
        end.received(pack(offer) + pack(Part(number, 0, octets)), 0.0)
    end.outbox.pull()
    inbounds = list(end.inbounds.values())
    assignment = AssignmentId(RequestId("r"), 1)
    deltas = [[Delta(assignment, n, Kind.TEXT, f" tok{n % 97}")] for n in range(ROUNDS)]

    def step(number: int) -> None:
        for inbound in inbounds:
            inbound.deltas(deltas[number])
        end.outbox.pull()

    return median_ns(step, streams)


def main() -> None:
    """Print the figures."""
    print(f"{'streams a step':<18}{'encode':>9}{'decode':>9}{'agent':>9}{'router':>9}")
    for streams in STREAMS:
        message = Deltas([(n + 1, 7, 0, f" tok{n % 97}") for n in range(streams)])
        frame = pack(message)
        read = reader(AGENT_SENDS)

        def decode(_: int, frame: bytes = frame, read: Reader = read) -> object:
            return [read.decode(one) for one in read.split(frame)]

        def encode(_: int, message: Message = message) -> object:
            return pack(message)

        print(
            f"{streams:<18}"
            f"{median_ns(encode, streams):>9.0f}"
            f"{median_ns(decode, streams):>9.0f}"
            f"{agent_ns(streams):>9.0f}"
            f"{router_ns(streams):>9.0f}   ns a delta"
        )
    credit = pack(Credit(1, 65536))
    read = reader(ROUTER_SENDS)
    print(
        f"a small frame: {median_ns(lambda _: pack(Credit(1, 65536)), 1):.0f} ns to"
        f" encode, {median_ns(lambda _: read.decode(read.split(credit)[0]), 1):.0f} ns"
        " to decode"
    )


if __name__ == "__main__":
    main()
