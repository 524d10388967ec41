"""What the benchmarks know of processes: CPU time, memory, start and end."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_TICK = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """*pid* and all its descendants, parents first."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                children = (task / "children").read_text(encoding="ascii")
                found.extend(int(child) for child in children.split())
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of *pid* and its descendants, in ticks of 10 ms."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            stat = Path(f"/proc/{one}/stat").read_text(encoding="utf-8")
            fields = stat.rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICK


def resident_mib(pid: int) -> float:
    """Memory of *pid* and its descendants, pages they share counted once."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii")
            total += int(rollup.split("\nPss:", 1)[1].split()[0])
    return total / 1024


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago, for those who need a number."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str], log: IO[bytes], *, speaks: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run *command*, its output going to *log*; on leaving its group is gone.

    *speaks*: its stdout is a pipe for the caller, not part of the log. It gets
    SIGTERM and 5 s to go; what is left of its process group then gets SIGKILL.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if speaks else log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
