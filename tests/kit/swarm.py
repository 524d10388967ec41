"""Routers and agents as processes, engines here, and clients that check it all.

An engine's answer names the generation that it is of, ``g7.0 g7.1 …``; so a
client can tell a piece twice, a piece missing, and two answers in one.
"""

import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import trio

from tests.kit.daemon import PATIENCE_S, Daemon, open_daemon, until
from tests.kit.engine import FakeEngine, open_engine
from tests.kit.exchange import Exchange
from tests.kit.keeping import free_port

#: Deltas of one answer, and the pause between two.
PIECES: Final = 20
PAUSE_S: Final = 0.01
TOKEN: Final = "a token of the swarm's own"
ENVIRON: Final = {"SWARM_TOKEN": TOKEN}


class Generations:
    """The engines' script, and what all engines did."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.begun = 0
        self.working: Counter[int] = Counter()
        #: Most that ever worked at once, by engine.
        self.most: Counter[int] = Counter()

    def script(self, engine: int) -> Any:
        async def play(x: Exchange) -> None:
            self.begun += 1
            number = self.begun
            self.working[engine] += 1
            self.most[engine] = max(self.most[engine], self.working[engine])
            try:
                await x.role()
                for n in range(PIECES):
                    await x.text(f"g{number}.{n} ")
                    await trio.sleep(PAUSE_S)
            finally:
                # Its slot is free before it has said so.
                self.working[engine] -= 1
            await x.finish()
            await x.usage(1, PIECES)
            await x.done()
            await x.end()

        return play


@attrs.define
class Asked:
    """One client's request, and how it ended."""

    text: str = ""
    whole: bool = False
    pieces: int = 0
    """Deltas that it came in."""
    tokens: int = 0
    """As its usage says."""
    error: str = ""
    status: int = 0

    def check(self) -> None:
        """F1: a gapless prefix of one generation, and whole if it says so."""
        pieces = self.text.split()
        if pieces:
            name = pieces[0].partition(".")[0]
            expected = [f"{name}.{n}" for n in range(len(pieces))]
            assert pieces == expected, f"a duplicate or a gap: {pieces}"
        if self.whole:
            assert len(pieces) == PIECES, f"a short answer as a whole one: {pieces}"


CHAT: Final = {
    "model": "m",
    "stream": True,
    "messages": [{"role": "user", "content": "go"}],
}


