"""The sink over a socket double: short sends, refusals, broken pipes."""

import errno

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import given

from router.edge.sink import BEHIND, HIGH, LOW, Sink
from router.ports import Taken
from router.tally import Tally
from tests.kit.cork import strict_cork
from tests.kit.short_socket import CountedRooms, ShortSocket

NEVER = 0
"""A script's step: the kernel takes nothing."""


class Rig:
    """A sink, and all that it touches."""

    def __init__(self, *script: int | OSError) -> None:
        self.sock = ShortSocket(script)
        self.rooms = CountedRooms()
        self.tally = Tally()
        self.cork = strict_cork()
        self.sink = Sink(self.sock, self.rooms, self.tally, self.cork)
        self.told: list[str] = []
        self.sink.on_room = lambda: self.told.append("room")
        self.sink.on_cut = lambda: self.told.append("cut")
        self.sink.on_empty = lambda: self.told.append("empty")


async def test_what_the_kernel_takes_at_once_is_never_held() -> None:
    rig = Rig()

    taken = rig.sink.write(b"abc")

    assert taken is Taken.MORE
    assert rig.sock.sent == b"abc"
    assert rig.sink.held == 0
    assert rig.rooms.asked == []


async def test_the_rest_of_a_short_send_waits_for_room() -> None:
    rig = Rig(1)

    taken = rig.sink.write(b"abc")

    assert taken is Taken.MORE
    assert rig.sink.held == 2
    assert rig.rooms.asked == [True]


async def test_bytes_written_while_some_are_held_queue_up_behind_them() -> None:
    rig = Rig(1)
    rig.sink.write(b"abc")

    rig.sink.write(b"def")
    rig.sink.flush()

    assert rig.sock.sent == b"abcdef"
    assert rig.sock.calls == 2
    assert rig.told == ["empty"]
    assert rig.rooms.asked == [True, False]


async def test_a_kernel_that_takes_nothing_is_no_failure() -> None:
    rig = Rig(NEVER, NEVER)
    rig.sink.write(b"abc")

    rig.sink.flush()

    assert rig.sink.held == 3
    assert not rig.sink.cut_off


async def test_a_broken_pipe_is_an_answer_and_no_exception() -> None:
    rig = Rig(OSError(errno.EPIPE, "broken"))

    assert rig.sink.write(b"abc") is Taken.GONE
    assert rig.sink.write(b"abc") is Taken.GONE
    assert rig.sock.calls == 1
    assert rig.sink.cut_off


async def test_a_pipe_that_breaks_in_a_flush_cuts_the_sink() -> None:
    rig = Rig(1, OSError(errno.ECONNRESET, "reset"))
    rig.sink.write(b"abc")

    rig.sink.flush()

    assert rig.sink.cut_off
    assert rig.sink.held == 0
    assert rig.told == ["empty"]
    assert rig.rooms.asked == [True, False]


async def test_h5_full_at_the_high_mark_and_room_at_the_low_one() -> None:
    rig = Rig(NEVER, HIGH - LOW - 1, 1)

    assert rig.sink.write(bytes(HIGH)) is Taken.FULL
    rig.sink.flush()
    assert rig.told == []
    rig.sink.flush()
    assert rig.sink.held == LOW
    assert rig.told == ["room"]
    rig.sink.flush()
    assert not rig.sink.full
    assert rig.told == ["room", "empty"]


async def test_h5_below_the_high_mark_one_event_is_taken_however_large() -> None:
    rig = Rig(NEVER)
    rig.sink.write(bytes(HIGH - 1))

    assert rig.sink.write(bytes(3 * BEHIND)) is Taken.FULL
    assert not rig.sink.cut_off


@pytest.mark.parametrize("corked", [False, True])
async def test_h5_behind_a_large_event_the_end_of_its_answer_is_taken(
    corked: bool,
) -> None:
    rig = Rig(NEVER)
    if corked:
        rig.cork.hold(0.0)
    assert rig.sink.write(bytes(3 * BEHIND)) is Taken.FULL

    assert rig.sink.write(b"the end") is Taken.FULL
    assert rig.sink.write(bytes(BEHIND)) is Taken.GONE


async def test_h5_past_the_ceiling_the_client_is_cut_and_its_bytes_dropped() -> None:
    rig = Rig(NEVER)
    rig.sink.write(bytes(HIGH))

    assert rig.sink.write(bytes(BEHIND)) is Taken.FULL
    assert rig.sink.write(b"x") is Taken.GONE
    assert rig.sink.held == 0
    assert rig.tally.buffer_high_water == HIGH + BEHIND


