"""The poll over real socket pairs."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import trio

from router.edge.poll import ClientPoll
from router.errors import LocalError


class Watched:
    """A client that counts what it is told."""

    def __init__(self, raises: Exception | None = None) -> None:
        self.hung_up = 0
        self.flushed = 0
        self.spilt = 0
        self.abandoned = False
        self.told = trio.Event()
        self.raises = raises

    def hang_up(self) -> None:
        self.hung_up += 1
        self.told.set()
        if self.raises is not None:
            raise self.raises

    def flush(self) -> None:
        self.flushed += 1
        self.told.set()

    def spill(self) -> None:
        self.spilt += 1

    def abandon(self) -> None:
        self.abandoned = True


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def fill(sock: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            sock.send(bytes(65536))


def drain(sock: socket.socket) -> None:
    with suppress(BlockingIOError):
        while True:
            sock.recv(1 << 20)


Pair = tuple[socket.socket, socket.socket]


def no_bugs(place: str, bug: Exception) -> None:
    raise AssertionError(place) from bug


async def test_h4_a_hang_up_behind_unread_bytes_is_told_and_does_not_spin(
    pair: Pair,
) -> None:
    ours, theirs = pair
    poll, client = ClientPoll(no_bugs), Watched()
    poll.add(ours.fileno(), client)
    theirs.send(b"unread")

    poll.look()
    assert client.hung_up == 0

    theirs.close()
    for _ in range(5):
        poll.look()
    assert client.hung_up == 1
    poll.remove(ours.fileno())
    poll.close()


async def test_h4_what_comes_is_told_to_who_asked_once_for_each_asking(
    pair: Pair,
) -> None:
    ours, theirs = pair
    poll, client = ClientPoll(no_bugs), Watched()
    poll.add(ours.fileno(), client)
    theirs.send(b"unread")
    poll.look()
    assert client.spilt == 0

    for times in (1, 2):
        poll.spill(ours.fileno())
        poll.look()
        poll.look()
        assert client.spilt == times

    # Room is another matter, and asking for it forgets nothing.
    poll.want_room(ours.fileno())
    poll.enough(ours.fileno())
    flushed = client.flushed
    theirs.send(b"more")
    poll.look()
    assert client.spilt > 2
    assert client.flushed == flushed
    poll.close()


async def test_run_tells_of_a_hang_up_without_being_asked(pair: Pair) -> None:
    ours, theirs = pair
    poll, client = ClientPoll(no_bugs), Watched()
    poll.add(ours.fileno(), client)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll.run)
        await trio.testing.wait_all_tasks_blocked()
        theirs.close()
        with trio.fail_after(1):
            await client.told.wait()
        nursery.cancel_scope.cancel()
    poll.close()

    assert client.hung_up == 1


async def test_room_is_told_only_while_it_is_wanted(pair: Pair) -> None:
    ours, theirs = pair
    poll, client = ClientPoll(no_bugs), Watched()
    poll.add(ours.fileno(), client)
    fill(ours)

    poll.want_room(ours.fileno())
    poll.look()
    assert client.flushed == 0

    drain(theirs)
    poll.look()
    assert client.flushed == 1

    poll.enough(ours.fileno())
    fill(ours)
    drain(theirs)
    poll.look()
    assert client.flushed == 1
    poll.close()


async def test_a_descriptor_that_was_removed_tells_its_next_owner_nothing(
    pair: Pair,
) -> None:
    """A forked child may hold the old file: here, its duplicate does."""
    ours, theirs = pair
    poll, old, new = ClientPoll(no_bugs), Watched(), Watched()
    number = ours.fileno()
    poll.add(number, old)
    held_elsewhere = ours.dup()
    poll.remove(number)
    ours.close()
    left, right = socket.socketpair()
    with left, right, held_elsewhere:
        poll.add(number, new)  # whichever socket has it now

        theirs.close()
        poll.look()

        assert (old.hung_up, new.hung_up) == (0, 0)
    poll.close()


async def test_removing_twice_is_no_failure(pair: Pair) -> None:
    ours, _ = pair
    poll = ClientPoll(no_bugs)
    poll.add(ours.fileno(), Watched())

    poll.remove(ours.fileno())
    poll.remove(ours.fileno())

    poll.close()


async def test_l1_a_bug_of_one_client_is_reported_and_the_others_are_told(
    pair: Pair,
) -> None:
    ours, theirs = pair
    bugs: list[tuple[str, Exception]] = []
    poll = ClientPoll(lambda place, bug: bugs.append((place, bug)))
    bug = ValueError("a bug")
    left, right = socket.socketpair()
    with left, right:
        broken, whole = Watched(bug), Watched()
        poll.add(ours.fileno(), broken)
        poll.add(left.fileno(), whole)
        theirs.close()
        right.close()

        poll.look()

        assert bugs == [("edge.poll", bug)]
        assert (broken.abandoned, whole.abandoned) == (True, False)
        assert whole.hung_up == 1
    poll.close()


async def test_l1_a_broken_invariant_goes_on_up(pair: Pair) -> None:
    ours, theirs = pair
    poll = ClientPoll(no_bugs)
    poll.add(ours.fileno(), Watched(LocalError("broken")))
    theirs.close()

    with pytest.raises(LocalError):
        poll.look()
    poll.close()
