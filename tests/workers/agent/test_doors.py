"""Who is let in by an agent, and what strangers cost (P1, P2, H6)."""

import pytest
import trio

from router.settings import AgentSettings
from tests.kit.agents import (
    TOKEN,
    listen,
    open_agent,
    port_of,
)
from tests.kit.edge import until
from tests.kit.peer import calling, router_passport
from tests.kit.visits import offer_of, slow, visiting
from workers import door, link
from workers.wire import frames
from workers.wire.frames import (
    Accepted,
    Bye,
    Cancel,
    Deltas,
    Reason,
    pack,
)


@pytest.mark.parametrize(
    ("octets", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", Reason.OVERSIZE),
        (b"\0\0\0\1\xc1", Reason.GARBAGE),
        (b"\0\0\0\2\x91\x63", Reason.UNKNOWN_MESSAGE),
        (pack(Cancel(1)), Reason.OUT_OF_ORDER),
        (pack(Accepted(1)), Reason.WRONG_DIRECTION),
        (b"\0\0\0\0", Reason.OVERSIZE),
    ],
)
async def test_p2_a_stranger_that_makes_no_sense_is_told_so_and_counted(
    octets: bytes, reason: Reason
) -> None:
    async with open_agent(None) as agent, visiting(agent) as good:
        async with calling(agent.port, router_passport("bad")) as bad:
            await bad.stream.send_all(octets)
            await bad.ended()
        assert agent.router.tally.wire["said", reason.value] == 1

        await good.send(*offer_of(good))
        await good.expect(frames.Finished)


async def test_p2_a_friend_that_breaks_the_wire_hurts_itself_alone() -> None:
    async with (
        open_agent(slow, slots=4) as agent,
        visiting(agent, "good") as good,
        visiting(agent, "bad") as bad,
    ):
        await good.send(*offer_of(good, 1))
        await bad.send(*offer_of(bad, 1))
        await good.expect(Deltas)
        await bad.expect(Deltas)
        await bad.stream.send_all(b"\xff" * 64)
        await bad.ended()
        assert bad.heard[-1].reason == "oversize"
        await until(lambda: agent.engines[0].live == 1)
        await good.send(Cancel(1))
        await until(lambda: agent.idle)


async def test_p1_a_peer_that_never_proves_itself_is_put_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "OPENING_S", 0.1)
    async with open_agent(None) as agent:
        async with calling(agent.port, router_passport()) as peer:
            await peer.ended()
        await until(lambda: agent.router.tally.wire["said", "slow_opening"] == 1)


async def test_h6_strangers_neither_fill_the_house_nor_bar_its_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "STRANGERS_MAX", 2)
    async with open_agent(None) as agent, visiting(agent, "friend") as friend:
        async with (
            calling(agent.port, router_passport("a")) as oldest,
            calling(agent.port, router_passport("b")),
        ):
            await until(lambda: agent.agent._door.strangers == 2)
            async with visiting(agent, "c") as third:
                await oldest.ended()
                assert agent.agent._door.strangers == 1
                await third.send(*offer_of(third))
                await third.expect(frames.Finished)
            assert agent.router.tally.wire["said", "too_many"] == 1
            assert not any(isinstance(m, Bye) for m in oldest.heard)
            await friend.send(*offer_of(friend))
            await friend.expect(frames.Finished)
        await until(lambda: agent.agent._door.strangers == 0)


async def test_h6_routers_that_an_agent_calls_on_are_no_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "STRANGERS_MAX", 1)
    quiet = listen()
    async with open_agent(None, routers=[port_of(quiet)]) as agent:
        with quiet:
            with trio.fail_after(1):
                await trio.lowlevel.wait_readable(quiet)
            async with calling(agent.port, router_passport("a")):
                await until(lambda: agent.agent._door.strangers == 1)


async def test_h6_a_house_that_is_full_takes_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "GUESTS_MAX", 1)
    async with open_agent(None) as agent, visiting(agent, "friend"):
        async with calling(agent.port, router_passport("c")) as other:
            await other.ended()
        assert agent.router.tally.wire["said", "too_many"] == 1


@pytest.mark.parametrize("token", [None, b"another token, as long"])
async def test_p1_a_wrong_token_is_told_and_hurts_nobody(
    token: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = AgentSettings(token_env="TOKEN")
    async with open_agent(None, settings=settings) as agent:
        async with calling(agent.port, router_passport("bad", token=token)) as bad:
            with pytest.raises(frames.WireError) as raised:
                await bad.open()
            assert raised.value.reason is Reason.UNAUTHORIZED
        await until(
            lambda: (
                agent.router.tally.wire["said", "unauthorized"]
                + agent.router.tally.wire["said", "lost"]
                == 1
            )
        )
        if agent.router.tally.wire["said", "unauthorized"]:
            assert "router at 127.0.0.1:" in caplog.text
            assert " is not let in (unauthorized): " in caplog.text
        async with visiting(agent, token=TOKEN.encode()) as good:
            await good.send(*offer_of(good))
            await good.expect(frames.Finished)
        assert TOKEN not in repr(agent.agent.status())
