"""A million mutated frames at each end: closed with a reason, never a crash (T7).

Streams of good frames are changed byte by byte, frame by frame, and cut; what
comes of it is a delivery, a fault of one assignment, or a reason to close.
"""

import random
import time
from collections import Counter
from typing import Any

import pytest

from tests.kit.deep import size
from tests.kit.delivery import JOB
from tests.kit.wire import Counter as Host
from tests.kit.wire import Desk, offered
from workers.wire import frames
from workers.wire.frames import (
    AGENT_SENDS,
    FRAME_MAX,
    ROUTER_SENDS,
    Accepted,
    Cancel,
    Credit,
    Deltas,
    Message,
    Observation,
    Part,
    Reader,
    Reason,
    RichDelta,
    Seen,
    Tool,
    Waiting,
    WireError,
    pack,
)
from workers.wire.inbound import Inbound, State
from workers.wire.opening import ByeHeard, Opening, Passport, Role

#: Frames thrown at each of the two ends, and at the opening.
MUTANTS = size(1_000_000, least=20_000)
#: Streams of some frames each, for one connection.
STREAMS = 4

FROM_AGENT: list[Message] = [
    Accepted(1),
    Waiting(1, "busy"),
    Deltas([(1, 0, 0, "a"), (1, 1, 1, "b"), (2, 0, 0, "é")]),
    RichDelta(1, 2, "tool_call", "{}", Tool(0, "id", "f"), b"[]"),
    frames.Piece(1, 3, 0, "piece"),
    frames.Finishing(1, 3, "stop"),
    frames.Finished(1, 3, "stop", frames.Tokens(1, 2, None, None), "END"),
    frames.Failed(2, "stalled", "words", 500, b"body", "t", 5, "p", "c"),
    frames.Declined(3, "no_slot", "words", 5),
    Observation(7, 1, 4, 1, {"m": (3, 2)}, 4096, ["min_p"], []),
    frames.Draining(),
    frames.Counted(4, 17),
]
FROM_ROUTER: list[Message] = [
    *offered(1),
    *offered(2),
    *offered(3, purpose=1),
    Credit(1, 100_000),
    Seen(3),
    frames.EndReasoning(1),
    Cancel(2),
    Part(1, 0, b"x" * 100),
]


def mutate(rng: random.Random, octets: bytes) -> bytes:
    """Change some of *octets*, in one of the ways that bytes go bad."""
    data = bytearray(octets)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(7):
            case 0 if data:
                data[place] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[place] = rng.randrange(256)
            case 2:
                del data[place : place + rng.randrange(1, 9)]
            case 3:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case 4 if len(data) > 4:
                # The body goes bad, and the length fits it.
                data[4 + rng.randrange(len(data) - 4)] = rng.randrange(256)
            case 5:
                data[place:place] = data[: rng.randrange(len(data) + 1)]
            case _:
                del data[place:]
    return bytes(data)


def stream_of(
    rng: random.Random, messages: list[Message], others: list[Message]
) -> list[bytes]:
    """Some frames in some order, one of them mutated, or the other end's."""
    chosen = [pack(rng.choice(messages)) for _ in range(rng.randrange(1, 5))]
    place = rng.randrange(len(chosen))
    if rng.randrange(50):
        chosen[place] = mutate(rng, chosen[place])
    else:
        chosen[place] = pack(rng.choice(others))
    return chosen


def throw(end: Any, octets: bytes, reasons: Counter[str]) -> bool:
    """Let *end* take *octets*; False: it closed, with a reason."""
    try:
        end.received(octets, 1.0)
    except ByeHeard:
        reasons["bye"] += 1
        return False
    except WireError as why:
        reasons[why.reason.value] += 1
        return False
    return True


@pytest.mark.deep
def test_t7_mutated_frames_of_an_agent_crash_no_router() -> None:
    rng = random.Random(1)
    reasons: Counter[str] = Counter()
    thrown = 0
    while thrown < MUTANTS:
        desk = Desk()
        for number in (1, 2, 3):
            desk.offer(number)
        desk.end.count(JOB, lambda _: None)
        desk.sent()
        alive = True
        # Not for long: a length that went up swallows all that follows it.
        for _ in range(STREAMS):
            for octets in stream_of(rng, FROM_AGENT, FROM_ROUTER):
                thrown += alive
                alive = alive and throw(desk.end, octets, reasons)
        assert desk.bugs == []
        assert desk.end._reader.held <= FRAME_MAX + 4
        for source in list(desk.end.sources.values()):
            source.close()
        assert desk.end.sources == {}
    assert {"oversize", "garbage", "bad_shape", "wrong_direction"} <= set(reasons)
    assert set(reasons) <= {reason.value for reason in Reason} | {"bye"}


@pytest.mark.deep
def test_t7_mutated_frames_of_a_router_crash_no_agent() -> None:
    rng = random.Random(2)
    reasons: Counter[str] = Counter()
    thrown = 0
    while thrown < MUTANTS:
        host = Host()
        alive = True
        # Not for long: a length that went up swallows all that follows it.
        for _ in range(STREAMS):
            for octets in stream_of(rng, FROM_ROUTER, FROM_AGENT):
                thrown += alive
                alive = alive and throw(host.end, octets, reasons)
            for inbound, _ in host.begun:
                emit(inbound)
        host.end.end()
        assert host.end.inbounds == {}
        assert len(host.end._gathering) == 0
        assert host.end._memory.room.taken == 0
    assert {"oversize", "garbage", "bad_shape", "wrong_direction"} <= set(reasons)


def emit(inbound: Inbound) -> None:
    """Let what was begun say something, if it still may."""
    if inbound.state is State.RUNNING:
        inbound.wait("busy")


@pytest.mark.deep
def test_t7_mutated_openings_let_nobody_in() -> None:
    rng = random.Random(3)
    token = b"a token that is long enough"
    opened = 0
    for _ in range(MUTANTS // 4):
        agent = Opening(Passport(Role.AGENT, "a", 1, token=token), rng.randbytes(32))
        router = Opening(Passport(Role.ROUTER, "r", 1, token=token), rng.randbytes(32))
        hello = router.out.pop(0)
        bad = rng.randrange(3)
        try:
            agent.receive(mutate(rng, hello) if bad == 0 else hello)
            for octets in agent.out:
                router.receive(octets)
            proof = router.out.pop(0)
            changed = mutate(rng, proof) if bad == 1 else proof
            if bad == 2:
                changed = pack(frames.Proof(rng.randbytes(32)))
            if agent.receive(changed) and bad == 1 and changed[: len(proof)] != proof:
                opened += 1
        except (WireError, IndexError):
            continue
        assert bad != 2, "a guessed proof was believed"
    assert opened == 0


@pytest.mark.deep
@pytest.mark.parametrize("sends", [AGENT_SENDS, ROUTER_SENDS], ids=["agent", "router"])
def test_t7_random_bytes_are_refused_in_bounded_time_and_space(
    sends: tuple[type[Message], ...],
) -> None:
    rng = random.Random(4)
    began = time.perf_counter()
    for _ in range(MUTANTS // 10):
        reader = Reader(sends)
        reader.most = FRAME_MAX
        octets = rng.randbytes(rng.randrange(1, 300))
        try:
            for frame in reader.split(octets):
                reader.decode(frame)
        except WireError:
            continue
        assert reader.held <= 300
    assert (time.perf_counter() - began) / (MUTANTS // 10) < 0.001
