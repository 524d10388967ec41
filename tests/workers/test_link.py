"""One connection's bytes: when they go out, and how it ends (P1, P7)."""

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from tests.kit.cork import strict_cork
from tests.kit.tls import make_contexts
from workers import link as link_module
from workers.link import Link
from workers.poll import WRITE
from workers.transport import TlsTransport
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
