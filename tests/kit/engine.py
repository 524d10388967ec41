"""A fake engine: a real HTTP/1.1 server on Trio, on 127.0.0.1 port 0.

It answers its control endpoints as the engine of its ``kind`` does
(PROTOCOLS B) and leaves every chat request to a script. It reads each
connection all the time, so that it sees a closed router socket in every
state, also under a script that never writes (``read_limit`` alone stops it).
"""

import json
import math
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import httptools
import trio

from tests.kit.exchange import Exchange, RouterGone
from tests.kit.routes import answer_probe

Script = Callable[[Exchange], Awaitable[None]]


class FakeEngine:
    """One fake engine; every public attribute may be changed while it runs."""

    def __init__(
        self,
        script: Script,
        kind: str,
        slots: int,
        models: Sequence[str],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Not for tests: see `open_engine`."""
        self.script = script
        self.kind = kind
        self.slots = slots
        self.models = tuple(models)
        self.context = 4096
        self.version = "b1-fake"
        #: Statuses of the control endpoints.
        self.health_status = 200
        self.models_status = 200
        self.slots_status = 200
        self.props_status = 200
        self.metrics_status = 200
        #: Body of ``/v1/models``; None: made from ``models``.
        self.models_body: bytes | None = None
        #: Slots at work for others than the router.
        self.foreign_busy = 0
        #: Seconds a slot stays processing after its router socket closed.
        self.linger_s = 0.0
        #: Process start, unix seconds: a change is a restart.
        self.started_at = 1_700_000_000
        #: llama-server's ``is_sleeping``.
        self.sleeping = False
        #: Tokens that it counts in every prompt; None: it can't count.
        self.counts: int | None = None
        #: llama-server's ``modalities.vision``.
        self.sees = False
        #: Leave control requests without an answer.
        self.hang_probes = False
        #: Seconds after an answer in which a connection that stays idle is closed.
        self.idle_close_s: float | None = None
        #: Start the script when the head is here, whatever the body does.
        self.before_body = False

        self.seen: list[Exchange] = []
        #: Bodies that llama-server's control endpoint was sent.
        self.controls: list[Any] = []
        #: Set at the first of them.
        self.told = trio.Event()
        #: Paths of the control requests, in order.
        self.probes: list[str] = []
        #: Connections accepted so far, and open now.
        self.accepted = 0
        self.connections: set[Connection] = set()
        self.port = 0
        self._scheme = "http" if tls is None else "https"
        self._tls = tls
        self._read_limit: int | None = None
        self._handed = 0
        self._lingering = 0
        self._news = trio.Event()
        self._changed = trio.Event()
        self._listener: trio.socket.SocketType | None = None

    @property
    def url(self) -> str:
        """Where it is reached, without ``/v1``."""
        host = "127.0.0.1" if self._tls is None else "localhost"
        return f"{self._scheme}://{host}:{self.port}"

    @property
    def live(self) -> int:
        """Chat requests that are neither whole nor closed."""
        return sum(not (x.ended.is_set() or x.closed.is_set()) for x in self.seen)

    @property
    def processing(self) -> int:
        """Slots at work, as ``/slots`` tells it."""
        return min(self.slots, self.foreign_busy + self.live + self._lingering)

    @property
    def read_limit(self) -> int | None:
        """Bytes to read of each connection before it stops; None: no limit."""
        return self._read_limit

    @read_limit.setter
    def read_limit(self, limit: int | None) -> None:
        self._read_limit = limit
        self._wake()

    @property
    def refuse(self) -> bool:
        """Whether connects are refused; its port stays its own."""
        return self._listener is None

    @refuse.setter
    def refuse(self, refuse: bool) -> None:
        if refuse and self._listener is not None:
            self._listener.close()
            self._listener = None
        elif not refuse and self._listener is None:
            self._listener = self._listen()
        self._wake()

    async def next_exchange(self) -> Exchange:
        """Give the chat requests one by one, waiting for each. A checkpoint."""
        while self._handed == len(self.seen):
            await self._news.wait()
        await trio.lowlevel.checkpoint()
        self._handed += 1
        return self.seen[self._handed - 1]

    async def cut(self) -> None:
        """Reset every connection, as a killed process would."""
        for connection in list(self.connections):
            connection.reset()
        await trio.lowlevel.checkpoint()

    # ---- serving ----

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Wait for a change of ``refuse`` or ``read_limit``. A checkpoint."""
        await self._changed.wait()

    def controlled(self, body: Any) -> None:
        """Note one call of the control endpoint."""
        self.controls.append(body)
        self.told.set()

    def arrived(self, exchange: Exchange) -> None:
        """Note one chat request."""
        self.seen.append(exchange)
        self._news.set()
        self._news = trio.Event()

    @contextmanager
    def lingering(self) -> Iterator[None]:
        """Count one slot as processing though its request is gone."""
        self._lingering += 1
        try:
            yield
        finally:
            self._lingering -= 1

    async def serve(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept until cancelled."""
        # Bound and never listening: it keeps the port ours while we refuse.
        with _bound(0) as keeper:
            self.port = keeper.getsockname()[1]
            self.refuse = False
            async with trio.open_nursery() as nursery:
                task_status.started()
                try:
                    while True:
                        await self._accept(nursery)
                finally:
                    self.refuse = True

    async def _accept(self, nursery: trio.Nursery) -> None:
        if self._listener is None:
            await self.wait_changed()
            return
        try:
            sock, _ = await self._listener.accept()
        except (trio.ClosedResourceError, ConnectionAbortedError):
            return
        sock.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        self.accepted += 1
        nursery.start_soon(Connection(self, sock, self.accepted).run)

    def _listen(self) -> trio.socket.SocketType:
        listener = trio.socket.from_stdlib_socket(_bound(self.port))
        listener.listen(1024)
        return listener

    def wrap(self, stream: trio.SocketStream) -> trio.abc.Stream:
        """Put TLS over *stream* where this engine speaks it."""
        if self._tls is None:
            return stream
        return trio.SSLStream(
            stream, self._tls, server_side=True, https_compatible=True
        )


class Connection:
    """One router socket: reads it always, answers one request at a time."""

    def __init__(
        self, engine: FakeEngine, sock: trio.socket.SocketType, number: int
    ) -> None:
        """Own *sock*."""
        self.number = number
        self.sock = sock
        self.stream: trio.abc.Stream = engine.wrap(trio.SocketStream(sock))
        self.gone = trio.Event()
        self._engine = engine
        self._url = b""
        self._parser = httptools.HttpRequestParser(self)
        self._received = 0
        self._raw_head = bytearray()
        self._in_body = False
        self._headers: dict[str, str] = {}
        self._content = bytearray()
        self._current: Exchange | None = None
        self._exchanges: list[Exchange] = []
        # The router never pipelines; two places show it if it does.
        self._inbox, self._outbox = trio.open_memory_channel[Exchange](2)

    def reset(self) -> None:
        """Cut the connection with a RST."""
        self.sock.setsockopt(
            trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )
        self.sock.close()

    async def run(self) -> None:
        """Serve until either side closes."""
        self._engine.connections.add(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer)
                await self._read()
                cut = self._current is not None and not self._current.ended.is_set()
                self._note_gone()
                self._inbox.close()
                if cut and self._engine.linger_s:
                    with self._engine.lingering():
                        await trio.sleep(self._engine.linger_s)
        finally:
            self._note_gone()

    def _note_gone(self) -> None:
        self._engine.connections.discard(self)
        self.sock.close()
        self.gone.set()
        for exchange in self._exchanges:
            if exchange.closed_at is None:
                exchange.closed_at = trio.current_time()
                exchange.closed.set()

    async def _read(self) -> None:
        while True:
            limit = self._engine.read_limit
            if limit is not None and self._received >= limit:
                await self._engine.wait_changed()
                continue
            room = 65536 if limit is None else min(65536, limit - self._received)
            try:
                octets = await self.stream.receive_some(room)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not octets:
                return
            self._received += len(octets)
            self._raw_head += octets
            self._parser.feed_data(bytes(octets))

    async def _answer(self) -> None:
        answered = False
        while True:
            idle = self._engine.idle_close_s if answered else None
            try:
                with trio.fail_after(math.inf if idle is None else idle):
                    exchange = await self._outbox.receive()
            except (trio.TooSlowError, trio.EndOfChannel):
                self.sock.close()
                return
            try:
                if self._is_chat(exchange):
                    await self._engine.script(exchange)
                else:
                    await answer_probe(self._engine, exchange)
            except RouterGone:
                return
            answered = True
            if not exchange.ended.is_set():
                # The script has said all: the rest is for the router to do.
                await self.gone.wait()
                return
            if not exchange.keep_alive:
                await exchange.fin()

    @staticmethod
    def _is_chat(exchange: Exchange) -> bool:
        return exchange.method == "POST" and exchange.path.endswith(
            ("/completions", "/embeddings")
        )

    # ---- httptools callbacks ----

    def on_message_begin(self) -> None:
        """Start a request."""
        self._headers = {}
        self._content = bytearray()
        self._current = None
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Take the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one field."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Make the exchange."""
        head, _, _ = bytes(self._raw_head).partition(b"\r\n\r\n")
        exchange = Exchange(
            self,
            len(self._exchanges) + 1,
            head,
            self._headers,
            self._parser.get_method().decode(),
            self._url.decode(),
        )
        self._current = exchange
        self._exchanges.append(exchange)
        if self._engine.before_body:
            self._hand_over(exchange)

    def on_body(self, piece: bytes) -> None:
        """Gather the body."""
        self._content += piece

    def on_message_complete(self) -> None:
        """Hand the request to its script."""
        exchange = self._current
        assert exchange is not None
        exchange.keep_alive = self._parser.should_keep_alive()
        exchange.content = bytes(self._content)
        self._raw_head.clear()
        if exchange.content:
            exchange.body = _parsed(exchange.content)
        if not self._engine.before_body:
            self._hand_over(exchange)

    def _hand_over(self, exchange: Exchange) -> None:
        if self._is_chat(exchange):
            self._engine.arrived(exchange)
        else:
            self._engine.probes.append(exchange.path)
        self._inbox.send_nowait(exchange)


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setblocking(False)
    sock.bind(("127.0.0.1", port))
    return sock


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@asynccontextmanager
async def open_engine(
    script: Script | None = None,
    kind: str = "llama-server",
    slots: int = 2,
    models: Sequence[str] = ("m",),
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[FakeEngine]:
    """Run one engine for the length of the block.

    Args:
        script: what each chat request gets; None: "Hello world", usage (3, 2).
        kind: llama-server, vllm, sglang or generic.
        slots: its parallelism as it tells it; it never queues by itself.
        models: ids that it lists.
        tls: a server context makes it speak https, on ``localhost``.
    """
    engine = FakeEngine(
        script or answers("Hello", " world", usage=(3, 2)), kind, slots, models, tls
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.serve)
        yield engine
        nursery.cancel_scope.cancel()


# ---- stock scripts ----


def answers(
    *pieces: str, usage: tuple[int, int] | None = None, finish: str = "stop"
) -> Script:
    """Answer every request with these text deltas and a proper end."""
    return partial(_answers, pieces, usage, finish)


async def _answers(
    pieces: Sequence[str],
    usage: tuple[int, int] | None,
    finish: str,
    x: Exchange,
) -> None:
    await x.role()
    await x.text(*pieces)
    await x.finish(finish)
    if usage is not None:
        await x.usage(*usage)
    await x.done()
    await x.end()


async def silent(x: Exchange) -> None:
    """Say nothing until the router gives up."""
    await x.wait_closed()


def refuses(status: int, body: object) -> Script:
    """Answer every request with this status and JSON body."""
    return partial(_refuses, status, body)


async def _refuses(status: int, body: object, x: Exchange) -> None:
    await x.json(status, body)


def in_turn(*scripts: Script) -> Script:
    """Give each request the next script; the last serves all that follow."""
    rest = list(scripts)

    async def script(x: Exchange) -> None:
        await (rest.pop(0) if len(rest) > 1 else rest[0])(x)

    return script
