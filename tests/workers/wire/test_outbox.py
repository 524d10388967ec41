"""What goes first, what is gathered, and when somebody is told."""

from workers.wire.frames import Accepted, Cancel, Deltas, pack
from workers.wire.outbox import HIGH, Outbox


class Body:
    def __init__(self, *parts: bytes) -> None:
        self.parts = list(parts)
        self.told = 0

    def next_part(self) -> bytes:
        return self.parts.pop(0) if self.parts else b""

    def written(self) -> None:
        self.told += 1


def test_frames_go_together_in_their_order() -> None:
    rings: list[None] = []
    outbox = Outbox(lambda: rings.append(None))
    outbox.put(Accepted(1))
    outbox.put(Accepted(2))

    assert rings != []
    assert outbox.pull() == pack(Accepted(1)) + pack(Accepted(2))
    assert outbox.pull() == b""
    assert outbox.size == 0


def test_p1_bodies_take_turns_and_come_behind_every_frame() -> None:
    outbox = Outbox(lambda: None)
    one, two = Body(b"1a", b"1b"), Body(b"2a", b"2b")
    outbox.put_body(one)
    outbox.put_body(two)
    outbox.put(Cancel(7))
    order = [outbox.pull(), outbox.pull(), outbox.pull()]
    outbox.put(Cancel(8))
    order += [outbox.pull(), outbox.pull(), outbox.pull(), outbox.pull()]

    assert order == [
        pack(Cancel(7)),
        b"1a",
        b"2a",
        pack(Cancel(8)),
        b"1b",
        b"2b",
        b"",
    ]


def test_p1_a_body_that_is_dropped_goes_no_further() -> None:
    outbox = Outbox(lambda: None)
    one, two = Body(b"1a", b"1b"), Body(b"2a")
    outbox.put_body(one)
    outbox.put_body(two)
    assert outbox.pull() == b"1a"
    outbox.drop_body(one)
    outbox.drop_body(one)
    outbox.wrote()

    assert [outbox.pull(), outbox.pull()] == [b"2a", b""]
    assert one.told == 1


def test_a_body_hears_of_each_part_that_is_with_the_kernel() -> None:
    outbox = Outbox(lambda: None)
    body = Body(b"1", b"2")
    outbox.put_body(body)
    outbox.pull()
    assert body.told == 0
    outbox.wrote()
    outbox.wrote()
    assert body.told == 1
    outbox.pull()
    outbox.wrote()

    assert body.told == 2


def test_p7_deltas_share_a_frame_until_something_else_comes() -> None:
    outbox = Outbox(lambda: None)
    outbox.put_delta((1, 0, 0, "a"), 65)
    outbox.put_delta((2, 0, 0, "b"), 65)
    outbox.put(Accepted(3))
    outbox.put_delta((1, 1, 0, "c"), 65)

    assert outbox.pull() == (
        pack(Deltas([(1, 0, 0, "a"), (2, 0, 0, "b")]))
        + pack(Accepted(3))
        + pack(Deltas([(1, 1, 0, "c")]))
    )


def test_p6_room_is_told_once_what_was_too_much_is_being_written() -> None:
    outbox = Outbox(lambda: None)
    told: list[None] = []
    outbox.on_room = lambda: told.append(None)
    outbox.put_frame(b"x" * HIGH)
    outbox.pull()
    assert told == []
    outbox.put_frame(b"x" * (HIGH + 1))
    outbox.pull()

    assert told == [None]
