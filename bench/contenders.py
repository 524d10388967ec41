"""The routers that are measured: how each is started in front of one engine.

A contender that is not installed is left out, and the table says so.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final, TypeAlias

import attrs

from bench.processes import free_port, running

#: Where the routers from PyPI live: `make bench` installs them there.
RUST_VENV: Final = Path(__file__).parent.parent / ".venv-bench"
#: Deltas a second of one stream.
RATE: Final = 50.0
#: Seconds a router may take until its first answer.
START_S: Final = 30.0

_FENCEPOST: Final = """
[server]
listen = "127.0.0.1:{port}"
state_dir = "{folder}"

[[worker]]
name = "mock"
url = "http://127.0.0.1:{engine}"
slots = 4096
engine = "generic"
"""

_FENCEPOST_FAR: Final = """
[server]
listen = "127.0.0.1:{port}"
state_dir = "{folder}"

[[worker]]
name = "far"
agent = "127.0.0.1:{agent}"
"""

_AGENT: Final = """
[server]
state_dir = "{folder}"

[agent]
listen = "127.0.0.1:{port}"

[[worker]]
name = "mock"
url = "http://127.0.0.1:{engine}"
slots = 4096
engine = "generic"
"""

_NGINX: Final = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream engine {{
    server 127.0.0.1:{engine};
    keepalive 1024;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    keepalive_requests 1000000;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def fencepost(port: int, engine: int, folder: Path) -> list[str]:
    """Our own router, from this checkout."""
    config = folder / "fencepost.toml"
    config.write_text(
        _FENCEPOST.format(port=port, engine=engine, folder=folder), encoding="utf-8"
    )
    return [sys.executable, "-m", "router", "serve", "--config", str(config)]


def fencepost_far(port: int, agent: int, folder: Path) -> list[str]:
    """Our own router, in front of an agent."""
    config = folder / "fencepost.toml"
    config.write_text(
        _FENCEPOST_FAR.format(port=port, agent=agent, folder=folder), encoding="utf-8"
    )
    return [sys.executable, "-m", "router", "serve", "--config", str(config)]


@contextmanager
def mock_agent(
    _engine: int, _folder: Path, log: IO[bytes]
) -> Iterator[tuple[int, int | None]]:
    """Run an agent that costs next to nothing; gives its port."""
    command = [sys.executable, "-m", "bench.agent", "--rate", str(RATE)]
    with running(command, log, speaks=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().split()[1]), None


@contextmanager
def real_agent(
    engine_port: int, folder: Path, log: IO[bytes]
) -> Iterator[tuple[int, int | None]]:
    """Run our own agent in front of the mock engine; gives its port and process."""
    own = folder / "agent"
    own.mkdir()
    port = free_port()
    config = own / "agent.toml"
    config.write_text(
        _AGENT.format(port=port, engine=engine_port, folder=own), encoding="utf-8"
    )
    command = [sys.executable, "-m", "router", "agent", "--config", str(config)]
    with running(command, log) as process:
        yield port, process.pid


@contextmanager
def agents_router(
    engine_port: int, folder: Path, log: IO[bytes]
) -> Iterator[tuple[int, int | None]]:
    """As `real_agent`, and it is the router that is measured."""
    with real_agent(engine_port, folder, log) as (port, _):
        yield port, None


@contextmanager
def nobody(
    engine_port: int, _folder: Path, _log: IO[bytes]
) -> Iterator[tuple[int, int | None]]:
    """Put nobody between the router and the engine."""
    yield engine_port, None


def nginx(port: int, engine: int, folder: Path) -> list[str]:
    """A byte proxy: the floor, since it neither parses nor checks an answer."""
    config = folder / "nginx.conf"
    config.write_text(
        _NGINX.format(port=port, engine=engine, folder=folder), encoding="utf-8"
    )
    return ["nginx", "-p", str(folder), "-e", "stderr", "-c", str(config)]


def _rust(module: str, port: int, engine: int) -> list[str]:
    # Health checks stay on, as anybody would run it; the log is down to warnings,
    # and no limit of its own is in the way of 512 streams.
    return [
        *(str(RUST_VENV / "bin" / "python"), "-m", f"{module}.launch_router"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"http://127.0.0.1:{engine}"),
        *("--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--max-concurrent-requests", "4096"),
        *("--worker-startup-timeout-secs", "20"),
        *("--worker-startup-check-interval", "1"),
    ]


def sglang_router(port: int, engine: int, _folder: Path) -> list[str]:
    """sglang-router from PyPI, in Rust."""
    return [*_rust("sglang_router", port, engine), "--log-level", "warn"]


def vllm_router(port: int, engine: int, _folder: Path) -> list[str]:
    """vllm-router from PyPI, in Rust."""
    return [*_rust("vllm_router", port, engine), "--log-level", "warning"]


#: From the engine's port, a folder of its own and a log.
Between: TypeAlias = Callable[
    [int, Path, IO[bytes]], AbstractContextManager[tuple[int, int | None]]
]


@attrs.frozen
class Contender:
    """One kind of router."""

    name: str
    command: Callable[[int, int, Path], list[str]]
    """From its port, the engine's port and a folder of its own."""
    missing: Callable[[], str | None]
    """What to type when it is not installed; None: it is."""
    between: Between = nobody
    """Runs what stands between router and engine; gives the port that the router
    is to use, and the process that is measured in the router's place."""


