"""The nested poll binds events to owners and lets others have their turn."""

import errno
import select
import socket

import pytest
import trio
import trio.testing

from router.engine import open_router
from router.errors import LocalError
from tests.kit.cork import strict_cork
from workers.poll import READ, RETRY_S, WAKE_BUDGET, WRITE, Poll, open_poll


class Owner:
    """Reads what comes; may do more inside of it."""

    def __init__(self, sock: socket.socket, moves: int = 1) -> None:
        self.sock = sock
        self.mask = 0
        self.moves = moves
        self.got: list[bytes] = []
        self.masks: list[int] = []
        self.then: list[object] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def ready(self, mask: int, now: float) -> int:
        assert now == trio.current_time() or now > 0
        self.masks.append(mask)
        if mask & READ:
            self.got.append(self.sock.recv(100))
        for step in self.then:
            assert callable(step)
            step()
        return self.moves


class Pairs:
    """Socket pairs, closed together with a poll."""

    def __init__(self) -> None:
        self.cork = strict_cork()
        self.poll = Poll(self.cork)
        self.owners: list[Owner] = []
        self.ends: list[socket.socket] = []

    def make(self, mask: int = READ, moves: int = 1) -> tuple[Owner, socket.socket]:
        near, far = socket.socketpair()
        near.setblocking(False)
        owner = Owner(near, moves)
        self.owners.append(owner)
        self.ends.append(far)
        self.poll.want(owner, mask)
        return owner, far

    def close(self) -> None:
        for owner in self.owners:
            if owner.mask:
                self.poll.want(owner, 0)
            owner.sock.close()
        for end in self.ends:
            end.close()
        self.poll.close()


async def until_rest() -> None:
    await trio.testing.wait_all_tasks_blocked(0.005)


async def test_an_owner_is_told_of_what_it_wants_only() -> None:
    pairs = Pairs()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pairs.poll.run)
        owner, far = pairs.make(READ)
        far.send(b"a")
        await until_rest()
        assert owner.got == [b"a"]

        pairs.poll.want(owner, 0)
        far.send(b"b")
        await until_rest()
        assert owner.got == [b"a"]

        pairs.poll.want(owner, READ)
        await until_rest()
        assert owner.got == [b"a", b"b"]
        nursery.cancel_scope.cancel()
    pairs.close()


async def test_writable_is_told_where_it_is_wanted() -> None:
    pairs = Pairs()
    async with trio.open_nursery() as nursery:
        owner, _ = pairs.make(WRITE)
        owner.then.append(lambda: pairs.poll.want(owner, READ))
        nursery.start_soon(pairs.poll.run)
        await until_rest()

        assert owner.masks == [WRITE]
        assert owner.mask == READ
        nursery.cancel_scope.cancel()
    pairs.close()


async def test_an_owner_that_another_closed_in_the_same_wake_is_skipped() -> None:
    pairs = Pairs()
    made = [pairs.make() for _ in range(2)]

    def close_other(me: int) -> None:
        other = made[1 - me][0]
        if other.mask:
            pairs.poll.want(other, 0)
            other.sock.close()

    for place, (owner, far) in enumerate(made):
        owner.then.append(lambda place=place: close_other(place))
        far.send(b"a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pairs.poll.run)
        await until_rest()
        nursery.cancel_scope.cancel()

    assert sorted(len(owner.got) for owner, _ in made) == [0, 1]
    pairs.close()


async def test_the_event_of_a_closed_owner_does_not_go_to_its_numbers_heir() -> None:
    pairs = Pairs()
    made = [pairs.make() for _ in range(2)]
    heirs: list[Owner] = []

    def swap(me: int) -> None:
        other = made[1 - me][0]
        if other.mask and not heirs:
            number = other.fileno()
            pairs.poll.want(other, 0)
            other.sock.close()
            heirs.append(pairs.make()[0])
            assert heirs[0].fileno() == number

    for place, (owner, far) in enumerate(made):
        owner.then.append(lambda place=place: swap(place))
        far.send(b"a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pairs.poll.run)
        await until_rest()
        nursery.cancel_scope.cancel()

    assert heirs[0].masks == []
    pairs.close()


async def test_a_wake_that_spent_its_budget_lets_others_run_and_goes_on() -> None:
    pairs = Pairs()
    order: list[str] = []
    made = [pairs.make(moves=WAKE_BUDGET) for _ in range(3)]
    for owner, far in made:
        owner.then.append(lambda: order.append("owner"))
        far.send(b"a")

    async def other() -> None:
        while order.count("owner") < 3:
            order.append("other")
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pairs.poll.run)
        nursery.start_soon(other)
        await until_rest()
        nursery.cancel_scope.cancel()

    assert order.count("owner") == 3
    first = order.index("owner")
    assert "other" in order[first + 1 : first + 3]
    pairs.close()


async def test_what_an_owner_raises_ends_the_poll() -> None:
    pairs = Pairs()
    owner, far = pairs.make()

    def crash() -> None:
        raise ZeroDivisionError

    owner.then.append(crash)
    far.send(b"a")
    with pytest.raises(ZeroDivisionError):
        await pairs.poll.run()
    pairs.close()


async def test_a_reset_of_an_unregistered_owner_does_not_spin() -> None:
    pairs = Pairs()
    owner, far = pairs.make()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pairs.poll.run)
        await until_rest()
        pairs.poll.want(owner, 0)
        far.close()
        # It would never be blocked if the poll spun.
        with trio.fail_after(1):
            await until_rest()
        assert owner.masks == []
        nursery.cancel_scope.cancel()
    pairs.close()


async def test_h6_a_poll_without_a_descriptor_is_opened_once_there_is_one(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def exhausted() -> select.epoll:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as short:
        short.setattr(select, "epoll", exhausted)
        with trio.move_on_after(10 * RETRY_S) as waited:
            await open_poll(strict_cork())
    assert waited.cancelled_caught

    (await open_poll(strict_cork())).close()


async def test_h6_a_worker_that_comes_without_a_descriptor_ends_no_router(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    def exhausted(_: Poll, _cork: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with open_router() as router:
        with monkeypatch.context() as short:
            short.setattr(Poll, "__init__", exhausted)
            await router.add_worker("http://127.0.0.1:1")
            await trio.testing.wait_all_tasks_blocked()
        assert len(router.fleet.members) == 1


async def test_p7_one_wake_is_one_turn() -> None:
    pairs = Pairs()
    held: list[bool] = []

    class Keeper:
        def uncork(self) -> None:
            held.append(pairs.cork.held)

        def crash(self) -> None:
            pytest.fail("a bug in a test's own keeper")

    keeper = Keeper()

    def look() -> None:
        held.append(pairs.cork.held)
        pairs.cork.keep(keeper)

    for owner, far in [pairs.make() for _ in range(2)]:
        owner.then.append(look)
        far.send(b"a")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pairs.poll.run)
        await until_rest()
        nursery.cancel_scope.cancel()

    # Both are woken, and only then what both kept is sent.
    assert held == [True, True, False, False]
    pairs.close()


async def test_an_owner_that_fails_ends_its_turn_all_the_same() -> None:
    pairs = Pairs()
    owner, far = pairs.make()

    def fail() -> None:
        raise LocalError("broken")

    owner.then.append(fail)
    far.send(b"a")
    with pytest.raises(LocalError):
        await pairs.poll.run()

    assert not pairs.cork.held
    pairs.close()


async def test_a_close_wakes_whoever_waits() -> None:
    pairs = Pairs()
    with pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pairs.poll.run)
            await until_rest()
            pairs.close()
