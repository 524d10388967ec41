"""Workers whose servers are run by the router: real tiny servers, real deaths."""

import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from router.engine import Router, open_router
from router.errors import FaultKind, RequestFailed
from router.messages import Job, ProbeResult
from router.settings import ServerSettings, Settings, WaitSettings, WorkerSettings
from tests.kit.child import LAST_WORDS
from tests.kit.daemon import until
from tests.kit.delivery import RecordingDelivery, assignment, served
from tests.kit.keeping import (
    PYTHON,
    child_settings,
    free_port,
    gone_after,
    is_gone,
    listening,
    numbers_in,
)
from workers import proc, process
from workers.supervised import DOUBT_S, SupervisedWorker, make_plan

pytestmark = pytest.mark.slow

#: Short, but not for a machine that has other things to do.
WAITS: Final = WaitSettings(poll_ms=100, idle_grace_ms=1_000)


@asynccontextmanager
async def opened(
    *workers: WorkerSettings, waits: WaitSettings = WAITS, state: Path | None = None
) -> AsyncIterator[Router]:
    server = ServerSettings(state_dir=None if state is None else str(state))
    settings = Settings(server=server, waits=waits, workers=workers)
    async with open_router(settings, rng=random.Random(1)) as router:
        yield router


def shown(router: Router, name: str = "w") -> dict[str, Any]:
    one: dict[str, Any]
    (one,) = [w for w in router.status()["workers"] if w["name"] == name]
    return one


async def when(router: Router, holds: Callable[[dict[str, Any]], bool]) -> Any:
    """Wait until the status of the worker is so; give it."""

    async def asked() -> bool:
        return holds(shown(router))

    await until(asked)
    return shown(router)


async def ready(router: Router, count: int = 1) -> None:
    async def are() -> bool:
        states = [worker["state"] for worker in router.status()["workers"]]
        return states.count("ready") == count

    await until(are)


def job(content: str) -> Job:
    return Job("m", ({"role": "user", "content": content},))


async def test_l6_a_command_is_a_worker() -> None:
    async with opened(child_settings()) as router:
        await ready(router)

        assert (await router.complete(job("say 3"))).text == "0 1 2 "
        one = shown(router)
        assert one["process"]["stage"] == "up"
        assert one["process"]["restarts"] == 0
        pid = one["process"]["pid"]
        # L9: a generic engine does not say when it was started; the kernel does.
        (member,) = router.fleet.members.values()
        assert member.started_at == proc.started_at(pid)
        start = trio.current_time()

    # E1: leaving the block leaves no child.
    assert is_gone(pid)
    assert trio.current_time() - start < 2.0


async def test_l2_a_server_that_listens_late_is_waited_for() -> None:
    async with opened(child_settings("slow")) as router:
        with pytest.raises(RequestFailed, match="coming up"):
            await router.complete(job("say 1"))
        one = await when(router, lambda one: one["process"]["pid"] is not None)
        assert (one["state"], one["reason"]) == ("starting", "WORKER_NOT_READY")
        pid = one["process"]["pid"]
        assert one["detail"] == f"pid {pid} runs and is not ready yet"
        await ready(router)

        assert (await router.complete(job("say 1"))).text == "0 "


async def test_l8_a_death_ends_its_streams_with_its_last_words() -> None:
    """At once, with its reason, and everybody else's streams go on (B106)."""
    settings = (child_settings(models=("m",)), child_settings(name="other"))
    async with opened(*settings) as router:
        await ready(router, 2)
        got: list[str] = []

        async def read() -> None:
            async with router.stream(job("die 4")) as deltas:
                async for delta in deltas:
                    got.append(delta.text)  # noqa: PERF401 - it breaks off

        with pytest.raises(RequestFailed) as caught:
            await read()

        assert got == ["0 ", "1 ", "2 "]
        assert caught.value.reason == "server_died"
        assert caught.value.committed
        assert caught.value.fault.message == (
            "The worker's process died: it ended with status 3: " + LAST_WORDS
        )
        assert (await router.complete(job("say 2"))).text == "0 1 "


