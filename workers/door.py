"""Where the other end of the wire comes in: an accept loop that nothing stops.

Strangers, who have not proven themselves, are few at a time, and the newest of
them, so that nobody fills the house, or bars it, by standing in the door (H6).
"""

import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import attrs
import trio

from router.cork import Cork
from router.errors import EXHAUSTED
from workers.access import Access
from workers.link import Link, contain
from workers.transport import PlainTransport, TlsTransport, Transport
from workers.wire.frames import Reason, WireError
from workers.wire.opening import Role

#: Connections that have not proven themselves, and all together.
STRANGERS_MAX: Final = 64
GUESTS_MAX: Final = 1024
#: Seconds to wait where no descriptor is left.
CALM_S: Final = 0.1
#: Seconds between two lines in the log about who is not let in for one reason.
TOLD_S: Final = 60.0


log: Final = logging.getLogger("fencepost.workers")


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
    comers: Role
    """Who comes here."""
    guests: int = attrs.field(default=0, init=False)
    _strangers: dict[Link, trio.CancelScope] = attrs.field(factory=dict, init=False)
    """The oldest first."""
    _told_at: dict[Reason, float] = attrs.field(factory=dict, init=False)

    @property
    def strangers(self) -> int:
        """Count the connections that have not proven themselves."""
        return len(self._strangers)

    async def listen(self, listener: socket.socket) -> None:
        """Accept until cancelled; *listener* is then closed. A checkpoint."""
        listener.setblocking(False)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    accepted = await self._accept(listener)
                    if accepted is not None:
                        nursery.start_soon(self._take_in, *accepted)
        finally:
            trio.lowlevel.notify_closing(listener)
            listener.close()

    async def open(self, link: Link) -> None:
        """Open *link*, whose peer came here, as one of the strangers.

        Raises as ``Link.open``, and where newer strangers need its place.
        """
        scope = self._strangers[link] = trio.CancelScope()
        try:
            with scope:
                await link.open()
        finally:
            self._strangers.pop(link, None)
        if scope.cancelled_caught:
            raise WireError(Reason.TOO_MANY, "it proved nothing, and others came")

    def tell(self, link: Link, why: WireError) -> None:
        """Log why the peer of *link*, which came here, is not let in.

        Once in `TOLD_S` for each reason; who just looks whether somebody listens
        is not told of.
        """
        now = trio.current_time()
        if why.reason is Reason.LOST or now < self._told_at.get(why.reason, now):
            return
        self._told_at[why.reason] = now + TOLD_S
        log.warning(
            "%s at %s is not let in (%s): %s; others for this reason are only counted"
            " for %g s",
            self.comers.value,
            link.whence,
            why.reason.value,
            why.words,
            TOLD_S,
        )

    async def _accept(
        self, listener: socket.socket
    ) -> tuple[socket.socket, str] | None:
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                await trio.sleep(CALM_S)
            return None
        if self.guests >= GUESTS_MAX:
            self.refused()
            sock.close()
            return None
        if self.strangers >= STRANGERS_MAX:
            # Who can prove itself does so in a way to us and back: the oldest can't.
            self._strangers.pop(next(iter(self._strangers))).cancel()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = address[:2]
        return sock, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _take_in(self, sock: socket.socket, whence: str) -> None:
        self.guests += 1
        try:
            await self.host(
                Link(
                    self._transport(sock),
                    self.access.passport,
                    self.cork,
                    whence=whence,
                )
            )
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            contain(raised, self.cork)
        finally:
            self.guests -= 1
            # Where there was no link yet to do it.
            with suppress(OSError):
                sock.close()

    def _transport(self, sock: socket.socket) -> Transport:
        tls = self.access.inward
        if tls is None:
            return PlainTransport.accepted(sock)
        return TlsTransport.accepted(sock, tls)
