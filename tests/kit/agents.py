"""Agents in this process, over fake engines and real sockets of 127.0.0.1."""

import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import trio

from router.engine import Router, open_router
from router.settings import (
    AgentSettings,
    AgentsSettings,
    ServerSettings,
    Settings,
    WaitSettings,
    WorkerSettings,
)
from tests.kit.edge import until
from tests.kit.engine import FakeEngine, Script, open_engine
from workers.access import agent_access, site_of
from workers.agent import Agent

#: Short enough for tests, long enough for a loaded machine.
QUICK = WaitSettings(connect_ms=1_000, poll_ms=100, offer_timeout_ms=2_000)
TOKEN = "a token of tests, long enough"
ENVIRON = {"TOKEN": TOKEN}


def listen() -> socket.socket:
    """Listen on a free port of 127.0.0.1."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=128)
    sock.setblocking(False)
    return sock


def port_of(sock: socket.socket) -> int:
    """Give the port that *sock* listens on."""
    port: int = sock.getsockname()[1]
    return port


@attrs.define
class RunningAgent:
    """One agent, its engines and where it listens."""

    agent: Agent
    router: Router
    engines: Sequence[FakeEngine]
    port: int
    scope: trio.CancelScope

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def idle(self) -> bool:
        """S2: nothing is held here, settling permits included."""
        fleet = self.router.fleet
        return (
            not self.router.flights
            and not self.agent.active
            and all(not member.busy for member in fleet.members.values())
        )

    def kill(self) -> None:
        """End it without a word, as far as one process can."""
        self.scope.cancel()


@asynccontextmanager
async def open_agent(
    *scripts: Script | None,
    slots: int = 4,
    models: Sequence[str] = ("m",),
    kind: str = "generic",
    name: str = "host",
    waits: WaitSettings = QUICK,
    server: ServerSettings | None = None,
    settings: AgentSettings | None = None,
    routers: Sequence[int] = (),
    sock: socket.socket | None = None,
) -> AsyncIterator[RunningAgent]:
    """Run one agent over one fake engine a script, all of them ready.

    Args:
        scripts: what each engine answers; None: the kit's usual answer.
        slots: of each engine.
        models: of each engine.
        kind: of each engine.
        name: the agent's.
        waits: the agent's.
        server: the agent's.
        settings: its token and certificates.
        routers: ports to announce itself at.
        sock: where it listens; None: any free port.
    """
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                open_engine(script, kind=kind, slots=slots, models=models)
            )
            for script in scripts
        ]
        workers = tuple(
            WorkerSettings(f"e{n}", engine.url, slots=slots, settle_ms=0)
            for n, engine in enumerate(engines)
        )
        own = attrs.evolve(settings or AgentSettings(), name=name)
        router = await stack.enter_async_context(
            open_router(
                Settings(
                    server=server or ServerSettings(),
                    waits=waits,
                    workers=workers,
                    agent=own,
                )
            )
        )
        with trio.fail_after(5):
            await until(lambda: all(m.serving for m in router.fleet.members.values()))
        agent = Agent(router, agent_access(own, ENVIRON), rng=random.Random(1))
        listener = sock or listen()
        port = port_of(listener)
        async with trio.open_nursery() as nursery:
            sites = [site_of(f"127.0.0.1:{p}", secure=False) for p in routers]

            async def run(task_status: trio.TaskStatus[trio.CancelScope]) -> None:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as inner:
                        await inner.start(agent.serve, [listener], sites)
                        task_status.started(scope)

            scope = await nursery.start(run)
            yield RunningAgent(agent, router, engines, port, scope)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_far_router(
    *agents: RunningAgent | int,
    waits: WaitSettings = QUICK,
    ready: bool = True,
    worker: dict[str, Any] | None = None,
    settings: AgentsSettings | None = None,
) -> AsyncIterator[Router]:
    """Run a router whose workers ``a0``, ``a1`` … are *agents* (or their ports)."""
    ports = [a if isinstance(a, int) else a.port for a in agents]
    workers = tuple(
        WorkerSettings(f"a{n}", agent=f"127.0.0.1:{port}", **(worker or {}))
        for n, port in enumerate(ports)
    )
    whole = Settings(waits=waits, workers=workers, agents=settings or AgentsSettings())
    async with open_router(whole, rng=random.Random(2)) as router:
        if ready:
            with trio.fail_after(5):
                await until(
                    lambda: all(m.serving for m in router.fleet.members.values())
                )
        yield router