async def ask(url: str, chat: Mapping[str, Any] = CHAT) -> Asked:
    """Stream one answer, whatever becomes of it. A checkpoint."""
    asked = Asked()
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = json.dumps(chat).encode()
    # HTTP/1.0: the body is what comes until the end.
    request = (
        b"POST /v1/chat/completions HTTP/1.0\r\nhost: f\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    got = b""
    try:
        with trio.fail_after(PATIENCE_S):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(request)
                while octets := await stream.receive_some(65536):
                    got += octets
    except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
        asked.error = type(error).__name__
    head, _, rest = got.partition(b"\r\n\r\n")
    if head:
        asked.status = int(head.split()[1])
    # What was cut off is no line.
    for line in rest.decode().split("\n"):
        _read(asked, line)
    if not asked.whole:
        asked.error = asked.error or "cut"
    return asked


def _read(asked: Asked, line: str) -> None:
    if line == "data: [DONE]":
        asked.whole = True
    elif line.startswith("data: ") and line.endswith("}"):
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            asked.error = str(event["error"]["code"])
        asked.tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            asked.text += text
            asked.pieces += bool(text)
    elif line.startswith("{") and line.endswith("}"):
        asked.error = str(json.loads(line)["error"]["code"])


@attrs.define
class Part:
    """A process that can be killed and started again, at the same address."""

    swarm: "Swarm"
    command: str
    config: Path
    daemon: Daemon | None = None
    prefix: tuple[str, ...] = ()

    async def run(
        self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run it until it is killed."""
        async with open_daemon(
            ["--config", str(self.config)],
            command=self.command,
            environ=ENVIRON,
            prefix=self.prefix,
        ) as daemon:
            self.daemon = daemon
            task_status.started()
            await daemon.process.wait()
            self.daemon = None

    @property
    def running(self) -> Daemon:
        assert self.daemon is not None
        return self.daemon

    async def start(self) -> None:
        """Start it, and wait until it listens. A checkpoint."""
        await self.swarm.nursery.start(self.run)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone. A checkpoint."""
        daemon = self.running
        daemon.signal(signal.SIGKILL)
        await daemon.process.wait()

    async def status(self) -> Any:
        """What its ``/status`` says. A checkpoint."""
        wire = httpx.AsyncHTTPTransport(uds=self.running.admin.removeprefix("unix:"))
        async with httpx.AsyncClient(
            transport=wire, base_url="http://admin", timeout=PATIENCE_S
        ) as client:
            return (await client.get("/status")).raise_for_status().json()


@attrs.define
class Swarm:
    """All of it."""

    nursery: trio.Nursery
    engines: Sequence[FakeEngine]
    generations: Generations
    agents: list[Part] = attrs.field(factory=list)
    routers: list[Part] = attrs.field(factory=list)

    async def ready(self) -> None:
        """Wait until every router has every agent. A checkpoint."""
        for router in self.routers:

            async def is_ready(router: Part = router) -> bool:
                workers = (await router.status())["workers"]
                ready = sum(worker["state"] == "ready" for worker in workers)
                return bool(ready == len(self.agents))

            await until(is_ready)

    async def rest(self) -> None:
        """Wait until nothing is held anywhere. A checkpoint."""

        async def is_idle() -> bool:
            if any(engine.live for engine in self.engines):
                return False
            parts = [*self.agents, *self.routers]
            for part in parts:
                status = await part.status()
                if status["requests"] or any(
                    w["in_flight"] or w["settling"] or w["ghosts"]
                    for w in status["workers"]
                ):
                    return False
            return True

        await until(is_idle)


def agent_config(
    folder: Path,
    port: int,
    url: str,
    slots: int,
    *,
    engine: str = "generic",
    # Our engine's script sees a closed request when it writes next.
    settle_ms: int = 100,
    host: str = "127.0.0.1",
) -> Path:
    """Write an agent's file into a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "agent.toml"
    path.write_text(
        f"""
        [server]
        state_dir = "{folder}"
        [agent]
        name = "{folder.name}"
        listen = "{host}:{port}"
        token_env = "SWARM_TOKEN"
        [waits]
        poll_ms = 100
        [[worker]]
        name = "e"
        url = "{url}"
        engine = "{engine}"
        slots = {slots}
        settle_ms = {settle_ms}
        """
    )
    return path


def router_config(folder: Path, port: int, agents: Sequence[str]) -> Path:
    """Write a router's file into a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "router.toml"
    lines = [
        "[server]",
        f'listen = "127.0.0.1:{port}"',
        f'state_dir = "{folder}"',
        "[agents]",
        'token_env = "SWARM_TOKEN"',
        "[waits]",
        # A machine under test answers late.
        "offer_timeout_ms = 1000",
        "[router]",
        "queue_limit = 1000",
    ]
    for number, agent in enumerate(agents):
        lines += ["[[worker]]", f'name = "a{number}"', f'agent = "{agent}"']
    path.write_text("\n".join(lines))
    return path


@asynccontextmanager
async def open_swarm(
    folder: Path, *, agents: int = 2, routers: int = 2, slots: int = 4
) -> AsyncIterator[Swarm]:
    """Run it all: an engine here for each agent, and every router with every agent."""
    generations = Generations(slots)
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                open_engine(generations.script(n), kind="generic", slots=slots)
            )
            for n in range(agents)
        ]
        nursery = await stack.enter_async_context(trio.open_nursery())
        swarm = Swarm(nursery, engines, generations)
        ports = [free_port() for _ in range(agents)]
        for n, (port, engine) in enumerate(zip(ports, engines, strict=True)):
            config = agent_config(folder / f"h{n}", port, engine.url, slots)
            swarm.agents.append(Part(swarm, "agent", config))
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for n in range(routers):
            config = router_config(folder / f"r{n}", free_port(), addresses)
            swarm.routers.append(Part(swarm, "serve", config))
        for part in (*swarm.agents, *swarm.routers):
            await part.start()
        await swarm.ready()
        yield swarm
        nursery.cancel_scope.cancel()
