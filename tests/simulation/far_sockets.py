"""Sockets of a simulation: to the product like those of TCP, and nobody's time."""

import errno
import socket
from collections import deque
from typing import Any, Final

#: Bytes that a pair holds in one direction, as socket buffers would.
BUFFER: Final = 16 * 1024


class FarSocket(socket.socket):
    """An end of a connection as the product has it; cut, it shows a reset."""

    cut = False
    #: Bytes of one call, at most.
    bite = 65536

    def setsockopt(self, level: int, *rest: Any) -> None:
        """Set what a pair has; it has nothing of TCP."""
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *rest)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Read, in short pieces where these are asked for."""
        self._check()
        return super().recv(min(size, self.bite), flags)

    def send(self, octets: Any, flags: int = 0) -> int:
        """Write, in short pieces where these are asked for."""
        self._check()
        return super().send(octets[: self.bite], flags)

    def _check(self) -> None:
        if self.cut:
            raise ConnectionResetError(errno.ECONNRESET, "cut")


def pair() -> tuple[FarSocket, socket.socket]:
    """Make the product's end and ours."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    product = FarSocket(fileno=ends[0].detach())
    product.setblocking(False)
    return product, ends[1]


class FarListener(socket.socket):
    """Where connections come in; readable while one waits."""

    def __init__(self) -> None:
        ours, self._bell = socket.socketpair()
        super().__init__(fileno=ours.detach())
        self.setblocking(False)
        self._waiting: deque[tuple[FarSocket, str]] = deque()
        self._ports = 0

    def offer(self, sock: FarSocket, host: str) -> None:
        """Let *sock* be accepted, as from *host*."""
        self._waiting.append((sock, host))
        self._bell.send(b"x")

    def accept(self) -> tuple[FarSocket, Any]:
        """Take the next, or raise BlockingIOError."""
        self.recv(1)
        sock, host = self._waiting.popleft()
        self._ports += 1
        return sock, (host, self._ports)

    def close(self) -> None:
        """Close, and what nobody has accepted."""
        super().close()
        self._bell.close()
        for sock, _ in self._waiting:
            sock.close()
