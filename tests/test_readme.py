"""Everything in README.md that can be run is run, over a fake engine."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
import trio

from router.cli import main
from tests.kit.daemon import Daemon, open_daemon, run_command, write_config
from tests.kit.engine import FakeEngine, answers, open_engine

ROOT: Final = Path(__file__).parent.parent
README: Final = (ROOT / "README.md").read_text()
PYTHON: Final = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS: Final = re.findall(r"```\n(.*?)```", README, re.DOTALL)
ROUTER: Final = "http://127.0.0.1:8080"
WORKER: Final = "http://127.0.0.1:8081"
STORY: Final = answers("Once ", "upon ", "a time", usage=(3, 3))

slow: Final = pytest.mark.slow


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Daemon, FakeEngine]]:
    """The daemon by the README's own command, but for the ports."""
    (line,) = (
        line
        for block in COMMANDS
        for line in block.splitlines()
        if "fencepost serve" in line
    )
    async with open_engine(STORY, kind="llama-server", models=("smollm2",)) as engine:
        words = shlex.split(line.replace(WORKER, engine.url))
        _, serve, *arguments = words[: words.index("--worker") + 2]
        assert serve == "serve"
        async with open_daemon(
            [*arguments, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        ) as daemon:
            await daemon.ready()
            yield daemon, engine


async def output(argv: list[str | Path]) -> str:
    with trio.fail_after(30):
        done = await trio.run_process(
            argv, capture_stdout=True, stderr=subprocess.STDOUT
        )
    return done.stdout.decode()


@slow
async def test_the_curl_line_streams_an_answer() -> None:
    (command,) = (block for block in COMMANDS if block.startswith("curl"))
    async with running() as (daemon, _):
        argv = shlex.split(command.replace("\\\n", "").replace(ROUTER, daemon.url))
        said = await output([argv[0], "-s", *argv[1:]])

    frames = [line[6:] for line in said.splitlines() if line.startswith("data: {")]
    texts = [json.loads(f)["choices"][0]["delta"].get("content") for f in frames]
    assert "".join(filter(None, texts)) == "Once upon a time"
    assert said.rstrip().endswith("data: [DONE]")


@slow
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_the_snippet_of_each_sdk_prints_an_answer(
    sdk: str, tmp_path: Path
) -> None:
    (source,) = (code for code in PYTHON if f"from {sdk} import" in code)
    program = tmp_path / "program.py"
    async with running() as (daemon, _):
        program.write_text(source.replace(ROUTER, daemon.url))
        said = await output([sys.executable, program])

    assert said == "Once upon a time"


@slow
async def test_the_program_that_embeds_a_router_prints_an_answer(
    tmp_path: Path,
) -> None:
    (source,) = (code for code in PYTHON if "open_router" in code)
    program = tmp_path / "program.py"
    async with open_engine(STORY, kind="llama-server", models=("smollm2",)) as engine:
        program.write_text(source.replace(WORKER, engine.url))
        said = await output([sys.executable, program])

    assert said == "Once upon a time"


@slow
async def test_check_takes_a_file(tmp_path: Path) -> None:
    assert "`fencepost check FILE`" in README
    config = write_config(tmp_path, [WORKER])

    done = await run_command("check", str(config))

    assert done.returncode == 0


def test_every_command_and_target_that_is_named_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()

    commands = set(re.findall(r"fencepost (\w+)", "\n".join(COMMANDS)))
    assert commands <= set(main.commands)
    for target in re.findall(r"^make (\w+)|`make (\w+)`", README, re.MULTILINE):
        assert f"\n{''.join(target)}: " in makefile


#: What README says of a load, and what the rig calls it.
LOADS: Final = {
    "per delta, 64 streams": "64 streams",
    "per delta, 512 streams": "512 streams",
    "per small whole request, as fast as they go": "small requests",
    "per small whole request, 1000 a second": "1000 requests/s",
}


def test_the_figures_are_those_of_the_bench() -> None:
    measured = (ROOT / "bench/README.md").read_text().partition("## Figures")[2]

    shown = re.findall(
        r"^\| (per .+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE
    )

    assert [load for load, *_ in shown] == list(LOADS)
    for load, *ratios in shown:
        block = measured.partition(f"\n{LOADS[load]} ")[2].partition("\n\n")[0]
        assert ratios == [
            re.findall(rf"^{name} +\d+\.\d +\S+ +(\d+\.\d+) ", block, re.MULTILINE)[0]
            for name in ("fencepost", "fencepost wire", "nginx")
        ]
