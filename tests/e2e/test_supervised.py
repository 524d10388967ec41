"""A real daemon that runs real tiny servers: what an operator sees and does."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio

from router.settings import WorkerSettings
from tests.kit.child import LAST_WORDS
from tests.kit.daemon import Daemon, open_daemon, run_command, until
from tests.kit.deep import size
from tests.kit.keeping import (
    PYTHON,
    child_settings,
    free_port,
    gone_after,
    is_gone,
    listening,
    numbers_in,
)

pytestmark = [
    pytest.mark.slow,
    # httpx leaves its own generators to the garbage collector, and Trio says so.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def config(folder: Path, *workers: WorkerSettings, more: str = "") -> Path:
    """Write a configuration of workers that are run."""
    state = folder / "state"
    lines = [f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{state}"', more]
    for one in workers:
        lines += ["[[worker]]", f'name = "{one.name}"', f"port = {one.port}"]
        lines += [f"command = {json.dumps(one.command)}", 'models = ["m"]']
        lines += [f"stop_grace_ms = {one.stop_grace_ms}"]
        lines += [f"max_restarts = {one.max_restarts}"]
    path = folder / "fencepost.toml"
    path.write_text("\n".join(lines))
    return path


async def worker_of(daemon: Daemon) -> dict[str, Any]:
    done = await run_command("status", "--json", "--admin", daemon.admin)
    one: dict[str, Any] = json.loads(done.stdout)["workers"][0]
    return one


async def drawn(daemon: Daemon) -> str:
    done = await run_command("status", "--admin", daemon.admin)
    return done.stdout.decode()


CHAT: Final = "/v1/chat/completions"


def chat(content: str) -> dict[str, Any]:
    return {
        "model": "m",
        "stream": True,
        "messages": [{"role": "user", "content": content}],
    }


async def test_l8_status_shows_pid_restarts_last_line_and_cause(
    tmp_path: Path,
) -> None:
    path = config(tmp_path, child_settings())
    async with open_daemon(["--config", str(path)]) as daemon, daemon.client() as http:
        await daemon.ready()
        lines: list[str] = []
        async with http.stream("POST", CHAT, json=chat("die 3")) as reply:
            with suppress(httpx.RemoteProtocolError):
                async for line in reply.aiter_lines():
                    lines.append(line)  # noqa: PERF401 - it breaks off
        await daemon.ready()

        last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "worker_lost"
        assert error["message"].endswith(LAST_WORDS)
        one = await worker_of(daemon)
        pid = one["process"]["pid"]
        assert not is_gone(pid)
        shown = await drawn(daemon)
        assert f"it ended with status 3: {LAST_WORDS}" in shown
        (row,) = [
            words for words in map(str.split, shown.splitlines()) if str(pid) in words
        ]
        assert row[:4] == ["w", str(pid), str(one["process"]["port"]), "1"]


async def test_l8_a_server_that_always_crashes_ends_in_failed_with_the_cause(
    tmp_path: Path,
) -> None:
    worker = WorkerSettings(
        name="w",
        command=(*PYTHON, "-c", "import sys; sys.exit('no such file: m.gguf')"),
        port=free_port(),
        max_restarts=1,
    )
    path = config(tmp_path, worker)
    async with open_daemon(["--config", str(path)]) as daemon, daemon.client() as http:

        async def failed() -> bool:
            return bool((await worker_of(daemon))["state"] == "failed")

        await until(failed)

        shown = await drawn(daemon)
        assert "failed: more than 1 restarts in 600 s" in shown
        assert "it ended with status 1: no such file: m.gguf" in shown
        reply = await http.post(CHAT, json=chat("say 1"))
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "no_worker_available"


async def test_l6_a_taken_port_shows_in_the_status(tmp_path: Path) -> None:
    with listening() as port:
        path = config(tmp_path, child_settings(port=port))
        async with open_daemon(["--config", str(path)]) as daemon:

            async def told() -> bool:
                return bool((await worker_of(daemon))["detail"])

            await until(told)
            one = await worker_of(daemon)
            assert one["reason"] == "WORKER_NOT_READY"
            assert f"port {port} is taken by pid {os.getpid()} (" in one["detail"]


async def test_d3_children_outlive_the_drain_and_are_stopped_after_it(
    tmp_path: Path,
) -> None:
    numbers = tmp_path / "numbers"
    path = config(tmp_path, child_settings(str(numbers), "family"))
    async with open_daemon(["--config", str(path)]) as daemon, daemon.client() as http:
        await daemon.ready()
        family = await numbers_in(numbers)
        got: list[int] = []

        async def ask() -> None:
            reply = await http.post(CHAT, json=chat("hang 1"))
            got.append(reply.status_code)
            assert "[DONE]" in reply.text

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.3)
            daemon.signal(signal.SIGTERM)

        assert got == [200]
        assert await daemon.exit_code() == 0
        assert all(map(is_gone, family))
        assert daemon.noise == []


async def test_d3_a_second_signal_waits_for_no_child(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers"
    stubborn = child_settings(str(numbers), "stubborn", stop_grace_ms=30_000)
    path = config(tmp_path, stubborn)
    async with open_daemon(["--config", str(path)]) as daemon:
        await daemon.ready()
        (pid,) = await numbers_in(numbers)
        daemon.signal(signal.SIGTERM)
        await daemon.event("stopping")
        await trio.sleep(0.5)
        assert daemon.process.returncode is None
        start = time.perf_counter()
        daemon.signal(signal.SIGTERM)

        assert await daemon.exit_code() == 0
        assert time.perf_counter() - start < 2.0
        assert is_gone(pid)


@pytest.mark.deep
async def test_l7_kill_9_of_the_daemon_leaves_nobody_and_the_port_free(
    tmp_path: Path,
) -> None:
    """The next one has its server up at once, on the same port."""
    numbers = tmp_path / "numbers"
    words = (str(numbers), "family", "stubborn")
    path = config(tmp_path, child_settings(*words))
    for _ in range(size(10, least=2)):
        async with open_daemon(["--config", str(path)]) as daemon:
            await daemon.ready()
            family = await numbers_in(numbers)
            killed_at = trio.current_time()
            daemon.signal(signal.SIGKILL)
            await daemon.exit_code()

            assert await gone_after(family, killed_at) <= 2.0
        numbers.unlink()


async def test_d2_a_command_that_is_not_there_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    worker = WorkerSettings(name="w", command=("no-such-server", "{prot}"), port=1)
    path = config(tmp_path, worker)

    for command in (["check", str(path)], ["serve", "--config", str(path)]):
        done = await run_command(*command)

        assert done.returncode == 2
        prefix = f"fencepost: {path}: worker[0].command"
        assert done.stderr.decode().splitlines() == [
            (
                f"{prefix}[1]: {{prot}} stands for nothing: "
                "there are {port}, {slots}, {model}"
            ),
            (
                f"{prefix}[0]: no program no-such-server in PATH: "
                "install it, or give its whole path"
            ),
        ]
    assert not (tmp_path / "state").exists()
