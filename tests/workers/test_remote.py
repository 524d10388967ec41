"""A worker that is an agent, as its router has it (P1-P6, L3, L5)."""

import os
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from router.engine import Router, open_router
from router.errors import Fault, FaultKind, RequestFailed, WorkerFailed
from router.lifecycle import State
from router.messages import Finished, GenerationParams, Probe, ProbeResult, Share
from router.ports import SourcePhase
from router.settings import AgentsSettings, Settings, WaitSettings, WorkerSettings
from router.tally import Tally
from tests.kit.cork import strict_cork
from tests.kit.delivery import JOB, RecordingDelivery, assignment
from tests.kit.edge import until
from tests.kit.peer import Doorway, Peer, agent_passport, doorway
from workers import link, remote
from workers.access import router_access, site_of
from workers.remote import RemoteWorker
from workers.transport import PlainTransport
from workers.wire import frames
from workers.wire.frames import (
    Accepted,
    Cancel,
    Counted,
    Credit,
    Declined,
    Deltas,
    Draining,
    EndReasoning,
    Finishing,
    Observation,
    Offer,
    Part,
    Reason,
    Seen,
    Waiting,
)

QUICK = WaitSettings(poll_ms=50, connect_ms=400, offer_timeout_ms=100)


@pytest.fixture(autouse=True)
def _short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in a test's hand does not read our last word by itself."""
    monkeypatch.setattr(link, "PARTING_S", 0.02)


@attrs.define
class Far:
    """A remote worker that runs, and who connects to its agent's door."""

    worker: RemoteWorker
    door: Doorway
    tally: Tally
    probes: list[Probe]
    scope: trio.CancelScope

    async def met(self, **observation: Any) -> Peer:
        """Take its connection; it has heard an observation on it."""
        peer = await self.door.next(agent_passport(**observation))
        await peer.open()
        await peer.observe()
        await peer.expect(Seen)
        return peer

    def send(self, number: int = 1) -> tuple[Any, RecordingDelivery]:
        delivery = RecordingDelivery()
        return self.worker.open(assignment(number), JOB, delivery), delivery