def _needs_rust(package: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        if next(RUST_VENV.glob(f"lib/python*/site-packages/{package}"), None):
            return None
        return "make bench installs it"

    return missing


def _needs_nginx() -> str | None:
    return None if shutil.which("nginx") else "apt-get install nginx-light"


CONTENDERS: Final = (
    Contender("fencepost", fencepost, lambda: None),
    Contender("fencepost wire", fencepost_far, lambda: None, mock_agent),
    Contender("fencepost far", fencepost_far, lambda: None, agents_router),
    Contender("its agent", fencepost_far, lambda: None, real_agent),
    Contender("sglang-router", sglang_router, _needs_rust("sglang_router")),
    Contender("vllm-router", vllm_router, _needs_rust("vllm_router")),
    Contender("nginx", nginx, _needs_nginx),
)
#: The yardstick: the better of these is 1.00.
RUST: Final = ("sglang-router", "vllm-router")


@attrs.frozen
class Started:
    """A router that answers."""

    name: str
    port: int
    pid: int


def ask(port: int, path: str, body: object | None = None) -> bytes:
    """One small HTTP exchange on a connection of its own; the whole reply.

    Raises:
        OSError: no connection, or no whole reply within 5 s.
    """
    text = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        peer.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            "".encode()
            + text
        )
        got = b""
        while chunk := peer.recv(65536):
            got += chunk
            head, split, rest = got.partition(b"\r\n\r\n")
            length = head.lower().partition(b"\r\ncontent-length:")[2]
            if split and length and len(rest) >= int(length.split(b"\r\n")[0]):
                break
        return got


def _await_answer(process: subprocess.Popen[bytes], name: str, port: int) -> None:
    chat = {
        "model": "mock",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
    }
    end = time.perf_counter() + START_S
    reply = b""
    while time.perf_counter() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with status {process.returncode}")
        try:
            reply = ask(port, "/v1/chat/completions", chat)
        except OSError:
            reply = b""
        if b" 200 " in reply[:20] and b"tok1" in reply:
            return
        time.sleep(0.1)
    raise RuntimeError(f"{name} gave no answer in {START_S:.0f} s: {reply[:300]!r}")


@contextmanager
def engine(rate: float, log: IO[bytes]) -> Iterator[int]:
    """Run the mock engine; gives its port."""
    command = [sys.executable, "-m", "bench.engine", "--rate", str(rate)]
    with running(command, log, speaks=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().split()[1])


@contextmanager
def started(
    contender: Contender, engine_port: int, folder: Path, log: IO[bytes]
) -> Iterator[Started]:
    """Run one router in front of the engine, from its first answer on.

    Raises:
        RuntimeError: it ended, or gave no answer in `START_S`.
    """
    own = folder / contender.name.replace(" ", "-")
    own.mkdir()
    port = free_port()
    with ExitStack() as stack:
        worker_port, measured = stack.enter_context(
            contender.between(engine_port, own, log)
        )
        process = stack.enter_context(
            running(contender.command(port, worker_port, own), log)
        )
        try:
            _await_answer(process, contender.name, port)
        except RuntimeError as error:
            tail = Path(log.name).read_text(encoding="utf-8", errors="replace")
            error.add_note("the end of the log:\n" + tail[-2000:])
            raise
        yield Started(contender.name, port, measured or process.pid)
