"""Where our router's time goes: one load on it, under cProfile.

cProfile makes each Python call dearer, C calls little: the shares shift towards
small functions. Trust the order of the list, and `compare` for what a change is
worth.
"""

import pstats
import tempfile
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

from bench.compare import Shape, load
from bench.contenders import RATE, Contender, engine, fencepost, started


def profile(shape: Shape, seconds: float, target: Path, lines: int) -> str:
    """Profile *shape* on our router into *target*; gives the dearest *lines*.

    Raises:
        RuntimeError: the router did not start.
        FileNotFoundError: it did not end cleanly, so that there is no profile.
    """

    def command(port: int, engine_port: int, folder: Path) -> list[str]:
        python, *rest = fencepost(port, engine_port, folder)
        return [python, "-m", "cProfile", "-o", str(target), *rest]

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((folder / "log").open("wb"))
        engine_port = stack.enter_context(engine(RATE, log))
        ours = Contender("fencepost", command, lambda: None)
        router = stack.enter_context(started(ours, engine_port, folder, log))
        measured = load(router, shape, seconds)
    text = StringIO()
    statistics = pstats.Stats(str(target), stream=text)
    statistics.sort_stats("tottime").print_stats(lines)
    unit = "delta" if shape.stream else "request"
    return f"{shape.cost(measured):.1f} µs/{unit} under the profiler\n{text.getvalue()}"
