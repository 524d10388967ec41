"""What each kind of engine says of itself, and what a probe makes of it."""

from typing import Any

import attrs
import pytest
import trio
import trio.testing

from router.messages import (
    Discovery,
    GenerationParams,
    Probe,
    ProbeResult,
    SlotView,
)
from router.settings import WaitSettings, WorkerSettings
from tests.kit.delivery import JOB, RecordingDelivery, assignment, served
from tests.kit.engine import FakeEngine, answers, open_engine, refuses, silent
from workers.direct import DirectWorker
from workers.engines.engine import metric

KINDS = ["llama-server", "vllm", "sglang", "generic"]


def worker_on(fake: FakeEngine, **settings: Any) -> DirectWorker:
    return DirectWorker(
        WorkerSettings(name="w", url=fake.url, **settings),
        WaitSettings(),
        environ={"KEY": "sk-1"},
        report_bug=lambda _where, bug: pytest.fail(str(bug)),
    )


def found(probe: Probe) -> Discovery:
    assert probe.result is ProbeResult.ANSWERED, probe
    assert probe.discovery is not None
    return probe.discovery


# ---- L9: discovery ----


@pytest.mark.parametrize("engine", ["auto", "own"])
@pytest.mark.parametrize(
    ("kind", "discovery"),
    [
        (
            "llama-server",
            Discovery(("a", "b"), 3, 4096, "llama-server", "b1-fake", 1_700_000_000.0),
        ),
        (
            "vllm",
            Discovery(("a", "b"), None, 4096, "vllm", "b1-fake", 1_700_000_000.0),
        ),
        ("sglang", Discovery(("a", "b"), 3, 4096, "sglang", "b1-fake")),
        ("generic", Discovery(("a", "b"))),
    ],
)
async def test_l9_each_engine_is_recognised_and_discovered(
    kind: str, discovery: Discovery, engine: str
) -> None:
    async with open_engine(kind=kind, slots=3, models=("a", "b")) as fake:
        worker = worker_on(fake, engine="auto" if engine == "auto" else kind)

        assert found(await worker.probe()) == discovery


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang"])
async def test_l9_an_engine_with_foreign_cards_is_told_by_its_endpoint(
    kind: str,
) -> None:
    async with open_engine(kind=kind) as fake:
        fake.models_body = b'{"data":[{"id":"m","owned_by":"me"}]}'

        assert found(await worker_on(fake).probe()).engine == kind


async def test_l9_an_engine_is_recognised_once_and_again_after_a_loss() -> None:
    async with open_engine(kind="generic") as fake:
        worker = worker_on(fake)
        for _ in range(2):
            assert found(await worker.probe()).engine == "generic"
        assert fake.probes.count("/props") == 1
        fake.refuse = True
        assert (await worker.probe()).result is ProbeResult.REFUSED
        fake.refuse = False
        fake.kind = "llama-server"

        assert found(await worker.probe()).engine == "llama-server"
        assert worker.settles_by_probe


async def test_l9_a_restart_shows_in_the_start_time() -> None:
    async with open_engine() as fake:
        worker = worker_on(fake)
        before = found(await worker.probe()).started_at
        fake.started_at += 5

        assert found(await worker.probe()).started_at == (before or 0) + 5


async def test_l9_a_build_without_metrics_has_no_start_time() -> None:
    async with open_engine() as fake:
        fake.metrics_status = 501

        assert found(await worker_on(fake).probe()).started_at is None


async def test_l9_aliases_follow_the_ids() -> None:
    async with open_engine() as fake:
        fake.models_body = (
            b'{"data":[{"id":"a","aliases":["x","a"],"owned_by":"llamacpp",'
            b'"meta":{"n_ctx":9}},{"id":"b","meta":{"n_ctx":7}},{"id":7},"odd"]}'
        )

        discovery = found(await worker_on(fake).probe())
        assert (discovery.models, discovery.context) == (("a", "b", "x"), 7)


