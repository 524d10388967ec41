"""An agent over fake engines, as routers meet it (P1-P6, S1, L5, F8)."""

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import msgspec.structs
import pytest
import trio
import trustme

from router.engine import Router, open_router
from router.engine.announced import Greeter
from router.engine.flight import Flight
from router.errors import FaultKind, RequestFailed
from router.ids import WorkerId
from router.messages import Endpoint, GenerationParams, Job
from router.settings import AgentSettings, AgentsSettings, Settings, WaitSettings
from tests.kit.agents import (
    ENVIRON,
    QUICK,
    TOKEN,
    RunningAgent,
    listen,
    open_agent,
    open_far_router,
    port_of,
)
from tests.kit.delivery import JOB, assignment
from tests.kit.edge import until
from tests.kit.engine import in_turn, refuses, silent
from tests.kit.exchange import Exchange
from tests.kit.peer import Peer, calling, doorway, router_passport
from workers import access, door, link, site
from workers.agent import agent as agent_module
from workers.agent import visit
from workers.agent.receiver import WireReceiver
from workers.shares import Shares
from workers.wire import frames
from workers.wire.frames import (
    Accepted,
    Bye,
    Cancel,
    Counted,
    Credit,
    Declined,
    Deltas,
    Draining,
    EndReasoning,
    Failed,
    Finishing,
    Message,
    Observation,
    Offer,
    Part,
    Reason,
    RichDelta,
    Seen,
    Waiting,
    pack,
)
from workers.wire.jobs import encode_job


@pytest.fixture(autouse=True)
def _short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PARTING_S", 0.05)


@asynccontextmanager
async def visiting(
    agent: RunningAgent, name: str = "router", **passport: Any
) -> AsyncIterator[Peer]:
    """Be a router of *agent*, which has observed."""
    async with calling(agent.port, router_passport(name, **passport)) as peer:
        await peer.open()
        await peer.expect(Observation)
        yield peer


def offer_of(
    peer: Peer, number: int = 1, *, job: Job = JOB, **fields: Any
) -> list[Message]:
    octets = encode_job(job)
    assert peer.opening.peer is not None
    offer = Offer(
        number,
        f"{peer.passport.id}.{number}",
        1,
        peer.opening.peer.epoch,
        job.target,
        len(octets),
        65536,
    )
    return [msgspec.structs.replace(offer, **fields), Part(number, 0, octets)]


async def slow(x: Exchange) -> None:
    """Say one word, and then nothing until the router leaves."""
    await x.role()
    await x.text("a")
    await x.wait_closed()


async def test_p4_an_agent_says_what_it_is() -> None:
    async with (
        open_agent(None, None, slots=3, models=("m", "n")) as agent,
        calling(agent.port, router_passport()) as peer,
    ):
        await peer.open()
        seen = await peer.expect(Observation)

    assert (seen.slots, seen.load) == (6, 0)
    assert seen.models == {"m": (6, 2), "n": (6, 2)}
    assert seen.epoch == agent.agent.epoch
    assert seen.hosts is not None
    assert [(h.name, h.state, h.slots) for h in seen.hosts] == [
        ("e0", "ready", 3),
        ("e1", "ready", 3),
    ]


async def test_a_whole_answer_crosses_the_wire() -> None:
    async with open_agent(None) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        await peer.expect(Accepted)
        deltas = await peer.expect(Deltas)
        finished = await peer.expect(frames.Finished)

        assert "".join(text for *_, text in deltas.entries) in {"Hello", "Hello world"}
        assert (finished.count, finished.reason) == (2, "stop")
        assert finished.usage is not None
        assert (finished.usage.prompt, finished.usage.completion) == (3, 2)
        await until(lambda: agent.idle)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"epoch": 1}, "wrong_epoch"),
        ({"target": "elsewhere"}, "unknown_model"),
        ({"size": 10**9}, "too_large"),
    ],
)
async def test_p3_each_no_has_its_word(fields: dict[str, Any], reason: str) -> None:
    async with open_agent(None) as agent, visiting(agent) as peer:
        await peer.send(offer_of(peer, **fields)[0])

        assert (await peer.expect(Declined)).reason == reason
        assert agent.router.tally.declines[reason] == (reason in NOTED)
        assert agent.engines[0].seen == []


#: Declines of the agent; others are its wire's.
NOTED = {"unknown_model"}


