"""All routers in one run, taking turns: the only comparison that means something.

Each round gives every router every load once. Routers that were measured minutes
apart met different machines; routers that take turns met the same one, and the
ratio of two of them within a round holds where neither figure does.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import attrs
import click

from bench.contenders import (
    CONTENDERS,
    RATE,
    RUST,
    Contender,
    Started,
    ask,
    engine,
    started,
)
from bench.load import Measured

_WARM_UP_S: Final = 1.0
#: Seconds that the last load's streams get to end, before the next begins.
_QUIET_S: Final = 20.0


@attrs.frozen
class Shape:
    """One kind of load."""

    name: str
    connections: int
    stream: bool
    pace_s: float = 0.0
    """Seconds from one request of a connection to its next; 0: at once."""

    def cost(self, measured: Measured) -> float:
        """What the router paid for one delta, or for one request, in µs."""
        return measured.per_delta_us if self.stream else measured.per_request_us

    def deltas(self, seconds: float) -> int:
        """How long its answers are; a stream outlasts the measurement."""
        return int((_WARM_UP_S + seconds + 1.5) * RATE) if self.stream else 2


SHAPES: Final = (
    Shape("64 streams", 64, stream=True),
    Shape("512 streams", 512, stream=True),
    Shape("1024 streams", 1024, stream=True),
    Shape("small requests", 16, stream=False),
    Shape("1000 requests/s", 16, stream=False, pace_s=0.016),
)


def load(router: Started, shape: Shape, seconds: float) -> Measured:
    """Put one load on *router*, from a process of its own."""
    command = [
        *(sys.executable, "-m", "bench.load"),
        *("--port", str(router.port), "--pid", str(router.pid)),
        *("--connections", str(shape.connections)),
        *("--deltas", str(shape.deltas(seconds))),
        "--stream" if shape.stream else "--reply",
        *("--pace", str(shape.pace_s)),
        *("--seconds", str(seconds), "--warm-up", str(_WARM_UP_S)),
    ]
    limit = _WARM_UP_S + seconds + 60
    done = subprocess.run(command, capture_output=True, check=True, timeout=limit)
    return Measured(**json.loads(done.stdout))


def _await_quiet(engine_port: int) -> None:
    """Wait until the engine has no stream left, so that no load meets another's."""
    end = time.perf_counter() + _QUIET_S
    while time.perf_counter() < end:
        stats = json.loads(ask(engine_port, "/stats").partition(b"\r\n\r\n")[2])
        if not stats["live"]:
            return
        time.sleep(0.05)


@attrs.frozen
class Row:
    """One router's figures for one shape, over all rounds."""

    router: str
    shape: str
    cost_us: float
    """Median over the rounds."""
    low_us: float
    high_us: float
    ratio: float | None
    """Median of the rounds' ratios to the better Rust router; None: no yardstick."""
    rate: float
    """Deltas or requests a second, median."""
    wait_p50_ms: float
    wait_p99_ms: float
    rss_mib: float
    late: float
    """Share of the deltas that came a step or more behind, median."""
    errors: int


def _row(name: str, shape: Shape, rounds: list[dict[tuple[str, str], Measured]]) -> Row:
    mine = [one[name, shape.name] for one in rounds]
    costs = [shape.cost(one) for one in mine]
    ratios = []
    for one, cost in zip(rounds, costs, strict=True):
        rust = [one[other, shape.name] for other in RUST if (other, shape.name) in one]
        if rust:
            ratios.append(cost / max(0.1, min(shape.cost(other) for other in rust)))
    counts = [(m.deltas if shape.stream else m.requests) / m.seconds for m in mine]
    return Row(
        router=name,
        shape=shape.name,
        cost_us=statistics.median(costs),
        low_us=min(costs),
        high_us=max(costs),
        ratio=statistics.median(ratios) if ratios else None,
        rate=statistics.median(counts),
        wait_p50_ms=statistics.median(m.wait_p50_ms for m in mine),
        wait_p99_ms=statistics.median(m.wait_p99_ms for m in mine),
        rss_mib=statistics.median(m.rss_mib for m in mine),
        late=statistics.median(m.late / max(1, m.deltas) for m in mine),
        errors=sum(m.errors for m in mine),
    )


def compare(
    contenders: list[Contender], rounds: int, seconds: float, shapes: list[Shape]
) -> list[Row]:
    """Measure all *contenders* in turns.

    Raises:
        RuntimeError: a router did not start, or a load on it failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((folder / "log").open("wb"))
        port = stack.enter_context(engine(RATE, log))
        routers = [
            stack.enter_context(started(one, port, folder, log)) for one in contenders
        ]
        results: list[dict[tuple[str, str], Measured]] = []
        for number in range(rounds):
            # Each round begins with another router.
            turn = number % len(routers)
            one: dict[tuple[str, str], Measured] = {}
            for shape in shapes:
                for router in routers[turn:] + routers[:turn]:
                    one[router.name, shape.name] = load(router, shape, seconds)
                    _await_quiet(port)
            results.append(one)
            click.echo(f"round {number + 1} of {rounds} done", err=True)
    return [_row(one.name, shape, results) for shape in shapes for one in contenders]


def table(rows: list[Row]) -> str:
    """The figures as text, one block for each shape."""
    lines = []
    shape = ""
    for row in rows:
        if row.shape != shape:
            shape = row.shape
            unit = "delta" if "streams" in shape else "request"
            lines.append(
                f"\n{shape:<16}{f'µs/{unit}':>11}{'low-high':>13}{'vs Rust':>8}"
                f"{f'{unit}s/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'late':>6}{'MiB':>6}"
                f"{'errors':>8}"
            )
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        span = f"{row.low_us:.0f}-{row.high_us:.0f}"
        lines.append(
            f"{row.router:<16}{row.cost_us:>11.1f}{span:>13}{ratio:>8}"
            f"{row.rate:>12.0f}{row.wait_p50_ms:>9.1f}{row.wait_p99_ms:>9.1f}"
            f"{row.late:>6.0%}{row.rss_mib:>6.0f}{row.errors:>8}"
        )
    return "\n".join(lines)


def present(names: tuple[str, ...]) -> list[Contender]:
    """The contenders of these *names* (none: all) that are installed.

    Tells of those that are not, and what to type.
    """
    found = []
    for contender in CONTENDERS:
        if names and contender.name not in names:
            continue
        missing = contender.missing()
        if missing is None:
            found.append(contender)
        else:
            click.echo(f"{contender.name} is not measured: {missing}", err=True)
    return found
