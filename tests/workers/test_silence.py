"""Silence before the answer, judged by each engine's own probe, over real sockets."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from router.engine import Router, open_router
from router.errors import FaultKind
from router.messages import Job
from router.ports import Taken
from router.settings import Settings, WaitSettings, WorkerSettings
from tests.kit.daemon import until
from tests.kit.engine import FakeEngine, Script, open_engine, silent
from tests.kit.exchange import Exchange
from tests.kit.receiver import Recorder

pytestmark = pytest.mark.slow

JOB = Job("m", ({"role": "user", "content": "hi"},), target="m")
#: All different, so that the time says which one it was.
WAITS = WaitSettings(
    poll_ms=100,
    busy_wait_ms=1_500,
    load_wait_ms=1_100,
    idle_grace_ms=400,
    liveness_ms=800,
)
SECONDS = {
    FaultKind.WAIT_TIMEOUT: 1.5,
    FaultKind.LOAD_TIMEOUT: 1.1,
    FaultKind.STALLED: 0.4,
}


async def head_only(x: Exchange) -> None:
    """What vLLM does with a request that it has not looked at."""
    await x.head()
    await x.wait_closed()


async def one_frame(x: Exchange) -> None:
    await x.role()
    await x.wait_closed()


@asynccontextmanager
async def routed(
    kind: str, script: Script, waits: WaitSettings = WAITS
) -> AsyncIterator[tuple[Router, FakeEngine]]:
    async with open_engine(script, kind=kind, slots=4) as fake:
        worker = WorkerSettings(name="w", url=fake.url, slots=4)
        settings = Settings(waits=waits, workers=(worker,))
        async with open_router(settings, rng=random.Random(1)) as router:

            async def ready() -> bool:
                return router.ready

            await until(ready)
            yield router, fake


async def ended(router: Router) -> tuple[FaultKind, float]:
    receiver = Recorder()
    start = trio.current_time()
    await router.serve(JOB, receiver, request=router.new_request_id())
    assert receiver.fault is not None
    return receiver.fault.kind, trio.current_time() - start


def lasted(took: float, seconds: float) -> bool:
    """Less by half a poll at most (W9); and more by what a machine pauses."""
    return seconds - 0.051 < took < seconds + 2


@pytest.mark.parametrize(
    ("kind", "script", "shows", "becomes"),
    [
        ("llama-server", silent, "work", FaultKind.WAIT_TIMEOUT),
        ("llama-server", silent, "nothing", FaultKind.STALLED),
        ("llama-server", silent, "no answer", FaultKind.LOAD_TIMEOUT),
        ("vllm", head_only, "work", FaultKind.WAIT_TIMEOUT),
        ("vllm", head_only, "nothing", FaultKind.STALLED),
        ("vllm", head_only, "no answer", FaultKind.LOAD_TIMEOUT),
        ("sglang", silent, "work", FaultKind.WAIT_TIMEOUT),
        ("sglang", silent, "nothing", FaultKind.STALLED),
        ("sglang", silent, "no answer", FaultKind.LOAD_TIMEOUT),
        ("generic", silent, "work", FaultKind.WAIT_TIMEOUT),
        # An answer to /v1/models is all there is: never idle.
        ("generic", silent, "nothing", FaultKind.WAIT_TIMEOUT),
        ("generic", silent, "no answer", FaultKind.LOAD_TIMEOUT),
    ],
)
async def test_w8_each_engine_is_judged_by_its_own_probe(
    kind: str, script: Script, shows: str, becomes: FaultKind
) -> None:
    async with routed(kind, script) as (router, fake):
        if shows == "nothing":
            # Ours is the only one, and it does not count.
            fake.foreign_busy = -1
        elif shows == "no answer":
            fake.hang_probes = True

        fault, took = await ended(router)

        assert fault is becomes
        assert lasted(took, SECONDS[becomes])


async def test_w8_a_vllm_head_is_no_answer_and_its_first_frame_is() -> None:
    """Idle would have ended it at 0.4 s: from the first frame on it is liveness."""
    async with routed("vllm", one_frame) as (router, fake):
        fake.foreign_busy = -1

        fault, took = await ended(router)

        assert fault is FaultKind.STALLED
        assert lasted(took, 0.8)
        assert router.tally.waits == {}


#: Only idle silence ends within a minute.
GRACE = WaitSettings(poll_ms=100, idle_grace_ms=400)
PIECE = "y" * 4_000


async def serve(router: Router, receiver: Recorder, content: str = "hi") -> None:
    job = attrs.evolve(JOB, messages=({"role": "user", "content": content},))
    await router.serve(job, receiver, request=router.new_request_id())


async def eight_looks(router: Router) -> dict[str, int]:
    """Say what the next looks found, after eight, or after a request has ended."""
    before, active = dict(router.tally.waits), router.active

    def since() -> dict[str, int]:
        return {k: n - before.get(k, 0) for k, n in router.tally.waits.items()}

    async def looked() -> bool:
        return sum(since().values()) >= 8 or router.active < active

    await until(looked)
    return {name: n for name, n in since().items() if n}


async def test_w2_a_request_that_is_still_being_sent_makes_no_prefill_idle() -> None:
    async with (
        routed("llama-server", silent, GRACE) as (router, fake),
        trio.open_nursery() as nursery,
    ):
        prefill = Recorder()
        nursery.start_soon(serve, router, prefill)
        await fake.next_exchange()
        # Of what comes now the engine reads next to nothing.
        fake.read_limit = 2_000
        nursery.start_soon(serve, router, Recorder(), "x" * 12_000_000)

        async def sending() -> bool:
            phases = [flight.phase_name() for flight in router.flights.values()]
            return "sending" in phases

        await until(sending)
        seen = await eight_looks(router)

        assert seen.keys() == {"busy"}
        assert prefill.fault is None
        nursery.cancel_scope.cancel()


async def test_w2_an_answer_that_waits_for_its_reader_makes_no_prefill_idle() -> None:
    async def first_flood(x: Exchange) -> None:
        if len(fake.seen) > 1:
            await x.wait_closed()
        for _ in range(20):
            await x.text(PIECE)
        await x.finish()
        await x.done()
        await x.end()

    reader, prefill = Recorder(), Recorder()
    reader.reply = Taken.FULL
    async with (
        routed("llama-server", first_flood, GRACE) as (router, fake),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(serve, router, reader)
        flooded = await fake.next_exchange()
        with trio.fail_after(10):
            await flooded.ended.wait()
        nursery.start_soon(serve, router, prefill)
        await fake.next_exchange()
        seen = await eight_looks(router)

        # The engine has one slot at work, and we have two requests there.
        assert (fake.processing, router.active) == (1, 2)
        assert seen.keys() == {"busy"}
        assert prefill.fault is None
        nursery.cancel_scope.cancel()