async def test_b106_a_crash_ends_no_stream_of_another_server() -> None:
    """Also nothing of theirs comes late for it."""
    dies, lives = child_settings(name="dies"), child_settings(name="lives", slots=3)
    async with opened(lives, dies) as router:
        await ready(router, 2)
        router.drain("dies")
        whole: list[str] = []

        async def read() -> None:
            whole.append((await router.complete(job("drip 30"))).text)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
            await trio.sleep(0.5)
            assert shown(router, "lives")["in_flight"] == 3
            os.kill(shown(router, "dies")["process"]["pid"], signal.SIGKILL)

        assert whole == ["".join(f"{n} " for n in range(30))] * 3
        assert router.tally.failovers == {}
        assert shown(router, "lives")["process"]["restarts"] == 0


async def test_l8_a_job_without_a_delta_moves_to_another_worker() -> None:
    workers = [child_settings(name=name) for name in ("a", "b")]
    async with opened(*workers) as router:
        await ready(router, 2)

        with pytest.raises(RequestFailed) as caught:
            await router.complete(job("vanish"))

        # It kills the second one too.
        assert caught.value.reason == "server_died"
        assert router.tally.failovers == {"server_died": 1}
        attempts = router.tally.attempts
        assert (attempts["a"], attempts["b"]) == (1, 1)


async def test_l8_a_dead_server_is_restarted_and_ramped_up_again() -> None:
    async with opened(child_settings()) as router:
        await ready(router)
        pid = shown(router)["process"]["pid"]
        os.kill(pid, signal.SIGKILL)
        down = await when(router, lambda one: one["state"] != "ready")
        assert (down["state"], down["reason"]) == ("starting", "restarting")
        assert "killed by SIGKILL" in down["detail"]
        assert down["process"]["cause"] == "it was killed by SIGKILL"

        back = await when(router, lambda one: one["state"] == "ready")

        assert back["process"]["pid"] not in {pid, None}
        assert (back["process"]["restarts"], back["limit"]) == (1, 1)
        assert router.tally.restarts == {"w": 1}
        assert (await router.complete(job("say 1"))).text == "0 "


async def test_s4_a_job_waits_for_a_server_that_is_restarted() -> None:
    async with opened(child_settings()) as router:
        await ready(router)
        os.kill(shown(router)["process"]["pid"], signal.SIGKILL)
        await when(router, lambda one: one["state"] == "starting")

        assert (await router.complete(job("say 1"))).text == "0 "


async def test_l8_a_crash_loop_is_a_failure_with_its_cause() -> None:
    crashes = (*PYTHON, "-c", "import sys; sys.exit('no such model: x.gguf')")
    worker = WorkerSettings(
        name="w", command=crashes, port=free_port(), max_restarts=1, models=("m",)
    )
    async with opened(worker) as router:
        one = await when(router, lambda one: one["state"] == "failed")

        assert one["reason"] == "crash_loop"
        assert one["detail"] == (
            "more than 1 restarts in 600 s, the last time "
            "it ended with status 1: no such model: x.gguf"
        )
        assert one["process"]["last_line"] == "no such model: x.gguf"
        with pytest.raises(RequestFailed) as caught:
            await router.complete(job("say 1"))
        assert caught.value.reason == "no_worker"
        # An operator who has mended it says so by drain and undrain.
        assert router.drain("w")
        assert router.undrain("w")
        await when(router, lambda one: one["process"]["stage"] != "failed")


async def test_l6_a_port_that_is_taken_is_no_worker_and_says_who_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "PORT_GRACE_S", 0.3)
    with listening() as port:
        async with opened(child_settings(port=port)) as router:
            one = await when(router, lambda one: one["state"] == "failed")

            assert one["reason"] == "WORKER_NOT_READY"
            assert one["detail"].startswith(
                f"port {port} is taken by pid {os.getpid()} ("
            )
            assert one["process"]["pid"] is None


