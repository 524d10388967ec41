"""Real llama.cpp servers that the router runs: slow, silent, stopped, dead.

Nothing here is a double: the signals are signals, and what a slot does is the
engine's own word.
"""

import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio

from router.engine import Router, open_router
from router.errors import Fault, FaultKind
from router.messages import GenerationParams, Job
from router.settings import Settings, WaitSettings, WorkerSettings
from tests.kit.daemon import Daemon, open_daemon, until
from tests.kit.deep import size
from tests.kit.keeping import free_port, gone_after, is_gone
from tests.kit.receiver import Recorder
from workers import proc

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    # httpx leaves its own generators to the garbage collector, and Trio says so.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL: Final = "smollm2"
#: Around 280 tokens: most of a second of prefill.
LONG: Final = "The river is long and wide. " * 40


def llama(name: str, *, engine_slots: int = 2, **more: Any) -> WorkerSettings:
    """A server with one thread, so that two leave room for the router."""
    command = (
        *(sys.executable, "-m", "workers.llama_cpp", "--port", "{port}"),
        *("--slots", str(engine_slots), "--threads", "1"),
    )
    return WorkerSettings(name=name, command=command, port=free_port(), **more)


@asynccontextmanager
async def opened(
    *workers: WorkerSettings, **waits: int
) -> AsyncIterator[tuple[Router, dict[str, int]]]:
    """A router whose servers are ready, and the numbers of their processes."""
    settings = Settings(waits=WaitSettings(**waits), workers=workers)
    async with open_router(settings, rng=random.Random(1)) as router:

        async def ready() -> bool:
            return all(w["state"] == "ready" for w in router.status()["workers"])

        await until(ready)
        pids = {w["name"]: w["process"]["pid"] for w in router.status()["workers"]}
        try:
            yield router, pids
        finally:
            for pid in pids.values():
                if not is_gone(pid):
                    os.kill(pid, signal.SIGCONT)
    assert all(map(is_gone, pids.values()))


def job(content: str, tokens: int) -> Job:
    return Job(
        MODEL,
        ({"role": "user", "content": content},),
        target=MODEL,
        params=GenerationParams(max_tokens=tokens, ignore_eos=True),
    )


class Timed(Recorder):
    """A receiver that knows when it was last given something, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.took_at = 0.0
        self.some = trio.Event()

    def take(self, deltas: Any) -> Any:
        self.took_at = trio.current_time()
        if len(self.deltas) > 5:
            self.some.set()
        return super().take(deltas)


async def serve(router: Router, receiver: Recorder, what: Job) -> float:
    """Serve to the end; give its time on Trio's clock."""
    await router.serve(what, receiver, request=router.new_request_id())
    return trio.current_time()


def kind_of(fault: Fault | None) -> FaultKind | None:
    return None if fault is None else fault.kind


async def test_l9_a_real_server_is_run_recognised_and_discovered() -> None:
    async with opened(llama("w")) as (router, pids):
        (one,) = router.status()["workers"]
        assert (one["engine"], one["slots"], one["models"][0]) == (
            "llama-server",
            2,
            MODEL,
        )
        assert one["context"]
        probe = router._keepers[router.fleet.members["w"].id].last_probe  # type: ignore[index]
        assert probe is not None
        assert probe.discovery is not None
        assert probe.discovery.started_at
        receiver = Recorder()
        await serve(router, receiver, job("Hi.", 3))
        assert receiver.finished is not None
        assert not is_gone(pids["w"])


async def test_s5_slots_beyond_the_engines_own_keep_a_run_worker_out() -> None:
    settings = Settings(workers=(llama("w", slots=4),))
    async with open_router(settings) as router:

        async def failed() -> bool:
            return bool(router.status()["workers"][0]["state"] == "failed")

        await until(failed)

        (one,) = router.status()["workers"]
        assert one["reason"] == "slots_exceed_engine"
        assert one["detail"] == "slots is set to 4, the engine has 2"