async def test_p3_the_order_of_the_questions_is_fixed() -> None:
    """An offer with everything wrong is refused for what is asked first."""
    async with open_agent(silent, slots=1) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, 1))
        await peer.expect(Accepted)
        agent.agent.drain()
        wrong: dict[str, Any] = {
            "request": "router.1",
            "epoch": 1,
            "size": 10**9,
            "target": "elsewhere",
        }
        heard = []
        for number, mended in enumerate(("", *wrong), 2):
            wrong.pop(mended, None)
            await peer.send(offer_of(peer, number, **wrong)[0])
            heard.append((await peer.expect(Declined)).reason)

    assert heard == ["stale", "wrong_epoch", "too_large", "draining", "draining"]


async def test_p3_a_full_agent_declines_and_says_first_what_there_is() -> None:
    async with open_agent(silent, slots=1) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, 1))
        await peer.expect(Accepted)
        await peer.send(*offer_of(peer, 2))
        declined = await peer.expect(Declined)

        assert declined.reason == "no_slot"
        before = peer.heard[: peer.heard.index(declined)]
        observation = [m for m in before if isinstance(m, Observation)][-1]
        assert observation.models == {"m": (1, 2)}
        assert observation.load == 1
        assert len(agent.engines[0].seen) <= 1


async def test_p3_offers_of_one_read_take_no_more_than_there_is() -> None:
    async with open_agent(silent, slots=3) as agent, visiting(agent) as peer:
        await peer.send(*(m for n in range(1, 9) for m in offer_of(peer, n)))
        for _ in range(3):
            await peer.expect(Accepted)
        for _ in range(5):
            assert (await peer.expect(Declined)).reason == "no_slot"
        await until(lambda: len(agent.engines[0].seen) == 3)


async def test_p3_a_prompt_of_tokens_that_does_not_fit_is_declined() -> None:
    job = attrs.evolve(
        JOB,
        endpoint=Endpoint.COMPLETIONS,
        messages=([1] * 5000,),
        params=GenerationParams(max_tokens=10),
    )
    async with open_agent(None, kind="llama-server") as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, job=job))

        assert (await peer.expect(Declined)).reason == "context_too_long"


async def test_p3_a_model_whose_engine_is_gone_is_declined() -> None:
    async with open_agent(None) as agent, visiting(agent) as peer:
        agent.engines[0].refuse = True
        agent.router._keepers[next(iter(agent.router.workers))].check()
        await until(
            lambda: not any(m.serving for m in agent.router.fleet.members.values())
        )
        await peer.send(*offer_of(peer))

        assert (await peer.expect(Declined)).reason == "no_engine"


async def test_p5_a_router_that_is_gone_leaves_nothing_behind() -> None:
    async with open_agent(slow, slots=4) as agent:
        async with visiting(agent) as peer:
            await peer.send(*offer_of(peer, 1), *offer_of(peer, 2))
            await peer.expect(Deltas)
            await until(lambda: agent.engines[0].live == 2)
            peer.reset()
            await until(lambda: agent.engines[0].live == 0)
        await until(lambda: agent.idle)

        assert agent.router.tally.wire["said", "lost"] == 1


async def test_p5_a_cancel_closes_the_engines_request_at_once() -> None:
    async with open_agent(slow) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        await peer.expect(Deltas)
        (x,) = agent.engines[0].seen
        await peer.send(Cancel(1))
        with trio.fail_after(1):
            await x.closed.wait()
        await until(lambda: agent.idle)


async def test_p4_a_router_that_is_silent_holds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "EXPIRY_S", 0.2)
    monkeypatch.setattr(link, "TICK_S", 0.05)
    async with open_agent(slow) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        await peer.expect(Deltas)
        await peer.ended()
        assert peer.heard[-1].reason == "expired"
        await until(lambda: agent.idle)
        await until(lambda: agent.engines[0].live == 0)


async def test_p4_heartbeats_come_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visit, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(agent_module, "TICK_S", 0.01)
    async with open_agent(None) as agent, visiting(agent) as peer:
        found = [await peer.expect(Observation) for _ in range(5)]
        await peer.send(Seen(found[-1].sequence))

        numbers = [seen.sequence for seen in found]
        assert numbers == sorted(set(numbers))
        # What has not changed is not told again.
        assert all(seen.hosts is None for seen in found)
        (guest,) = agent.agent.visits.values()
        await until(lambda: guest.end.seen == numbers[-1])


