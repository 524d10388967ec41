"""An edge on a real listening socket, and a client that speaks bytes to it."""

import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from router.edge.core import Core
from router.edge.server import Edge, client_edge
from router.edge.site import Patience
from router.settings import ServerSettings

#: Seconds that no single step of these tests may take.
STEP_S = 5.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

#: The product's own patience; and that, looked at more often.
PATIENT = Patience()
SWEPT = Patience(sweep_s=0.02)
#: For tests of patience itself: a machine that pauses would have it end others.
QUICK = Patience(head_s=0.2, body_s=0.2, idle_s=0.3, linger_s=0.2, sweep_s=0.02)


def listen(unix: Path | None = None, backlog: int = 512) -> socket.socket:
    """Listen on a loopback port of the system's choice, or at a path."""
    if unix is None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(unix))
    sock.listen(backlog)
    return sock


class RawClient:
    """One client connection, byte for byte."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.got = b""

    @classmethod
    async def connect(cls, listener: socket.socket, rcvbuf: int = 0) -> "RawClient":
        sock = socket.socket(listener.family)
        if rcvbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        sock.connect(listener.getsockname())
        sock.setblocking(False)
        await trio.lowlevel.checkpoint()
        return cls(sock)

    async def send(self, octets: bytes) -> None:
        view = memoryview(octets)
        with trio.fail_after(STEP_S):
            while view:
                await trio.lowlevel.wait_writable(self.sock)
                view = view[self.sock.send(view) :]

    async def read(self) -> bytes:
        """Give what comes next; empty: end of stream."""
        with trio.fail_after(STEP_S):
            await trio.lowlevel.wait_readable(self.sock)
        return self.sock.recv(65536)

    async def until(self, mark: bytes) -> bytes:
        """Read until *mark*; give all up to its end, and forget that."""
        while mark not in self.got:
            more = await self.read()
            assert more, f"the stream ended before {mark!r}: {self.got!r}"
            self.got += more
        end = self.got.index(mark) + len(mark)
        given, self.got = self.got[:end], self.got[end:]
        return given

    async def rest(self) -> bytes:
        """Read to the end of the stream. A RST raises ConnectionResetError."""
        while more := await self.read():
            self.got += more
        given, self.got = self.got, b""
        return given

    async def reply(self) -> "RawReply":
        """Read one whole reply that has a Content-Length."""
        head = await self.until(b"\r\n\r\n")
        reply = RawReply(head)
        length = int(reply.headers["content-length"])
        while len(self.got) < length:
            more = await self.read()
            assert more, "the stream ended within a body"
            self.got += more
        reply.body, self.got = self.got[:length], self.got[length:]
        return reply

    def fin(self) -> None:
        """Half-close: nothing more will be sent."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


class RawReply:
    """A reply's head, taken apart, and its body."""

    def __init__(self, head: bytes) -> None:
        first, *lines = head[:-4].decode().split("\r\n")
        self.status = int(first.split()[1])
        self.headers: dict[str, str] = dict(
            line.split(": ", 1)
            for line in lines  # a field twice would show as one: see below
        )
        assert len(self.headers) == len(lines), f"a repeated field: {head!r}"
        self.body = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    version: str = "1.1",
) -> bytes:
    """Write a request."""
    lines = [f"{method} {path} HTTP/{version}", "Host: x"]
    if body is not None:
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def chat(
    *,
    stream: bool = True,
    headers: Mapping[str, str] | None = None,
    version: str = "1.1",
    **fields: Any,
) -> bytes:
    """Write a chat request."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": stream,
        **fields,
    }
    return request(
        "POST", "/v1/chat/completions", json.dumps(body).encode(), headers, version
    )


def events(chunked: bytes) -> list[bytes]:
    """Take a chunked body apart into its chunks; the zero chunk is b""."""
    chunks = []
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        length = int(size, 16)
        chunks.append(chunked[:length])
        assert chunked[length : length + 2] == b"\r\n"
        chunked = chunked[length + 2 :]
    return chunks


class RunningEdge:
    """An edge that serves, and where."""

    def __init__(self, edge: Edge, listener: socket.socket) -> None:
        self.edge = edge
        self.listener = listener
        self.clients: list[RawClient] = []

    async def connect(self, rcvbuf: int = 0) -> RawClient:
        client = await RawClient.connect(self.listener, rcvbuf)
        self.clients.append(client)
        return client

    async def empty(self) -> None:
        """Wait until no connection is left."""
        await until(lambda: self.edge.connections == 0)


async def until(happened: Callable[[], bool]) -> None:
    """Wait for what nobody announces, looking again each millisecond."""
    with trio.fail_after(STEP_S):
        while not happened():  # noqa: ASYNC110
            await trio.sleep(0.001)


class QuietLog:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, event: str, /, **fields: Any) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, /, **fields: Any) -> None:
        self.lines.append(("error", event, fields))


@asynccontextmanager
async def running(
    router: Core,
    settings: ServerSettings | None = None,
    *,
    patience: Patience = PATIENT,
    unix: Path | None = None,
    log: QuietLog | None = None,
    edge: Edge | None = None,
) -> AsyncIterator[RunningEdge]:
    """Serve *router* on a socket, for the block; its clients are closed after."""
    if edge is None:
        edge = client_edge(
            router, settings, log=QuietLog() if log is None else log, patience=patience
        )
    with listen(unix) as listener:
        here = RunningEdge(edge, listener)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(
                    lambda task_status: edge.serve([listener], task_status=task_status)
                )
                yield here
                nursery.cancel_scope.cancel()
        finally:
            for client in here.clients:
                client.close()
