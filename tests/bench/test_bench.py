"""The rig itself, at its smallest: that it measures, and leaves nothing running."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.compare import SHAPES, Row, table

pytestmark = pytest.mark.slow


def bench(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compare_measures_our_router_under_every_load(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    once = ["--router", "fencepost", "--rounds", "1", "--seconds", "0.5"]

    bench("compare", *once, "--json", str(target))

    rows = [Row(**row) for row in json.loads(target.read_text())]
    assert [row.shape for row in rows] == [shape.name for shape in SHAPES]
    assert {row.errors for row in rows} == {0}
    assert {row.ratio for row in rows} == {None}
    assert rows[0].rate > 64 * 50 / 2
    assert all(row.cost_us > 1 for row in rows)
    assert all(row.rss_mib > 10 for row in rows)
    assert table(rows).count("fencepost") == len(SHAPES)


def test_h5_a_client_that_stops_reading_costs_the_router_nothing() -> None:
    said = bench("stalled", "--router", "fencepost", "--seconds", "2")

    router, clients, before, after, *_ = said.splitlines()[1].split()
    assert (router, clients) == ("fencepost", "1")
    assert said.splitlines()[1].endswith("held back")
    assert float(after) - float(before) <= 4
