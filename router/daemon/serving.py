"""The composition root: from settings to a running daemon and back to nothing.

Order matters twice. Addresses are taken before workers are met, so that a
second daemon by mistake touches nothing; and sockets in the file system are
removed last, after nobody answers there any more.
"""

import gc
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from router.logs import Log, LogForm, bridged, open_log, request_line
from router.settings import Settings

RequestEnd: TypeAlias = Callable[[Mapping[str, object]], None]

LISTEN: Final = "--listen or server.listen"
ADMIN: Final = "--admin or admin.listen"


def run_daemon(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    form: LogForm,
    stream: TextIO,
) -> None:
    """Run a whole daemon in a Trio run of its own; returns after a signal.

    Blocks, and takes the signals of the process: for its main thread.

    Args:
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
            trio.run(_run, settings, environ, log, request_line(form, stream))
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
    settings = _with_state_dir(settings, environ)
    with trio.open_signal_receiver(*SIGNALS) as signals, ExitStack() as sockets:
        operators = await _open_admin(settings, environ, sockets)
        clients: list[socket.socket] = []
        for text in settings.server.listen:
            opened = await open_listeners(parse_address(text), LISTEN)
            _own(opened, sockets)
            clients += opened
        async with trio.open_nursery() as last:
            async with open_router(settings) as router:
                router.on_request_end = on_request_end
                edge, admin = client_edge(router, log=log), admin_edge(router, log=log)
                ended = trio.Event()
                async with trio.open_nursery() as nursery:
                    await nursery.start(admin.serve, operators)
                    await nursery.start(_serve_to_the_end, edge, clients, ended)
                    log.info(
                        "listening",
                        clients=[shown(sock) for sock in clients],
                        admin=[shown(sock) for sock in operators],
                        workers=len(settings.workers),
                    )
                    await stop_on_signal(
                        signals, router, edge, admin, ended, settings.server, log
                    )
                    nursery.cancel_scope.cancel()
                # Workers that are run end now, and may take their time.
                last.start_soon(hurry_on_signal, signals, router, log)
            last.cancel_scope.cancel()
    log.info("stopped")


def _with_state_dir(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """Say where the state folder is, and make it where workers are to be run."""
    folder = state_dir(settings, environ)
    if any(worker.command is not None for worker in settings.workers):
        private_dir(folder, "server.state_dir")
    return attrs.evolve(
        settings, server=attrs.evolve(settings.server, state_dir=str(folder))
    )


async def _serve_to_the_end(
    edge: Edge,
    listeners: Sequence[socket.socket],
    ended: trio.Event,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    await edge.serve(listeners, task_status=task_status)
    ended.set()


async def _open_admin(
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
    _own(opened, sockets)
    if isinstance(address, UnixAddress):
        make_private(opened)
    return opened


def _own(opened: Sequence[socket.socket], sockets: ExitStack) -> None:
    """Have *sockets* close what was opened, and remove it from the file system."""
    sockets.callback(close_all, opened)
    sockets.enter_context(unlinked_after(opened))