async def test_p4_an_agent_looks_often_only_while_a_slot_changes_hands() -> None:
    async with open_agent(slow, slots=1) as agent:
        one, own = agent.agent, agent.agent.shares
        (member,) = agent.router.fleet.members.values()
        assert one._pause() == agent_module.TICK_S
        async with visiting(agent) as peer:
            await peer.send(*offer_of(peer, 1), *offer_of(peer, 2))
            await peer.expect(Declined)
            assert own.contested
            assert one._pause() == agent_module.TICK_S

            member.settling[assignment(9)] = 0.0
            assert one._pause() == agent_module.CONTEST_S
            member.ghosts.add(assignment(9))
            assert one._pause() == agent_module.TICK_S
            del member.settling[assignment(9)]
            member.ghosts.clear()
            (guest,) = one.visits
            own.view(guest, "m", 1, trio.current_time())
            assert one._pause() == agent_module.CONTEST_S
            own.lapse(trio.current_time() + 1)
            assert one._pause() == agent_module.TICK_S


async def test_p6_an_answer_beyond_its_credit_stops_its_engine_alone() -> None:
    piece = "x" * 32_768

    async def flood(x: Exchange) -> None:
        await x.role()
        if x.body["messages"][0]["content"] == "much":
            await x.text(*[piece] * 200)
        await x.text("done")
        await x.finish()
        await x.done()
        await x.end()

    much = attrs.evolve(JOB, messages=({"role": "user", "content": "much"},))
    async with open_agent(flood) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, 1, job=much, credit=50_000))
        await peer.expect(Deltas)
        await peer.send(*offer_of(peer, 2))
        assert (await peer.expect(frames.Finished)).stream == 2

        # What came is the credit, and the delta that used it up.
        assert len(said(peer, 1)) <= 50_000 + len(piece)
        await until(lambda: agent.engines[0].live == 1)
        await peer.send(Credit(1, 10**9))
        assert (await peer.expect(frames.Finished)).stream == 1
        assert said(peer, 1) == piece * 200 + "done"


def said(peer: Peer, stream: int) -> str:
    """Put together what came of one answer."""
    pieces = []
    for message in peer.heard:
        if isinstance(message, Deltas):
            pieces += [text for n, _, _, text in message.entries if n == stream]
        elif isinstance(message, RichDelta) and message.stream == stream:
            pieces.append(message.text)
    return "".join(pieces)


async def test_l5_a_draining_agent_finishes_what_it_has_and_takes_nothing() -> None:
    go = trio.Event()

    async def waits(x: Exchange) -> None:
        await x.role()
        await x.text("a")
        await go.wait()
        await x.finish()
        await x.done()
        await x.end()

    async with open_agent(waits) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, 1))
        await peer.expect(Deltas)
        agent.agent.drain()
        await peer.expect(Draining)
        await peer.send(*offer_of(peer, 2))
        assert (await peer.expect(Declined)).reason == "draining"
        assert not agent.agent.rested.is_set()
        go.set()
        await peer.expect(frames.Finished)
        await see_all(peer, agent)

        async with calling(agent.port, router_passport("later")) as late:
            await late.open()
            await late.expect(Draining)
        agent.agent.dismiss()
        await peer.ended()
        assert peer.heard[-1] == Bye("stopping", "the agent stops")


async def see_all(peer: Peer, agent: RunningAgent) -> None:
    """Answer observations, as routers do, until *agent* has its rest."""
    with trio.fail_after(1):
        while not agent.agent.rested.is_set():
            await peer.send(Seen((await peer.expect(Observation)).sequence))
            with trio.move_on_after(2 * agent_module.REST_S):
                await agent.agent.rested.wait()


@asynccontextmanager
async def unread(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[RunningAgent, Peer, int]]:
    """An answer that is whole at its agent, of which its router reads nothing yet."""
    monkeypatch.setattr(link, "PARTING_S", 0.5)
    enough = trio.Event()
    said_so_far = 0

    async def talks(x: Exchange) -> None:
        nonlocal said_so_far
        await x.role()
        while not enough.is_set():
            await x.text("x" * 50_000)
            said_so_far += 50_000
        await x.finish()
        await x.done()
        await x.end()

    async with open_agent(talks) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, credit=10**9))
        (guest,) = agent.agent.visits.values()
        await until(lambda: guest.end.outbox.size > 300_000)
        enough.set()
        await until(lambda: not agent.agent.active)
        yield agent, peer, said_so_far