async def test_l6_another_server_on_our_port_is_not_taken_for_ours(
    tmp_path: Path,
) -> None:
    """It comes between our look at the port and our server's bind."""
    port = free_port()
    numbers = tmp_path / "numbers"
    async with opened(child_settings("mute", str(numbers), port=port)) as router:
        (ours,) = await numbers_in(numbers)
        foreign = child_settings(port=port)
        argv = [part.replace("{port}", str(port)) for part in foreign.command or ()]
        async with trio.open_nursery() as nursery:
            other = await nursery.start(trio.run_process, argv)
            one = await when(router, lambda one: "answered" in one["detail"])

            assert (one["state"], one["reason"]) == ("starting", "WORKER_NOT_READY")
            assert one["detail"].startswith(
                f"port {port} is answered by pid {other.pid} ("
            )
            assert one["detail"].endswith(f", not by our process {ours}")
            assert not router.ready
            nursery.cancel_scope.cancel()


async def test_w10_a_silent_server_at_work_is_waited_for_and_one_at_rest_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A generic engine answers its probes whatever its requests do."""
    monkeypatch.setattr("workers.pulse.WINDOW_S", 1.0)
    async with opened(child_settings()) as router:
        await ready(router)
        start = trio.current_time()

        assert (await router.complete(job("spin 4"))).text == "0 1 2 3 "

        assert trio.current_time() - start >= 4.0
        assert "idle" not in router.tally.waits
        with pytest.raises(RequestFailed) as caught:
            await router.complete(job("hang"))
        assert caught.value.reason == "stalled"
        assert router.tally.waits["idle"] >= 10


async def test_a_connection_that_breaks_under_a_server_that_lives_is_told_in_time() -> (
    None
):
    async with opened(child_settings()) as router:
        await ready(router)
        start = trio.current_time()
        with pytest.raises(RequestFailed) as caught:
            await router.complete(job("cut 1"))

        assert caught.value.reason == "stream_closed_early"
        assert DOUBT_S <= trio.current_time() - start < 1.0
        assert shown(router)["state"] == "ready"


async def test_a7_a_client_that_leaves_while_a_death_is_in_doubt_is_told_nothing() -> (
    None
):
    async with opened(child_settings()) as router:
        await ready(router)
        with trio.move_on_after(0.08):
            await router.complete(job("cut 1"))
        await trio.sleep(2 * DOUBT_S)

        assert router.tally.requests["m", "cancelled"] == 1
        assert router.tally.verdicts["late"] == 0
        assert shown(router)["in_flight"] == 0


async def test_s2_a_server_killed_under_load_leaves_nothing_out() -> None:
    async with opened(child_settings(slots=8), waits=WaitSettings()) as router:
        await ready(router)
        reasons: list[str] = []

        async def ask() -> None:
            try:
                await router.complete(job("hang"))
            except RequestFailed as failed:
                reasons.append(failed.reason)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
            await when(router, lambda one: one["in_flight"] == 8)
            await trio.sleep(0.2)
            start = trio.current_time()
            os.kill(shown(router)["process"]["pid"], signal.SIGKILL)

        assert trio.current_time() - start < 2
        assert reasons == ["server_died"] * 8
        one = shown(router)
        assert (one["in_flight"], one["settling"], one["ghosts"]) == (0, 0, 0)


async def test_l7_what_a_killed_router_left_is_swept_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router and shim are killed together: the grandchild has nobody left."""
    monkeypatch.setattr("workers.leftovers.PATIENCE_S", 0.2)
    numbers, state = tmp_path / "numbers", tmp_path / "state"
    state.mkdir()
    settings = child_settings(str(numbers), "family", "stubborn")
    code = (
        "import sys, trio\n"
        "from router.engine import open_router\n"
        "from router.settings import ServerSettings, Settings, WorkerSettings\n"
        "async def main():\n"
        f"    worker = WorkerSettings(name='w', command={settings.command!r},"
        f" port={settings.port})\n"
        f"    settings = Settings(ServerSettings(state_dir={str(state)!r}),"
        " workers=(worker,))\n"
        "    async with open_router(settings):\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    router = await trio.lowlevel.open_process([sys.executable, "-c", code])
    child, grandchild = await numbers_in(numbers)
    record = state / "workers" / "w.json"

    async def known() -> bool:
        return record.exists() and str(grandchild) in record.read_text()

    await until(known)
    stat = proc.stat_of(child)
    assert stat is not None
    os.kill(stat.parent, signal.SIGKILL)
    router.kill()
    await router.wait()
    await gone_after([child], trio.current_time())
    assert not is_gone(grandchild)

    async with opened(child_settings(), state=state) as again:
        assert is_gone(grandchild)
        await ready(again)
        assert record.exists()

    assert not record.exists()
    assert (state / "workers" / "w.log").exists()


async def test_e1_two_routers_of_one_program_know_nothing_of_each_other(
    tmp_path: Path,
) -> None:
    async with opened(child_settings(name="a"), state=tmp_path) as first:
        await ready(first)
        async with opened(child_settings(name="b"), state=tmp_path) as second:
            await ready(second)

        assert first.ready
        assert (await first.complete(job("say 1"))).text == "0 "


async def test_l5_a_worker_that_is_run_comes_and_goes_at_run_time(
    tmp_path: Path,
) -> None:
    async with opened(child_settings(name="first"), state=tmp_path) as router:
        await ready(router)
        await router.add_worker(child_settings(name="second"))
        await ready(router, 2)
        pid = shown(router, "first")["process"]["pid"]

        assert router.remove_worker("first")
        assert await gone_after([pid], trio.current_time()) < 2.0

        assert [w["name"] for w in router.status()["workers"]] == ["second"]
        assert (await router.complete(job("say 1"))).text == "0 "

        async def only_its_log_is_left() -> bool:
            names = sorted(path.name for path in (tmp_path / "workers").iterdir())
            return names == ["first.log", "second.json", "second.log"]

        await until(only_its_log_is_left)


@pytest.mark.parametrize("content", ["vanish", "share"])
async def test_l8_a_worker_alone_tells_a_death_too_whoever_holds_the_sockets(
    content: str,
) -> None:
    """Without a router around it, and where a grandchild keeps the connection."""
    worker = SupervisedWorker(
        child_settings(), WAITS, environ={}, report_bug=lambda *_: None
    )
    async with served(worker):

        async def answers() -> bool:
            return (await worker.probe()).result is ProbeResult.ANSWERED

        await until(answers)
        delivery = RecordingDelivery()
        start = trio.current_time()
        worker.open(assignment(), job(content), delivery)
        fault = await delivery.fault()

        assert fault.kind is FaultKind.SERVER_DIED
        assert trio.current_time() - start < 2
        assert worker._all == set()


def test_l6_a_plan_needs_a_command_and_a_port() -> None:
    with pytest.raises(ValueError, match="needs command and port"):
        make_plan(WorkerSettings(name="w", command=("x",)), {})
    with pytest.raises(ValueError, match="needs command and port"):
        make_plan(WorkerSettings(name="w", port=1), {})


def test_l6_a_plan_is_complete() -> None:
    settings = WorkerSettings(
        name="w",
        command=("serve", "{port}", "{slots}", "{model}", '{"a": {}}'),
        port=9,
        slots=2,
        model="m",
        env={"A": "1", "B": "2"},
        stop_grace_ms=1_500,
    )

    plan = make_plan(settings, {"A": "0", "PATH": "/bin", "HF_TOKEN": "hf_12345"})

    assert plan.command == ["serve", "9", "2", "m", '{"a": {}}']
    assert plan.environ == {
        "A": "1",
        "B": "2",
        "PATH": "/bin",
        "HF_TOKEN": "hf_12345",
    }
    assert plan.secrets == {"hf_12345"}
    assert plan.stop_grace_s == 1.5


def test_l6_a_word_without_its_setting_is_refused_when_it_is_hired() -> None:
    settings = WorkerSettings(name="w", command=("x", "{model}"), port=1)

    with pytest.raises(ValueError, match="needs the setting model"):
        SupervisedWorker(
            settings, WaitSettings(), environ={}, report_bug=lambda *_: None
        )