@asynccontextmanager
async def far(
    environ: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[Far]:
    async with doorway() as door:
        tally = Tally()
        worker = RemoteWorker(
            "w",
            site_of(f"127.0.0.1:{door.port}", secure=False),
            router_access(AgentsSettings(**settings), environ or {}),
            tally=tally,
            report_bug=lambda _where, bug: pytest.fail(str(bug)),
            rng=random.Random(1),
            waiting=lambda _: 3,
        )
        probes: list[Probe] = []
        worker.told = probes.append
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            yield Far(worker, door, tally, probes, nursery.cancel_scope)
            nursery.cancel_scope.cancel()


async def test_p4_what_the_agent_says_is_what_is_known_of_it() -> None:
    async with far() as f:
        assert (await f.worker.probe()).result is ProbeResult.REFUSED
        peer = await f.door.next(agent_passport())
        await peer.open()
        assert (await f.worker.probe()).result is ProbeResult.SILENT
        await peer.observe(
            1, slots=8, load=3, models={"m": (5, 2), "n": (0, 1), "o": (0, 0)}
        )
        assert (await peer.expect(Seen)).sequence == 1

        probe = await f.worker.probe()
        assert probe.discovery is not None
        assert probe.discovery.models == ("m", "n", "o")
        assert probe.discovery.slots == 8
        assert probe.discovery.shares == {
            "m": Share(5),
            "n": Share(0, serves=False, coming=True),
            "o": Share(0, serves=False),
        }
        assert f.probes[-1] == probe
        slots = await f.worker.slot_view()
        assert slots is not None
        assert (slots.total, slots.processing) == (8, 3)
        assert await f.worker.alive()


@pytest.mark.parametrize(
    ("models", "result"),
    [({"m": (0, 1)}, ProbeResult.LOADING), ({"m": (0, 0)}, ProbeResult.REFUSED)],
)
async def test_an_agent_without_an_engine_that_is_up_is_not_ready(
    models: dict[str, tuple[int, int]], result: ProbeResult
) -> None:
    async with far() as f:
        peer = await f.met()
        await peer.observe(2, models=models)
        await peer.expect(Seen)

        assert (await f.worker.probe()).result is result


async def test_p4_an_observation_that_is_not_newer_changes_nothing() -> None:
    async with far() as f:
        peer = await f.met()
        await peer.observe(5, slots=5)
        await peer.observe(5, slots=6)
        await peer.observe(4, slots=7)
        for _ in range(3):
            await peer.expect(Seen)

        found = (await f.worker.probe()).discovery
        assert found is not None
        assert found.slots == 5


async def test_p5_the_loss_of_the_connection_fails_what_was_on_it_at_once() -> None:
    async with far() as f:
        peer = await f.met()
        sent = [f.send(number)[1] for number in (1, 2)]
        await peer.expect(Part)
        peer.reset()
        for delivery in sent:
            assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY

        assert f.probes[-1].result is ProbeResult.REFUSED
        # For people, who are shown "lost: ..." already.
        assert not f.probes[-1].detail.startswith("lost")
        with pytest.raises(WorkerFailed) as raised:
            f.send(3)
        assert raised.value.fault.kind is FaultKind.CONNECT
        assert not await f.worker.alive()
        assert await f.worker.slot_view() is None


async def test_it_connects_again_and_an_old_end_tears_nothing_down() -> None:
    async with far() as f:
        first = await f.met()
        first.reset()
        second = await f.met()
        _, delivery = f.send()
        offer = await second.expect(Offer)
        await second.send(
            Accepted(offer.stream),
            Deltas([(offer.stream, 0, 0, "a")]),
            frames.Finished(offer.stream, 1, "stop"),
        )

        assert isinstance(await delivery.finish(), Finished)
        assert f.tally.wire["said", "lost"] == 1


def await_agent() -> RemoteWorker:
    """Make a worker whose agent comes by itself."""
    return RemoteWorker(
        "w",
        None,
        router_access(AgentsSettings(), {}),
        tally=Tally(),
        report_bug=lambda _where, bug: pytest.fail(str(bug)),
        rng=random.Random(1),
    )


async def carry(worker: RemoteWorker, door: Doorway) -> frames.WireError:
    """Have *worker* use one connection to *door* until its end; gives why."""
    transport = PlainTransport((socket.AF_INET, ("127.0.0.1", door.port)))
    one = link.Link(
        transport, router_access(AgentsSettings(), {}).passport, strict_cork()
    )
    try:
        await one.open()
        return await worker.carry(one)
    finally:
        await one.part(None)


async def test_an_agent_that_is_here_before_its_worker_runs_is_not_told_of() -> None:
    """Who is told that it is ready may send a request the next moment."""
    async with doorway() as door, trio.open_nursery() as nursery:
        worker = await_agent()
        probes: list[Probe] = []
        worker.told = probes.append

        nursery.start_soon(carry, worker, door)
        peer = await door.next(agent_passport(epoch=7))
        await peer.open()
        await peer.observe()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert probes == []
        assert worker.route is None

        nursery.start_soon(worker.run)
        await until(lambda: bool(probes))
        source, _ = _send(worker)
        assert source.phase is not SourcePhase.CLOSED
        nursery.cancel_scope.cancel()


async def test_a_newer_connection_takes_an_older_ones_place() -> None:
    """An agent that announces itself came back before it was missed."""
    async with doorway() as door, trio.open_nursery() as nursery:
        worker = await_agent()
        ends: list[frames.WireError] = []

        async def carry_on() -> None:
            ends.append(await carry(worker, door))

        nursery.start_soon(worker.run)
        nursery.start_soon(carry_on)
        old = await door.open(agent_passport(epoch=7))
        _, lost = _send(worker)
        nursery.start_soon(carry_on)
        new = await door.open(agent_passport(epoch=8))
        assert (await lost.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        await old.ended()
        _, delivery = _send(worker, 2)
        offer = await new.expect(Offer)
        await new.send(Accepted(offer.stream), frames.Finished(offer.stream, 0, "stop"))
        await delivery.finish()
        assert [why.reason for why in ends] == [Reason.SUPERSEDED]

        nursery.start_soon(carry_on)
        older = await door.next(agent_passport(epoch=6))
        await older.open()
        await older.ended()
        assert worker.route is not None
        assert worker.route.epoch == 8
        nursery.cancel_scope.cancel()


def _send(worker: RemoteWorker, number: int = 1) -> tuple[Any, RecordingDelivery]:
    delivery = RecordingDelivery()
    return worker.open(assignment(number), JOB, delivery), delivery


async def test_p1_an_agent_that_refuses_our_token_is_unauthorized() -> None:
    async with far({"T": "a token of tests, wrong"}, token_env="T") as f:
        peer = await f.door.next(agent_passport(token=b"the right token of tests"))
        with pytest.raises(frames.WireError):
            await peer.open()
        await peer.send(frames.Bye("unauthorized", "the token is not the same"))
        await peer.ended()
        await until(lambda: bool(f.probes))

        assert f.probes[-1].result is ProbeResult.UNAUTHORIZED
        assert "wrong" not in f.probes[-1].detail


async def test_p1_an_agent_of_another_version_is_unfit_until_it_is_mended() -> None:
    async with far() as f:
        peer = await f.door.next(agent_passport(versions=(8, 9)))
        with pytest.raises(frames.WireError):
            await peer.open()
        await peer.ended()
        await until(lambda: bool(f.probes))
        assert (f.probes[-1].result, f.probes[-1].reason) == (
            ProbeResult.UNFIT,
            "wire_version",
        )

        await f.met()
        assert (await f.worker.probe()).result is ProbeResult.ANSWERED


async def test_p1_something_that_is_no_agent_is_unfit() -> None:
    async with far() as f:
        peer = await f.door.next(agent_passport())
        await peer.stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await peer.ended()
        await until(lambda: bool(f.probes))

        assert f.probes[-1].reason == "not_an_agent"
        assert f.tally.wire["said", "oversize"] == 1


async def test_p2_an_agent_that_breaks_the_wire_is_told_why_and_left() -> None:
    async with far() as f:
        peer = await f.met()
        _, delivery = f.send()
        await peer.send(Credit(1, 5))
        await peer.ended()

        assert peer.heard[-1].reason == "wrong_direction"
        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert f.tally.wire["said", "wrong_direction"] == 1


async def test_p4_an_agent_that_is_silent_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "EXPIRY_S", 0.2)
    monkeypatch.setattr(link, "TICK_S", 0.05)
    async with far() as f:
        peer = await f.met()
        began = trio.current_time()
        await peer.ended()

        assert peer.heard[-1].reason == "expired"
        assert 0.1 < trio.current_time() - began < 1.0


async def test_p4_a_loop_that_stalls_is_no_agent_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "EXPIRY_S", 0.2)
    monkeypatch.setattr(link, "TICK_S", 0.05)
    async with far() as f:
        peer = await f.met()
        seen = Observation(7, 2, 4, 0, {"m": (4, 2)}, None, [])
        # It comes while our whole process, this router with it, does nothing.
        os.write(peer.stream.socket.fileno(), frames.pack(seen))
        time.sleep(0.5)  # noqa: ASYNC251
        await trio.sleep(0.02)

        assert f.worker.route is not None
        assert f.worker.route.observation is not None
        assert f.worker.route.observation.sequence == 2


