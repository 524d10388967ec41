"""Supervised processes for tests: plans, a process that is kept, and who is gone."""

import os
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import trio

from router.settings import WorkerSettings
from tests.kit.daemon import until
from workers import proc
from workers.life import Plan
from workers.process import ServerProcess, Stage

CHILD: Final = Path(__file__).with_name("child.py")
PYTHON: Final = (sys.executable, "-I", "-S")
#: Seconds for what takes a fraction of one on a machine that has nothing else to do.
PATIENCE_S: Final = 15.0


def free_port() -> int:
    """Give a port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Have no descriptor to spare for the length of a block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Have a port taken; gives its number."""
    with socket.create_server(("127.0.0.1", port)) as sock:
        yield int(sock.getsockname()[1])


def child_settings(*words: str, name: str = "w", **more: Any) -> WorkerSettings:
    """Give settings of a worker whose server is `child.py`."""
    port = more.pop("port", None) or free_port()
    command = (*PYTHON, str(CHILD), "{port}", *words)
    return WorkerSettings(name=name, command=command, port=port, **more)


def plan(code: str, **more: Any) -> Plan:
    """Plan to run *code* in Python, without the site packages."""
    facts: dict[str, Any] = {
        "name": "w",
        "command": (*PYTHON, "-c", code),
        "port": free_port(),
        "environ": {"PATH": "/usr/bin:/bin"},
        "cwd": None,
        "stop_grace_s": 5.0,
        "max_restarts": 5,
        "restart_window_s": 600.0,
        **more,
    }
    return Plan(**facts)


def is_gone(pid: int) -> bool:
    """Say whether a process has ended; its zombie waits for its parent only."""
    stat = proc.stat_of(pid)
    return stat is None or stat.zombie


async def gone_after(pids: Iterable[int], since: float) -> float:
    """Wait until all are gone; give the seconds from *since*, on Trio's clock."""
    pids = list(pids)

    async def gone() -> bool:
        return all(map(is_gone, pids))

    await until(gone)
    return trio.current_time() - since


async def numbers_in(path: Path) -> list[int]:
    """Wait for the file of a child's numbers; give them, its own first."""

    async def is_there() -> bool:
        return path.exists()

    await until(is_there)
    return [int(number) for number in path.read_text().split()]


class Kept:
    """One process that is kept, and its stages as they came."""

    def __init__(self, what: Plan, folder: Path | None) -> None:
        self.stages: list[Stage] = []
        self._news = trio.Event()
        self.process = ServerProcess(what, folder, self._changed)
        self.lines = self.process._spoken.lines

    def _changed(self) -> None:
        self.stages.append(self.process.stage)
        self._news.set()
        self._news = trio.Event()

    async def stage(self, wanted: Stage) -> None:
        """Wait until it is in a stage. A checkpoint."""
        with trio.fail_after(PATIENCE_S):
            while self.process.stage is not wanted:
                await self._news.wait()
        await trio.lowlevel.checkpoint()

    async def up(self) -> int:
        """Wait until it runs; give its number. A checkpoint."""
        await self.stage(Stage.UP)
        assert self.process.pid is not None
        return self.process.pid

    async def said(self, line: str) -> None:
        """Wait until it has said *line*. A checkpoint."""

        async def has() -> bool:
            return line in self.lines

        await until(has)


@asynccontextmanager
async def kept(what: Plan, folder: Path | None = None) -> AsyncIterator[Kept]:
    """Keep a process for the length of a block; it is gone behind it."""
    one = Kept(what, folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.process.run)
        yield one
        nursery.cancel_scope.cancel()
