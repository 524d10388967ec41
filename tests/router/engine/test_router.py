"""What the router knows and says of itself."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, open_router
from router.engine.records import Receipts
from router.errors import FaultKind, LocalError, RequestFailed
from router.messages import Discovery, Job, ProbeResult
from router.settings import ModelSettings, Settings, WaitSettings, WorkerSettings
from tests.kit.receiver import Recorder
from workers.scripted import Head, Say, ScriptedWorker, answers, hangs


@asynccontextmanager
async def opened(
    *workers: ScriptedWorker, settings: Settings | None = None
) -> AsyncIterator[Router]:
    async with open_router(settings, workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router


def named(name: str, *models: str) -> ScriptedWorker:
    return ScriptedWorker(name, answers("ok"), models=models)


async def test_o2_models_are_the_union_over_ready_workers_and_their_aliases(
    autojump_clock: MockClock,
) -> None:
    lost = named("b", "n")
    settings = Settings(
        models={"m": ModelSettings(("gpt",)), "n": ModelSettings(("old", "*"))}
    )
    async with opened(named("a", "m", "k"), lost, settings=settings) as router:
        assert [c.id for c in router.model_cards()] == ["gpt", "k", "m", "n", "old"]

        lost.result = ProbeResult.REFUSED
        await trio.sleep(3)

        assert [c.id for c in router.model_cards()] == ["gpt", "k", "m"]
        assert router.resolve("n") == "n"


async def test_o6_aliases_resolve_and_a_star_catches_the_rest(
    autojump_clock: MockClock,
) -> None:
    settings = Settings(models={"m": ModelSettings(("gpt", "*"))})
    async with opened(named("a", "m"), settings=settings) as router:
        assert router.resolve("gpt") == "m"
        assert router.resolve("../../slots") == "m"


async def test_o6_an_unknown_model_is_loading_while_a_worker_was_never_seen(
    autojump_clock: MockClock,
) -> None:
    unseen = named("b", "n")
    unseen.result = ProbeResult.REFUSED
    settings = Settings(waits=WaitSettings(load_wait_ms=10_000))
    async with opened(named("a", "m"), unseen, settings=settings) as router:
        with pytest.raises(RequestFailed) as raised:
            router.resolve("n")
        assert raised.value.fault.kind is FaultKind.MODEL_LOADING
        assert raised.value.fault.retry_after is not None

        await trio.sleep(10)

        assert router.resolve("n") is None
        assert router.resolve("m") == "m"


async def test_d2_a_fallback_stands_in_while_no_worker_of_the_model_is_ready(
    autojump_clock: MockClock,
) -> None:
    big = named("a", "big")
    settings = Settings(models={"big": ModelSettings(fallback="small")})
    async with opened(big, named("b", "small"), settings=settings) as router:
        assert router.resolve("big") == "big"

        big.result = ProbeResult.REFUSED
        await trio.sleep(3)

        assert router.resolve("big") == "small"


async def test_d4_the_router_is_ready_when_a_worker_is(
    autojump_clock: MockClock,
) -> None:
    worker = named("a", "m")
    worker.result = ProbeResult.LOADING
    async with opened(worker) as router:
        assert not router.ready

        worker.result = ProbeResult.ANSWERED
        await trio.sleep(1)

        assert router.ready


async def test_e1_a_program_can_wait_until_a_worker_is_ready(
    autojump_clock: MockClock,
) -> None:
    worker = named("a", "m")
    worker.result = ProbeResult.LOADING
    async with opened(worker) as router, trio.open_nursery() as nursery:
        start = trio.current_time()

        async def come_up() -> None:
            await trio.sleep(7)
            worker.result = ProbeResult.ANSWERED

        nursery.start_soon(come_up)
        await router.wait_ready()

        assert 7.0 <= trio.current_time() - start <= 7.5
        await router.wait_ready()


async def test_d4_the_status_shows_every_worker_with_its_reason(
    autojump_clock: MockClock,
) -> None:
    small = named("a", "m")
    small.discovery = Discovery(("m",), 2, 4096, "scripted", "v1")
    async with opened(small) as router:
        (worker,) = router.status()["workers"]

    assert worker["name"] == "a"
    assert worker["state"] == worker["reason"] == "ready"
    assert worker["slots"] == worker["limit"] == 2
    assert (worker["engine"], worker["version"]) == ("scripted", "v1")


async def test_e3_two_routers_live_in_one_process(autojump_clock: MockClock) -> None:
    async with opened(named("a", "m")) as one, opened(named("a", "n")) as two:
        assert one.resolve("m") == "m"
        assert two.resolve("m") is None
        assert one.tally is not two.tally


def test_f2_request_ids_are_unique_and_sort_by_birth() -> None:
    router = Router(Settings(), random.Random(1))
    ids = [router.new_request_id() for _ in range(1_000)]

    assert len(set(ids)) == 1_000
    assert [i[:16] for i in ids] == sorted(i[:16] for i in ids)


async def test_e1_workers_may_be_given_as_urls_and_settings() -> None:
    async with open_router(
        Settings(workers=(WorkerSettings("first", "http://127.0.0.1:9"),)),
        workers=["http://127.0.0.1:10/v1"],
    ) as router:
        assert list(router.workers) == ["first", "127.0.0.1:10"]


def test_x3_only_the_last_receipts_are_kept() -> None:
    receipts = Receipts(2)
    for name in "abc":
        receipts.add(name, {"request": name})

    assert receipts.get("a") is None
    assert receipts.get("c") == {"request": "c"}


JOB = Job("m", (), target="m")


async def serve(router: Router, receiver: Recorder) -> None:
    await router.serve(JOB, receiver, request=router.new_request_id())


async def test_l5_a_worker_whose_caller_left_is_kept_or_was_never_taken_in(
    autojump_clock: MockClock,
) -> None:
    async with opened() as router:
        with trio.CancelScope() as left:
            left.cancel()
            await router.add_worker(named("a", "m"))
        assert not router.fleet.members

        with trio.CancelScope() as left:
            async with trio.open_nursery() as nursery:
                for name in "abc":
                    nursery.start_soon(router.add_worker, named(name, "m"))
                await trio.lowlevel.checkpoint()
                left.cancel()
        await trio.sleep(1)
        assert all(m.serving for m in router.fleet.members.values())


async def test_l5_a_worker_may_be_added_while_the_router_runs(
    autojump_clock: MockClock,
) -> None:
    receiver = Recorder()
    async with opened() as router:
        assert not router.ready

        await router.add_worker(named("late", "m"))
        await router.wait_ready()
        await serve(router, receiver)

        assert receiver.text == "ok"
        with pytest.raises(LocalError):
            await router.add_worker(named("late", "m"))


async def test_l5_a_removed_worker_finishes_what_it_has_and_is_forgotten(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("x", every=5.0))
    receiver = Recorder()
    async with opened(worker) as router:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, receiver)
            await wait_all_tasks_blocked()

            assert router.remove_worker("a")
            assert router.status()["workers"][0]["state"] == "draining"

        assert receiver.text == "x"
        await wait_all_tasks_blocked()
        assert router.status()["workers"] == []
        assert not router.workers
        assert not router.remove_worker("a")
        assert worker._nursery is None


async def test_l5_an_idle_worker_is_removed_at_once(
    autojump_clock: MockClock,
) -> None:
    async with opened(named("a", "m"), named("b", "n")) as router:
        assert router.remove_worker("a")

        assert [w["name"] for w in router.status()["workers"]] == ["b"]
        await trio.sleep(10)


async def test_l5_what_outlives_the_drains_deadline_is_cut(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", hangs(Head(), Say(("a",))))
    receiver = Recorder()
    async with opened(worker) as router:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, receiver)
            await wait_all_tasks_blocked()
            assert router.drain("a", within_s=7)

        assert trio.current_time() - start == pytest.approx(7.0)
        assert receiver.fault is not None
        assert receiver.fault.kind is FaultKind.DRAINED


async def test_l5_undraining_takes_the_deadline_back(
    autojump_clock: MockClock,
) -> None:
    worker = ScriptedWorker("a", answers("x", every=20.0))
    receiver = Recorder()
    async with opened(worker) as router, trio.open_nursery() as nursery:
        nursery.start_soon(serve, router, receiver)
        await wait_all_tasks_blocked()
        router.remove_worker("a", within_s=7)
        router.undrain("a")

    assert receiver.text == "x"
