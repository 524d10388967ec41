"""The client side of a benchmark: N connections on one epoll loop, bounded in time.

``python -m bench.load`` opens its connections, warms up, measures for a while and
writes one JSON object: what came, and what CPU time the router's processes took
for it. A *stream* load asks once per connection for an answer that outlasts the
measurement, so that nothing but deltas is measured; a *reply* load asks for one
small whole answer after the other, each connection at once, or at a pace: at
once a fast router meets busy peers, which cost it no wake-up, and a slow one
pays for waking them; at a pace all do the same work.
"""

import json
import select
import socket
import time
from collections import deque
from typing import Final

import attrs
import click

from bench.processes import cpu_seconds, resident_mib

#: What one delta of the mock engine holds, however it was encoded since.
_DELTA: Final = b'" tok'
_CHUNKED_END: Final = b"0\r\n\r\n"


@attrs.frozen
class Measured:
    """One load on one router."""

    connections: int
    seconds: float
    deltas: int
    late: int
    """Deltas that a client read together with an earlier one of its stream."""
    requests: int
    """Whole replies within the measurement."""
    errors: int
    """Connections lost, answers other than 200, streams without a delta."""
    cpu_s: float
    rss_mib: float
    wait_p50_ms: float
    """From the request to the first delta, or to the whole reply."""
    wait_p99_ms: float

    @property
    def per_delta_us(self) -> float:
        """CPU of the router for one delta, in microseconds."""
        return self.cpu_s * 1e6 / max(1, self.deltas)

    @property
    def per_request_us(self) -> float:
        """CPU of the router for one whole reply, in microseconds."""
        return self.cpu_s * 1e6 / max(1, self.requests)


class _Line:
    """One client connection."""

    __slots__ = ("got", "peer", "sent_at", "waited")

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.got = b""
        self.sent_at = 0.0
        self.waited = False


class _Load:
    """All client connections, on one epoll."""

    def __init__(
        self, port: int, connections: int, deltas: int, stream: bool, pace_s: float
    ) -> None:
        body = json.dumps(
            {
                "model": "mock",
                "messages": [{"role": "user", "content": "Tell me of a river."}],
                "max_tokens": deltas,
                "stream": stream,
            }
        ).encode()
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        self.stream = stream
        self.pace_s = pace_s
        #: When each idle connection asks next, soonest first.
        self.due: deque[tuple[float, _Line]] = deque()
        self.deltas = self.late = self.requests = self.errors = 0
        self.waits: list[float] = []
        self.lines: dict[int, _Line] = {}
        self.poll = select.epoll()
        for _ in range(connections):
            peer = socket.create_connection(("127.0.0.1", port), timeout=10)
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = self.lines[peer.fileno()] = _Line(peer)
            self.poll.register(peer, select.EPOLLIN)
            self._ask(line)
            self.run(0.0)

    def run(self, seconds: float) -> None:
        """Take what comes for so long."""
        end = time.perf_counter() + seconds
        while True:
            now = time.perf_counter()
            while self.due and self.due[0][0] <= now:
                self._ask(self.due.popleft()[1])
            left = end - now
            wait = min(left, self.due[0][0] - now) if self.due else left
            for number, _ in self.poll.poll(max(0.0, wait), 1024):
                self._take(self.lines[number])
            if left <= 0:
                return

    def _ask(self, line: _Line) -> None:
        line.got = b""
        line.waited = False
        line.sent_at = time.perf_counter()
        # A kilobyte into the empty buffer of a fresh or answered connection.
        line.peer.send(self.request)

    def _take(self, line: _Line) -> None:
        try:
            chunk = line.peer.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            self.errors += 1
            self.poll.unregister(line.peer)
            line.peer.close()
        elif self.stream:
            deltas = chunk.count(_DELTA)
            self.deltas += deltas
            if deltas > 1:
                self.late += deltas - 1
            if not line.waited and deltas:
                line.waited = True
                self.waits.append(time.perf_counter() - line.sent_at)
        else:
            line.got += chunk
            if _is_whole(line.got):
                self.requests += 1
                if not line.got.startswith(b"HTTP/1.1 200"):
                    self.errors += 1
                self.waits.append(time.perf_counter() - line.sent_at)
                if self.pace_s:
                    self.due.append((line.sent_at + self.pace_s, line))
                else:
                    self._ask(line)

    def measure(self, pid: int, seconds: float) -> Measured:
        """Count for so long what comes, and what process *pid* works for it."""
        deltas, late, requests = self.deltas, self.late, self.requests
        start, cpu = time.perf_counter(), cpu_seconds(pid)
        self.run(seconds)
        cpu = cpu_seconds(pid) - cpu
        took = time.perf_counter() - start
        rss = resident_mib(pid)
        if self.stream:
            self.errors += sum(not line.waited for line in self.lines.values())
        waits = sorted(self.waits) or [0.0]
        return Measured(
            connections=len(self.lines),
            seconds=took,
            deltas=self.deltas - deltas,
            late=self.late - late,
            requests=self.requests - requests,
            errors=self.errors,
            cpu_s=cpu,
            rss_mib=rss,
            wait_p50_ms=waits[len(waits) // 2] * 1e3,
            wait_p99_ms=waits[len(waits) * 99 // 100] * 1e3,
        )


def _is_whole(got: bytes) -> bool:
    """Is *got* one whole HTTP reply?"""
    head, split, body = got.partition(b"\r\n\r\n")
    if not split:
        return False
    lower = head.lower()
    if b"\r\ncontent-length:" in lower:
        length = lower.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0]
        return len(body) >= int(length)
    return body.endswith(_CHUNKED_END)


@click.command()
@click.option("--port", type=int, required=True, help="Where the router listens.")
@click.option("--pid", type=int, required=True, help="The router's process.")
@click.option("--connections", type=int, required=True)
@click.option("--deltas", type=int, required=True, help="Length of one answer.")
@click.option("--stream/--reply", default=True)
@click.option("--pace", default=0.0, help="Seconds from request to request.")
@click.option("--warm-up", default=1.0, help="Seconds before the measurement.")
@click.option("--seconds", default=4.0, help="Seconds of the measurement.")
def main(
    port: int,
    pid: int,
    connections: int,
    deltas: int,
    stream: bool,
    pace: float,
    warm_up: float,
    seconds: float,
) -> None:
    """Measure one load on one router."""
    load = _Load(port, connections, deltas, stream, pace)
    load.run(warm_up)
    click.echo(json.dumps(attrs.asdict(load.measure(pid, seconds))))


if __name__ == "__main__":
    main()