async def test_w6_a_stopped_server_is_stalled_at_its_limit_and_delivers_no_more() -> (
    None
):
    """SIGSTOP mid-stream: the head was here, so liveness_ms rules."""
    async with opened(llama("w"), liveness_ms=1_500) as (router, pids):
        receiver = Timed()
        ended: list[float] = []

        async def run() -> None:
            ended.append(await serve(router, receiver, job("Tell a story.", 1_500)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await receiver.some.wait()
            os.kill(pids["w"], signal.SIGSTOP)

        assert kind_of(receiver.fault) is FaultKind.STALLED
        assert ended[0] - receiver.took_at == pytest.approx(1.5, abs=0.25)
        got = len(receiver.deltas)

        os.kill(pids["w"], signal.SIGCONT)
        await serve(router, again := Timed(), job("Hi.", 3))

        assert again.finished is not None
        assert len(receiver.deltas) == got
        assert router.status()["verdicts"].get("next", 0) == 0


async def test_w4_a_server_stopped_before_its_head_is_a_load_timeout() -> None:
    """Its probes hang too: unavailable, not idle."""
    waits = {"load_wait_ms": 2_000, "idle_grace_ms": 60_000}
    async with opened(llama("w"), **waits) as (router, pids):
        for after in (0.0, 0.13, 0.29, 0.41):
            os.kill(pids["w"], signal.SIGSTOP)
            # Wherever on the grid of polls it begins.
            await trio.sleep(after)
            start = trio.current_time()
            ended = await serve(router, receiver := Recorder(), job("Hi.", 3))
            os.kill(pids["w"], signal.SIGCONT)

            assert kind_of(receiver.fault) is FaultKind.LOAD_TIMEOUT
            assert ended - start == pytest.approx(2.0, abs=0.25)
            assert receiver.deltas == []
            await at_rest(router)
        assert set(router.tally.waits) == {"unavailable"}


async def at_rest(router: Router) -> None:
    """Wait until the one worker is as good as new."""
    (member,) = router.fleet.members.values()

    async def is_so() -> bool:
        return member.busy == 0 and member.serving

    await until(is_so)
    member.trust()
    member.rest_until = 0.0


async def test_a2_a_job_moves_off_a_stopped_server_before_its_first_delta() -> None:
    """In its prefill, with the head here: Stalled, then the other one answers."""
    workers = (llama("a"), llama("b"))
    # Longer than the other one's whole prefill, which is silent too.
    async with opened(*workers, liveness_ms=12_000) as (router, pids):
        receiver = Recorder()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, router, receiver, job(LONG, 5))

            async def has_its_head() -> bool:
                phases = [one.phase_name() for one in router.flights.values()]
                return phases == ["assigned"]

            await until(has_its_head)
            (first,) = receiver.routes
            os.kill(pids[first[0]], signal.SIGSTOP)

        assert receiver.finished is not None
        assert len(receiver.deltas) >= 3
        assert {worker for worker, _ in receiver.routes} == {"a", "b"}
        assert router.tally.failovers == {"stalled": 1}
        got = receiver.text
        os.kill(pids[first[0]], signal.SIGCONT)
        await trio.sleep(1)
        assert receiver.text == got
        assert router.tally.verdicts["stale"] == 0


async def test_w2_a_slot_that_a_foreign_client_holds_is_busy_and_then_ours(
    tmp_path: Path,
) -> None:
    """Pinned to slot 0, which somebody else has, while slot 1 is free: the client
    sees keepalives, the operator *busy*, and the answer comes."""
    worker = llama("w", pin_slots=True, models=(MODEL,))
    more = "[router]\nkeepalive_ms = 200\ncommit_after_ms = 200"
    path = config(tmp_path, worker, more=more)
    async with open_daemon(["--config", str(path)]) as daemon:
        await daemon.ready()
        states: set[tuple[str, bool]] = set()
        lines: list[str] = []
        async with trio.open_nursery() as nursery:
            held = trio.Event()
            nursery.start_soon(hold_slot, f"http://127.0.0.1:{worker.port}", held)
            await held.wait()
            nursery.start_soon(note_waits, daemon, states)
            await read_lines(daemon, lines)
            nursery.cancel_scope.cancel()

        assert lines.count(": ka") >= 3
        # The role, then silence that is filled, then the answer.
        first_text = ['"delta":{"content":"' in line for line in lines].index(True)
        assert lines[1:first_text] == [": ka"] * (first_text - 1)
        assert lines[-1] == "data: [DONE]"
        assert states == {("busy", True)}


async def hold_slot(url: str, held: trio.Event) -> None:
    """Be a foreign client that has slot 0 for a while."""
    body = {
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "id_slot": 0,
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if line:
                held.set()


def operator(daemon: Daemon) -> httpx.AsyncClient:
    wire = httpx.AsyncHTTPTransport(uds=daemon.admin.removeprefix("unix:"))
    return httpx.AsyncClient(transport=wire, base_url="http://admin")


async def note_waits(daemon: Daemon, states: set[tuple[str, bool]]) -> None:
    """Look at what the one request waits for, until cancelled."""
    async with operator(daemon) as http:
        while True:
            for one in (await http.get("/status")).json()["requests"]:
                if "waiting" in one:
                    states.add((one["waiting"], one["slot_busy"]))
            await trio.sleep(0.05)


async def read_lines(daemon: Daemon, lines: list[str]) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi."}],
        "max_tokens": 5,
        "stream": True,
    }
    async with (
        daemon.client() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status_code == 200
        lines += [line async for line in reply.aiter_lines() if line]


async def test_s4_a_server_that_is_still_loading_is_waited_for(tmp_path: Path) -> None:
    path = config(tmp_path, llama("w", models=(MODEL,)))
    async with open_daemon(["--config", str(path)]) as daemon:
        async with operator(daemon) as http:
            (one,) = (await http.get("/status")).json()["workers"]
        lines: list[str] = []
        await read_lines(daemon, lines)

        assert one["state"] in {"starting", "loading"}
        assert lines[-1] == "data: [DONE]"


async def test_l7_kill_9_of_the_daemon_leaves_no_real_server(tmp_path: Path) -> None:
    path = config(tmp_path, llama("a"), llama("b"))
    for _ in range(size(5, least=2)):
        async with open_daemon(["--config", str(path)]) as daemon:
            assert daemon.process.returncode is None
            await daemon.ready()
            family = list(proc.below(daemon.process.pid, proc.everybody()))
            # Two shims, each with its server.
            assert len(family) == 4
            killed_at = trio.current_time()
            daemon.signal(signal.SIGKILL)
            await daemon.exit_code()

            assert await gone_after(family, killed_at) <= 2.0


def config(folder: Path, *workers: WorkerSettings, more: str = "") -> Path:
    state = folder / "state"
    lines = [f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{state}"', more]
    for one in workers:
        lines += ["[[worker]]", f'name = "{one.name}"', f"port = {one.port}"]
        lines += [f"command = {list(one.command or ())}"]
        lines += [f"models = {list(one.models)}"]
        lines += [f"pin_slots = {str(one.pin_slots).lower()}"]
    path = folder / "fencepost.toml"
    path.write_text("\n".join(lines).replace("'", '"'))
    return path
