"""docs/workers.md: its example is a configuration, its figures are the code's."""

import re
from pathlib import Path
from typing import Final

from router.config import parse
from workers import process, pulse, restarts, shim, spoken

DOC: Final = (Path(__file__).parent.parent / "docs/workers.md").read_text()


def test_the_example_is_valid_and_complete() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)

    # None: these programs are not on this machine.
    settings = parse(example, environ=None, directory=Path("/etc"))

    assert [(w.name, w.port, w.slots) for w in settings.workers] == [
        ("gpu0", 8081, 4),
        ("gpu1", 8082, 64),
    ]
    first = settings.workers[0].command
    assert first is not None
    assert first[-1] == '{"enable_thinking": false}'


def test_the_figures_are_those_of_the_code() -> None:
    first, longest = restarts.BACKOFF_S

    assert f"taken for {process.PORT_GRACE_S} s" in DOC
    assert f"after {first:g} s, then 1 s, 2 s … up to {longest:g} s" in DOC
    assert f"Without {pulse.TICKS * 10} ms of it in {pulse.WINDOW_S:g} s" in DOC
    assert f"({spoken.LOG_MAX // 2**20} MiB, and one old one)" in DOC
    assert shim.ORPHAN_GRACE == 1.0
    assert "SIGKILL a second later" in DOC
