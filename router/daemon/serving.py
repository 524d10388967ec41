"""The composition root: from settings to a running daemon and back to nothing.

Order matters twice. Addresses are taken before workers are met, so that a
second daemon by mistake touches nothing; and sockets in the file system are
removed last, after nobody answers there any more.
"""

import gc
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, TextIO, TypeAlias

import attrs
import trio

from router.config.addresses import UnixAddress, parse_address
from router.control import admin_address, state_dir
from router.daemon.faults import Crashed, StartFailed
from router.daemon.listening import (
    close_all,
    make_private,
    open_listeners,
    private_dir,
    shown,
    unlinked_after,
)
from router.daemon.stopping import SIGNALS, hurry_on_signal, stop_on_signal
from router.edge.admin import admin_edge
from router.edge.server import Edge, client_edge
from router.engine import open_router
from router.engine.announced import Greeter
from router.logs import Log, LogForm, bridged, open_log, request_line
from router.settings import Settings
from workers.access import router_access

RequestEnd: TypeAlias = Callable[[Mapping[str, object]], None]
Whole: TypeAlias = Callable[
    [Settings, Mapping[str, str], Log, RequestEnd], Awaitable[None]
]

LISTEN: Final = "--listen or server.listen"
AGENTS: Final = "agents.listen"
ADMIN: Final = "--admin or admin.listen"


def run_daemon(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    form: LogForm,
    stream: TextIO,
) -> None:
    """Run a whole router; see ``run_to_the_end``."""
    run_to_the_end(_run, settings, environ=environ, form=form, stream=stream)


def run_to_the_end(
    run: Whole,
    settings: Settings,
    *,
    environ: Mapping[str, str],
    form: LogForm,
    stream: TextIO,
) -> None:
    """Run a whole daemon in a Trio run of its own; returns after a signal.

    Blocks, and takes the signals of the process: for its main thread.

    Args:
        run: what it does between its first and its last signal.
        settings: checked.
        environ: where the default state folder is looked for.
        form: how lines look on *stream*.
        stream: gets the log.

    Raises:
        StartFailed: an address or a folder can't be had; nothing is left open.
        Crashed: a bug ended it; the log has its trace.
    """
    log = open_log(form, stream)
    raise_descriptor_limit()
    _calm_collector()
    with bridged(log, "fencepost"):
        try:
            trio.run(run, settings, environ, log, request_line(form, stream))
        except StartFailed:
            raise
        except (Exception, BaseExceptionGroup) as bug:
            log.error("crashed", exc_info=bug)  # noqa: TRY400  it traces without text
            raise Crashed from None


def _calm_collector() -> None:
    """Keep the garbage collector from looking through all modules all the time.

    What is imported by now lives as long as the process. A request makes no
    cycles that matter, so looking for them ten times less often costs some
    hundred KiB and saves a few per cent of the CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def raise_descriptor_limit() -> int:
    """Raise the soft limit on descriptors to the hard one; give what holds (H6)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


async def _run(
    settings: Settings,
    environ: Mapping[str, str],
    log: Log,
    on_request_end: RequestEnd,
) -> None:
    settings = with_state_dir(settings, environ)
    with trio.open_signal_receiver(*SIGNALS) as signals, ExitStack() as sockets:
        operators = await open_admin(settings, environ, sockets)
        clients: list[socket.socket] = []
        for text in settings.server.listen:
            opened = await open_listeners(parse_address(text), LISTEN)
            own(opened, sockets)
            clients += opened
        doors: list[socket.socket] = []
        for text in settings.agents.listen:
            opened = await open_listeners(parse_address(text), AGENTS)
            own(opened, sockets)
            doors += opened
        with unusable_files():
            router_access(settings.agents, environ)
        async with trio.open_nursery() as last:
            async with open_router(settings) as router:
                router.on_request_end = on_request_end
                edge, admin = client_edge(router, log=log), admin_edge(router, log=log)
                ended = trio.Event()
                async with trio.open_nursery() as nursery:
                    await nursery.start(admin.serve, operators)
                    if doors:
                        # First: a client must not hear that there is no model.
                        await nursery.start(Greeter(router).serve, doors)
                    await nursery.start(_serve_to_the_end, edge, clients, ended)
                    log.info(
                        "listening",
                        clients=[shown(sock) for sock in clients],
                        agents=[shown(sock) for sock in doors],
                        admin=[shown(sock) for sock in operators],
                        workers=len(settings.workers),
                        connections_max=edge.site.settings.connections_max,
                    )
                    await stop_on_signal(
                        signals, router, edge, admin, ended, settings.server, log
                    )
                    nursery.cancel_scope.cancel()
                # Workers that are run end now, and may take their time.
                last.start_soon(hurry_on_signal, signals, router, log)
            last.cancel_scope.cancel()
    log.info("stopped")


def with_state_dir(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Say where the state folder is, and make it where workers are to be run."""
    folder = state_dir(settings, environ)
    if any(worker.command is not None for worker in settings.workers):
        private_dir(folder, "server.state_dir")
    return attrs.evolve(
        settings, server=attrs.evolve(settings.server, state_dir=str(folder))
    )


@contextmanager
def unusable_files() -> Iterator[None]:
    """Turn a certificate that can't be used into one line (D5)."""
    try:
        yield
    except ValueError as error:
        raise StartFailed(f"{error}: correct tls_cert, tls_key and tls_ca") from None


async def _serve_to_the_end(
    edge: Edge,
    listeners: Sequence[socket.socket],
    ended: trio.Event,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    await edge.serve(listeners, task_status=task_status)
    ended.set()


async def open_admin(
    settings: Settings, environ: Mapping[str, str], sockets: ExitStack
) -> list[socket.socket]:
    """Listen for operators: on a socket that only this user reaches, or as told."""
    try:
        address = admin_address(settings, environ)
    except ValueError as error:
        raise StartFailed(
            f"server.state_dir is no place for a socket: {error}"
        ) from None
    if settings.admin.listen is None:
        private_dir(state_dir(settings, environ), "server.state_dir")
    opened = await open_listeners(address, ADMIN)
    own(opened, sockets)
    if isinstance(address, UnixAddress):
        make_private(opened)
    return opened


def own(opened: Sequence[socket.socket], sockets: ExitStack) -> None:
    """Have *sockets* close what was opened, and remove it from the file system."""
    sockets.callback(close_all, opened)
    sockets.enter_context(unlinked_after(opened))
