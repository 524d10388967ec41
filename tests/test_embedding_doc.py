"""docs/embedding.md names every call of a router, and its example runs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from router.engine import Router
from tests.kit.engine import answers, open_engine

DOC: Final = (Path(__file__).parent.parent / "docs/embedding.md").read_text()
#: Calls of the engine's own rooms: a keeper's and a flight's shell.
INNER: Final = {
    "access",
    "admit",
    "workers_status",
    "add",
    "apply",
    "at_work",
    "changed",
    "depart",
    "heard_at",
    "hurry",
    "record",
    "report_bug",
    "silent",
}


def test_every_call_of_a_router_is_in_the_table() -> None:
    table = DOC.partition("## What you call")[2].partition("\n## ")[0]
    named = set(re.findall(r"`router\.(\w+)", table.partition("`workers` are")[0]))

    public = {name for name in vars(Router) if not name.startswith("_")}
    assert named == public - INNER


def test_what_is_told_to_be_no_checkpoint_is_no_coroutine() -> None:
    for calls, says in re.findall(r"^\| (`.+?) \| (.+?) \|", DOC, re.MULTILINE):
        for name in re.findall(r"`router\.(\w+)\(", calls):
            method = inspect.unwrap(getattr(Router, name))
            waits = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(
                method
            )

            assert waits is not says.startswith("no"), name


@pytest.mark.slow
async def test_e1_the_example_of_the_page_runs(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    program = tmp_path / "program.py"
    async with open_engine(answers("The ", "Elbe"), kind="generic") as engine:
        program.write_text(source.replace("http://127.0.0.1:8081", engine.url))
        with trio.fail_after(20):
            done = await trio.run_process(
                [sys.executable, program], capture_stdout=True, stderr=subprocess.STDOUT
            )

    assert done.stdout == b"The Elbe"