async def test_p4_a_late_loop_reads_before_it_gives_an_offer_up() -> None:
    async with far() as f:
        peer = await f.met()
        source, delivery = f.send()
        offer = await peer.expect(Offer)
        octets = frames.pack(Accepted(offer.stream))
        # Behind our loop's back, which has no turn before we look.
        os.write(peer.stream.socket.fileno(), octets)
        phases = [source.phase]
        source.catch_up()
        phases.append(source.phase)

        assert phases == [SourcePhase.OFFERED, SourcePhase.AWAITING_HEAD]
        assert delivery.names == ["accepted"]


async def test_the_offer_says_how_many_more_wait() -> None:
    async with far() as f:
        peer = await f.met()
        f.send()

        assert (await peer.expect(Offer)).waiting == 3


async def test_m8_a_count_is_asked_of_the_agent() -> None:
    async with far() as f:
        peer = await f.met()
        counts: list[int | None] = []

        async def ask() -> None:
            counts.append(await f.worker.count_tokens(JOB))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            offer = await peer.expect(Offer)
            assert offer.purpose == 1
            await peer.send(Counted(offer.stream, 17))
        assert counts == [17]

        with trio.move_on_after(0.02):
            await f.worker.count_tokens(JOB)
        offer = await peer.expect(Offer)
        assert (await peer.expect(Cancel)).stream == offer.stream


async def test_m8_an_agent_that_can_not_count_is_not_asked() -> None:
    async with far() as f:
        peer = await f.door.next(attrs.evolve(agent_passport(), capabilities=()))
        await peer.open()
        await peer.observe()
        await peer.expect(Seen)

        assert await f.worker.count_tokens(JOB) is None
        assert not any(isinstance(m, Offer) for m in peer.heard)


