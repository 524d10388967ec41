"""What one engine step costs a router, from the wire's frame to its clients' sockets.

``python -m bench.step [STREAMS]``: real flights, fences, encoders, sinks and sockets
in this process, drained by another; only the read of the wire is left out. The
figure is CPU time a delta: *chain*, to the sink, and *send*, the run of sends behind
it; the best and the median of the rounds.
"""

import json
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final, NoReturn

import trio

from bench.wire import Nobody, reader
from router.edge.server import client_edge
from router.engine import Router, open_router
from router.ids import AssignmentId, WorkerId
from router.messages import Discovery, Job, Probe, ProbeResult, SlotView
from router.ports import Delivery
from workers.wire.attempt import RemoteSource
from workers.wire.frames import AGENT_SENDS, Accepted, Deltas, pack
from workers.wire.routing import RouterEnd

ROUNDS: Final = 30
STEPS: Final = 20
BODY: Final = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
).encode()
REQUEST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)


class Wired(Nobody):
    """A worker whose deltas come when this file says so."""

    def __init__(self) -> None:
        """Wait for offers."""
        self.id = WorkerId("far")
        self.works: bool | None = None
        self.settle_s = 0.0
        self.settles_by_probe = False
        self.end = RouterEnd(self, reader(AGENT_SENDS), 1, frozenset(), lambda: None)

    def now(self) -> float:
        """Give the time."""
        return trio.current_time()

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> RemoteSource:
        """Accept at once."""
        del slot
        source = self.end.offer(assignment, job, delivery, 0)
        source.opening = False
        return source

    async def run(self) -> NoReturn:
        """Do nothing by itself."""
        await trio.sleep_forever()

    async def probe(self) -> Probe:
        """Be there, with room for everybody."""
        await trio.lowlevel.checkpoint()
        return Probe(ProbeResult.ANSWERED, discovery=Discovery(("m",), 4096))

    async def slot_view(self) -> SlotView | None:
        """Say nothing of slots."""
        await trio.lowlevel.checkpoint()
        return None

    async def alive(self) -> bool:
        """Live."""
        await trio.lowlevel.checkpoint()
        return True

    async def count_tokens(self, job: Job) -> int | None:
        """Count nothing."""
        del job
        await trio.lowlevel.checkpoint()
        return None


def drain(port: int, streams: int) -> None:
    """Be all clients: ask, and read until the router is gone."""
    poll = select.epoll()
    socks = {}
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(REQUEST)
        sock.setblocking(False)
        socks[sock.fileno()] = sock
        poll.register(sock, select.EPOLLIN)
    while socks:
        for number, _ in poll.poll():
            if not socks[number].recv(65536):
                return


async def measure(streams: int) -> Mapping[str, list[float]]:
    """Give microseconds a delta, by part, of each round."""
    worker = Wired()
    found: dict[str, list[float]] = {"chain": [], "send": []}
    async with open_router(workers=[worker]) as router, trio.open_nursery() as nursery:
        listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
        edge = client_edge(router)
        await nursery.start(edge.serve, [listener])
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-m", "bench.step", "--drain", port, str(streams)]
        # Blocking for a moment, before anything is measured.
        with subprocess.Popen(command) as clients:  # noqa: ASYNC220
            while len(worker.end.sources) < streams:  # noqa: ASYNC110 - other process
                await trio.sleep(0.05)
            sources = list(worker.end.sources.values())
            worker.end.outbox.pull()
            worker.end.received(b"".join(pack(Accepted(s.number)) for s in sources), 0)
            for turn in range(ROUNDS):
                steps = [_step(sources, turn * STEPS + index) for index in range(STEPS)]
                chain, send = _round(router, worker, steps)
                found["chain"].append(chain / STEPS / streams / 1e3)
                found["send"].append(send / STEPS / streams / 1e3)
                worker.end.outbox.pull()
                await trio.sleep(0.05)
            clients.kill()
        nursery.cancel_scope.cancel()
    return found


def _step(sources: list[RemoteSource], index: int) -> bytes:
    return pack(Deltas([(s.number, index, 0, f" tok{index % 97}") for s in sources]))


def _round(router: Router, worker: Wired, steps: list[bytes]) -> tuple[int, int]:
    chain = send = 0
    for step in steps:
        began = time.process_time_ns()
        now = trio.current_time()
        router.cork.hold(now)
        worker.end.received(step, now)
        between = time.process_time_ns()
        router.cork.release()
        send += time.process_time_ns() - between
        chain += between - began
    return chain, send


def main() -> None:
    """Print the figures."""
    if "--drain" in sys.argv:
        drain(int(sys.argv[-2]), int(sys.argv[-1]))
        return
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    found = trio.run(measure, streams)
    for name, values in found.items():
        median, best = statistics.median(values), min(values)
        print(f"{name:8}{median:7.2f} median{best:7.2f} best   µs a delta")


if __name__ == "__main__":
    main()
