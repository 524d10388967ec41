"""Cancelled at each step of its life, a request leaves nothing behind (T5)."""

from collections.abc import Awaitable, Callable
from typing import Final

import pytest
import trio

from router.messages import Job
from tests.kit.edge import until
from tests.kit.exchange import Exchange
from tests.kit.receiver import Recorder
from tests.kit.stack import Stack, open_stack

JOB: Final = Job("m", ({"role": "user", "content": "hi"},), target="m")


class CancelAt(trio.abc.Instrument):
    """Cancels *scope* just before the n-th step of the task that it follows."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self.steps = 0
        self._scope = scope
        self._step = step
        self._task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self._task:
            self.steps += 1
            if self.steps == self._step:
                self._scope.cancel()


async def serve(stack: Stack, step: int, *, buffered: bool) -> tuple[int, bool]:
    """Serve one request, cancelled at *step*; give its steps, and if it was."""
    receiver = Recorder(buffered=buffered)
    with trio.CancelScope() as scope:
        instrument = CancelAt(scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            await stack.router.serve(
                JOB, receiver, request=stack.router.new_request_id()
            )
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return instrument.steps, scope.cancelled_caught


async def dies_then_answers(x: Exchange) -> None:
    if x.headers["x-request-id"].endswith("/1"):
        await x.role()
        await x.reset()
        return
    for n in range(4):
        await x.text(f"{n}")
        await trio.lowlevel.checkpoint()
    await x.finish()
    await x.done()
    await x.end()


async def is_full_then_answers(x: Exchange) -> None:
    if x.headers["x-request-id"].endswith("/1"):
        await x.json(503, {"error": {"message": "full", "code": 503}})
        return
    await dies_then_answers(x)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("script", [dies_then_answers, is_full_then_answers])
async def test_t5_cancelled_at_any_step_nothing_is_left(
    script: Callable[[Exchange], Awaitable[None]],
    buffered: bool,
) -> None:
    async with open_stack(script, script, slots=1) as stack:
        steps, _ = await serve(stack, 0, buffered=buffered)
        assert steps >= 2
        for step in range(1, steps + 3):
            for member in stack.router.fleet.members.values():
                member.rest_until = 0.0
                member.faults = 0

            await serve(stack, step, buffered=buffered)

            assert not stack.router.flights
            assert not stack.router.fleet.requests
            await stack.settle()
        await until(lambda: all(engine.live == 0 for engine in stack.engines))