async def test_j3_what_an_engine_of_it_lacks_is_named() -> None:
    async with far() as f:
        peer = await f.met()
        await peer.observe(2, lacks=["min_p"])
        await peer.expect(Seen)
        job = attrs.evolve(JOB, params=GenerationParams(min_p=0.1, top_k=5))

        assert f.worker.unsupported(job) == ("min_p",)


async def test_j6_reasoning_is_ended_through_the_agent() -> None:
    async with far() as f:
        peer = await f.met()
        source, _ = f.send()

        assert source.end_reasoning() > 0
        assert (await peer.expect(EndReasoning)).stream == source.number


async def test_its_status_shows_the_agent_and_what_it_hosts() -> None:
    async with far() as f:
        assert f.worker.agent_status()["connected"] is False
        peer = await f.met()
        host = frames.Host("gpu0", "ready", "ready", "vllm", "1", 4, 1, ["m"])
        await peer.observe(2, hosts=[host])
        await peer.expect(Seen)
        status = f.worker.agent_status()

        assert (status["agent"], status["epoch"], status["connected"]) == (
            "host",
            7,
            True,
        )
        assert status["hosts"] == [
            {
                "name": "gpu0",
                "state": "ready",
                "reason": "ready",
                "engine": "vllm",
                "version": "1",
                "slots": 4,
                "busy": 1,
                "models": ["m"],
            }
        ]


async def test_leaving_closes_the_connection_with_a_word() -> None:
    async with far() as f:
        peer = await f.met()
        source, delivery = f.send()
        await peer.expect(Part)
        f.scope.cancel()
        with trio.CancelScope(shield=True):
            await peer.ended()

    assert peer.heard[-1].reason == "stopping"
    assert delivery.end is None
    assert source.phase is SourcePhase.CLOSED


# ---- in a whole router ----


@asynccontextmanager
async def routed(*doors: Doorway, **waits: int) -> AsyncIterator[Router]:
    workers = tuple(
        WorkerSettings(f"w{n}", agent=f"127.0.0.1:{door.port}")
        for n, door in enumerate(doors)
    )
    settings = Settings(waits=attrs.evolve(QUICK, **waits), workers=workers)
    async with open_router(settings, rng=random.Random(1)) as router:
        yield router


async def test_a2_a_silent_agent_is_sent_a_cancel_before_the_job_moves() -> None:
    async with (
        doorway() as d0,
        doorway() as d1,
        routed(d0, d1, connect_ms=5_000) as router,
    ):
        peers = [await d0.open(), await d1.open()]
        await until(lambda: all(m.serving for m in router.fleet.members.values()))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            first, second = peers
            offer = await first.expect(Offer)
            began = trio.current_time()
            assert (await first.expect(Cancel)).stream == offer.stream
            assert 0.05 < trio.current_time() - began < 4
            again = await second.expect(Offer)
            assert (again.request, again.attempt) == (offer.request, 2)
            await first.send(Accepted(offer.stream))
            await second.send(
                Accepted(again.stream), frames.Finished(again.stream, 0, "stop")
            )


async def test_a2_with_nobody_else_to_go_to_a_late_answer_is_waited_for() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            offer = await peer.expect(Offer)
            await trio.sleep(0.25)
            await peer.send(
                Accepted(offer.stream), frames.Finished(offer.stream, 0, "stop")
            )


async def test_a2_but_not_for_longer_than_for_a_connection() -> None:
    async with doorway() as door, routed(door) as router:
        await door.open()
        await until(lambda: router.ready)
        began = trio.current_time()
        with pytest.raises(RequestFailed) as raised:
            await router.complete(JOB)

        assert raised.value.fault.kind is FaultKind.CONNECT
        assert 0.3 < trio.current_time() - began < 1.0


async def test_p3_a_job_that_found_no_slot_waits_until_the_agent_has_one() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            offer = await peer.expect(Offer)
            await peer.observe(2, models={"m": (0, 2)})
            await peer.send(Declined(offer.stream, "no_slot"))
            await until(lambda: len(router.fleet.room) == 1)
            (member,) = router.fleet.members.values()
            assert member.life.state is State.READY
            assert member.faults == 0
            await peer.observe(3, models={"m": (1, 2)})
            again = await peer.expect(Offer)
            assert (again.request, again.attempt) == (offer.request, 2)
            await peer.send(
                Accepted(again.stream), frames.Finished(again.stream, 0, "stop")
            )


