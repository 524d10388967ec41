"""Calls into a router's thread, and what is left of those whose caller has gone."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, RouterClosed
from router.engine.background import BackgroundRun, Call, only
from workers.scripted import ScriptedWorker, answers


def opened() -> BackgroundRun:
    run = BackgroundRun(None, [ScriptedWorker("w", answers("x"))], None)
    run.start()
    return run


def test_a_call_gives_what_its_action_gives_or_raises() -> None:
    given, failed = Call[int](None), Call[int](None)
    given.do(lambda: 3)
    failed.do(lambda: 1 // 0)

    assert given.done.is_set()
    assert given.result() == 3
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_j2_a_call_that_was_done_for_nobody_is_undone() -> None:
    undone: list[int] = []
    before, after = Call(undone.append), Call(undone.append)
    after.do(lambda: 1)
    after.abandon()
    before.abandon()
    before.do(lambda: 2)

    assert undone == [1]
    assert before.done.is_set()
    with pytest.raises(RouterClosed):
        before.result()


async def test_j2_a_call_that_waits_for_nobody_is_cancelled(
    autojump_clock: MockClock,
) -> None:
    undone: list[None] = []
    call = Call(undone.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.run, trio.sleep_forever)
        await wait_all_tasks_blocked()
        call.abandon()

    assert call.done.is_set()
    assert undone == []


async def test_j2_a_call_that_is_done_in_the_moment_in_which_it_is_given_up_is_undone(
    autojump_clock: MockClock,
) -> None:
    undone: list[int] = []
    call = Call(undone.append)

    async def action() -> int:
        await trio.lowlevel.checkpoint()
        call.abandon()
        return 3

    await call.run(action)

    assert undone == [3]


async def test_j2_a_call_whose_run_ends_is_told_that_it_is_closed(
    autojump_clock: MockClock,
) -> None:
    call = Call[None](None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(call.run, trio.sleep_forever)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()

    with pytest.raises(RouterClosed):
        call.result()


def test_j2_a_run_lives_from_its_start_to_its_stop() -> None:
    run = BackgroundRun(None, [], None)
    with pytest.raises(RouterClosed):
        _ = run.router
    with pytest.raises(RouterClosed):
        run.now(lambda: None, None)
    run.stop()

    run.start()
    assert isinstance(run.router, Router)
    assert run.now(lambda: 3, None) == 3
    run.stop()
    run.stop()

    with pytest.raises(RouterClosed):
        _ = run.router
    with pytest.raises(RouterClosed):
        run.wait(trio.sleep_forever)
    assert not run.soon(lambda: None)


def test_j2_a_run_can_be_stopped_from_within() -> None:
    run = opened()

    run.now(run.stop, None)
    run.stop()

    with pytest.raises(RouterClosed):
        _ = run.nursery


def test_j2_a_call_that_comes_while_the_run_ends_is_refused() -> None:
    run = opened()

    def end() -> None:
        run._nursery = None

    run.now(end, None)
    with pytest.raises(RouterClosed):
        run.wait(trio.sleep_forever)
    run.stop()


def test_an_error_that_is_alone_comes_out_of_its_groups() -> None:
    error, other = ValueError(), OSError()
    both = ExceptionGroup("", [error, other])

    assert only(ExceptionGroup("", [ExceptionGroup("", [error])])) is error
    assert only(both) is both
