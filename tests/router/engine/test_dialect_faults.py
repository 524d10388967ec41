"""Answers that a dialect can't say, and prompts that workers count (M3, M8, B80)."""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from router.engine import Router, open_router
from router.engine.router import COUNT_S
from router.errors import Fault, FaultKind
from router.messages import Delta, Finished, Job
from router.ports import Taken
from tests.kit.receiver import Recorder
from workers.scripted import Head, Say, ScriptedWorker, Wait, answers

JOB = Job("m", ({"role": "user", "content": "hi"},), target="m")
UNFIT = Fault(FaultKind.PROTOCOL, "unsayable")
NO_JSON = Fault(FaultKind.TOOL_PARSE, "no JSON")


class Choosy(Recorder):
    """Can't say a delta with this text, or an end."""

    def __init__(
        self, unsayable: str = "", end: Fault | None = None, *, buffered: bool = False
    ) -> None:
        super().__init__(buffered=buffered)
        self.unsayable = unsayable
        self.end = end

    def take(self, deltas: Sequence[Delta]) -> Taken | Fault:  # type: ignore[override]
        if self.unsayable in [delta.text for delta in deltas]:
            return UNFIT
        return super().take(deltas)

    def finish(self, finished: Finished) -> Taken | Fault:  # type: ignore[override]
        return self.end or super().finish(finished)


@asynccontextmanager
async def opened(*workers: ScriptedWorker) -> AsyncIterator[Router]:
    async with open_router(workers=workers, rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        yield router


async def serve(router: Router, receiver: Recorder) -> None:
    await router.serve(JOB, receiver, request=router.new_request_id())
    assert all(not m.busy for m in router.fleet.members.values())


async def test_m3_what_a_dialect_can_not_say_moves_the_job_before_commit(
    autojump_clock: MockClock,
) -> None:
    receiver = Choosy("odd")
    odd = ScriptedWorker("a", lambda *_: (Head(), Say(("odd",)), Wait(99)))
    async with opened(odd, ScriptedWorker("b", answers("whole"))) as router:
        await serve(router, receiver)

        assert receiver.text == "whole"
        assert receiver.restarts == 1
        assert odd.sources[0].closed_at is not None
        assert router.tally.failovers[FaultKind.PROTOCOL.value] == 1


async def test_m3_what_a_dialect_can_not_say_ends_the_stream_after_commit(
    autojump_clock: MockClock,
) -> None:
    receiver = Choosy("odd")
    steps = (Head(), Say(("good",)), Say(("odd",)), Wait(99))
    async with opened(
        ScriptedWorker("a", lambda *_: steps), ScriptedWorker("b", answers("whole"))
    ) as router:
        await serve(router, receiver)

        assert receiver.text == "good"
        assert receiver.fault is UNFIT
        assert receiver.finished is None


async def test_b80_a_whole_answer_of_no_use_fails_and_blames_nobody(
    autojump_clock: MockClock,
) -> None:
    receiver = Choosy(end=NO_JSON, buffered=True)
    worker = ScriptedWorker("a", answers("x"))
    async with opened(worker) as router:
        ended: list[object] = []
        router.on_request_end = lambda record: ended.append(
            (record["outcome"], record["reason"])
        )
        await serve(router, receiver)

        assert receiver.fault is NO_JSON
        assert ended == [("failed", "tool_parse_error")]
        assert router.fleet.members[worker.id].faults == 0
        assert len(worker.sources) == 1


async def test_m8_a_ready_worker_counts(autojump_clock: MockClock) -> None:
    silent, counting = (ScriptedWorker(n, answers("x")) for n in "ab")
    async with opened(silent, counting) as router:
        for count in (31, None):
            counting.counts = count
            assert await router.count_tokens(JOB) == count


class Slow(ScriptedWorker):
    """Never says how many they are."""

    async def count_tokens(self, job: Job) -> int | None:
        del job
        await trio.sleep(99)
        return 1


async def test_m8_a_worker_has_only_so_long_to_count(
    autojump_clock: MockClock,
) -> None:
    counting = ScriptedWorker("b", answers("x"))
    counting.counts = 31
    async with opened(Slow("a", answers("x")), counting) as router:
        before = trio.current_time()

        assert await router.count_tokens(JOB) == 31
        assert trio.current_time() - before == COUNT_S


class Removing(ScriptedWorker):
    """Does not know, and sees the other worker go meanwhile."""

    router: Router

    async def count_tokens(self, job: Job) -> int | None:
        del job
        assert self.router.remove_worker("b")
        await trio.sleep(1)
        return None


async def test_m8_a_worker_that_is_removed_meanwhile_is_not_asked(
    autojump_clock: MockClock,
) -> None:
    first = Removing("a", answers("x"))
    async with opened(first, ScriptedWorker("b", answers("x"))) as router:
        first.router = router
        assert await router.count_tokens(JOB) is None


async def test_m8_without_a_worker_nobody_counts(autojump_clock: MockClock) -> None:
    async with opened() as router:
        assert await router.count_tokens(JOB) is None
