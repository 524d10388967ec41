"""The whole router over real sockets, in one process: fake engines behind it,
raw clients before it, and the books to check afterwards."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import attrs
import trio

from router.engine import Router, open_router
from router.settings import (
    ModelSettings,
    RouterSettings,
    Settings,
    WaitSettings,
    WorkerSettings,
)
from tests.kit.edge import RunningEdge, running, until
from tests.kit.engine import FakeEngine, Script, open_engine

#: Short enough for tests, long enough for a loaded machine.
QUICK = WaitSettings(connect_ms=1_000, poll_ms=100)


@attrs.define
class Stack:
    """A running router with its engines and its edge."""

    router: Router
    edge: RunningEdge
    engines: Sequence[FakeEngine]

    @property
    def at_rest(self) -> bool:
        """S2: nothing is held anywhere, settling permits included."""
        fleet = self.router.fleet
        return (
            not self.router.flights
            and not fleet.requests
            and len(fleet.room) == 0
            and all(not member.busy for member in fleet.members.values())
        )

    async def settle(self) -> None:
        """Wait until everything is at its baseline."""
        await until(lambda: self.at_rest)


@asynccontextmanager
async def open_stack(
    *scripts: Script,
    kind: str = "generic",
    slots: int = 4,
    router: RouterSettings | None = None,
    waits: WaitSettings = QUICK,
    settle_ms: int | None = 0,
    models: Mapping[str, ModelSettings] | None = None,
) -> AsyncIterator[Stack]:
    """Open one fake engine a script, a router over them, and its edge.

    The engines are workers ``w0``, ``w1`` …, and all are ready on entry.
    """
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(open_engine(script, kind=kind, slots=slots))
            for script in scripts
        ]
        settings = Settings(
            router=router or RouterSettings(),
            waits=waits,
            models=models or {},
            workers=tuple(
                WorkerSettings(
                    f"w{number}", engine.url, slots=slots, settle_ms=settle_ms
                )
                for number, engine in enumerate(engines)
            ),
        )
        opened = await stack.enter_async_context(open_router(settings))
        with trio.fail_after(5):
            await until(lambda: all(m.serving for m in opened.fleet.members.values()))
        edge = await stack.enter_async_context(running(opened))
        yield Stack(opened, edge, engines)
