"""What a router counts and times of its requests, in its metrics (X1)."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.edge.metrics import Metrics
from router.engine import Router, open_router
from router.engine.opening import LAG_EVERY_S
from router.engine.router import MODEL_LABELS_MAX
from router.errors import Fault, FaultKind
from router.messages import Job
from router.settings import RouterSettings, Settings
from tests.kit.receiver import Recorder
from workers.scripted import (
    Fail,
    Finish,
    Head,
    Refuse,
    Say,
    ScriptedSource,
    ScriptedWorker,
    Step,
    Wait,
    answers,
)

LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")
#: One delta after 1 s, the others 2 s and 4 s behind it.
STEPS = (Head(), Wait(1), Say(("a",)), Wait(2), Say(("b",)), Wait(4), Say(("c",)))


@asynccontextmanager
async def opened(
    *workers: ScriptedWorker, settings: Settings | None = None
) -> AsyncIterator[Router]:
    """A router whose workers have all been probed once."""
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router


async def serve(router: Router, receiver: Recorder, model: str = "m") -> None:
    job = Job(model, ({"role": "user", "content": "hi"},), target=model)
    await router.serve(job, receiver, request=router.new_request_id())


def measured(router: Router) -> dict[str, tuple[float, float]]:
    """Count and sum of each histogram, by its name without ``fencepost_``."""
    found: dict[str, dict[str, float]] = {}
    for line in Metrics(router).render().decode().splitlines():
        name, _, value = line.partition(" ")
        for part in ("count", "sum"):
            if name.startswith("fencepost_") and name.endswith(f"_seconds_{part}"):
                key = name.removeprefix("fencepost_").removesuffix(f"_seconds_{part}")
                found.setdefault(key, {})[part] = float(value)
    return {key: (both["count"], both["sum"]) for key, both in found.items()}


def metric(router: Router, name: str) -> dict[str, float]:
    """Samples of one metric, by what stands in their braces."""
    lines = Metrics(router).render().decode().splitlines()
    found = (line.removeprefix(name) for line in lines if line.startswith(f"{name}{{"))
    return {
        labels: float(value)
        for labels, _, value in (line.rpartition(" ") for line in found)
    }


async def test_x1_each_time_of_a_request_is_measured_once_and_right(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", lambda *_: (*STEPS, Finish()), slots=1)
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await wait_all_tasks_blocked()
        await serve(router, Recorder())
        took = measured(router)

    # The second waits for the first, which takes 7 s.
    assert took["queue_wait"] == pytest.approx((2, 0 + 7))
    assert took["first_delta"] == pytest.approx((2, 1 + 8))
    assert took["between_deltas"] == pytest.approx((4, 2 * (2 + 4)))
    assert took["request_duration"] == pytest.approx((2, 7 + 14))
    assert took["cancel"] == took["settle"] == (0, 0)


async def test_x1_a_cancel_and_the_settling_behind_it_are_measured(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = ScriptedSource.close

    def slowly(source: ScriptedSource) -> None:
        close(source)
        autojump_clock.jump(0.25)

    receiver = Recorder()
    worker = ScriptedWorker("a", lambda *_: (*STEPS, Finish()), slots=1, settle_s=3.0)
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await trio.sleep(1.5)
        monkeypatch.setattr(ScriptedSource, "close", slowly)
        receiver.on_gone()
        monkeypatch.undo()
        await trio.sleep(5)
        took = measured(router)

    assert took["cancel"] == pytest.approx((1, 0.25))
    assert took["settle"] == pytest.approx((1, 3.0))
    assert took["request_duration"] == pytest.approx((1, 1.75))
    assert took["first_delta"] == pytest.approx((1, 1))


async def test_x1_the_lag_of_the_loop_is_how_late_it_wakes(
    autojump_clock: MockClock,
) -> None:
    async with opened() as router:
        autojump_clock.jump(LAG_EVERY_S + 2.5)
        await trio.sleep(LAG_EVERY_S / 2)
        late = measured(router)["loop_lag"]
        await trio.sleep(LAG_EVERY_S)
        then = measured(router)["loop_lag"]

    assert late == pytest.approx((1, 2.5))
    assert then == pytest.approx((2, 2.5))


REFUSES: tuple[Step, ...] = (Refuse(),)


@pytest.mark.parametrize(
    ("first", "second", "moved"),
    [
        (REFUSES, (Head(), Say(("x",)), Finish()), {'{cause="connect"}': 1}),
        (REFUSES, REFUSES, {'{cause="connect"}': 1}),
        (REFUSES, (Head(), Say(("x",)), Fail(LOST)), {'{cause="connect"}': 1}),
    ],
)
async def test_x1_an_attempt_that_did_not_move_is_no_failover(
    autojump_clock: MockClock,
    first: tuple[Step, ...],
    second: tuple[Step, ...],
    moved: dict[str, float],
) -> None:
    scripts = [first, second]
    settings = Settings(router=RouterSettings(attempts=2))
    workers = [ScriptedWorker(name, lambda *_: scripts.pop(0)) for name in "ab"]
    async with opened(*workers, settings=settings) as router:
        await serve(router, Recorder())

        attempts = metric(router, "fencepost_attempts_total")
        assert sum(attempts.values()) == 2
        assert metric(router, "fencepost_failovers_total") == moved


async def test_x1_the_last_worker_that_is_drained_moves_nobody(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", lambda *_: (*STEPS, Finish()))
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, Recorder())
        await trio.sleep(1.5)

        router.cut("a")

        assert metric(router, "fencepost_failovers_total") == {}


async def test_x1_models_beyond_a_hundred_share_one_label(
    autojump_clock: MockClock,
) -> None:
    models = tuple(f"m{number}" for number in range(MODEL_LABELS_MAX + 2))
    async with opened(ScriptedWorker("a", answers("x"), models=models)) as router:
        for model in (*models, models[0]):
            await serve(router, Recorder(), model)
        counted = metric(router, "fencepost_requests_total")

    assert len(counted) == MODEL_LABELS_MAX + 1
    assert counted['{model="other",outcome="completed"}'] == 2
    assert counted['{model="m0",outcome="completed"}'] == 2
    assert counted['{model="m99",outcome="completed"}'] == 1
    assert MODEL_LABELS_MAX == 100
