"""Real processes for tests with real parts: llama.cpp servers and our daemon.

Each is started with a pipe on stdin or a port of its own, ended by its own id, and
gone when its block is left. Nothing here is a double.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import attrs
import httpx

from workers.llama_cpp import LISTENING, command, missing_parts

#: Seconds until a process must have said that it listens.
START_S = 30.0
#: Seconds until it must be gone after SIGTERM.
STOP_S = 10.0
#: Lines of its log that a process may have in memory here.
_LINES_MAX = 2_000


class Spoken:
    """What a process says on one pipe, always drained, its last lines kept."""

    def __init__(self, pipe: IO[bytes]) -> None:
        """Start to read *pipe* to its end."""
        self.lines: deque[str] = deque(maxlen=_LINES_MAX)
        self._news = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            with self._news:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def await_line(self, part: str, seconds: float = START_S) -> str:
        """Give the first line that holds *part*. Blocks.

        Raises:
            TimeoutError: none came, or the pipe ended; with what did come.
        """
        end = time.perf_counter() + seconds
        with self._news:
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                left = end - time.perf_counter()
                if self._ended or left <= 0:
                    said = "\n".join(self.lines)
                    raise TimeoutError(f"no line with {part!r}, but:\n{said}")
                self._news.wait(left)

    def join(self) -> None:
        """Wait for the end of the pipe, which the end of the process brings."""
        self._thread.join(STOP_S)


@attrs.frozen
class Llama:
    """One real llama.cpp server."""

    url: str
    process: subprocess.Popen[bytes]

    def busy_slots(self) -> int:
        """How many of its slots are at work, as it says itself."""
        slots = httpx.get(f"{self.url}/slots", timeout=STOP_S, trust_env=False).json()
        return sum(slot["is_processing"] for slot in slots)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(STOP_S)


def await_idle(llamas: Sequence[Llama], seconds: float) -> float:
    """Wait until no slot of *llamas* is at work; gives the seconds it took. Blocks.

    Raises:
        TimeoutError: some still is after *seconds*.
    """
    start = time.perf_counter()
    while busy := [llama.busy_slots() for llama in llamas]:
        took = time.perf_counter() - start
        if not any(busy):
            return took
        if took > seconds:
            raise TimeoutError(f"slots at work: {busy}")
        time.sleep(0.02)
    return 0.0


@contextmanager
def running(
    argv: Sequence[str], **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], ExitStack]]:
    """Run *argv*; on leaving it has had SIGTERM, SIGKILL if need be, and is gone."""
    with ExitStack() as last:
        process = subprocess.Popen(argv, **options)
        try:
            yield process, last
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@contextmanager
def llama_servers(
    count: int, slots: int, *, embeddings: bool = False
) -> Iterator[list[Llama]]:
    """Run *count* servers on the bundled model, one thread each.

    Raises:
        ModuleNotFoundError: a part is not installed.
        TimeoutError: one did not come to listen.
    """
    if missing_parts():
        raise ModuleNotFoundError(f"not installed: {missing_parts()}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process, _ = stack.enter_context(
                running(
                    command(slots=slots, threads=1, embeddings=embeddings),
                    stderr=subprocess.DEVNULL,
                    **pipes,
                )
            )
            processes.append(process)
        servers = []
        for process in processes:
            assert process.stdout is not None
            line = Spoken(process.stdout).await_line(LISTENING)
            servers.append(Llama(line.split()[1], process))
        yield servers


@attrs.frozen
class Daemon:
    """Our own daemon in a process of its own."""

    url: str
    """Of its first TCP listener."""
    admin: Path
    process: subprocess.Popen[bytes]
    log: Spoken

    def status(self) -> Any:
        """What ``/status`` says now."""
        wire = httpx.HTTPTransport(uds=str(self.admin))
        with httpx.Client(transport=wire, base_url="http://admin") as client:
            return client.get("/status").raise_for_status().json()

    def await_status(
        self, holds: Callable[[Any], bool], seconds: float = START_S
    ) -> Any:
        """Wait until the status *holds*, and give it. Blocks.

        Raises:
            TimeoutError: it does not in time; with what it is.
        """
        end = time.perf_counter() + seconds
        while not holds(status := self.status()):
            if time.perf_counter() > end:
                raise TimeoutError(f"still: {status}")
            time.sleep(0.02)
        return status

    def await_ready(self, workers: int = 1) -> None:
        """Wait until so many workers are ready. Blocks.

        Raises:
            TimeoutError: they are not in time.
        """
        self.await_status(
            lambda status: (
                [w["state"] for w in status["workers"]].count("ready") >= workers
            )
        )


@contextmanager
def daemon(folder: Path, config: str) -> Iterator[Daemon]:
    """Run ``python -m router serve`` on *config* from its listening on.

    Args:
        folder: its own, for its configuration and its state.
        config: TOML; ``[server]`` with ``listen`` and ``state_dir`` is added
            unless it has one.

    Raises:
        TimeoutError: it did not come to listen; with its log.
    """
    state = folder / "state"
    if "[server]" not in config:
        config = f'[server]\nlisten = "127.0.0.1:0"\nstate_dir = "{state}"\n{config}'
    file = folder / "fencepost.toml"
    file.write_text(config, encoding="utf-8")
    argv = [sys.executable, "-m", "router", "serve", "--config", str(file)]
    argv += ["--log-format", "json"]
    with running(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as (
        process,
        last,
    ):
        assert process.stderr is not None
        log = Spoken(process.stderr)
        last.callback(process.stderr.close)
        last.callback(log.join)
        said = json.loads(log.await_line('"event":"listening"'))
        tcp = [where for where in said["clients"] if not where.startswith("unix:")]
        admin = Path(said["admin"][0].removeprefix("unix:"))
        yield Daemon(f"http://{tcp[0]}", admin, process, log)


def worker_table(name: str, url: str, *more: str) -> str:
    """One ``[[worker]]`` table; *more* are lines of TOML."""
    return "\n".join(["[[worker]]", f'name = "{name}"', f'url = "{url}"', *more, ""])
