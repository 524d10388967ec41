"""One suite for every kind of worker: what ``ports.Worker`` promises (T3).

A scenario is a list of the scripted worker's steps. The scripted worker plays
it itself; for the direct worker a fake engine plays it over real sockets; for the
remote one the same engine stands behind a real agent.
"""

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import pytest
import trio
import trio.testing

from router.errors import Fault, FaultKind, WorkerFailed
from router.messages import Finished, FinishReason, ProbeResult, Usage
from router.ports import Source, SourcePhase, Worker
from router.settings import AgentsSettings, WaitSettings, WorkerSettings
from router.tally import Tally
from tests.kit.agents import RunningAgent, open_agent
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.edge import until
from tests.kit.engine import FakeEngine, open_engine
from tests.kit.exchange import Exchange
from workers.access import router_access, site_of
from workers.direct import DirectWorker
from workers.remote import RemoteWorker
from workers.scripted import (
    Fail,
    Finish,
    FinishWithoutUsage,
    Head,
    Say,
    ScriptedWorker,
    Step,
    Wait,
)

#: Long enough for nothing to happen that is going to.
NEVER = Wait(float("inf"))
BUSY = Fail(Fault(FaultKind.DECLINED, "busy", status=503))
LOST = Fail(Fault(FaultKind.STREAM_CLOSED_EARLY, "lost"))


class Stage(Protocol):
    """A worker and the switch that takes it off the net."""

    worker: Worker

    def lose(self) -> None: ...


class ScriptedStage:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.worker: Worker = ScriptedWorker("w", lambda _assignment, _job: steps)

    def lose(self) -> None:
        assert isinstance(self.worker, ScriptedWorker)
        self.worker.die()


class DirectStage:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.worker: Worker = DirectWorker(
            WorkerSettings(name="w", url=engine.url),
            WaitSettings(),
            environ={},
            report_bug=lambda _where, bug: pytest.fail(str(bug)),
        )

    def lose(self) -> None:
        self.engine.refuse = True
        for connection in list(self.engine.connections):
            connection.reset()


class RemoteStage:
    def __init__(self, agent: RunningAgent) -> None:
        self.agent = agent
        settings = AgentsSettings()
        worker = RemoteWorker(
            "w",
            site_of(agent.address, secure=False),
            router_access(settings, {}),
            tally=Tally(),
            report_bug=lambda _where, bug: pytest.fail(str(bug)),
            rng=random.Random(1),
        )
        self.remote = worker
        self.worker: Worker = worker

    def lose(self) -> None:
        self.agent.kill()

    def is_met(self) -> bool:
        route = self.remote.route
        return route is not None and route.observation is not None


async def perform(steps: Sequence[Step], x: Exchange) -> None:
    """Play *steps* as an engine would."""
    headed = False
    for step in steps:
        match step:
            case Wait(seconds):
                await trio.sleep(seconds)
            case Head():
                headed = True
                await x.head()
            case Say(pieces):
                chunks = [
                    {"choices": [{"index": 0, "delta": {"content": piece}}]}
                    for piece in pieces
                ]
                frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
                await x.data("".join(frames).encode())
            case FinishWithoutUsage():
                await x.finish()
            case Finish(reason, usage):
                await x.finish(reason.value)
                if usage is not None:
                    await x.usage(usage.prompt_tokens, usage.completion_tokens)
                await x.done()
                await x.end()
            case Fail(fault) if fault.status is not None and not headed:
                await x.json(fault.status, {"error": {"message": fault.message}})
            case Fail():
                await x.fin()
            case _:
                pytest.fail(f"no engine does {step}")


@asynccontextmanager
async def stage(kind: str, *steps: Step) -> AsyncIterator[Stage]:
    if kind == "scripted":
        acted: Stage = ScriptedStage(steps)
        async with served(acted.worker):
            yield acted
        return

    async def script(x: Exchange) -> None:
        await perform(steps, x)

    if kind == "remote":
        async with open_agent(script, slots=8, kind="llama-server") as agent:
            far = RemoteStage(agent)
            async with served(far.worker):
                await until(far.is_met)
                yield far
        return
    async with open_engine(script) as engine:
        acted = DirectStage(engine)
        async with served(acted.worker):
            yield acted


def send(worker: Worker, number: int = 1) -> tuple[Source, RecordingDelivery]:
    delivery = RecordingDelivery()
    return worker.open(assignment(number), JOB, delivery), delivery


each = pytest.mark.parametrize("kind", ["scripted", "direct", "remote"])


@each
async def test_a_whole_answer_is_accepted_stamped_and_finished_once(kind: str) -> None:
    steps = (Head(), Say(("a",)), Say(("b", "c")), Finish(usage=Usage(3, 2)))
    async with stage(kind, *steps) as s:
        source, delivery = send(s.worker)
        finished = await delivery.finish()
        await trio.testing.wait_all_tasks_blocked(0.01)

        assert source.phase is SourcePhase.CLOSED
    assert finished == Finished(assignment(), FinishReason.STOP, Usage(3, 2))
    assert delivery.names[0] == "accepted"
    assert delivery.names.count("finished") == 1
    assert delivery.names[-1] == "finished"
    assert [(d.index, d.text) for d in delivery.taken] == [(0, "a"), (1, "b"), (2, "c")]
    assert set(delivery.stamps) == {assignment()}


