"""The direct worker on a real llama.cpp server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from router.errors import FaultKind
from router.messages import FinishReason, GenerationParams, Job, SlotView
from router.settings import WaitSettings, WorkerSettings
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.processes import Llama
from workers.direct import DirectWorker

pytestmark = pytest.mark.real

#: Slots of the shared server.
SLOTS = 4


@pytest.fixture
def llama(llamas: list[Llama]) -> Llama:
    return llamas[0]


@asynccontextmanager
async def worker_on(llama: Llama) -> AsyncIterator[DirectWorker]:
    worker = DirectWorker(
        WorkerSettings(name="w", url=llama.url),
        WaitSettings(),
        environ={},
        report_bug=lambda _where, bug: pytest.fail(str(bug)),
    )
    async with served(worker):
        probe = await worker.probe()
        assert probe.discovery is not None, probe
        yield worker


def job(text: str, max_tokens: int) -> Job:
    return attrs.evolve(
        JOB,
        model="smollm2",
        target="smollm2",
        messages=({"role": "user", "content": text},),
        params=GenerationParams(max_tokens=max_tokens),
    )


async def test_l9_it_is_recognised_and_says_what_it_is(llama: Llama) -> None:
    async with worker_on(llama) as worker:
        discovery = (await worker.probe()).discovery
        assert discovery is not None
        assert discovery.engine == "llama-server"
        assert discovery.slots == SLOTS
        assert discovery.models[0] == "smollm2"
        assert discovery.context
        assert await worker.slot_view() == SlotView(SLOTS, 0, frozenset())
        assert await worker.alive()


async def test_answers_come_whole_one_after_another_on_one_connection(
    llama: Llama,
) -> None:
    async with worker_on(llama) as worker:
        for number in range(1, 4):
            delivery = RecordingDelivery()
            worker.open(assignment(number), job("Count to ten.", 8), delivery)
            finished = await delivery.finish()

            assert finished.reason in {FinishReason.LENGTH, FinishReason.STOP}
            assert finished.usage is not None
            assert finished.usage.completion_tokens <= 8
            assert delivery.text
            assert [d.index for d in delivery.taken] == list(range(len(delivery.taken)))


async def test_s3_a_closed_request_frees_its_slot_and_a_probe_sees_it(
    llama: Llama,
) -> None:
    async with worker_on(llama) as worker:
        delivery = RecordingDelivery()
        source = worker.open(assignment(), job("Tell a story.", 500), delivery)
        await delivery.until("deltas")
        view = await worker.slot_view()
        assert view is not None
        assert (view.total, view.processing, len(view.busy or ())) == (SLOTS, 1, 1)
        source.close()
        with trio.fail_after(5):
            # Each answer comes from between two of its steps: no busy loop.
            while await worker.slot_view() != SlotView(SLOTS, 0, frozenset()):
                pass


async def test_a4_a_prompt_beyond_the_context_is_told_as_such(llama: Llama) -> None:
    async with worker_on(llama) as worker:
        delivery = RecordingDelivery()
        worker.open(assignment(), job("long " * 20_000, 8), delivery)

        assert (await delivery.fault()).kind is FaultKind.CONTEXT_LENGTH