async def test_l5_an_agent_rests_only_when_its_routers_have_read_every_answers_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with unread(monkeypatch) as (agent, peer, length):
        agent.agent.drain()
        with trio.move_on_after(3 * agent_module.REST_S) as tried:
            await agent.agent.rested.wait()
        assert tried.cancelled_caught

        await peer.expect(frames.Finished)
        assert len(said(peer, 1)) == length
        await see_all(peer, agent)


async def test_d3_what_is_written_goes_out_before_the_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with unread(monkeypatch) as (agent, peer, length):
        agent.agent.dismiss()
        await peer.ended()

        assert len(said(peer, 1)) == length
        assert isinstance(peer.heard[-2], frames.Finished)
        assert peer.heard[-1] == Bye("stopping", "the agent stops")


async def test_a_router_that_comes_back_takes_its_old_connections_place() -> None:
    async with open_agent(slow) as agent, visiting(agent) as old:
        await old.send(*offer_of(old))
        await old.expect(Deltas)
        async with visiting(agent) as new:
            await old.ended()
            assert old.heard[-1].reason == "superseded"
            await until(lambda: agent.idle)
            await new.send(*offer_of(new, 5))
            await new.expect(Accepted)
            async with visiting(agent, "another"):
                await until(lambda: len(agent.agent.visits) == 2)


async def test_w2_what_silence_means_is_told_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visit, "LOOK_S", 0.02)
    monkeypatch.setattr(agent_module, "TICK_S", 0.01)
    go = trio.Event()

    async def waits(x: Exchange) -> None:
        await go.wait()
        await x.role()
        await x.wait_closed()

    quick = attrs.evolve(QUICK, poll_ms=20)
    async with open_agent(waits, waits=quick) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        assert (await peer.expect(Waiting)).state == "busy"
        go.set()
        assert (await peer.expect(Waiting)).state == "head"
        await peer.send(Cancel(1))


async def test_m3_a_finish_reason_is_told_before_usage_is_there() -> None:
    go = trio.Event()

    async def waits(x: Exchange) -> None:
        await x.role()
        await x.text("a")
        await x.finish("length")
        await go.wait()
        await x.usage(1, 1)
        await x.done()
        await x.end()

    async with open_agent(waits) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        assert await peer.expect(Finishing) == Finishing(1, 1, "length")
        go.set()
        finished = await peer.expect(frames.Finished)
        assert finished.usage is not None
        assert finished.usage.prompt == 1


async def test_a4_a_refusal_of_its_engine_arrives_as_it_is() -> None:
    bad = refuses(400, {"error": {"message": "no such field", "param": "top_k"}})
    async with open_agent(bad) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        failed = await peer.expect(Failed)

        assert (failed.kind, failed.status, failed.param) == ("rejected", 400, "top_k")
        assert b"no such field" in failed.body


async def test_a2_an_agent_moves_a_job_between_its_own_engines() -> None:
    async with (
        open_agent(refuses(503, {"error": {"message": "busy"}}), None) as agent,
        visiting(agent) as peer,
    ):
        for number in (1, 2):
            await peer.send(*offer_of(peer, number))
            await peer.expect(frames.Finished)
        assert not any(isinstance(m, Failed) for m in peer.heard)


async def test_a2_but_it_queues_nothing_for_want_of_one() -> None:
    only = in_turn(refuses(503, {"error": {"message": "busy"}}))
    async with open_agent(only) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        failed = await peer.expect(Failed)

        assert failed.kind == "declined"
        assert len(agent.router.fleet.room) == 0


async def test_m8_a_count_is_the_engines_own() -> None:
    async with open_agent(None, kind="llama-server") as agent, visiting(agent) as peer:
        agent.engines[0].counts = 31
        await peer.send(*offer_of(peer, 1, purpose=1))

        assert (await peer.expect(Counted)).tokens == 31
        assert agent.agent.active == 0


