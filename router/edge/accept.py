"""Taking connections off listening sockets, whatever the system is short of.

An accept that fails never ends the listener (H6). When the process is out of
file descriptors, one that was kept in reserve answers those who wait, so that
the queue moves and a health probe still hears from us.
"""

import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

import trio

from router.edge.connection import READ_SIZE
from router.edge.exchange import Answer, compose, refusal
from router.edge.site import Site
from router.errors import EXHAUSTED

#: Connections taken in one wake, before other tasks get a turn.
PER_WAKE: Final = 64
#: Seconds to let descriptors come free, and between two lines about it.
BACK_OFF_S: Final = 0.1
_LOG_EVERY_S: Final = 1.0

_CLOSED: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})

#: Unsent bytes that the kernel holds for one client before it takes no more:
#: without it a stalled reader costs megabytes of send buffer (H5).
_NOTSENT_LOWAT: Final = 64 * 1024
#: Seconds of silence before the kernel asks whether a client's machine is
#: still there, and between asking again: nobody else notices one that died
#: without a FIN while its request waits.
_ASK_AFTER_S: Final = 30
_ASK_EVERY_S: Final = 10

FULL: Final = refusal(
    503,
    "Too many connections.",
    error_type="server_error",
    headers=((b"retry-after", b"1"),),
)
ALIVE: Final = Answer(200, b'{"status":"ok"}')


class Exhausted(Exception):
    """The process has no file descriptor, or the system no memory, to accept."""


class Acceptor:
    """Accepts for one edge, with one descriptor in reserve."""

    def __init__(self, site: Site) -> None:
        """Open the reserve; ``close`` lets it go."""
        self._site = site
        self._reserve: int | None = _reserve()
        self._log_at = -_LOG_EVERY_S

    def close(self) -> None:
        """Let the reserve go."""
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def waiting(self, listener: socket.socket, limit: int) -> Iterator[socket.socket]:
        """Take connections that wait at *listener*, at most *limit*.

        Each is set not to block, and belongs to the caller.

        Raises:
            Exhausted: some were turned away for want of descriptors; give the
                system ``BACK_OFF_S``.
        """
        for _ in range(limit):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                if error.errno in EXHAUSTED:
                    self._complain(error)
                    self._spend_reserve(listener)
                    raise Exhausted from error
                # The client's connection broke while it waited (accept(2)).
                continue
            sock.setblocking(False)
            yield sock

    def turn_away(self, sock: socket.socket) -> None:
        """Answer without a task, and close *sock*: we are full."""
        self._site.refused(FULL.status)
        fields = b"%bx-request-id: %b\r\n" % (
            self._site.date,
            self._site.new_request_id().encode(),
        )
        try:
            # Also so that closing does not reset what we answer.
            line = sock.recv(READ_SIZE).partition(b"\r\n")[0]
        except OSError:
            line = b""
        asks_health = line.startswith(b"GET /") and b"/healthz HTTP/1." in line
        answer = ALIVE if asks_health else FULL
        try:
            sock.send(compose(answer, fields, keep=False))
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is gone, or reads nothing
        finally:
            sock.close()

    def _spend_reserve(self, listener: socket.socket) -> None:
        """Answer who waits, one at a time, with the descriptor in reserve."""
        for _ in range(PER_WAKE):
            if self._reserve is None:
                self._reserve = _reserve()
            if self._reserve is None:
                return
            os.close(self._reserve)
            self._reserve = None
            try:
                sock, _ = listener.accept()
                sock.setblocking(False)
                self.turn_away(sock)
            except OSError:
                return
            finally:
                self._reserve = _reserve()

    def _complain(self, error: OSError) -> None:
        now = trio.current_time()
        if now >= self._log_at + _LOG_EVERY_S:
            self._log_at = now
            self._site.warn("accept_exhausted", error=error.strerror)


def tune(listener: socket.socket, stall_ms: int) -> None:
    """Set what each TCP connection of *listener* will need.

    Linux gives accepted connections the options of their listener, so that
    none of these costs a system call per client.

    Args:
        listener: TCP, or another kind, which is left as it is.
        stall_ms: how long bytes to a client may go unacknowledged.
    """
    if listener.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    tcp = socket.IPPROTO_TCP
    listener.setsockopt(tcp, socket.TCP_NODELAY, 1)
    listener.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, _NOTSENT_LOWAT)
    listener.setsockopt(tcp, socket.TCP_USER_TIMEOUT, stall_ms)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(tcp, socket.TCP_KEEPIDLE, _ASK_AFTER_S)
    listener.setsockopt(tcp, socket.TCP_KEEPINTVL, _ASK_EVERY_S)


def _reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
