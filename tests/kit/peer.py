"""One end of the wire in a test's own hand, over a real socket of 127.0.0.1."""

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import attrs
import trio

from workers.wire.frames import Message, Observation, Seen, pack
from workers.wire.opening import NONCE_BYTES, Opening, Passport, Role

#: Seconds for what should take a fraction of one.
PATIENCE_S: Final = 5.0

M = TypeVar("M", bound=Message)


class Peer:
    """One connection, and what its other end said."""

    def __init__(self, stream: trio.SocketStream, passport: Passport) -> None:
        """*passport*: who we are."""
        self.stream = stream
        self.passport = passport
        self.opening = Opening(passport, os.urandom(NONCE_BYTES))
        self.heard: list[Any] = []
        self._taken = 0

    async def open(self) -> None:
        """Prove each other. Raises as ``Opening.receive``."""
        with trio.fail_after(PATIENCE_S):
            while True:
                while self.opening.out:
                    await self.stream.send_all(self.opening.out.pop(0))
                octets = await self.stream.receive_some(65536)
                if not octets:
                    raise trio.EndOfChannel
                if self.opening.receive(octets):
                    break
            while self.opening.out:
                await self.stream.send_all(self.opening.out.pop(0))
        self._read(b"")

    async def send(self, *messages: Message) -> None:
        """Say *messages* in one write."""
        await self.stream.send_all(b"".join(map(pack, messages)))

    async def expect(self, kind: type[M]) -> M:
        """Wait for the next message of *kind*; leave others aside."""
        with trio.fail_after(PATIENCE_S):
            while True:
                while self._taken < len(self.heard):
                    message = self.heard[self._taken]
                    self._taken += 1
                    if isinstance(message, kind):
                        await trio.lowlevel.checkpoint()
                        return message
                octets = await self.stream.receive_some(65536)
                if not octets:
                    raise trio.EndOfChannel
                self._read(octets)

    async def ended(self) -> None:
        """Wait until the other end has closed."""
        with trio.fail_after(PATIENCE_S):
            try:
                while octets := await self.stream.receive_some(65536):
                    self._read(octets)
            except trio.BrokenResourceError:
                return

    async def observe(self, sequence: int = 1, **fields: Any) -> None:
        """Say what an agent is: model ``m``, four slots, unless told otherwise."""
        seen: dict[str, Any] = {
            "epoch": self.passport.epoch,
            "sequence": sequence,
            "slots": 4,
            "load": 0,
            "models": {"m": (4, 2)},
            "context": None,
            "lacks": [],
        }
        await self.send(Observation(**{**seen, **fields}))

    def reset(self) -> None:
        """Cut the connection with a RST."""
        sock = self.stream.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()

    def _read(self, octets: bytes) -> None:
        reader = self.opening.reader
        self.heard += [reader.decode(frame) for frame in reader.split(octets)]


def agent_passport(epoch: int = 7, token: bytes | None = None, **more: Any) -> Passport:
    return Passport(
        Role.AGENT, "host", epoch, ("count", "end_reasoning"), token, **more
    )


def router_passport(
    name: str = "router", epoch: int = 3, token: bytes | None = None, **more: Any
) -> Passport:
    return Passport(Role.ROUTER, name, epoch, (), token, **more)


@attrs.define
class Doorway:
    """Where somebody connects to us."""

    listener: trio.SocketListener
    peers: list[Peer] = attrs.field(factory=list)

    @property
    def port(self) -> int:
        port: int = self.listener.socket.getsockname()[1]
        return port

    async def next(self, passport: Passport) -> Peer:
        """Take the next connection; nothing is said on it yet."""
        with trio.fail_after(PATIENCE_S):
            peer = Peer(await self.listener.accept(), passport)
        self.peers.append(peer)
        return peer

    async def open(self, passport: Passport | None = None) -> Peer:
        """Take the next connection, prove each other, and observe."""
        peer = await self.next(passport or agent_passport())
        await peer.open()
        await peer.observe()
        await peer.expect(Seen)
        return peer


@asynccontextmanager
async def doorway(port: int = 0) -> AsyncIterator[Doorway]:
    """Listen for somebody who connects to us."""
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    door = Doorway(listener)
    try:
        async with listener:
            yield door
    finally:
        for peer in door.peers:
            peer.stream.socket.close()


@asynccontextmanager
async def calling(port: int, passport: Passport) -> AsyncIterator[Peer]:
    """Connect to somebody who listens; nothing is said yet."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        yield Peer(stream, passport)