@each
async def test_a_decline_is_a_fault_and_an_engine_accepts_nothing_by_it(
    kind: str,
) -> None:
    async with stage(kind, BUSY) as s:
        source, delivery = send(s.worker)

        assert (await delivery.fault()).kind is FaultKind.DECLINED
        # An agent has accepted the job before its engine declines it.
        accepted = ["accepted"] if kind == "remote" else []
        assert delivery.names == [*accepted, "failed"]
        assert source.phase is SourcePhase.CLOSED


@each
async def test_f7_a_loss_after_deltas_is_a_fault(kind: str) -> None:
    async with stage(kind, Head(), Say(("a",)), LOST) as s:
        _, delivery = send(s.worker)

        assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        assert delivery.text == "a"
        assert delivery.names[-1] == "failed"


@each
async def test_open_calls_nobody_before_it_returns(kind: str) -> None:
    async with stage(kind, Head(), Finish()) as s:
        _, delivery = send(s.worker)
        assert delivery.calls == []

        await delivery.ended()


@each
async def test_f4_a_closed_attempt_is_silent(kind: str) -> None:
    steps = (Head(), Say(("a",)), Wait(0.01), Say(("late",)), Finish())
    async with stage(kind, *steps) as s:
        source, delivery = send(s.worker)
        await delivery.until("deltas")
        source.close()
        source.close()
        said = list(delivery.calls)
        await trio.sleep(0.03)

        assert delivery.calls == said
        assert source.phase is SourcePhase.CLOSED


@each
async def test_a_paused_attempt_delivers_nothing_and_loses_nothing(kind: str) -> None:
    steps = (Head(), Say(("a",)), Wait(0.01), Say(("b",)), Finish())
    async with stage(kind, *steps) as s:
        source, delivery = send(s.worker)
        await delivery.until("deltas")
        source.pause()
        held = source.paused
        await trio.sleep(0.03)
        assert delivery.text == "a"
        before = source.last_byte_at

        source.resume()
        assert (held, source.paused) == (True, False)
        assert source.last_byte_at > before
        await delivery.finish()
        assert delivery.text == "ab"


@each
async def test_m3_finish_now_ends_the_wait_for_usage(kind: str) -> None:
    async with stage(kind, Head(), Say(("a",)), FinishWithoutUsage(), NEVER) as s:
        source, delivery = send(s.worker)
        await delivery.reach(source, SourcePhase.FINISHING)
        source.finish_now()

        assert delivery.end == Finished(assignment(), FinishReason.STOP)
        assert source.phase is SourcePhase.CLOSED


@each
async def test_phases_only_go_forward_and_carry_their_time(kind: str) -> None:
    steps = (
        Head(),
        Wait(0.01),
        Say(("a",)),
        FinishWithoutUsage(),
        Wait(0.01),
        Finish(),
    )
    async with stage(kind, *steps) as s:
        seen: list[tuple[SourcePhase, float]] = []
        source, delivery = send(s.worker)
        delivery.hook = lambda _name: seen.append((source.phase, source.since))
        await delivery.finish()

    order = list(SourcePhase)
    assert seen == sorted(seen, key=lambda step: (order.index(step[0]), step[1]))
    assert {SourcePhase.STREAMING, SourcePhase.CLOSED} <= {phase for phase, _ in seen}


@each
async def test_attempts_run_side_by_side(kind: str) -> None:
    async with stage(kind, Head(), Say(("a",)), Wait(0.01), Finish()) as s:
        sent = [send(s.worker, number) for number in range(1, 9)]
        for number, (_, delivery) in enumerate(sent, 1):
            assert (await delivery.finish()).assignment == assignment(number)
            assert set(delivery.stamps) == {assignment(number)}


@each
async def test_a_lost_worker_fails_its_attempts_and_refuses_new_ones(kind: str) -> None:
    async with stage(kind, Head(), NEVER) as s:
        sent = [send(s.worker, number)[1] for number in (1, 2)]
        for delivery in sent:
            await delivery.until("accepted")
        assert (await s.worker.probe()).result is ProbeResult.ANSWERED
        assert await s.worker.alive()
        s.lose()

        for delivery in sent:
            assert (await delivery.fault()).kind is FaultKind.STREAM_CLOSED_EARLY
        with pytest.raises(WorkerFailed) as raised:
            send(s.worker, 3)
        assert raised.value.fault.kind is FaultKind.CONNECT
        assert (await s.worker.probe()).result is ProbeResult.REFUSED
        assert not await s.worker.alive()


@each
async def test_a_ready_worker_says_which_models_it_has(kind: str) -> None:
    async with stage(kind) as s:
        probe = await s.worker.probe()

        assert probe.discovery is not None
        assert probe.discovery.models == ("m",)


@each
async def test_a_worker_whose_run_ended_is_silent_and_opens_nothing(kind: str) -> None:
    async with stage(kind, Head(), NEVER) as s:
        _, delivery = send(s.worker)
        await delivery.until("accepted")
    said = list(delivery.calls)

    with pytest.raises(WorkerFailed):
        send(s.worker, 2)
    assert delivery.calls == said