@pytest.mark.parametrize(
    ("job", "target"),
    [
        (attrs.evolve(JOB, target="", model="elsewhere"), "m"),
        (attrs.evolve(JOB, target="n"), "n"),
        (attrs.evolve(JOB, messages=(5,)), "m"),
    ],
)
async def test_l1_a_count_that_can_not_be_answered_ends_nobody(
    job: Job, target: str
) -> None:
    async with (
        open_agent(None, kind="llama-server") as agent,
        visiting(agent) as peer,
    ):
        await peer.send(*offer_of(peer, 1, job=job, purpose=1, target=target))
        assert (await peer.expect(Counted)).tokens is None

        await peer.send(*offer_of(peer, 2))
        await peer.expect(frames.Finished)


@pytest.mark.parametrize(
    ("owner", "place", "message", "ends"),
    [
        (Flight, "gone", Cancel(1), ()),
        (WireReceiver, "resume", Credit(1, 10**6), (1,)),
        (WireReceiver, "end_reasoning", EndReasoning(1), (1,)),
        (WireReceiver, "tell_silence", Seen(1), (1,)),
    ],
)
async def test_l1_a_bug_in_one_assignment_ends_no_other(
    owner: type,
    place: str,
    message: Message,
    ends: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def chats(x: Exchange) -> None:
        await x.role()
        await x.text("a", "b")
        if x.body["messages"][0]["content"] != "long":
            await x.finish()
            await x.done()
            await x.end()
        await x.wait_closed()

    long = attrs.evolve(JOB, messages=({"role": "user", "content": "long"},))
    async with open_agent(chats) as agent, visiting(agent) as peer:
        with monkeypatch.context() as broken:
            broken.setattr(owner, place, lambda _: 1 / 0)
            broken.setattr(visit, "LOOK_S", 0.02)
            broken.setattr(agent_module, "TICK_S", 0.01)
            await peer.send(*offer_of(peer, 1, job=long, credit=1))
            await peer.expect(Accepted)
            (guest,) = agent.agent.visits.values()
            inbounds = guest.end.inbounds
            await until(lambda: 1 not in inbounds or inbounds[1].next_index == 2)
            await peer.send(message)
            await until(lambda: agent.router.tally.bugs["workers.agent"] > 0)
            assert agent.agent.active == 0
        await peer.send(*offer_of(peer, 2))
        assert (await peer.expect(frames.Finished)).stream == 2
        failed = [m.stream for m in peer.heard if isinstance(m, Failed)]
        assert failed == list(ends)


async def test_l1_a_bug_at_an_offers_first_look_declines_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_agent(None) as agent, visiting(agent) as peer:
        with monkeypatch.context() as broken:
            broken.setattr(Shares, "may", lambda *_: 1 / 0)
            await peer.send(*offer_of(peer, 1))
            assert (await peer.expect(Declined)).reason == "no_engine"
        await peer.send(*offer_of(peer, 2))
        await peer.expect(frames.Finished)


# ---- who is let in ----


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


# ---- whole routers before whole agents ----


async def test_two_routers_share_two_agents_to_the_last_slot() -> None:
    """S1 as the engines see it, with more wishes than slots."""
    most = [0, 0]

    def counting(place: int) -> Any:
        async def script(x: Exchange) -> None:
            engine = engines[place]
            most[place] = max(most[place], engine.live)
            await x.role()
            for n in range(5):
                await x.text(str(n))
                await trio.sleep(0.002)
            most[place] = max(most[place], engine.live)
            await x.finish()
            await x.done()
            await x.end()

        return script

    async with (
        open_agent(counting(0), slots=3, name="h0") as a0,
        open_agent(counting(1), slots=2, name="h1") as a1,
        open_far_router(a0, a1) as r0,
        open_far_router(a0, a1) as r1,
    ):
        engines = [a0.engines[0], a1.engines[0]]
        texts: list[str] = []

        async def ask(router: Any) -> None:
            texts.append((await router.complete(JOB)).text)

        async with trio.open_nursery() as nursery:
            for n in range(60):
                nursery.start_soon(ask, (r0, r1)[n % 2])
        assert texts == ["01234"] * 60
        assert most == [3, 2]
        await until(lambda: a0.idle and a1.idle)
        for router in (r0, r1):
            assert not router.flights
            assert all(not m.busy for m in router.fleet.members.values())


async def test_s1_two_ways_to_one_agent_are_two_guests_and_stay() -> None:
    live = most = 0

    async def counting(x: Exchange) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await x.role()
        await x.text("a")
        live -= 1
        await x.finish()
        await x.done()
        await x.end()

    sock = listen()
    async with (
        open_agent(counting, slots=2, routers=[port_of(sock)]) as agent,
        open_far_router(agent, agent) as router,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Greeter(router).serve, [sock])
        await until(lambda: len(agent.agent.visits) == 3)
        await until(lambda: all(m.serving for m in router.fleet.members.values()))
        async with trio.open_nursery() as asking:
            for _ in range(30):
                asking.start_soon(router.complete, JOB)
        assert most == 2
        await until(lambda: agent.idle)
        assert len(agent.agent.visits) == 3
        assert agent.router.tally.wire.total() == router.tally.wire.total() == 0
        nursery.cancel_scope.cancel()


async def test_s4_a_router_with_a_deep_queue_leaves_another_its_part() -> None:
    async def brief(x: Exchange) -> None:
        await x.role()
        await trio.sleep(0.005)
        await x.text("a")
        await x.finish()
        await x.done()
        await x.end()

    async with (
        open_agent(brief, slots=2) as agent,
        open_far_router(agent) as greedy,
        open_far_router(agent) as modest,
    ):
        done: list[str] = []

        async def ask(router: Any, name: str) -> None:
            await router.complete(JOB)
            done.append(name)

        async with trio.open_nursery() as nursery:
            for _ in range(80):
                nursery.start_soon(ask, greedy, "greedy")
            await until(lambda: len(done) >= 4)
            for _ in range(10):
                nursery.start_soon(ask, modest, "modest")
        # The modest one's ten are long done when the greedy one's eighty are.
        assert done[-25:].count("modest") == 0


async def test_p5_a_killed_agent_fails_over_before_the_first_delta() -> None:
    texts: list[str] = []
    async with (
        open_agent(silent, name="h0") as a0,
        open_agent(None, name="h1") as a1,
        open_far_router(a0, a1) as router,
        trio.open_nursery() as nursery,
    ):

        async def ask() -> None:
            texts.append((await router.complete(JOB)).text)

        nursery.start_soon(ask)
        nursery.start_soon(ask)
        await until(lambda: bool(a0.engines[0].seen))
        a0.kill()
        await until(lambda: len(texts) == 2)
    assert texts == ["Hello world"] * 2


async def test_f8_an_agent_that_restarts_is_another_life() -> None:
    sock = listen()
    port = port_of(sock)
    faults: list[FaultKind] = []
    async with open_agent(slow, sock=sock) as first, open_far_router(port) as router:

        async def ask() -> None:
            with pytest.raises(RequestFailed) as raised:
                await read_all(router)
            faults.append(raised.value.fault.kind)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: any(f.delta_count for f in router.flights.values()))
            first.kill()
        again = socket.create_server(("127.0.0.1", port))
        again.setblocking(False)
        async with open_agent(None, sock=again):
            await until(lambda: router.ready)
            assert (await router.complete(JOB)).text == "Hello world"

    assert faults == [FaultKind.STREAM_CLOSED_EARLY]
    assert router.tally.restarts["a0"] == 1


