"""What a router holds in memory for clients that stop reading.

The engine floods: each client asks for a stream of tens of megabytes, reads its
head and then nothing for a while. A router that reads on without a bound grows by
all of it; one that passes the pressure back stays as it was, and what the engine
could write shows how much lies in its buffers and the kernel's.
"""

import json
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import attrs

from bench.contenders import Contender, ask, engine, started
from bench.processes import resident_mib

#: Bytes of one delta of the mock engine on the wire, roughly.
_DELTA_BYTES: Final = 257


@attrs.frozen
class Held:
    """One router with stalled clients."""

    router: str
    clients: int
    before_mib: float
    after_mib: float
    taken_mib: float
    """What the engine could write, for all clients together."""
    engine: str
    """*held back*, *read to its end*, or *still being read* after the wait."""


def _written(engine_port: int) -> int:
    stats = json.loads(ask(engine_port, "/stats").partition(b"\r\n\r\n")[2])
    written: int = stats["written"]
    return written


def _fate(taken: int, lately: int, megabytes: int) -> str:
    """What became of the engine's streams of *megabytes* in all."""
    if taken > 0.95 * megabytes * 1_000_000:
        return "read to its end"
    return "still being read" if lately > 2**20 else "held back"


def stalled(
    contenders: list[Contender], clients: int, megabytes: int, seconds: float
) -> list[Held]:
    """Stall *clients* streams of *megabytes* each for *seconds*, router by router.

    Raises:
        RuntimeError: a router did not start.
        OSError: it did not begin to answer.
    """
    chat = json.dumps(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": megabytes * 1_000_000 // _DELTA_BYTES,
            "stream": True,
        }
    ).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(chat), chat)
    )
    held = []
    for contender in contenders:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log = stack.enter_context((folder / "log").open("wb"))
            port = stack.enter_context(engine(0, log))
            router = stack.enter_context(started(contender, port, folder, log))
            before, base = resident_mib(router.pid), _written(port)
            for _ in range(clients):
                peer = stack.enter_context(
                    socket.create_connection(("127.0.0.1", router.port), timeout=10)
                )
                peer.sendall(request)
                peer.recv(1024)
            time.sleep(seconds / 2)
            half = _written(port)
            time.sleep(seconds / 2)
            written = _written(port)
            held.append(
                Held(
                    router=contender.name,
                    clients=clients,
                    before_mib=before,
                    after_mib=resident_mib(router.pid),
                    taken_mib=(written - base) / 2**20,
                    engine=_fate(written - base, written - half, clients * megabytes),
                )
            )
    return held


def table(rows: list[Held]) -> str:
    """The figures as text."""
    lines = []
    lines.append(
        f"{'router':<16}{'clients':>8}{'MiB before':>12}{'MiB after':>11}"
        f"{'MiB/client':>12}{'MiB from engine':>17}  the engine was"
    )
    for row in rows:
        each = (row.after_mib - row.before_mib) / row.clients
        lines.append(
            f"{row.router:<16}{row.clients:>8}{row.before_mib:>12.0f}"
            f"{row.after_mib:>11.0f}{each:>12.2f}{row.taken_mib:>17.1f}  {row.engine}"
        )
    return "\n".join(lines)
