"""Open the sockets that a daemon listens on, and say plainly why it can't.

Plain non-blocking sockets: the edge has its own accept loop. A unix socket
left by a router that died is taken over; one that somebody answers is not.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import attrs
import trio

from router.config.addresses import Address, TcpAddress, UnixAddress
from router.daemon.faults import StartFailed

#: Connections that the kernel holds for us; it cuts this to its own limit.
BACKLOG: Final = 4096
#: Seconds for whoever owns an old unix socket to answer a connect.
_ANSWER_S: Final = 1.0
_PRIVATE: Final = 0o700
_OWNER_ONLY: Final = 0o600
_OTHERS_WRITE: Final = 0o022


async def open_listeners(address: Address, key: str) -> list[socket.socket]:
    """Listen on *address*: more than one socket where a name means more.

    A checkpoint. If it raises, nothing stays open.

    Args:
        address: where.
        key: the setting that says so, to be named in a failure.

    Raises:
        StartFailed: taken, not allowed, or no such address.
    """
    if isinstance(address, UnixAddress):
        await trio.lowlevel.checkpoint()
        return [_open_unix(address, key)]
    try:
        found = await trio.socket.getaddrinfo(
            address.host,
            address.port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except (OSError, UnicodeError):
        raise StartFailed(
            f"the host of {address} is not known: correct {key}"
        ) from None
    opened: list[socket.socket] = []
    failure: OSError | None = None
    for family, _, _, _, where in dict.fromkeys(found):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _bind_tcp(sock, where)
        except OSError as error:
            sock.close()
            # A name may mean ::1 as well on a machine without IPv6.
            if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
                close_all(opened)
                raise StartFailed(_why(error, address, key)) from None
            failure = error
        else:
            opened.append(sock)
    if not opened and failure is not None:
        raise StartFailed(_why(failure, address, key))
    return opened


def close_all(listeners: Sequence[socket.socket]) -> None:
    """Close listeners that no task waits on yet. Not a checkpoint."""
    for sock in listeners:
        sock.close()


def shown(sock: socket.socket) -> str:
    """Write the address that *sock* listens on, its real port included."""
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    return str(TcpAddress(name[0], name[1]))


def _bind_tcp(sock: socket.socket, where: object) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind(where)  # type: ignore[arg-type]  # as getaddrinfo gave it
    sock.listen(BACKLOG)


def _why(error: OSError, address: Address, key: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{address} is taken: stop what listens there, or set {key} "
                "to another address"
            )
        case errno.EACCES | errno.EPERM:
            return (
                f"{address} is not allowed to this user: set {key} to a port "
                "from 1024 up, or give the process CAP_NET_BIND_SERVICE"
            )
        case errno.EADDRNOTAVAIL:
            return f"{address} is not an address of this machine: correct {key}"
        case _:
            return f"cannot listen on {address} ({error.strerror}): correct {key}"


# ---- unix sockets ----


def _open_unix(address: UnixAddress, key: str) -> socket.socket:
    path = Path(address.path)
    _take_over(path, key)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(address.path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartFailed(
            f"cannot make the socket {path} ({error.strerror}): "
            f"create its folder, or correct {key}"
        ) from None
    return sock


def _take_over(path: Path, key: str) -> None:
    """Remove a socket that nobody answers; leave everything else alone."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartFailed(f"{path} is there and is no socket: remove it or set {key}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_ANSWER_S)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            # Between our look and our bind another router may take it too:
            # then its bind or ours fails, and says so.
            path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError:
            pass
    raise StartFailed(
        f"a running router answers at {path}: stop it first, or set {key} "
        "to another address"
    )


def private_dir(path: Path, key: str) -> None:
    """Make *path* a folder for this user alone, or see that nobody else writes it.

    A folder that is there already is taken as it is, never changed.

    Raises:
        StartFailed: it can't be made, or others could put things into it.
    """
    try:
        path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StartFailed(
            f"cannot make the folder {path} ({error.strerror}): set {key} "
            "to one that this user may write"
        ) from None
    ours = found.st_uid in {0, os.geteuid()} and not found.st_mode & _OTHERS_WRITE
    if not stat.S_ISDIR(found.st_mode) or not ours:
        raise StartFailed(
            f"{path} is not a folder that only this user writes: set {key} to one"
        )


def make_private(listeners: Sequence[socket.socket]) -> None:
    """Let only this user connect to the unix sockets among *listeners*."""
    for sock in listeners:
        name = sock.getsockname()
        if isinstance(name, str):
            Path(name).chmod(_OWNER_ONLY)


@attrs.frozen
class _Node:
    """A unix socket in the file system, as it was when we made it."""

    path: Path
    device: int
    inode: int


@contextmanager
def unlinked_after(listeners: Sequence[socket.socket]) -> Iterator[None]:
    """Remove the unix sockets among *listeners* at the end, if still ours."""
    nodes = []
    for sock in listeners:
        name = sock.getsockname()
        if isinstance(name, str):
            found = Path(name).stat()
            nodes.append(_Node(Path(name), found.st_dev, found.st_ino))
    try:
        yield
    finally:
        for node in nodes:
            with suppress(OSError):
                found = node.path.lstat()
                if (found.st_dev, found.st_ino) == (node.device, node.inode):
                    node.path.unlink()
