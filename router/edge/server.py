"""The edge: listening sockets, their connections, and how both end.

Two rules: connections live outside the nursery that accepts them, so that
closing the listeners ends none of them; and of a client's doing, nothing ends
the server (H6).
"""

import logging
import resource
import socket
from collections.abc import Sequence
from typing import Final

import attrs
import structlog
import trio

from router.edge.accept import BACK_OFF_S, PER_WAKE, Acceptor, Exhausted, tune
from router.edge.connection import Connection
from router.edge.core import Core, Log
from router.edge.keys import Keys
from router.edge.poll import ClientPoll
from router.edge.routes import RouteTable, api_routes
from router.edge.site import Patience, Site
from router.errors import LocalError
from router.settings import ServerSettings
from router.waiting import LATE_S

#: What waits in the kernel when listening ends is still served, up to here.
_LAST_ACCEPTS: Final = 1024
#: Descriptors that are not for clients: ours, which are a dozen, those of operators
#: and a few agents; and of each worker two probes at once, or its process's pipes.
OWN: Final = 64
OF_A_WORKER: Final = 4


class Edge:
    """HTTP/1.1 in front of some routes.

    ``serve`` runs it. ``drain`` and ``stop_accepting`` are synchronous and
    may be called from any task of the same run.
    """

    def __init__(self, site: Site, routes: RouteTable) -> None:
        """Beyond ``connections_max`` of the site's settings it is 503 (H6)."""
        self.site = site
        self.routes = routes
        self._live: set[Connection] = set()
        self._listeners: Sequence[socket.socket] = ()
        self._stopping = False

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._live)

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve what comes at *listeners*, once. A checkpoint.

        Returns when, after ``stop_accepting``, the last connection has ended.
        If cancelled, every connection is closed; the listeners are left open,
        for they are the caller's.

        Raises:
            LocalError: an invariant is broken (L1), inside exception groups.
        """
        for listener in listeners:
            listener.setblocking(False)
            tune(listener, self.site.settings.client_stall_ms)
        self._listeners = listeners
        poll = ClientPoll(self.site.bug)
        acceptor = Acceptor(self.site)
        try:
            async with trio.open_nursery() as background:
                background.start_soon(poll.run)
                background.start_soon(self._sweep)
                async with (
                    trio.open_nursery() as connections,
                    trio.open_nursery() as accepting,
                ):
                    for listener in listeners:
                        accepting.start_soon(
                            self._accept, listener, acceptor, poll, connections
                        )
                    task_status.started()
                background.cancel_scope.cancel()
        finally:
            acceptor.close()
            poll.close()

    def drain(self) -> None:
        """Ask clients to go elsewhere (D3).

        Readiness turns to 503 and each reply closes its connection; new
        requests are still served.
        """
        self.site.draining = True

    def stop_accepting(self) -> None:
        """Close the listeners, and connections that are idle (D3).

        What the kernel had accepted already is still served. ``serve``
        returns once the last connection has ended.
        """
        self.drain()
        if self._stopping:
            return
        self._stopping = True
        for listener in self._listeners:
            trio.lowlevel.notify_closing(listener)
        now = trio.current_time()
        for connection in self._live:
            connection.retire(now)

    async def _accept(
        self,
        listener: socket.socket,
        acceptor: Acceptor,
        poll: ClientPoll,
        connections: trio.Nursery,
    ) -> None:
        """Accept until told to stop, then close *listener*."""
        while not self._stopping:
            try:
                await trio.lowlevel.wait_readable(listener)
            except trio.ClosedResourceError:
                break
            try:
                for sock in acceptor.waiting(listener, PER_WAKE):
                    self._admit(sock, acceptor, poll, connections)
            except Exhausted:
                await trio.sleep(BACK_OFF_S)
        try:
            for sock in acceptor.waiting(listener, _LAST_ACCEPTS):
                self._admit(sock, acceptor, poll, connections)
        except Exhausted:
            pass  # those who still wait are refused by the close
        finally:
            listener.close()

    def _admit(
        self,
        sock: socket.socket,
        acceptor: Acceptor,
        poll: ClientPoll,
        connections: trio.Nursery,
    ) -> None:
        """Give *sock* a task, or turn it away."""
        if len(self._live) >= self.site.settings.connections_max:
            acceptor.turn_away(sock)
            return
        connection = Connection(sock, self.site, self.routes, poll, self._live.discard)
        self._live.add(connection)
        if self._stopping:
            # It came with the last of them: it may have nothing to ask.
            connection.retire(trio.current_time())
        connections.start_soon(connection.run)

    async def _sweep(self) -> None:
        """Look at all clocks, now and then. Returns only when cancelled."""
        site = self.site
        held_up = False
        while True:
            due = trio.current_time() + site.patience.sweep_s
            await trio.sleep_until(due)
            site.read_wall_clock()
            now = trio.current_time()
            held_up = not held_up and now > due + LATE_S
            if held_up:
                # What clients did in time waits in the kernel, and is read before
                # the next sweep.
                continue
            for connection in [c for c in self._live if c.until <= now]:
                try:
                    connection.expire(now)
                except LocalError:
                    raise
                except Exception as bug:  # noqa: BLE001  one client's bug (L1)
                    site.bug("edge.sweep", bug)


def default_log() -> Log:
    """Give the log of those who bring none: Python's own, ``fencepost``."""
    log: Log = structlog.wrap_logger(
        logging.getLogger("fencepost"),
        processors=[structlog.stdlib.render_to_log_kwargs],
    )
    return log


def clients_that_fit(descriptors: int, workers: int) -> int:
    """Say how many clients may be served at once; each may need a second
    descriptor, towards its worker (H6)."""
    return max(1, (descriptors - OWN - OF_A_WORKER * workers) // 2)


def client_edge(
    router: Core,
    settings: ServerSettings | None = None,
    *,
    log: Log | None = None,
    patience: Patience | None = None,
) -> Edge:
    """Make the edge for clients of *router*.

    Args:
        router: what serves.
        settings: None: the router's own. Whatever ``connections_max`` says, no
            more clients are served than there are descriptors for, see
            ``clients_that_fit`` (H6); how many that is, the edge's site says.
        log: None: Python's ``fencepost`` logger.
        patience: None: the defaults of H1.

    Raises:
        KeysInvalid: ``api_keys_file`` can't be read as one. The file is read
            here; to read it anew, set ``edge.routes.keys``.
    """
    settings = router.settings.server if settings is None else settings
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        fit = clients_that_fit(soft, len(router.settings.workers))
        most = min(settings.connections_max, fit)
        settings = attrs.evolve(settings, connections_max=most)
    site = Site(
        settings,
        router.tally,
        router.cork,
        router.new_request_id,
        default_log() if log is None else log,
        Patience() if patience is None else patience,
    )
    routes = api_routes(router, site, settings.prefixes)
    if settings.api_keys_file is not None:
        routes.keys = Keys.load(settings.api_keys_file)
    return Edge(site, routes)


async def serve(
    router: Core,
    listeners: Sequence[socket.socket],
    *,
    settings: ServerSettings | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Put the HTTP edge of *router* on *listeners* (E2). A checkpoint.

    Runs until cancelled; then every connection is closed and the listeners,
    which are the caller's, are left open.

    Args:
        router: an open router, which outlives this call.
        listeners: bound, listening stream sockets, TCP or unix.
        settings: as ``client_edge`` takes them.
        task_status: started once connections are accepted.

    Raises:
        KeysInvalid: ``api_keys_file`` can't be read as one.
    """
    edge = client_edge(router, settings)
    await edge.serve(listeners, task_status=task_status)