# ---- L2: ready, loading, lost ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("status", "result"),
    [
        (503, ProbeResult.LOADING),
        (401, ProbeResult.UNAUTHORIZED),
        (403, ProbeResult.UNAUTHORIZED),
        (404, ProbeResult.SILENT),
        (500, ProbeResult.SILENT),
    ],
)
async def test_l2_the_models_decide(
    kind: str, status: int, result: ProbeResult
) -> None:
    async with open_engine(kind=kind) as fake:
        fake.models_status = status
        for engine in ("auto", kind):
            probe = await worker_on(fake, engine=engine).probe()
            assert probe.result is result
            assert str(status) in probe.detail
            assert "127.0.0.1" not in probe.detail


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang"])
async def test_b83_models_with_a_loading_health_path_are_not_ready(kind: str) -> None:
    async with open_engine(kind=kind) as fake:
        fake.health_status = 503

        assert (await worker_on(fake).probe()).result is ProbeResult.LOADING


async def test_l2_a_health_path_that_is_not_there_says_nothing() -> None:
    async with open_engine(kind="vllm") as fake:
        fake.health_status = 404

        found(await worker_on(fake).probe())


async def test_l2_sglang_is_not_made_to_generate_for_its_health() -> None:
    async with open_engine(kind="sglang") as fake:
        found(await worker_on(fake).probe())

        assert "/health" not in fake.probes
        assert "/ready" in fake.probes


@pytest.mark.parametrize("body", [b"<html>", b"", b"{", b"[" * 5000])
async def test_l2_models_without_json_are_no_answer(body: bytes) -> None:
    async with open_engine(kind="generic") as fake:
        fake.models_body = body

        assert (await worker_on(fake).probe()).result is ProbeResult.SILENT


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"7", b'{"data":7}', b'{"data":[1]}'])
async def test_l2_json_of_any_shape_is_an_answer(body: bytes) -> None:
    async with open_engine(kind="generic") as fake:
        fake.models_body = body

        assert found(await worker_on(fake).probe()).models == ()


async def test_l2_nothing_that_listens_is_hard_evidence() -> None:
    async with open_engine() as fake:
        fake.refuse = True

        assert (await worker_on(fake).probe()).result is ProbeResult.REFUSED


async def test_l2_a_probe_without_an_answer_lasts_until_its_caller_ends_it() -> None:
    async with open_engine() as fake:
        fake.hang_probes = True
        worker = worker_on(fake)
        with trio.move_on_after(0.05) as scope:
            await worker.probe()

        assert scope.cancelled_caught
        assert not await bounded(worker.alive)
        assert await bounded(worker.slot_view) is None


async def bounded(question: Any) -> Any:
    with trio.move_on_after(0.05):
        return await question()
    return None


async def test_l2_a_name_that_does_not_resolve_is_soft_evidence() -> None:
    worker = DirectWorker(
        WorkerSettings(name="w", url="http://nowhere.invalid"),
        WaitSettings(),
        environ={},
        report_bug=lambda _where, bug: pytest.fail(str(bug)),
    )
    probe = await worker.probe()

    assert probe == Probe(ProbeResult.SILENT, "its name does not resolve")


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (200, ProbeResult.ANSWERED),
        (503, ProbeResult.LOADING),
        (404, ProbeResult.SILENT),
        (401, ProbeResult.UNAUTHORIZED),
    ],
)
async def test_l2_a_configured_health_url_has_to_answer_well(
    status: int, result: ProbeResult
) -> None:
    async with open_engine() as health, open_engine(kind="generic") as fake:
        health.health_status = status
        worker = worker_on(fake, health_url=f"{health.url}/health", api_key_env="KEY")

        assert (await worker.probe()).result is result
        assert health.probes[0] == "/health"


async def test_l2_a_health_url_serves_where_there_are_no_models() -> None:
    async with open_engine() as health, open_engine(kind="generic") as fake:
        fake.models_status = 404
        health_url = f"{health.url}/health"
        worker = worker_on(fake, health_url=health_url, models=("x",))

        assert found(await worker.probe()).models == ("x",)


