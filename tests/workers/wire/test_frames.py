"""The codec: what is one of the peer's frames, and what is anything else."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.wire.frames import (
    AGENT_SENDS,
    FRAME_MAX,
    FRAME_MAX_UNPROVEN,
    PART_MAX,
    ROUTER_SENDS,
    Accepted,
    Bye,
    Cancel,
    Deltas,
    Message,
    Offer,
    Part,
    Reader,
    Reason,
    RichDelta,
    WireError,
    encode,
    pack,
)

OFFER = Offer(1, "req_1", 1, 7, "m", 10, 65536)


def reader(sends: tuple[type[Message], ...] = AGENT_SENDS) -> Reader:
    made = Reader(sends)
    made.most = FRAME_MAX
    return made


def reason(octets: bytes, sends: tuple[type[Message], ...] = AGENT_SENDS) -> Reason:
    read = reader(sends)
    with pytest.raises(WireError) as raised:
        list(map(read.decode, read.split(octets)))
    return raised.value.reason


def framed(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + body


def test_p1_a_frame_is_a_length_and_one_array() -> None:
    assert pack(Accepted(3)) == b"\x00\x00\x00\x03\x92\x20\x03"


@given(st.data())
def test_p1_frames_come_out_whole_however_they_are_cut(draw: st.DataObject) -> None:
    messages: list[Message] = [
        Deltas([(1, 0, 0, "a"), (2, 5, 1, "é")]),
        Accepted(9),
        RichDelta(1, 1, "tool_call", "{", None, b"[]"),
        Bye("stopping", "x" * 300),
    ]
    octets = b"".join(map(pack, messages))
    places = draw.draw(st.lists(st.integers(0, len(octets)), max_size=8))
    cuts = sorted([*places, 0, len(octets)])
    read = reader()

    found = [
        read.decode(frame)
        for start, end in pairwise(cuts)
        for frame in read.split(octets[start:end])
    ]

    assert found == messages
    assert read.held == 0


def test_p1_a_line_of_one_mebibyte_fits() -> None:
    text = "x" * (1024 * 1024)

    (frame,) = reader().split(pack(Deltas([(1, 0, 0, text)])))

    assert len(frame) < FRAME_MAX


def test_p1_a_frame_over_the_limit_is_refused_at_its_length() -> None:
    assert reason((FRAME_MAX + 1).to_bytes(4, "big")) is Reason.OVERSIZE
    assert reason(b"\0\0\0\0") is Reason.OVERSIZE


def test_p1_strangers_get_a_smaller_limit() -> None:
    read = Reader(AGENT_SENDS)

    (frame,) = read.split((FRAME_MAX_UNPROVEN + 1).to_bytes(4, "big"))
    with pytest.raises(WireError) as raised:
        read.decode(frame)
    assert raised.value.reason is Reason.OVERSIZE
    assert raised.value.words == f"a frame of {FRAME_MAX_UNPROVEN + 1} bytes"


@pytest.mark.parametrize("bad", [b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_p2_what_came_whole_before_a_bad_length_is_read(bad: bytes) -> None:
    read = reader()
    first, second = read.split(pack(Accepted(1)) + bad + pack(Accepted(2)))
    assert read.decode(first) == Accepted(1)

    for frame in (second, *read.split(pack(Accepted(3)))):
        with pytest.raises(WireError) as raised:
            read.decode(frame)
        assert raised.value.reason is Reason.OVERSIZE


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (b"\x00\x00\x00\x01\xc1", Reason.GARBAGE),
        (b"\x00\x00\x00\x02\x92\x20", Reason.GARBAGE),
        (b"GET / HTTP/1.1\r\n\r\n", Reason.OVERSIZE),
        (framed([]), Reason.BAD_SHAPE),
        (framed("accepted"), Reason.BAD_SHAPE),
        (framed({"type": 32}), Reason.BAD_SHAPE),
        (framed(["accepted", 1]), Reason.BAD_SHAPE),
        (framed([99, 1]), Reason.UNKNOWN_MESSAGE),
        (framed([32]), Reason.BAD_SHAPE),
        (framed([32, "1"]), Reason.BAD_SHAPE),
        (framed([32, 0]), Reason.BAD_SHAPE),
        (framed([32, -1]), Reason.BAD_SHAPE),
        (framed([32, 2**60]), Reason.BAD_SHAPE),
        (framed([32, 1, 2]), Reason.BAD_SHAPE),
        (framed([35, [[1, 0, 3, "kind 3"]]]), Reason.BAD_SHAPE),
        (framed([35, [[1, 0, -1, "kind -1"]]]), Reason.BAD_SHAPE),
        (framed([35, [[1, 0, 0]]]), Reason.BAD_SHAPE),
        (framed([35, [[1, 0, 0, b"\xff"]]]), Reason.BAD_SHAPE),
        (framed([True, 1]), Reason.BAD_SHAPE),
    ],
)
def test_p2_what_is_no_message_of_the_peer_has_a_reason(
    octets: bytes, why: Reason
) -> None:
    assert reason(octets) is why


@pytest.mark.parametrize("kind", sorted(set(ROUTER_SENDS) - set(AGENT_SENDS), key=str))
def test_p2_an_agent_says_nothing_that_routers_say(kind: type[Message]) -> None:
    assert reason(framed([kind.__struct_config__.tag])) is Reason.WRONG_DIRECTION


@pytest.mark.parametrize("kind", sorted(set(AGENT_SENDS) - set(ROUTER_SENDS), key=str))
def test_p2_a_router_says_nothing_that_agents_say(kind: type[Message]) -> None:
    octets = framed([kind.__struct_config__.tag])

    assert reason(octets, ROUTER_SENDS) is Reason.WRONG_DIRECTION


def test_p2_no_number_means_two_messages() -> None:
    numbers = [kind.__struct_config__.tag for kind in {*ROUTER_SENDS, *AGENT_SENDS}]

    assert len(set(numbers)) == len(numbers)


def test_a_part_has_its_limit() -> None:
    assert pack(Part(1, 0, b"x" * PART_MAX))
    assert reason(pack(Part(1, 0, b"x" * (PART_MAX + 1))), ROUTER_SENDS) is (
        Reason.BAD_SHAPE
    )


def test_deep_nesting_is_bad_and_no_crash() -> None:
    deep = b"\x91" * 100_000
    octets = len(deep).to_bytes(4, "big") + deep

    assert reason(octets) in {Reason.GARBAGE, Reason.BAD_SHAPE}


def test_h8_no_error_repeats_what_was_in_the_frame() -> None:
    secret = "the secret of a user"
    read = reader(ROUTER_SENDS)

    with pytest.raises(WireError) as raised:
        read.decode(encode(Cancel(1))[:1] + msgspec.msgpack.encode(secret))
    assert secret not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_message_survives_its_bytes() -> None:
    rng = random.Random(3)
    for _ in range(200):
        entries = [
            (rng.randrange(1, 2**53), rng.randrange(2**40), rng.randrange(3), "é" * n)
            for n in range(rng.randrange(5))
        ]
        (frame,) = reader().split(pack(Deltas(entries)))
        assert reader().decode(frame) == Deltas(entries)
    (frame,) = reader(ROUTER_SENDS).split(pack(OFFER))
    assert reader(ROUTER_SENDS).decode(frame) == OFFER