async def read_all(router: Router) -> None:
    async with router.stream(JOB) as deltas:
        async for _ in deltas:
            pass


# ---- TLS, and agents that come by themselves ----


@attrs.frozen
class Files:
    """Certificates of one authority, as files."""

    cert: str
    key: str
    ca: str

    @property
    def keys(self) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}


def certify(folder: Path, authority: trustme.CA, name: str) -> Files:
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, ca = (folder / f"{name}.{part}" for part in ("cert", "key", "ca"))
    issued.private_key_pem.write_to_path(key)
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(cert, append=number > 0)
    authority.cert_pem.write_to_path(ca)
    return Files(str(cert), str(key), str(ca))


async def test_p1_mutual_tls_lets_in_who_has_a_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    host, ours = (certify(tmp_path, authority, name) for name in ("host", "ours"))
    settings = AgentSettings(**host.keys)
    async with (
        open_agent(None, settings=settings) as agent,
        open_far_router(agent, settings=AgentsSettings(**ours.keys)) as router,
    ):
        assert (await router.complete(JOB)).text == "Hello world"


async def test_p1_mutual_tls_keeps_others_out_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = certify(tmp_path, trustme.CA(), "host")
    stranger = certify(tmp_path, trustme.CA(), "stranger")
    half = AgentsSettings(tls_ca=host.ca)
    wrong = attrs.evolve(half, tls_cert=stranger.cert, tls_key=stranger.key)
    cases = {
        "tlsv13 alert certificate required": half,
        "tlsv1 alert unknown ca": wrong,
        "a certificate fails: ": AgentsSettings(**stranger.keys),
    }
    async with open_agent(None, settings=AgentSettings(**host.keys)) as agent:
        for words, settings in cases.items():
            async with open_far_router(agent, settings=settings, ready=False) as router:
                await until(partial(tells_of_tls, router, words))
                assert not router.ready
        assert agent.agent.visits == {}
    assert "is not let in (tls): " in caplog.text


