"""Where the other end of the wire comes in: an accept loop that nothing stops.

Strangers, who have not proven themselves, are few at a time, so that nobody
fills the house by standing in the door (H6).
"""

import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from router.cork import Cork
from workers.access import Access
from workers.link import Link
from workers.transport import PlainTransport, TlsTransport, Transport

#: Connections that have not proven themselves, and all together.
STRANGERS_MAX: Final = 64
GUESTS_MAX: Final = 1024
#: Seconds to wait where no descriptor is left.
CALM_S: Final = 0.1
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@attrs.define
class Door:
    """Takes connections in, one task each, for `host` to see to their end."""

    access: Access
    host: Callable[[Link], Awaitable[None]]
    """Owns a link whose opening has just begun."""
    refused: Callable[[], None]
    """Told of each connection that there was no room for."""
    cork: Cork
    """That of the router at this end."""
    strangers: int = attrs.field(default=0, init=False)
    guests: int = attrs.field(default=0, init=False)

    async def listen(self, listener: socket.socket) -> None:
        """Accept until cancelled; *listener* is then closed. A checkpoint."""
        listener.setblocking(False)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    sock = await self._accept(listener)
                    if sock is not None:
                        nursery.start_soon(self._take_in, sock)
        finally:
            trio.lowlevel.notify_closing(listener)
            listener.close()

    async def open(self, link: Link) -> None:
        """Open *link* as one of the strangers. Raises as ``Link.open``."""
        self.strangers += 1
        try:
            await link.open()
        finally:
            self.strangers -= 1

    async def _accept(self, listener: socket.socket) -> socket.socket | None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                await trio.sleep(CALM_S)
            return None
        if self.strangers >= STRANGERS_MAX or self.guests >= GUESTS_MAX:
            self.refused()
            sock.close()
            return None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    async def _take_in(self, sock: socket.socket) -> None:
        self.guests += 1
        try:
            tls = self.access.inward
            transport: Transport = (
                PlainTransport.accepted(sock)
                if tls is None
                else TlsTransport.accepted(sock, tls)
            )
            await self.host(Link(transport, self.access.passport, self.cork))
        finally:
            self.guests -= 1
