"""One task's wake-up call."""

from math import inf

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine.bell import Bell
from router.waiting import LATE_S


async def test_a_ring_wakes_the_waiter() -> None:
    bell = Bell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait_until, inf)
        await wait_all_tasks_blocked()

        bell.ring()


async def test_a_ring_while_nobody_waits_is_kept_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    await bell.wait_until(inf)

    with pytest.raises(trio.TooSlowError), trio.fail_after(0):
        await bell.wait_until(inf)


async def test_the_deadline_ends_the_wait(autojump_clock: MockClock) -> None:
    start = trio.current_time()

    await Bell().wait_until(start + 3.0)

    assert trio.current_time() == start + 3.0


async def test_w6_a_loop_that_was_held_up_waits_once_more(
    mock_clock: MockClock,
) -> None:
    bell = Bell()
    over = trio.Event()

    async def wait() -> None:
        await bell.wait_until(3.0)
        over.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        mock_clock.jump(3.0 + 2 * LATE_S)
        await wait_all_tasks_blocked()
        assert not over.is_set()
        mock_clock.jump(2 * LATE_S)
        await wait_all_tasks_blocked()
        assert over.is_set()


async def test_w6_a_ring_ends_the_wait_of_a_loop_that_was_held_up(
    mock_clock: MockClock,
) -> None:
    bell = Bell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait_until, 3.0)
        await wait_all_tasks_blocked()
        mock_clock.jump(100.0)
        await wait_all_tasks_blocked()

        bell.ring()


async def test_a_cancelled_wait_leaves_the_bell_usable() -> None:
    bell = Bell()
    with trio.move_on_after(0):
        await bell.wait_until(inf)
    bell.ring()

    await bell.wait_until(inf)


async def test_a_ring_in_the_tick_of_the_cancel_is_not_lost() -> None:
    bell = Bell()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bell.wait_until, inf)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        bell.ring()

    # Whoever won, nothing is broken: the next ring is heard.
    bell.ring()
    await bell.wait_until(inf)
