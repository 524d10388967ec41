"""An agent over fake engines, as one router meets it (P3-P6, L5)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from router.engine.flight import Flight
from router.messages import Endpoint, GenerationParams, Job
from router.ports import SourcePhase
from router.waiting import WaitState
from tests.kit.agents import (
    QUICK,
    RunningAgent,
    open_agent,
    open_far_router,
)
from tests.kit.delivery import JOB, assignment
from tests.kit.edge import until
from tests.kit.engine import in_turn, refuses, silent
from tests.kit.exchange import Exchange
from tests.kit.peer import Peer, calling, router_passport
from tests.kit.receiver import Recorder
from tests.kit.visits import offer_of, slow, visiting
from workers import link
from workers.agent import agent as agent_module
from workers.agent import visit
from workers.agent.receiver import WireReceiver
from workers.shares import Shares
from workers.wire import frames, gathering
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
    Part,
    RichDelta,
    Seen,
    Waiting,
)


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
        assert agent.router.tally.declines == {reason: 1}
        assert agent.engines[0].seen == []


async def test_p3_each_no_is_counted_once_whoever_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visit, "LOOK_S", 0.02)
    monkeypatch.setattr(agent_module, "TICK_S", 0.01)
    monkeypatch.setattr(gathering, "GATHER_S", 0.05)
    async with open_agent(None) as agent, visiting(agent) as peer:
        for number, (fields, parts) in enumerate(NOES.values(), 1):
            offer, _ = offer_of(peer, number, **fields)
            await peer.send(offer, *(Part(number, 0, part) for part in parts))
            await peer.expect(Declined)

        assert [m.reason for m in peer.heard if isinstance(m, Declined)] == list(NOES)
        assert agent.agent.status()["agent"]["declines"] == dict.fromkeys(NOES, 1)


#: Offers, and parts of their jobs, for which there is a no.
NOES: dict[str, tuple[dict[str, Any], list[bytes]]] = {
    "wrong_epoch": ({"epoch": 1}, []),
    # As many bytes as it says do not come.
    "too_large": ({"request": "x", "size": 3}, [b"ab"]),
    "stale": ({"request": "x"}, []),
    "bad_job": ({"size": 1}, [b"\xc1"]),
    "unknown_model": ({"target": "elsewhere"}, []),
}


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


async def test_p3_a_burst_that_finds_no_slot_is_told_once_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What engines do is for people, and goes with heartbeats alone.
    monkeypatch.setattr(visit, "HEARTBEAT_S", 3600.0)
    async with open_agent(silent, slots=1) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer, 1))
        await peer.expect(Accepted)
        before = len(peer.heard)
        await peer.send(*(offer_of(peer, n)[0] for n in range(2, 202)))
        await until_declined(peer, 200)

        told = [m for m in peer.heard[before:] if isinstance(m, Observation)]
        # A read or a few, and what the slots' own changes bring.
        assert len(told) < 20
        assert all(seen.hosts is None for seen in told)


async def until_declined(peer: Peer, most: int) -> None:
    """Read until *most* declines were heard."""
    for _ in range(most):
        await peer.expect(Declined)


async def test_p3_what_changed_since_the_first_no_of_a_read_is_told_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "TICK_S", 3600.0)
    monkeypatch.setattr(agent_module, "GATHER_S", 3600.0)
    async with (
        open_agent(silent, slots=1, models=("m", "n")) as agent,
        visiting(agent) as peer,
    ):
        await peer.send(*offer_of(peer, 1))
        await peer.expect(Accepted)
        job = attrs.evolve(JOB, target="n")
        await peer.send(
            offer_of(peer, 2)[0],
            Cancel(1),
            *offer_of(peer, 3, job=job),
            offer_of(peer, 4)[0],
        )
        await until_declined(peer, 2)
        told = await peer.expect(Observation)

        assert told.models == {"m": (0, 2), "n": (1, 2)}


async def test_p2_an_agent_says_once_that_it_can_not_tell_of_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(visit, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(agent_module, "TICK_S", 0.01)
    monkeypatch.setattr("workers.wire.shapes.MODELS_MAX", 2)
    async with open_agent(None, models=("m", "n", "o")) as agent, visiting(agent) as x:
        for _ in range(5):
            assert list((await x.expect(Observation)).models) == ["m", "n"]

    (line,) = [r.getMessage() for r in caplog.records if "not told of" in r.msg]
    assert "router router" in line
    assert "all 3 models and 1 engines" in line


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


def telling_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have agents look at silence all the time."""
    monkeypatch.setattr(visit, "LOOK_S", 0.02)
    monkeypatch.setattr(visit, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(agent_module, "TICK_S", 0.01)


class Moved:
    """An engine that is lost behind its head, and one that has the job then."""

    def __init__(self) -> None:
        self.first_head = trio.Event()
        self.lose = trio.Event()
        self.moved = trio.Event()
        self.head = trio.Event()
        self.say = trio.Event()

    async def script(self, x: Exchange) -> None:
        """Be the first of them for whoever comes first."""
        if not self.lose.is_set():
            await self.first_head.wait()
            await x.role()
            await self.lose.wait()
            await x.reset()
            return
        self.moved.set()
        await self.head.wait()
        await x.role()
        await self.say.wait()
        await x.text("hello")
        await x.finish()
        await x.done()
        await x.end()


async def test_w2_an_agent_takes_the_head_of_an_engine_back_that_it_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telling_soon(monkeypatch)
    engines = Moved()
    # No poll of its own says what the silence means before this test is over.
    slow_looks = attrs.evolve(QUICK, poll_ms=600_000)
    async with (
        open_agent(engines.script, engines.script, waits=slow_looks) as agent,
        visiting(agent) as peer,
    ):
        engines.first_head.set()
        await peer.send(*offer_of(peer))
        assert (await peer.expect(Waiting)).state == "head"
        engines.lose.set()
        assert (await peer.expect(Waiting)).state == "busy"
        engines.head.set()
        assert (await peer.expect(Waiting)).state == "head"
        engines.say.set()
        assert (await peer.expect(frames.Finished)).count == 1


async def test_w4_a_router_waits_for_the_engine_that_has_a_job_after_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telling_soon(monkeypatch)
    engines, client = Moved(), Recorder()
    async with (
        open_agent(engines.script, engines.script) as agent,
        open_far_router(agent) as router,
        trio.open_nursery() as nursery,
    ):
        request = router.new_request_id()
        nursery.start_soon(lambda: router.serve(JOB, client, request=request))

        def phase() -> SourcePhase | None:
            flight = router.flights.get(request)
            source = None if flight is None else flight.source
            return None if source is None else source.phase

        await until(lambda: request in router.flights)
        flight = router.flights[request]
        await until(lambda: flight.wait_state is WaitState.BUSY and flight.waited > 0)
        engines.first_head.set()
        await until(lambda: phase() is SourcePhase.STREAMING)
        assert (flight.wait_state, flight.waited) == (None, 0.0)
        engines.lose.set()
        await engines.moved.wait()
        await until(lambda: phase() is SourcePhase.AWAITING_HEAD)
        await until(lambda: flight.wait_state is WaitState.BUSY)
        engines.head.set()
        await until(lambda: phase() is SourcePhase.STREAMING)
        engines.say.set()

    assert (client.text, client.fault) == ("hello", None)
    assert [attempts for _, attempts in client.routes] == [1]


async def test_w6_a_head_is_told_once_however_bytes_move_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telling_soon(monkeypatch)
    go = trio.Event()

    async def comments(x: Exchange) -> None:
        await x.role()
        await go.wait()
        await x.data(b": here still\n\n")
        await x.wait_closed()

    async with open_agent(comments) as agent, visiting(agent) as peer:
        await peer.send(*offer_of(peer))
        assert (await peer.expect(Waiting)).state == "head"
        go.set()
        assert (await peer.expect(Waiting)).state == "moves"
        # Looked at a few times more.
        for _ in range(5):
            await peer.expect(Observation)

        told = [m.state for m in peer.heard if isinstance(m, Waiting)]
        assert told == ["head", "moves"]
