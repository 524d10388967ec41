"""A real `fencepost serve` in a process of its own, and its log as it comes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import trio

ROOT: Final = Path(__file__).parent.parent.parent
COMMAND: Final = (sys.executable, "-m", "router")
#: Seconds for what should take a fraction of one, on a busy machine.
PATIENCE_S: Final = 15.0
ASK_EVERY_S: Final = 0.02


class Daemon:
    """One daemon; ``lines`` is its log so far, one mapping a line."""

    def __init__(self, process: trio.Process) -> None:
        """Not for tests: see `open_daemon`."""
        self.process = process
        self.lines: list[dict[str, Any]] = []
        #: Lines that are not JSON: there should be none.
        self.noise: list[str] = []
        self.ended_at: float | None = None
        self._news = trio.Event()

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return f"http://{self.events('listening')[0]['clients'][0]}"

    @property
    def admin(self) -> str:
        """Where operators reach it."""
        address: str = self.events("listening")[0]["admin"][0]
        return address

    def events(self, name: str) -> list[dict[str, Any]]:
        """Give the lines of one event, oldest first."""
        return [line for line in self.lines if line["event"] == name]

    async def event(self, name: str) -> dict[str, Any]:
        """Wait for the first line of an event. A checkpoint."""
        with trio.fail_after(PATIENCE_S):
            while not (found := self.events(name)):
                await self._news.wait()
        await trio.lowlevel.checkpoint()
        return found[0]

    async def ready(self) -> None:
        """Wait until ``/readyz`` says that a worker is ready. A checkpoint."""
        async with self.client() as client:

            async def is_ready() -> bool:
                return (await client.get("/readyz")).is_success

            await until(is_ready)

    def client(self) -> httpx.AsyncClient:
        """Make a client of its API."""
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def exit_code(self) -> int:
        """Wait for its end. A checkpoint."""
        with trio.fail_after(PATIENCE_S):
            return await self.process.wait()

    async def read_log(self) -> None:
        """Take its log until its end. A checkpoint."""
        assert self.process.stderr is not None
        rest = b""
        async for piece in self.process.stderr:
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                try:
                    self.lines.append(json.loads(line))
                except ValueError:
                    self.noise.append(line.decode())
            self._news.set()
            self._news = trio.Event()


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until *holds* says yes. A checkpoint.

    For what another process does, which sets no event of ours.
    """
    with trio.fail_after(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110  no event crosses processes
            await trio.sleep(ASK_EVERY_S)


@asynccontextmanager
async def open_daemon(
    arguments: Sequence[str],
    *,
    command: str = "serve",
    environ: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[Daemon]:
    """Run ``fencepost serve`` with *arguments*, until it listens and the block ends.

    *command*: ``agent`` in place of ``serve``. *prefix*: what runs it, if anything.

    What is left of it at the end of the block is killed.
    """
    process = await trio.lowlevel.open_process(
        [*prefix, *COMMAND, command, "--log-format", "json", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    daemon = Daemon(process)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.read_log)
            await daemon.event("listening")
            yield daemon
            nursery.cancel_scope.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + PATIENCE_S):
            await process.wait()
        if process.stderr is not None:
            with trio.CancelScope(shield=True):
                await process.stderr.aclose()


async def run_command(
    *arguments: str, environ: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run ``fencepost`` with *arguments* to its end; its output is kept."""
    with trio.fail_after(PATIENCE_S):
        return await trio.run_process(
            [*COMMAND, *arguments],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )


def write_config(
    folder: Path, urls: Sequence[str], *, server: str = "", worker: str = ""
) -> Path:
    """Write a configuration into *folder*, for a daemon that keeps to it.

    Args:
        folder: also its state folder.
        urls: of workers ``w0``, ``w1`` …
        server: more lines of ``[server]``.
        worker: more lines of each ``[[worker]]``.
    """
    lines = ["[server]", 'listen = "127.0.0.1:0"', f'state_dir = "{folder}"', server]
    for place, url in enumerate(urls):
        lines += ["[[worker]]", f'name = "w{place}"', f'url = "{url}"', worker]
    path = folder / "fencepost.toml"
    path.write_text("\n".join(lines))
    return path