async def test_s1_what_others_have_of_an_agent_is_not_offered_to() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        await peer.observe(2, models={"m": (2, 2)})
        await peer.expect(Seen)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(router.complete, JOB)
            offers = [await peer.expect(Offer), await peer.expect(Offer)]
            await until(lambda: len(router.fleet.room) == 1)
            await trio.sleep(0.02)
            assert sum(isinstance(m, Offer) for m in peer.heard) == 2
            for offer in offers:
                await peer.send(
                    Accepted(offer.stream), frames.Finished(offer.stream, 0, "stop")
                )
            third = await peer.expect(Offer)
            await peer.send(
                Accepted(third.stream), frames.Finished(third.stream, 0, "stop")
            )


async def test_s1_each_model_of_an_agent_has_its_own_room() -> None:
    other = attrs.evolve(JOB, model="n", target="n")
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await peer.observe(2, models={"m": (0, 2), "n": (1, 2)})
        await until(lambda: router.ready)
        await peer.expect(Seen)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            await until(lambda: len(router.fleet.room) == 1)
            nursery.start_soon(router.complete, other)
            offer = await peer.expect(Offer)
            assert offer.target == "n"
            await peer.send(
                Accepted(offer.stream), frames.Finished(offer.stream, 0, "stop")
            )
            nursery.cancel_scope.cancel()


async def test_s4_a_model_whose_engine_is_gone_is_refused_at_once() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await peer.observe(2, models={"m": (0, 0), "n": (1, 2)})
        await until(lambda: router.ready)
        await peer.expect(Seen)
        with pytest.raises(RequestFailed) as raised:
            await router.complete(JOB)

        assert raised.value.fault.kind is FaultKind.NO_WORKER


async def test_l5_an_agent_that_drains_is_offered_nothing_until_it_is_back() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open(agent_passport(epoch=7))
        await until(lambda: router.ready)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            offer = await peer.expect(Offer)
            await peer.send(Accepted(offer.stream), Draining())
            (member,) = router.fleet.members.values()
            await until(lambda: member.life.state is State.DRAINING)
            assert member.life.reason == "agent_drains"
            await peer.send(frames.Finished(offer.stream, 0, "stop"))
        await peer.send(frames.Bye("stopping"))
        await until(lambda: member.life.state is State.STARTING)
        await door.open(agent_passport(epoch=5_000))

        await until(lambda: member.serving)
        assert router.tally.restarts["w0"] == 1


async def test_l5_an_operators_drain_outlasts_the_agents_word() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        assert router.drain("w0")
        await peer.observe(2)
        await peer.expect(Seen)
        await trio.sleep(0.02)
        (member,) = router.fleet.members.values()
        assert member.life.state is State.DRAINING
        assert router.undrain("w0")

        await until(lambda: member.serving)


async def test_l3_a_lost_agent_is_lost_at_once_and_comes_back_ramped() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        (member,) = router.fleet.members.values()
        peer.reset()
        await until(lambda: member.life.state is State.LOST)
        await door.open()
        await until(lambda: member.serving)

        assert member.ramp == 1


async def test_w2_what_the_agent_says_of_silence_ends_at_our_budget() -> None:
    waits = {"idle_grace_ms": 100, "busy_wait_ms": 10_000}
    async with doorway() as door, routed(door, **waits) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        fault: list[Fault] = []

        async def ask() -> None:
            with pytest.raises(RequestFailed) as raised:
                await router.complete(JOB)
            fault.append(raised.value.fault)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            offer = await peer.expect(Offer)
            await peer.send(Accepted(offer.stream), Waiting(offer.stream, "busy"))
            await trio.sleep(0.25)
            assert fault == []
            await peer.send(Waiting(offer.stream, "idle"))
            await peer.expect(Cancel)
        assert fault[0].kind is FaultKind.STALLED


async def test_m3_usage_is_waited_for_no_longer_than_allowed() -> None:
    async with doorway() as door, routed(door, usage_wait_ms=50) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            offer = await peer.expect(Offer)
            await peer.send(
                Accepted(offer.stream),
                Deltas([(offer.stream, 0, 0, "a")]),
                Finishing(offer.stream, 1, "stop"),
            )
            await peer.expect(Cancel)


def test_the_words_of_every_refusal_name_a_probe() -> None:
    for reason in Reason:
        probe = remote._why(frames.WireError(reason, "words"))
        assert probe.result in {
            ProbeResult.REFUSED,
            ProbeResult.UNFIT,
            ProbeResult.UNAUTHORIZED,
        }