def tells_of_tls(router: Router, words: str) -> bool:
    (member,) = router.fleet.members.values()
    return member.life.reason == "tls_failed" and words in member.life.detail


async def test_p1_tls_at_one_end_alone_is_told_at_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = AgentsSettings(**certify(tmp_path, trustme.CA(), "a").keys)
    host = AgentSettings(**certify(tmp_path, trustme.CA(), "b").keys)
    async with open_agent(None, settings=host) as agent:
        async with open_far_router(agent, ready=False) as router:
            await until(partial(was_refused, router))
            worker = router.workers[WorkerId("a0")]
            assert "one end uses TLS alone" in (await worker.probe()).detail
        assert "is not let in (tls): TLS failed: wrong version number" in caplog.text
    async with (
        open_agent(None) as agent,
        open_far_router(agent, settings=keys, ready=False) as router,
    ):
        await until(partial(tells_of_tls, router, "TLS failed: wrong version number"))


async def test_a_connection_that_ends_in_the_handshake_is_lost_and_no_fault_of_tls(
    tmp_path: Path,
) -> None:
    keys = AgentsSettings(**certify(tmp_path, trustme.CA(), "a").keys)
    async with (
        doorway() as hall,
        open_far_router(hall.port, settings=keys, ready=False) as router,
    ):
        stream = await hall.listener.accept()
        await stream.receive_some(65536)
        await stream.aclose()
        await until(partial(was_refused, router))

        assert router.tally.wire["said", "lost"] >= 1
        assert router.tally.wire["said", "tls"] == 0


def was_refused(router: Router) -> bool:
    return router.tally.wire.total() > 0


async def test_a_plain_router_is_no_guest_of_a_tls_agent(tmp_path: Path) -> None:
    host = certify(tmp_path, trustme.CA(), "host")
    async with open_agent(None, settings=AgentSettings(**host.keys)) as agent:
        async with calling(agent.port, router_passport()) as peer:
            with pytest.raises((trio.EndOfChannel, frames.WireError)):
                await peer.open()
        await until(lambda: agent.router.tally.wire["said", "tls"] == 1)


def test_files_that_are_no_certificates_are_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(ValueError, match="the TLS files are of no use"):
        access.agent_access(AgentSettings(tls_ca=str(tmp_path / "x")), {})
    good = certify(tmp_path, trustme.CA(), "good")
    made = access.agent_access(AgentSettings(**good.keys), ENVIRON)
    assert made.inward is not None
    assert made.inward.verify_mode is ssl.CERT_REQUIRED


@asynccontextmanager
async def greeting(
    settings: AgentsSettings | None = None, waits: WaitSettings = QUICK
) -> AsyncIterator[tuple[Any, int]]:
    """A router that lets agents come, and the port where they do."""
    sock = listen()
    whole = Settings(waits=waits, agents=settings or AgentsSettings())
    async with open_router(whole) as router, trio.open_nursery() as nursery:
        await nursery.start(Greeter(router).serve, [sock])
        yield router, port_of(sock)
        nursery.cancel_scope.cancel()


async def test_p1_an_agent_that_announces_itself_is_a_worker() -> None:
    async with greeting() as (router, port):
        async with open_agent(None, name="gpu-7", routers=[port]):
            await until(lambda: router.ready)
            assert list(router.workers) == ["gpu-7"]
            assert (await router.complete(JOB)).text == "Hello world"
        await until(lambda: not router.ready)
        assert list(router.workers) == ["gpu-7"]
        assert list(router.fleet.models) == ["m"]
        async with open_agent(None, name="gpu-7", routers=[port]):
            await until(lambda: router.ready)
            assert (await router.complete(JOB)).text == "Hello world"


