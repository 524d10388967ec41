"""What tests of SDKs share: a daemon over a scripted engine, and JavaScript."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from tests.kit.engine import FakeEngine, Script, open_engine
from tests.kit.processes import Daemon, daemon, worker_table

JS: Final = Path(__file__).parents[1] / "real" / "js"


@asynccontextmanager
async def scripted(
    folder: Path, script: Script, *settings: str, slots: int = 2
) -> AsyncIterator[tuple[Daemon, FakeEngine]]:
    """A daemon in front of one scripted engine that is ready."""
    async with open_engine(script, slots=slots) as engine:
        table = worker_table("fake", engine.url)
        with daemon(folder, "\n".join([*settings, table])) as router:
            await trio.to_thread.run_sync(router.await_ready)
            yield router, engine


async def run_js(file: str, package: str, *arguments: str) -> Any:
    """Run a program of ``tests/real/js``, which uses *package*; give its JSON.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    if not (JS / "node_modules" / package).is_dir():
        raise FileNotFoundError("no JavaScript SDK: make test installs it")
    with trio.fail_after(30):
        ended = await trio.run_process(
            ["node", file, *arguments], cwd=JS, capture_stdout=True
        )
    return json.loads(ended.stdout)