async def test_h5_a_sink_stalls_only_while_bytes_are_held_and_none_move(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(1, 1)
    began = trio.current_time()
    assert not rig.sink.stalled(began + 1000, 10)

    rig.sink.write(b"abc")
    assert not rig.sink.stalled(began + 9.9, 10)
    assert rig.sink.stalled(began + 10, 10)

    await trio.sleep(6)
    rig.sink.flush()
    assert not rig.sink.stalled(began + 15.9, 10)
    assert rig.sink.stalled(began + 16, 10)

    rig.sink.flush()
    assert not rig.sink.stalled(began + 1000, 10)


async def test_an_abandoned_sink_tells_nobody_and_takes_nothing() -> None:
    rig = Rig(NEVER)
    rig.sink.write(bytes(HIGH))

    rig.sink.abandon()

    assert rig.sink.write(b"x") is Taken.GONE
    assert rig.told == []
    # Its owner takes it out of the poll before closing it.
    assert rig.rooms.asked == [True]


async def test_p7_what_a_turn_brings_goes_out_in_one_write_behind_it() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    assert rig.sink.write(b"abc") is Taken.MORE
    assert rig.sink.write(b"def") is Taken.MORE
    assert rig.sock.calls == 0
    assert rig.sink.held == 6

    rig.cork.release()

    assert rig.sock.sent == b"abcdef"
    assert rig.sock.calls == 1
    assert rig.sink.held == 0
    # Behind the turn nothing is kept.
    rig.sink.write(b"g")
    assert rig.sock.sent == b"abcdefg"


async def test_a_turn_joins_what_the_kernel_has_not_taken() -> None:
    rig = Rig(1)
    rig.sink.write(b"abc")
    rig.cork.hold(0.0)

    rig.sink.write(b"def")
    rig.cork.release()
    rig.sink.flush()

    assert rig.sock.sent == b"abcdef"
    assert rig.told == ["empty"]


async def test_what_the_kernel_does_not_take_behind_a_turn_is_held() -> None:
    rig = Rig(2)
    rig.cork.hold(0.0)
    rig.sink.write(b"abc")
    rig.cork.release()

    assert rig.sink.held == 1
    assert rig.rooms.asked == [True]
    assert rig.tally.buffer_high_water == 1
    rig.sink.flush()
    assert rig.sock.sent == b"abc"
    assert rig.rooms.asked == [True, False]


async def test_h5_a_turn_beyond_the_high_mark_pauses_until_it_is_sent() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    assert rig.sink.write(bytes(HIGH - 1)) is Taken.MORE
    assert rig.sink.write(b"x") is Taken.FULL
    assert rig.told == []

    rig.cork.release()

    assert not rig.sink.full
    assert rig.told == ["room"]


async def test_h5_a_turn_that_the_kernel_does_not_take_stays_full() -> None:
    rig = Rig(HIGH - LOW - 1, 1)
    rig.cork.hold(0.0)
    rig.sink.write(bytes(HIGH))
    rig.cork.release()
    assert rig.sink.full
    assert rig.told == []

    rig.sink.flush()

    assert rig.told == ["room"]


async def test_h5_past_the_ceiling_a_turn_cuts_its_client() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    rig.sink.write(bytes(HIGH))
    assert rig.sink.write(bytes(BEHIND)) is Taken.FULL
    assert rig.sink.write(b"x") is Taken.GONE

    rig.cork.release()

    assert rig.sock.calls == 0
    assert rig.sink.held == 0
    # Whoever wrote was told; nobody else is.
    assert rig.told == []


async def test_h4_a_client_found_gone_behind_a_turn_is_told_of() -> None:
    rig = Rig(OSError(errno.EPIPE, "broken"))
    rig.cork.hold(0.0)
    assert rig.sink.write(b"abc") is Taken.MORE

    rig.cork.release()

    assert rig.sink.cut_off
    assert rig.told == ["cut"]
    assert rig.sink.write(b"abc") is Taken.GONE


async def test_an_abandoned_sink_sends_nothing_behind_its_turn() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    rig.sink.write(bytes(HIGH))
    rig.sink.abandon()

    rig.cork.release()

    assert rig.sock.calls == 0
    assert rig.told == []


@given(
    steps=st.lists(
        st.tuples(
            st.binary(min_size=1, max_size=12),
            st.integers(0, 4),
            st.sampled_from(["no turn", "turn begins", "whole turn"]),
        )
    ),
    script=st.lists(st.integers(0, 5), max_size=30),
)
async def test_whatever_the_kernel_takes_the_bytes_come_out_in_order(
    steps: list[tuple[bytes, int, str]], script: list[int]
) -> None:
    rig = Rig(*script)
    written = b""

    for octets, flushes, turn in steps:
        if turn != "no turn":
            rig.cork.hold(0.0)
        rig.sink.write(octets)
        written += octets
        if turn == "whole turn":
            rig.cork.release()
        for _ in range(flushes):
            rig.sink.flush()
        assert written.startswith(rig.sock.sent)
        assert len(rig.sock.sent) + rig.sink.held == len(written)
    rig.sock.script.clear()
    rig.cork.release()
    rig.sink.flush()

    assert rig.sock.sent == written
    assert rig.rooms.asked.count(True) == rig.rooms.asked.count(False)
