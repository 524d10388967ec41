"""Is a port free, who has it, and is it this process that listens there (L6).

The kernel is asked, by a bind and by ``/proc``; nothing is sent to anybody.
Blocking, for a thread.
"""

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from router.errors import EXHAUSTED
from workers.proc import PROC, command_of, numbers

#: Where a supervised server is spoken to.
HOST: Final = "127.0.0.1"
_TABLES: Final = ("tcp", "tcp6")
_LISTEN: Final = "0A"
_TIME_WAIT: Final = "06"
#: Characters of a name.
_NAME_MAX: Final = 80


def why_taken(port: int) -> str | None:
    """Say why a server could not listen on *port*; None: it could.

    As servers bind: with SO_REUSEADDR, so that TIME_WAIT is not taken. Where we have
    no descriptor to look with, it may: its start will tell.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((HOST, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is taken{owner(port)}"
        if error.errno in EXHAUSTED:
            # Ours to mend; it says nothing of a port.
            return None
        return f"port {port} can't be had: {os.strerror(error.errno or 0)}"
    return None


def owner(port: int) -> str:
    """Name who holds *port*, as `` by pid 7 (name)``; "" where it can't be told."""
    try:
        wanted = {inode for state, inode in _sockets(port) if state != _TIME_WAIT}
    except OSError:
        return ""
    for pid in numbers():
        with suppress(OSError):
            if wanted & _inodes(pid):
                return f" by pid {pid} ({_name(command_of(pid))})"
    return ""


def _name(command: Sequence[str]) -> str:
    """Say what a process is, and nothing of its arguments: they may hold keys."""
    program, option, module = [*command, "", "", ""][:3]
    shown = Path(program).name or "?"
    return (f"{shown} -m {module}" if option == "-m" else shown)[:_NAME_MAX]


def listens(port: int, pids: Iterable[int]) -> bool | None:
    """Say whether one of *pids* listens on *port*; None: it can't be told.

    It can't where the kernel hides its sockets, or one of *pids*, from us, and where
    we have no descriptor to look with.
    """
    if not any((PROC / "net" / table).exists() for table in _TABLES):
        return None
    try:
        wanted = {inode for state, inode in _sockets(port) if state == _LISTEN}
    except OSError:
        return None
    hidden = False
    for pid in pids:
        try:
            if wanted & _inodes(pid):
                return True
        except FileNotFoundError:
            continue
        except OSError:
            hidden = True
    return None if hidden else False


def _sockets(port: int) -> Iterator[tuple[str, str]]:
    """Give (state, inode) of every TCP socket whose own port it is.

    Raises:
        OSError: there is such a table, and it can't be read.
    """
    for table in _TABLES:
        with suppress(FileNotFoundError):
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
            for line in lines:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                    yield fields[3], fields[9]


def _inodes(pid: int) -> set[str]:
    """Name the sockets that a process holds.

    Raises:
        OSError: it is gone (FileNotFoundError), or not ours to look at.
    """
    found = set()
    folder = PROC / str(pid) / "fd"
    for name in os.listdir(folder):  # noqa: PTH208
        with suppress(FileNotFoundError):
            link = os.readlink(Path(folder, name))  # noqa: PTH115
            if link.startswith("socket:["):
                found.add(link[8:-1])
    return found
