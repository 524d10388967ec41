"""The composition root of an agent: from settings to a daemon and to nothing (D1).

As a router's, with the wire in place of the clients' edge: addresses first,
engines next; at a signal no offer is taken any more, and what runs may finish
until ``drain_ms`` (L5).
"""

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, TextIO

import trio

from router.config.addresses import parse_address
from router.daemon.listening import open_listeners, shown
from router.daemon.serving import (
    RequestEnd,
    open_admin,
    own,
    run_to_the_end,
    unusable_files,
    with_state_dir,
)
from router.daemon.stopping import SIGNALS, hurry_on_signal, stop_on_signal
from router.edge.admin import admin_edge
from router.engine import open_router
from router.errors import Fault, FaultKind
from router.logs import Log, LogForm
from router.settings import AgentSettings, Settings
from workers.access import agent_access, site_of
from workers.agent import Agent

LISTEN: Final = "agent.listen"
#: What clients of its routers hear, whose answers outlast its drain.
DRAIN_OVER: Final = Fault(
    FaultKind.SHUTTING_DOWN, "the agent stopped before the answer was whole"
)


def run_agent(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    form: LogForm,
    stream: TextIO,
) -> None:
    """Run a whole agent; see ``serving.run_to_the_end``. It has ``[agent]``."""
    run_to_the_end(_run, settings, environ=environ, form=form, stream=stream)


class _Front:
    """The agent as the part of a daemon that ends (``stopping.Front``)."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def connections(self) -> int:
        """Routers that are connected."""
        return len(self._agent.visits)

    def drain(self) -> None:
        """Take no offer any more."""
        self._agent.drain()

    def stop_accepting(self) -> None:
        """Routers may look in until the end: they are told that we drain."""


async def _run(
    settings: Settings,
    environ: Mapping[str, str],
    log: Log,
    on_request_end: RequestEnd,
) -> None:
    own_settings = settings.agent or AgentSettings()
    with unusable_files():
        access = agent_access(own_settings, environ)
    settings = with_state_dir(settings, environ)
    with trio.open_signal_receiver(*SIGNALS) as signals, ExitStack() as sockets:
        operators = await open_admin(settings, environ, sockets)
        doors: list[socket.socket] = []
        for text in own_settings.listen:
            opened = await open_listeners(parse_address(text), LISTEN)
            own(opened, sockets)
            doors += opened
        sites = [
            site_of(text, secure=access.outward is not None)
            for text in own_settings.routers
        ]
        async with trio.open_nursery() as last:
            async with open_router(settings) as router:
                router.on_request_end = on_request_end
                agent = Agent(router, access, rng=router.rng)
                router.also = agent.status
                admin = admin_edge(router, log=log)
                async with trio.open_nursery() as nursery:
                    await nursery.start(admin.serve, operators)
                    await nursery.start(agent.serve, doors, sites)
                    log.info(
                        "listening",
                        routers=[shown(sock) for sock in doors],
                        announces=list(own_settings.routers),
                        admin=[shown(sock) for sock in operators],
                        workers=len(settings.workers),
                        pid=os.getpid(),
                    )
                    await stop_on_signal(
                        signals,
                        router,
                        _Front(agent),
                        admin,
                        agent.rested,
                        settings.server,
                        log,
                        cut=DRAIN_OVER,
                    )
                    agent.dismiss()
                    await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                # Workers that are run end now, and may take their time.
                last.start_soon(hurry_on_signal, signals, router, log)
            last.cancel_scope.cancel()
    log.info("stopped")
