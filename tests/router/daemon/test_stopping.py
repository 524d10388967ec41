import signal
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from router.daemon.stopping import (
    DRAIN_OVER,
    LAST_WORDS_S,
    STOPPING,
    stop_on_signal,
)
from router.errors import Fault
from router.logs import Log
from router.settings import ServerSettings

SETTINGS = ServerSettings(lame_duck_ms=2_000, drain_ms=30_000)


class Stage:
    """Router, edge and signals in one, and what was done when."""

    def __init__(self) -> None:
        self.done: list[tuple[float, object]] = []
        self.active = 3
        self.connections = 4
        self.ended = trio.Event()
        self.send, self._signals = trio.open_memory_channel[int](2)
        self._born = trio.current_time()

    def _note(self, what: object) -> None:
        self.done.append((round(trio.current_time() - self._born, 6), what))

    def drain(self) -> None:
        self._note("drain")

    def stop_accepting(self) -> None:
        self._note("stop_accepting")

    def refuse_new(self, fault: Fault) -> None:
        self._note(fault)

    def cut_all(self, fault: Fault) -> None:
        self._note(fault)

    def hurry(self) -> None:
        self._note("hurry")

    def info(self, event: str, /, **_: object) -> None:
        self._note(event)

    warning = error = info

    async def signals(self) -> AsyncIterator[int]:
        async for number in self._signals:
            yield number

    async def run(self) -> float:
        """Stop as the daemon does; gives how long it took."""
        log: Log = self
        signals = self.signals()
        await stop_on_signal(signals, self, self, self, self.ended, SETTINGS, log)
        await signals.aclose()  # type: ignore[attr-defined]  # it is a generator
        return round(trio.current_time() - self._born, 6)


async def test_d3_streams_that_finish_end_the_drain(autojump_clock: MockClock) -> None:
    stage = Stage()
    stage.send.send_nowait(signal.SIGTERM)

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def finish() -> None:
            await trio.sleep(10)
            stage.ended.set()

        took = await stage.run()

    assert took == 10
    assert stage.done == [
        (0, "stopping"),
        (0, "drain"),
        (0, "drain"),
        (2, "stop_accepting"),
        (2, STOPPING),
    ]


async def test_d3_what_outlives_the_drain_is_cut_and_has_its_last_words(
    autojump_clock: MockClock,
) -> None:
    stage = Stage()
    stage.send.send_nowait(signal.SIGTERM)

    took = await stage.run()

    assert stage.done[5:] == [(32, "drain is over"), (32, DRAIN_OVER)]
    assert took == 32 + LAST_WORDS_S


@pytest.mark.parametrize("after", [1, 5])
async def test_d3_a_second_signal_ends_it_whatever_it_does(
    after: float, autojump_clock: MockClock
) -> None:
    stage = Stage()
    stage.send.send_nowait(signal.SIGTERM)

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def press_again() -> None:
            await trio.sleep(after)
            stage.send.send_nowait(signal.SIGINT)

        took = await stage.run()

    assert took == after
    assert stage.done[-3:] == [
        (after, "stopping at once"),
        (after, "hurry"),
        (after, DRAIN_OVER),
    ]
