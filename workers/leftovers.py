"""Who we have started, on disk: so that a next router finds what a dead one left.

One small file for each server: the router that started it and all of its
processes, each by number, start and command line. Swept are only processes that
match in all three, of routers that are gone (L7, B100). Blocking: for a thread.
"""

import errno
import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import attrs
import msgspec

from workers import proc
from workers.proc import Identity

log: Final = logging.getLogger("fencepost.workers")

#: Seconds that the keeper of an old server has to end it, before we do.
PATIENCE_S: Final = 2.0
#: Rounds of SIGKILL, and the seconds between two.
_ROUNDS: Final = 100
_ROUND_S: Final = 0.02
_OWNER_ONLY: Final = 0o600


@attrs.frozen
class Entry:
    """One server as its file tells of it."""

    epoch: str
    """Boot and process namespace: elsewhere the numbers mean nothing."""
    router: Identity
    processes: tuple[Identity, ...]
    """The shim first."""


class Record:
    """The file of one server."""

    def __init__(self, folder: Path, name: str) -> None:
        """*name*: the worker's, as a file name; nothing is written yet."""
        self.path = folder / f"{name}.json"
        self._written = b""

    def write(self, processes: Sequence[Identity]) -> None:
        """Write down *processes*, the shim first; a reader sees all or nothing.

        A disk that takes nothing costs the sweep, not the server; so does a
        process without a descriptor to spare.
        """
        ourselves = proc.identify([os.getpid()])
        if not ourselves:
            return
        self._written = msgspec.json.encode(
            Entry(proc.epoch(), ourselves[0], tuple(processes))
        )
        fresh = self.path.with_suffix(".new")
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            with os.fdopen(os.open(fresh, flags, _OWNER_ONLY), "wb") as file:
                file.write(self._written)
            fresh.replace(self.path)

    def erase(self) -> None:
        """Its processes are gone. Idempotent; what another wrote since stays."""
        with suppress(OSError):
            if self.path.read_bytes() == self._written:
                self.path.unlink()


def sweep(folder: Path) -> list[str]:
    """End what routers that are gone have left; say what that was, for the log.

    Takes up to ``PATIENCE_S`` and a little, and only if something is left. What
    can't be looked at now, for want of a descriptor say, stays for the next router.
    """
    found: list[str] = []
    try:
        _sweep(folder, found)
    except OSError as error:
        log.warning(
            "what routers that are gone have left can't be looked for: %s",
            error.strerror,
        )
    return found


def _sweep(folder: Path, found: list[str]) -> None:
    """Do it; put into *found* what was ended.

    Raises:
        OSError: what is there can't be told.
    """
    here = proc.epoch()
    for path in sorted(folder.glob("*.json")):
        entry = _read(path)
        if not proc.identify([os.getpid()]):
            # As we do not see ourselves, nobody we do not see is gone.
            raise OSError(errno.ENOENT, "no process can be seen")
        if entry is not None and entry.epoch == here:
            if _runs(entry.router):
                continue
            ours = [one for one in entry.processes if proc.lives(one)]
            if ours:
                found.append(f"{path.stem}: {_shown(ours)}")
            end_all(entry.processes, patience_s=PATIENCE_S)
        elif entry is not None and _same_boot(entry.epoch, here):
            # Another namespace's: its router may well be alive.
            continue
        with suppress(OSError):
            path.unlink(missing_ok=True)


def end_all(processes: Sequence[Identity], *, patience_s: float = 0.0) -> None:
    """Kill those of *processes* that live, and their descendants.

    Args:
        processes: the shim first: where it lives, it ends its tree by itself.
        patience_s: seconds that it has for that.
    """
    until = time.monotonic() + patience_s  # noqa: TID251 - in a thread, without Trio
    while any(map(proc.lives, processes[:1])):
        if time.monotonic() >= until:  # noqa: TID251
            break
        time.sleep(_ROUND_S)
    for _ in range(_ROUNDS):
        roots = [one.pid for one in processes if proc.lives(one)]
        everybody = proc.everybody()
        below = {
            pid
            for root in roots
            for pid, stat in proc.below(root, everybody).items()
            if not stat.zombie
        }
        if not roots:
            return
        # Whoever is left without a parent falls to the shim, so it goes last.
        for pid in below or roots:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)


def _read(path: Path) -> Entry | None:
    """Read a file; None: it is no record.

    Raises:
        OSError: it can't be read now.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Entry)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _runs(router: Identity) -> bool:
    """Say whether a router lives; by its title it may have called itself anything."""
    stat = proc.stat_of(router.pid)
    return stat is not None and not stat.zombie and stat.start == router.start


def _same_boot(one: str, other: str) -> bool:
    return one.partition(" ")[0] == other.partition(" ")[0]


def _shown(processes: Sequence[Identity]) -> str:
    return ", ".join(f"pid {one.pid}" for one in processes)