async def test_p1_an_agent_says_once_why_its_router_does_not_take_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "BACKOFF_S", (0.001, 1.0))
    async with greeting() as (router, port):
        wrong = AgentSettings(token_env="TOKEN")
        async with open_agent(None, settings=wrong, routers=[port]) as agent:
            await until(lambda: router.tally.wire.total() > 3)
            (away,) = agent.agent.status()["agent"]["away"]
            assert away["address"] == f"127.0.0.1:{port}"
            assert away["reason"] == "unauthorized"
            (line,) = [r.message for r in caplog.records if "it is tried" in r.message]
            assert line.startswith(f"router 127.0.0.1:{port} ")
            assert " (unauthorized): " in line
            at_router = [r.message for r in caplog.records if "agent at" in r.message]
            assert len([line for line in at_router if "(unauthorized)" in line]) == 1
            assert TOKEN not in caplog.text
        caplog.clear()
        async with open_agent(None, name="gpu-7", routers=[port]) as agent:
            await until(lambda: router.ready)
            assert agent.agent.status()["agent"]["away"] == []


async def test_p1_two_agents_of_one_name_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "BACKOFF_S", (0.001, 0.001))
    epochs = iter((1, 5, 9))
    monkeypatch.setattr(access, "new_epoch", lambda: next(epochs))
    async with greeting() as (router, port):
        async with open_agent(None, routers=[port]):
            await until(lambda: router.ready)
            async with open_agent(None, routers=[port]):
                await until(lambda: "lets us in no more (superseded)" in caplog.text)
                await until(lambda: "is not let in (superseded)" in caplog.text)
                await until(lambda: router.ready)


async def test_an_agent_tries_what_it_knew_where_a_name_resolves_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with greeting() as (router, port), open_agent(None) as agent:
        found = site.Resolver(site.Site(secure=False, host="h", port=port, base=""))
        found.addresses = [(socket.AF_INET, ("127.0.0.1", port))]

        async def fails() -> None:
            await trio.lowlevel.checkpoint()
            raise OSError

        monkeypatch.setattr(found, "refresh", fails)
        monkeypatch.setattr(agent_module, "Resolver", lambda _: found)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.agent._call_on, site.Site(False, "h", port, ""))
            await until(lambda: router.ready)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["no name!", "x" * 65, "-x"])
async def test_p1_an_agent_without_a_proper_name_is_not_taken_in(name: str) -> None:
    async with greeting() as (router, port):
        async with open_agent(None, name=name, routers=[port]):
            await until(lambda: router.tally.wire["said", "name"] > 0)
        assert router.workers == {}


async def test_p1_an_agent_takes_no_other_workers_name() -> None:
    sock = listen()
    async with (
        open_agent(None) as host,
        open_far_router(host) as router,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Greeter(router).serve, [sock])
        async with open_agent(None, name="a0", routers=[port_of(sock)]):
            await until(lambda: router.tally.wire["said", "name"] > 0)
        assert (await router.complete(JOB)).text == "Hello world"
        nursery.cancel_scope.cancel()


async def test_an_agent_that_stays_away_is_forgotten() -> None:
    sock = listen()
    async with (
        open_router(Settings(waits=QUICK)) as router,
        trio.open_nursery() as nursery,
    ):
        greeter = Greeter(router, forget_s=0.05)
        await nursery.start(greeter.serve, [sock])
        async with open_agent(None, name="h", routers=[port_of(sock)]):
            await until(lambda: router.ready)
        await until(lambda: router.workers == {})
        assert router.fleet.models == {}
        nursery.cancel_scope.cancel()


async def test_p1_two_agents_and_two_routers_meet_from_either_side() -> None:
    async with (
        greeting() as (r0, p0),
        greeting() as (r1, p1),
        open_agent(None, name="h0", routers=[p0, p1]) as a0,
        open_agent(None, name="h1", routers=[p0, p1]) as a1,
    ):
        await until(lambda: len(r0.workers) == len(r1.workers) == 2)
        members = [m for r in (r0, r1) for m in r.fleet.members.values()]
        await until(lambda: all(m.serving for m in members))
        async with trio.open_nursery() as nursery:
            for n in range(12):
                nursery.start_soon((r0, r1)[n % 2].complete, JOB)
        assert len(a0.engines[0].seen) + len(a1.engines[0].seen) == 12
