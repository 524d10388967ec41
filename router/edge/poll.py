"""Who of all clients went away, and whose socket has room again.

One epoll holds every client socket of a listener, and one task waits for it:
a hang-up is seen whatever state the client's request is in, since nobody has
to read for it (H4).

A FIN behind more than a client's receive window does not arrive while nobody
reads: such a client is ``spill``ed, told of all that comes so that it reads on.

Two rules: nothing closes a socket while a batch of events is looked at, and a
fault of one client's chain never ends the loop (L1).
"""

import select
from collections.abc import Callable
from typing import Final, Protocol

import trio

from router.errors import LocalError

#: Events looked at before other tasks get a turn.
BATCH: Final = 256

#: Edge-triggered: a FIN behind bytes that nobody reads yet is told once, and
#: does not make the poll spin until they are read.
_WATCH: Final = select.EPOLLRDHUP | select.EPOLLET
_GONE: Final = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Client(Protocol):
    """One client's socket, as the poll tells it of events. The calls are
    synchronous, and none closes the socket."""

    def hang_up(self) -> None:
        """Learn that the client will send nothing more, or is gone. May be
        called again."""

    def flush(self) -> None:
        """Learn that the socket takes bytes again."""

    def spill(self) -> None:
        """Learn that there are bytes to read: for who has asked for it."""

    def abandon(self) -> None:
        """End for a bug in one of the calls above. Never raises."""


class ClientPoll:
    """The readiness of all client sockets of one listener."""

    def __init__(self, on_bug: Callable[[str, Exception], None]) -> None:
        """*on_bug*: told of an exception in one client's chain, by its place."""
        self._on_bug = on_bug
        self._epoll = select.epoll()
        self._clients: dict[int, Client] = {}
        #: What each socket is watched for.
        self._watched: dict[int, int] = {}

    def add(self, fd: int, client: Client) -> None:
        """Watch *fd* for its client's hang-up, until ``remove``."""
        self._epoll.register(fd, _WATCH)
        self._watched[fd] = _WATCH
        self._clients[fd] = client

    def remove(self, fd: int) -> None:
        """Forget *fd*; to be called before it is closed.

        Closing alone would not do: a child process that was just forked may
        hold the same open file, whose events would then reach the next client
        that gets this number.
        """
        if self._clients.pop(fd, None) is not None:
            del self._watched[fd]
            self._epoll.unregister(fd)

    def want_room(self, fd: int) -> None:
        """Call this client's ``flush`` each time that its socket has room."""
        self._watch(fd, self._watched[fd] | select.EPOLLOUT)

    def enough(self, fd: int) -> None:
        """Call ``flush`` no more."""
        self._watch(fd, self._watched[fd] & ~select.EPOLLOUT)

    def spill(self, fd: int) -> None:
        """Call this client's ``spill`` if there is something to read, and each
        time that more comes."""
        self._watch(fd, self._watched[fd] | select.EPOLLIN)

    def _watch(self, fd: int, flags: int) -> None:
        self._watched[fd] = flags
        # Also where they are the same: what is ready is then told once more.
        self._epoll.modify(fd, flags)

    async def run(self) -> None:
        """Tell clients of their events. Returns only when cancelled."""
        fd = self._epoll.fileno()
        while True:
            await trio.lowlevel.wait_readable(fd)
            self.look()

    def close(self) -> None:
        """Let go of the epoll, once no client is left in it."""
        trio.lowlevel.notify_closing(self._epoll.fileno())
        self._epoll.close()

    def look(self) -> None:
        """Tell clients of what is ready now, at most ``BATCH`` events.

        Raises:
            LocalError: an invariant is broken; the process should end.
        """
        for fd, events in self._epoll.poll(0, BATCH):
            client = self._clients.get(fd)
            if client is None:
                continue
            try:
                if events & _GONE:
                    client.hang_up()
                if events & select.EPOLLOUT:
                    client.flush()
                if events & select.EPOLLIN:
                    client.spill()
            except LocalError:
                raise
            except Exception as bug:  # noqa: BLE001  one client's bug is its own (L1)
                self._on_bug("edge.poll", bug)
                client.abandon()
