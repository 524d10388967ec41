"""One connection's bytes: when they go out, and how it ends (P1, P7)."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tests.kit.cork import strict_cork
from tests.kit.tls import make_contexts
from workers import link as link_module
from workers.link import Link
from workers.poll import WRITE
from workers.transport import PlainTransport, TlsTransport
from workers.wire.frames import Cancel, Reason, WireError, pack
from workers.wire.opening import Passport, Role
from workers.wire.outbox import Outbox

PASSPORT = Passport(Role.AGENT, "a", 1)


class Paper:
    """A transport on which every write is written down, and nothing comes."""

    unsent = False
    connect_mask = WRITE

    def __init__(self, number: int) -> None:
        self.number = number
        self.writes: list[bytes] = []

    def fileno(self) -> int:
        return self.number

    def advance(self) -> bool:
        return True

    def send(self, octets: memoryview) -> int:
        if octets:
            self.writes.append(bytes(octets))
        return len(octets)

    def recv(self, size: int = 0) -> bytes | None:
        del size
        return None

    def close(self) -> None:
        """Nothing is open."""


class End:
    """An end that has an outbox, and nothing else."""

    def __init__(self, link: Link) -> None:
        self.outbox = Outbox(link.ring)

    def received(self, octets: bytes, now: float) -> None:
        """Nothing is read here."""


@pytest.fixture
def paper() -> Iterator[Paper]:
    one, other = socket.socketpair()
    with one, other:
        yield Paper(one.fileno())


async def test_p7_what_a_turn_puts_out_is_one_write_and_wakes_no_task(
    paper: Paper,
) -> None:
    cork = strict_cork()
    link = Link(paper, PASSPORT, cork)
    end = End(link)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.carry, end)
        await trio.testing.wait_all_tasks_blocked()

        cork.hold(0.0)
        for number in range(1, 4):
            end.outbox.put(Cancel(number))
        assert paper.writes == []
        cork.release()

        assert paper.writes == [b"".join(pack(Cancel(n)) for n in range(1, 4))]
        # The next turn is kept anew.
        cork.hold(0.0)
        end.outbox.put(Cancel(4))
        cork.release()
        assert len(paper.writes) == 2
        nursery.cancel_scope.cancel()


async def test_what_is_put_out_between_turns_goes_with_the_loops_next_pass(
    paper: Paper,
) -> None:
    link = Link(paper, PASSPORT, strict_cork())
    end = End(link)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.carry, end)
        await trio.testing.wait_all_tasks_blocked()

        end.outbox.put(Cancel(1))
        end.outbox.put(Cancel(2))
        assert paper.writes == []
        await trio.testing.wait_all_tasks_blocked()

        assert paper.writes == [pack(Cancel(1)) + pack(Cancel(2))]
        nursery.cancel_scope.cancel()


class Quiet(End):
    """An end whose peer is heard, and says nothing of weight."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.link = link

    async def beat(self) -> None:
        """Hear the peer, as heartbeats do."""
        while True:
            self.link.heard_at = trio.current_time()
            await trio.sleep(1)


@asynccontextmanager
async def filled(size: int) -> AsyncIterator[tuple[Quiet, socket.socket, list[Reason]]]:
    """A link with *size* bytes to write, and its peer's socket, that nobody reads."""
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        link = Link(PlainTransport.accepted(one), PASSPORT, strict_cork())
        end = Quiet(link)
        ended: list[Reason] = []

        async def carry() -> None:
            ended.append((await link.carry(end)).reason)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(carry)
            nursery.start_soon(end.beat)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(2):
                end.outbox.put_frame(bytes(size // 2))
                await trio.testing.wait_all_tasks_blocked()
            yield end, other, ended
            nursery.cancel_scope.cancel()


class Large:
    """A body of any size."""

    def next_part(self) -> bytes:
        return bytes(65536)

    def written(self) -> None:
        """Nobody waits for it."""


async def test_p6_a_slow_link_with_much_to_carry_is_kept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    async with filled(48 * 1024 * 1024) as (_, other, ended):
        for _ in range(50):
            # So little that for long the socket is not writable once.
            assert other.recv(65536)
            await trio.sleep(0.8 * link_module.STUCK_S)
            assert ended == []


@pytest.mark.parametrize("bodies", [False, True])
async def test_p6_a_peer_that_speaks_and_never_reads_is_left(
    bodies: bool, autojump_clock: trio.testing.MockClock
) -> None:
    del autojump_clock
    async with filled(0 if bodies else 4 * 1024 * 1024) as (end, _, ended):
        if bodies:
            end.outbox.put_body(Large())
        await trio.sleep(link_module.STUCK_S)
        assert ended == []
        await trio.sleep(4 * link_module.TICK_S)
        assert ended == [Reason.OVERFLOW]


async def test_p6_a_peer_for_which_nothing_waits_may_take_its_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    del autojump_clock
    async with filled(1000) as (_, _, ended):
        await trio.sleep(10 * link_module.STUCK_S)
        assert ended == []


async def test_p6_what_no_honest_peer_makes_wait_ends_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    del autojump_clock
    monkeypatch.setattr(link_module, "CEILING", 4 * 1024 * 1024)
    async with filled(6 * 1024 * 1024) as (_, _, ended):
        await trio.sleep(1)
        assert ended == [Reason.OVERFLOW]


class CountedTransport(TlsTransport):
    """Counts what is asked of it."""

    __slots__ = ("asked",)

    def send(self, octets: memoryview) -> int:
        self.asked = getattr(self, "asked", 0) + 1
        return super().send(octets)


async def test_p1_who_says_nothing_over_tls_gets_no_last_word_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """Its socket takes bytes at once, and TLS none before the handshake."""
    del autojump_clock
    monkeypatch.setattr(link_module, "PARTING_S", 0.05)
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        transport = CountedTransport.accepted(one, make_contexts().server)
        link = Link(transport, PASSPORT, strict_cork())
        with pytest.raises(WireError) as raised:
            await link.open()
        assert raised.value.reason is Reason.SLOW_OPENING
        await link.part(raised.value)

        assert getattr(transport, "asked", 0) == 0