async def test_l2_one_token_warms_up_what_can_say_nothing() -> None:
    async def script(x: Any) -> None:
        await x.json(200, {"choices": []})

    async with open_engine(script, kind="generic") as fake:
        fake.models_status = 404
        worker = worker_on(fake, models=("x",))
        for _ in range(3):
            assert found(await worker.probe()).models == ("x",)

        assert len(fake.seen) == 1
        assert fake.seen[0].body["model"] == "x"
        assert fake.seen[0].body["max_tokens"] == 1


@pytest.mark.parametrize(
    ("status", "result"), [(503, ProbeResult.LOADING), (400, ProbeResult.SILENT)]
)
async def test_l2_a_warm_up_that_fails_is_not_ready(
    status: int, result: ProbeResult
) -> None:
    async with open_engine(refuses(status, {}), kind="generic") as fake:
        fake.models_status = 404

        assert (await worker_on(fake, models=("x",)).probe()).result is result


async def test_h8_the_workers_key_goes_to_the_worker_only() -> None:
    keys: list[tuple[str, str | None]] = []

    def listen(engine: FakeEngine, name: str) -> None:
        for connection in engine.connections:
            keys.extend(
                (name, x.headers.get("authorization")) for x in connection._exchanges
            )

    async with open_engine() as health, open_engine(kind="generic") as fake:
        health.hang_probes = True
        worker = worker_on(fake, health_url=f"{health.url}/health", api_key_env="KEY")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.probe)
            await trio.testing.wait_all_tasks_blocked(0.02)
            listen(health, "health")
            nursery.cancel_scope.cancel()
        fake.hang_probes = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.alive)
            await trio.testing.wait_all_tasks_blocked(0.02)
            listen(fake, "worker")
            nursery.cancel_scope.cancel()

    assert dict(keys) == {"health": None, "worker": "Bearer sk-1"}


# ---- S3, W2: slots ----


async def probed(fake: FakeEngine, **settings: Any) -> DirectWorker:
    worker = worker_on(fake, **settings)
    found(await worker.probe())
    return worker


@pytest.mark.parametrize(
    ("kind", "view"),
    [
        ("llama-server", SlotView(4, 3, frozenset({0, 1, 2}))),
        ("vllm", SlotView(None, 3)),
        ("sglang", SlotView(4, 3)),
        ("generic", None),
    ],
)
async def test_w2_slots_at_work_are_counted(kind: str, view: SlotView | None) -> None:
    async with open_engine(kind=kind, slots=4) as fake:
        worker = await probed(fake)
        fake.foreign_busy = 3

        assert await worker.slot_view() == view


@pytest.mark.parametrize("status", [501, 503])
@pytest.mark.parametrize("kind", ["llama-server", "sglang"])
async def test_w2_a_failed_slot_probe_says_nothing(kind: str, status: int) -> None:
    async with open_engine(kind=kind) as fake:
        worker = await probed(fake)
        fake.slots_status = status

        assert await worker.slot_view() is None


async def test_w2_a_build_without_slots_is_asked_for_its_metrics() -> None:
    async with open_engine(slots=4) as fake:
        fake.slots_status = 501
        worker = await probed(fake)
        fake.foreign_busy = 2

        assert await worker.slot_view() == SlotView(4, 2)
        assert "/slots" not in fake.probes
        assert worker.settles_by_probe


async def test_s3_a_build_that_shows_nothing_settles_by_time() -> None:
    async with open_engine() as fake:
        fake.slots_status = fake.metrics_status = 501
        worker = await probed(fake)

        assert not worker.settles_by_probe
        assert worker.settle_s == 1.0


async def test_b0_a_sleeping_llama_server_is_not_woken_by_its_slots() -> None:
    async with open_engine(slots=4) as fake:
        worker = await probed(fake)
        fake.sleeping = True

        assert await worker.slot_view() == SlotView(4, 0, frozenset())
        assert "/slots" not in fake.probes


