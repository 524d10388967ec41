"""How a daemon ends: the order of D3, step by step.

The first signal drains: readiness goes, then the listeners, then what waits,
then, at ``drain_ms``, what still runs. The second ends all at once.
"""

import signal
from collections.abc import AsyncIterator
from typing import Final, Protocol

import trio

from router.errors import Fault, FaultKind
from router.logs import Log
from router.settings import ServerSettings

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
#: Seconds for error frames to leave once the drain is over (T8.8: exit within
#: a second of it).
LAST_WORDS_S: Final = 0.5

STOPPING: Final = Fault(
    FaultKind.SHUTTING_DOWN, "the router is stopping", retry_after=1.0
)
DRAIN_OVER: Final = Fault(
    FaultKind.SHUTTING_DOWN, "the router stopped before the answer was whole"
)


class Requests(Protocol):
    """The part of a Router that ends."""

    @property
    def active(self) -> int:
        """Requests under way, waiting ones included."""

    def refuse_new(self, fault: Fault) -> None:
        """Fail what waits, and all that comes, with *fault*."""

    def cut_all(self, fault: Fault) -> None:
        """Fail every live request with *fault*."""

    def hurry(self) -> None:
        """Give the workers that are run no more time to end by themselves."""


class Front(Protocol):
    """The part of an Edge that ends."""

    @property
    def connections(self) -> int:
        """Connections that are open now."""

    def drain(self) -> None:
        """Turn readiness to 503, and close each connection behind its reply."""

    def stop_accepting(self) -> None:
        """Close the listeners, and connections that are idle."""


async def stop_on_signal(
    signals: AsyncIterator[int],
    router: Requests,
    edge: Front,
    admin: Front,
    edge_ended: trio.Event,
    settings: ServerSettings,
    log: Log,
    *,
    cut: Fault = DRAIN_OVER,
) -> None:
    """Wait for a signal, then bring the edge to its end; returns when done.

    A checkpoint. Cancelled: nothing more is done; whoever cancels closes all.

    Args:
        signals: as ``trio.open_signal_receiver`` yields them.
        router: refuses and at last cuts its requests.
        edge: the clients' edge.
        admin: tells that we are not ready, and listens to the end.
        edge_ended: set by whoever runs ``edge.serve`` when it has returned.
        settings: ``lame_duck_ms`` and ``drain_ms``.
        log: told of each step.
        cut: what ends requests that are not done at ``drain_ms``.
    """
    first = await anext(signals)
    log.info("stopping", signal=signal.Signals(first).name, live=router.active)
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope
        nursery.start_soon(_stop_at_once, signals, scope, router, log, cut)
        if not await _drained(router, edge, admin, edge_ended, settings):
            log.warning(
                "drain is over", cut=router.active, connections=edge.connections
            )
            router.cut_all(cut)
            with trio.move_on_after(LAST_WORDS_S):
                await edge_ended.wait()
        nursery.cancel_scope.cancel()


async def hurry_on_signal(
    signals: AsyncIterator[int], router: Requests, log: Log
) -> None:
    """Wait for another signal; then the workers that we run have no more time."""
    another = await anext(signals)
    log.warning("stopping at once", signal=signal.Signals(another).name)
    router.hurry()


async def _stop_at_once(
    signals: AsyncIterator[int],
    scope: trio.CancelScope,
    router: Requests,
    log: Log,
    cut: Fault,
) -> None:
    await hurry_on_signal(signals, router, log)
    # Else what still runs would be told of as left by its clients (X3).
    router.cut_all(cut)
    scope.cancel()


async def _drained(
    router: Requests,
    edge: Front,
    admin: Front,
    edge_ended: trio.Event,
    settings: ServerSettings,
) -> bool:
    """Let what runs finish until ``drain_ms``; gives whether it did."""
    edge.drain()
    admin.drain()
    await trio.sleep(settings.lame_duck_ms / 1000)
    edge.stop_accepting()
    router.refuse_new(STOPPING)
    with trio.move_on_after(settings.drain_ms / 1000):
        await edge_ended.wait()
    return edge_ended.is_set()
