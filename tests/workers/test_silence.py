"""Silence before the answer, judged by each engine's own probe, over real sockets."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from router.engine import Router, open_router
from router.errors import FaultKind
from router.messages import Job
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
async def routed(kind: str, script: Script) -> AsyncIterator[tuple[Router, FakeEngine]]:
    async with open_engine(script, kind=kind, slots=4) as fake:
        worker = WorkerSettings(name="w", url=fake.url, slots=4)
        settings = Settings(waits=WAITS, workers=(worker,))
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
    """Never less; and more by a poll, or by what a machine pauses."""
    return seconds * 0.95 < took < seconds + 2


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
