"""What the kernel says of processes: trees, times, and who is who (Linux, /proc).

Plain blocking reads of small files, for a thread where there may be many. Two
rules: a process is known by its number *and* its start, never by the number
alone; and what can't be read is left out, never guessed.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs

PROC: Final = Path("/proc")


@attrs.frozen
class Stat:
    """One process at one moment."""

    parent: int
    zombie: bool
    ticks: int
    """CPU time used so far by all its threads (utime + stime)."""
    start: int
    """Ticks after boot at which it began."""


@attrs.frozen
class Identity:
    """One process for good: no other has all three in one boot."""

    pid: int
    start: int
    command: tuple[str, ...]


def parse_stat(line: bytes) -> Stat:
    """Read ``/proc/PID/stat``: from the last ``)`` on, names may hold anything.

    Raises:
        ValueError: it is no such line.
    """
    fields = line.rpartition(b")")[2].split()
    if len(fields) < 20:
        raise ValueError("no process status")
    return Stat(
        parent=int(fields[1]),
        zombie=fields[0] in {b"Z", b"X"},
        ticks=int(fields[11]) + int(fields[12]),
        start=int(fields[19]),
    )


def stat_of(pid: int) -> Stat | None:
    """Read one process; None: there is none."""
    try:
        # By hand: half the time of a Path, and there may be thousands.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return parse_stat(os.read(descriptor, 4096))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None


def everybody() -> dict[int, Stat]:
    """Read all processes; nobody where the kernel tells of none."""
    found = {}
    for pid in numbers():
        if (stat := stat_of(pid)) is not None:
            found[pid] = stat
    return found


def numbers() -> list[int]:
    """Give the number of every process."""
    try:
        names = os.listdir(PROC)  # noqa: PTH208 - thousands of Paths for their names
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit()]


def below(root: int, processes: Mapping[int, Stat]) -> dict[int, Stat]:
    """Give the descendants of *root*, parents first, without itself."""
    children: dict[int, list[int]] = {}
    for pid, stat in processes.items():
        children.setdefault(stat.parent, []).append(pid)
    found: dict[int, Stat] = {}
    left = [root]
    while left:
        for pid in children.get(left.pop(), ()):
            if pid not in found:
                found[pid] = processes[pid]
                left.append(pid)
    return found


def tree(root: int) -> dict[int, Stat]:
    """Give the descendants of *root* now, zombies left out."""
    found = below(root, everybody())
    return {pid: stat for pid, stat in found.items() if not stat.zombie}


def started_at(pid: int) -> float | None:
    """Say when a process began, in unix seconds; None: it can't be told."""
    stat = stat_of(pid)
    try:
        lines = (PROC / "stat").read_text().splitlines()
        (boot,) = (line.split()[1] for line in lines if line.startswith("btime "))
    except (OSError, ValueError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return None if stat is None else int(boot) + stat.start / ticks


def command_of(pid: int) -> tuple[str, ...]:
    """Give the command line; empty: it has none, or is not ours to read."""
    try:
        octets = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(octets).removesuffix("\0").split("\0")) if octets else ()


def identify(pids: Iterable[int]) -> list[Identity]:
    """Say who is behind each number; those that are gone are left out."""
    found = []
    for pid in pids:
        stat = stat_of(pid)
        if stat is not None and not stat.zombie:
            found.append(Identity(pid, stat.start, command_of(pid)))
    return found


def lives(one: Identity) -> bool:
    """Say whether this very process is there, and no other with its number."""
    stat = stat_of(one.pid)
    return (
        stat is not None
        and not stat.zombie
        and stat.start == one.start
        and command_of(one.pid) == one.command
    )


def epoch() -> str:
    """Name the boot and the process namespace: numbers mean nothing beyond them."""
    parts = []
    with suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str((PROC / "self/ns/pid").readlink()))
    return " ".join(parts)
