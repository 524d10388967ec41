"""A mock agent for benchmarks: the wire's other end on one epoll loop.

``python -m bench.agent --rate 50`` writes ``listening PORT`` to stdout, then serves
routers until stdin closes. It answers as `bench.engine` does, delta for delta and
group for group; what the groups of one moment have goes out in one write, as an
agent's engine step does.
"""

import os
import select
import socket
import time
from typing import Final

import click

from bench.engine import AT_ONCE, GROUPS
from workers.wire.frames import (
    HEARTBEAT_S,
    Accepted,
    Cancel,
    Deltas,
    Finished,
    Message,
    Observation,
    Offer,
    Part,
    Tokens,
    pack,
)
from workers.wire.jobs import decode_job
from workers.wire.opening import NONCE_BYTES, Opening, Passport, Role, State

_VARIETY: Final = 97
_TEXTS: Final = tuple(f" tok{n}" for n in range(_VARIETY))
_USAGE: Final = Tokens(9, 2, None, None)


class _Line:
    """One router, and the streams that it has."""

    def __init__(self, peer: socket.socket, epoch: int) -> None:
        self.peer = peer
        passport = Passport(Role.AGENT, "bench", epoch)
        self.opening = Opening(passport, os.urandom(NONCE_BYTES))
        self.epoch = epoch
        #: Bytes that the socket did not take yet.
        self.held = b""
        self.sequence = 0
        #: By group: stream to [next index, deltas left].
        self.groups: list[dict[int, list[int]]] = [{} for _ in range(GROUPS)]
        self.parts: dict[int, list[bytes]] = {}
        self.sizes: dict[int, int] = {}
        self.write(b"".join(self.opening.out))
        self.opening.out.clear()

    def read(self, octets: bytes) -> None:
        """Take what the router sent."""
        if self.opening.state is not State.OPEN:
            opened = self.opening.receive(octets)
            self.write(b"".join(self.opening.out))
            self.opening.out.clear()
            if not opened:
                return
            self.observe()
            octets = b""
        out = []
        for frame in self.opening.reader.split(octets):
            message = self.opening.reader.decode(frame)
            if isinstance(message, Offer):
                self.parts[message.stream] = []
                self.sizes[message.stream] = message.size
            elif isinstance(message, Part):
                out += self.part(message)
            elif isinstance(message, Cancel):
                self.groups[message.stream % GROUPS].pop(message.stream, None)
        if out:
            self.write(b"".join(map(pack, out)))

    def part(self, part: Part) -> list[Message]:
        """Take a piece of a job; begin with the last."""
        number = part.stream
        parts = self.parts[number]
        parts.append(part.octets)
        if sum(map(len, parts)) < self.sizes[number]:
            return []
        job = decode_job(b"".join(parts))
        del self.parts[number], self.sizes[number]
        count = job.params.max_tokens or 2
        if count > AT_ONCE:
            self.groups[number % GROUPS][number] = [0, count]
            return [Accepted(number)]
        entries = [(number, n, 0, _TEXTS[n % _VARIETY]) for n in range(count)]
        return [
            Accepted(number),
            Deltas(entries),
            Finished(number, count, "length", _USAGE),
        ]

    def step(self, turn: int) -> None:
        """One engine step: a delta for each stream of a group, in one write."""
        group = self.groups[turn]
        if not group or self.held:
            return
        entries = []
        ends: list[Message] = []
        for number, place in group.items():
            index, left = place
            if index < left:
                entries.append((number, index, 0, _TEXTS[index % _VARIETY]))
                place[0] = index + 1
            else:
                ends.append(Finished(number, index, "length", _USAGE))
        out = [pack(Deltas(entries))] if entries else []
        for end in ends:
            out.append(pack(end))
            assert isinstance(end, Finished)
            del group[end.stream]
        self.write(b"".join(out))

    def observe(self) -> None:
        """Say what there is, which proves that we live."""
        self.sequence += 1
        load = sum(map(len, self.groups))
        seen = Observation(
            self.epoch, self.sequence, 4096, load, {"mock": (4096, 2)}, None, []
        )
        self.write(pack(seen))

    def write(self, octets: bytes) -> None:
        """Send, or hold what the socket does not take."""
        octets = self.held + octets
        try:
            sent = self.peer.send(octets)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The read side tells of the loss.
            sent = len(octets)
        self.held = octets[sent:]


class _Agent:
    """All routers, on one epoll."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.epoch = time.time_ns() // 1_000_000
        self.lines: dict[int, _Line] = {}
        self.poll = select.epoll()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.listener.setblocking(False)
        self.poll.register(self.listener, select.EPOLLIN)
        self.port: int = self.listener.getsockname()[1]

    def run(self) -> None:
        """Serve until stdin is at its end."""
        self.poll.register(0, select.EPOLLIN)
        step = 1 / self.rate / GROUPS
        due = time.perf_counter() + step
        beat = time.perf_counter() + HEARTBEAT_S
        turn = 0
        while True:
            wait = max(0.0, due - time.perf_counter())
            for number, _ in self.poll.poll(wait, 256):
                if number == 0:
                    return
                if number == self.listener.fileno():
                    self._accept()
                else:
                    self._read(number)
            now = time.perf_counter()
            if now >= due:
                due += step
                turn = (turn + 1) % GROUPS
                for line in self.lines.values():
                    line.step(turn)
            if now >= beat:
                beat += HEARTBEAT_S
                for line in self.lines.values():
                    # Its first one goes out behind its proof, and not before.
                    if line.opening.state is State.OPEN:
                        line.observe()

    def _accept(self) -> None:
        peer, _ = self.listener.accept()
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines[peer.fileno()] = _Line(peer, self.epoch)
        self.poll.register(peer, select.EPOLLIN)

    def _read(self, number: int) -> None:
        line = self.lines[number]
        try:
            octets = line.peer.recv(262144)
        except OSError:
            octets = b""
        if octets:
            if line.held:
                line.write(b"")
            line.read(octets)
            return
        del self.lines[number]
        self.poll.unregister(number)
        line.peer.close()


@click.command()
@click.option("--rate", default=50.0, help="Deltas a second of a stream.")
def main(rate: float) -> None:
    """Serve on a free port of 127.0.0.1 until stdin closes."""
    agent = _Agent(rate)
    click.echo(f"listening {agent.port}")
    agent.run()


if __name__ == "__main__":
    main()