@pytest.mark.parametrize(
    ("kind", "settle_s", "by_probe"),
    [
        ("llama-server", 1.0, True),
        ("vllm", 0.0, True),
        ("sglang", 6.0, True),
        ("generic", 1.0, False),
    ],
)
async def test_s3_each_engine_settles_in_its_own_time(
    kind: str, settle_s: float, by_probe: bool
) -> None:
    async with open_engine(kind=kind) as fake:
        worker = await probed(fake)
        assert (worker.settle_s, worker.settles_by_probe) == (settle_s, by_probe)

        worker = await probed(fake, settle_ms=250)
        assert worker.settle_s == 0.25


async def test_s3_an_sglang_without_loads_settles_by_time() -> None:
    async with open_engine(kind="sglang") as fake:
        fake.slots_status = 404

        assert not (await probed(fake)).settles_by_probe


@pytest.mark.parametrize("kind", KINDS)
async def test_w8_alive_is_any_sane_answer(kind: str) -> None:
    async with open_engine(kind=kind) as fake:
        worker = await probed(fake)
        assert await worker.alive()
        fake.refuse = True

        assert not await worker.alive()


async def test_w8_a_generic_server_that_loads_is_not_alive() -> None:
    async with open_engine(kind="generic") as fake:
        worker = await probed(fake)
        fake.models_status = 503

        assert not await worker.alive()


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("llama-server", "max_tokens"),
        ("vllm", "max_completion_tokens"),
        ("sglang", "max_completion_tokens"),
        ("generic", "max_tokens"),
    ],
)
async def test_o1_each_engine_gets_the_name_of_the_limit_that_it_knows(
    kind: str, field: str
) -> None:
    async with open_engine(answers("a"), kind=kind) as fake:
        worker = await probed(fake)

        assert worker._engine.max_tokens_field == field


@pytest.mark.parametrize(
    ("kind", "sent", "missing"),
    [
        ("llama-server", {"repeat_penalty": 1.1, "typical_p": 0.9}, ("min_tokens",)),
        ("vllm", {"repetition_penalty": 1.1, "min_tokens": 2}, ("typical_p",)),
        ("sglang", {"repetition_penalty": 1.1, "min_tokens": 2}, ("typical_p",)),
        ("generic", {}, ("typical_p", "repeat_penalty", "min_tokens")),
    ],
)
async def test_j3_each_engine_gets_its_own_names_of_the_sampling_parameters(
    kind: str, sent: dict[str, float], missing: tuple[str, ...]
) -> None:
    params = GenerationParams(repeat_penalty=1.1, typical_p=0.9, min_tokens=2)
    job = attrs.evolve(JOB, params=params)
    async with open_engine(answers("a"), kind=kind) as fake:
        worker = await probed(fake)
        async with served(worker):
            worker.open(assignment(), job, RecordingDelivery())
            exchange = await fake.next_exchange()

        assert worker.unsupported(job) == missing
        asked = exchange.body.keys() - {"model", "messages", "stream", "stream_options"}
        assert {name: exchange.body[name] for name in asked} == sent


async def test_s2_probes_leave_no_connection() -> None:
    async with open_engine(silent) as fake:
        worker = await probed(fake)
        await worker.slot_view()
        await worker.alive()
        await trio.testing.wait_all_tasks_blocked(0.02)

        assert fake.connections == set()


def test_an_engine_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine"):
        DirectWorker(
            WorkerSettings(name="w", url="http://a", engine="llama"),
            WaitSettings(),
            report_bug=lambda _where, _bug: None,
        )


# ---- metrics ----

TEXT = """\
# HELP x y
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_running_total 9
start 1.7e+09
odd{a="}"} 4
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_running", 3.0),
        ("start", 1.7e9),
        ("odd", 4.0),
        ("absent", None),
        ("x", None),
    ],
)
def test_a_metric_is_added_up_over_its_labels(name: str, value: float | None) -> None:
    assert metric(TEXT, name) == value


@pytest.mark.parametrize("value", ["nan", "inf", "1e999", "1.2.3", "--", "+Inf"])
def test_a_metric_that_is_no_number_is_none(value: str) -> None:
    assert metric(f"x {value}\n", "x") is None
