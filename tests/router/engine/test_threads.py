"""The router for threads and scripts: real threads, scripted workers."""

import gc
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
import trio

from router.engine import (
    JobResult,
    JobState,
    JobUnknown,
    Router,
    RouterClosed,
    SyncRouter,
)
from router.errors import Fault, FaultKind, RequestFailed
from router.ids import AssignmentId, RequestId, WorkerId
from router.messages import FinishReason, Job, SignalCode
from router.settings import RouterSettings, Settings, WorkerSettings
from workers.scripted import (
    Fail,
    Finish,
    Head,
    Say,
    Script,
    ScriptedWorker,
    Step,
    Wait,
    answers,
    hangs,
)

LOST: Final = Fault(FaultKind.STREAM_CLOSED_EARLY, "closed")
MANY: Final = Settings(router=RouterSettings(queue_limit=10_000))
ROOT: Final = Path(__file__).parents[3]
#: Seconds for what takes a fraction of one.
PATIENCE_S: Final = 20.0


def job(content: str = "hi") -> Job:
    return Job("m", ({"role": "user", "content": content},))


def echo(_: AssignmentId, job: Job) -> Sequence[Step]:
    """Say what the user said, in two pieces."""
    said = job.messages[0]["content"]
    return (Head(), Say((said[:3],)), Say((said[3:],)), Finish())


def opened(script: Script, settings: Settings = MANY, **worker: Any) -> SyncRouter:
    router = SyncRouter(settings, workers=[ScriptedWorker("w", script, **worker)])
    router.wait_ready(within_s=PATIENCE_S)
    return router


def telling(told: threading.Event, script: Script) -> Script:
    """Make *script* say when it begins, in the router's thread."""

    def telling(assignment: AssignmentId, job: Job) -> Sequence[Step]:
        told.set()
        return script(assignment, job)

    return telling


def at_rest(router: SyncRouter) -> bool:
    """S2: nothing is held anywhere; looked at in the router's thread."""

    def look() -> bool:
        inner = router._run.router
        return (
            not inner.flights
            and not inner.fleet.requests
            and len(inner.fleet.room) == 0
            and all(not m.busy for m in inner.fleet.members.values())
        )

    end = time.perf_counter() + PATIENCE_S
    while not router._run.now(look, None):
        assert time.perf_counter() < end, router.status()
    return True


def kept(router: SyncRouter) -> int:
    return router._run.now(lambda: len(router._run.router.jobs), None)


def run_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# -- jobs ----------------------------------------------------------------------


@pytest.mark.slow
def test_j2_eight_threads_get_every_result_once_and_none_mixed_up() -> None:
    with opened(echo, slots=16) as router:

        def work(thread: int) -> list[tuple[str, JobResult]]:
            said = [f"{thread}: {n}" for n in range(200)]
            jobs = [router.submit(job(content)) for content in said]
            order = list(zip(said, jobs, strict=True))
            random.Random(thread).shuffle(order)
            return [(content, router.get_result(one)) for content, one in order]

        with ThreadPoolExecutor(8) as pool:
            results = [pair for got in pool.map(work, range(8)) for pair in got]

        assert len(results) == 1_600
        assert [r.text for content, r in results if r.text != content] == []
        assert Counter(r.state for _, r in results) == {JobState.COMPLETED: 1_600}
        assert len({r.id for _, r in results}) == 1_600
        assert kept(router) == 0
        assert at_rest(router)


@pytest.mark.slow
def test_s2_threads_that_cancel_and_release_at_random_leave_nothing_held() -> None:
    rng = random.Random(5)

    def script(assignment: AssignmentId, job: Job) -> Sequence[Step]:
        first, second = (Wait(rng.random() / 200) for _ in range(2))
        last = Fail(LOST) if rng.random() < 0.2 else Finish()
        said = job.messages[0]["content"]
        return (first, Head(), Say((said,)), second, last)

    with opened(script, slots=4, settle_s=0.001) as router:

        def work(thread: int) -> Counter[str]:
            own = random.Random(thread)
            seen: Counter[str] = Counter()
            for n in range(30):
                one = router.submit(job(f"{thread}: {n}"))
                choice = own.random()
                if choice < 0.3:
                    router.cancel(one)
                if choice > 0.8:
                    assert router.release(one)
                    seen["released"] += 1
                    continue
                result = router.get_result(one)
                seen[result.state.value] += 1
                assert result.text in ("", f"{thread}: {n}")
                with pytest.raises(JobUnknown):
                    router.get_status(one)
            return seen

        with ThreadPoolExecutor(8) as pool:
            seen = sum(pool.map(work, range(8)), Counter[str]())

        assert sum(seen.values()) == 240
        assert {"completed", "cancelled", "failed", "released"} == set(seen)
        assert kept(router) == 0
        assert at_rest(router)


def test_j2_the_methods_are_those_of_a_router() -> None:
    with opened(echo) as router:
        one = router.submit(job("Hello"))
        result = router.get_result(one)

        assert (result.id, result.text) == (one, "Hello")
        assert router.complete(job("Hello")).text == "Hello"
        assert router.ready
        assert router.resolve("m") == "m"
        assert router.resolve("nobody") is None
        assert router.as_sent(job("Hello")).target == "m"
        assert router.unsupported(job("Hello"), WorkerId("w")) == ()
        assert router.active == 0
        assert [card.id for card in router.model_cards()] == ["m"]
        assert router.status()["workers"][0]["name"] == "w"
        receipt = router.receipt(one)
        assert receipt is not None
        assert receipt["outcome"] == "completed"
        assert router.drain("w", within_s=60)
        assert router.cut("w")
        assert not router.cut("nobody")
        assert router.undrain("w")
        assert router.count_tokens(job("Hello")) is None
        router.add_worker(ScriptedWorker("more", echo))
        assert router.remove_worker("more")
        assert not router.remove_worker("nobody")
        assert not router.cancel("req_nobody")
        assert not router.release(RequestId("req_nobody"))


def test_j2_no_method_of_a_router_is_missing_but_those_for_servers() -> None:
    table = (ROOT / "docs/embedding.md").read_text()
    named = set(re.findall(r"`router\.(\w+)[(`]", table))
    servers = {"serve", "new_request_id", "refuse_new", "cut_all", "on_request_end"}

    assert servers < named
    assert {name for name in named if not hasattr(SyncRouter, name)} == servers


def test_j2_what_has_ended_can_be_looked_for_without_waiting() -> None:
    def script(_: AssignmentId, job: Job) -> Sequence[Step]:
        slow = job.messages[0]["content"] == "slow"
        return (Head(), Wait(inf)) if slow else (Head(), Say(("x",)), Finish())

    with opened(script) as router:
        router.wait_ready(within_s=0)
        slow, one, two = (router.submit(job(says)) for says in ("slow", "1", "2"))
        end = time.perf_counter() + PATIENCE_S
        while router.active > 1:
            assert time.perf_counter() < end

        with pytest.raises(TimeoutError):
            router.get_result(slow, within_s=0)
        with pytest.raises(trio.WouldBlock):
            router.get_result_nowait(slow)
        assert router.get_result(one, within_s=0).text == "x"
        assert router.get_result_nowait(two).text == "x"
        with pytest.raises(JobUnknown):
            router.get_result_nowait(two)
        assert router.cancel(slow)
    with (
        SyncRouter(workers=["http://127.0.0.1:1"]) as nobody,
        pytest.raises(TimeoutError),
    ):
        nobody.wait_ready(within_s=0)


def test_j2_failures_are_raised_in_the_thread_that_asked() -> None:
    lost = (Head(), Say(("half",)), Fail(LOST))
    with opened(lambda *_: lost) as router:
        with pytest.raises(RequestFailed) as raised:
            router.complete(job())
        assert raised.value.fault is LOST
        with pytest.raises(RequestFailed):
            router.submit(Job("unknown", ()))
        with pytest.raises(JobUnknown):
            router.get_result(RequestId("req_nobody"))

        result = router.get_result(router.submit(job()))
        assert (result.text, result.reason) == ("half", "stream_closed_early")


def test_s4_a_full_queue_refuses_at_submit() -> None:
    settings = Settings(router=RouterSettings(queue_limit=1))
    with opened(hangs(Head()), settings, slots=1) as router:
        router.submit(job())
        router.submit(job())
        with pytest.raises(RequestFailed) as raised:
            router.submit(job())

        assert raised.value.reason == "queue_full"


def test_j2_a_wait_may_have_its_time() -> None:
    with opened(hangs(Head(), Say(("half",)))) as router:
        one = router.submit(job())
        with pytest.raises(TimeoutError):
            router.get_result(one, within_s=0.01)
        with pytest.raises(TimeoutError):
            router.complete(job(), within_s=0.01)

        assert router.active == 1
        router.cancel(one)
        assert router.get_result(one).text == "half"
        assert at_rest(router)


# -- streams -------------------------------------------------------------------


def test_j2_a_stream_is_a_blocking_iterator() -> None:
    with opened(echo) as router, router.stream(job("Hello")) as deltas:
        assert [delta.text for delta in deltas] == ["Hel", "lo"]
        assert deltas.finished is not None
        assert deltas.finished.reason is FinishReason.STOP
        assert list(deltas) == []


def test_f7_a_stream_that_is_lost_raises_after_what_had_come() -> None:
    lost = (Head(), Say(("a", "b")), Fail(LOST))
    with opened(lambda *_: lost) as router, router.stream(job()) as deltas:
        got: list[str] = []
        with pytest.raises(RequestFailed) as raised:
            got.extend(delta.text for delta in deltas)
        with pytest.raises(RequestFailed):
            next(deltas)

        assert got == ["a", "b"]
        assert raised.value.committed
        assert deltas.finished is None


def test_l1_a_stream_that_is_refused_leaves_the_router_to_the_others() -> None:
    with opened(echo) as router:
        bad = Job("m", job().messages, exit_tools=(SignalCode.LOOP_DETECTED,))
        with router.stream(bad) as deltas, pytest.raises(RequestFailed):
            next(deltas)
        assert router.complete(job("hello")).text == "hello"


def test_j2_a_stream_without_its_block_holds_nothing_once_it_is_read() -> None:
    with opened(echo) as router:
        stream = router.stream(job("Hello"))
        assert [delta.text for delta in stream] == ["Hel", "lo"]

        assert at_rest(router)
        stream.close()


@pytest.mark.parametrize("how", ["leave", "close", "drop"])
def test_j2_leaving_a_stream_early_is_the_disconnect(how: str) -> None:
    with opened(hangs(Head(), Say(("a",)))) as router:
        deltas = router.stream(job())
        assert next(deltas).text == "a"
        if how == "leave":
            with deltas:
                pass
        elif how == "close":
            deltas.close()
            deltas.close()
            with pytest.raises(RequestFailed):
                next(deltas)
        del deltas
        gc.collect()

        assert at_rest(router)


def test_j2_a_long_stream_is_whole_and_its_worker_held_back() -> None:
    said = [Say((f"{n} ",)) for n in range(5_000)]
    with opened(lambda *_: (Head(), *said, Finish())) as router:
        with router.stream(job()) as deltas:
            assert next(deltas).text == "0 "
            rest = [delta.text for delta in deltas]

        assert rest == [f"{n} " for n in range(1, 5_000)]


def test_j2_one_thread_at_a_time_iterates() -> None:
    begun = threading.Event()
    with opened(telling(begun, hangs(Head()))) as router:
        deltas = router.stream(job())

        def read() -> None:
            with pytest.raises(RouterClosed):
                next(deltas)

        thread = run_thread(read)
        begun.wait(PATIENCE_S)
        while not deltas._reading.locked():
            time.sleep(0)
        with pytest.raises(RuntimeError):
            next(deltas)
        router.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def interrupt() -> None:
    """Do what Ctrl-C does to a program whose main thread waits."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


# -- interrupted ---------------------------------------------------------------


@pytest.fixture
def own_interrupts() -> Iterator[None]:
    """The main thread's handler of SIGINT is Python's own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_once(router: SyncRouter, waits: Callable[[Router], bool]) -> None:
    """Interrupt the main thread once *waits* says that its call is under way."""
    run = router._run

    async def watch() -> None:
        while not waits(run.router):
            await trio.lowlevel.checkpoint()
        interrupt()

    run.soon(lambda: run.nursery.start_soon(watch))


def test_j2_an_interrupted_complete_leaves_nothing_running(
    own_interrupts: None,
) -> None:
    with opened(hangs(Head(), Say(("a",)))) as router:
        interrupt_once(
            router, lambda inner: any(f.delta_count for f in inner.flights.values())
        )
        with pytest.raises(KeyboardInterrupt):
            router.complete(job())

        assert at_rest(router)
        assert router.ready


def test_j2_an_interrupted_wait_for_a_result_takes_nothing(
    own_interrupts: None,
) -> None:
    with opened(answers("late", every=0.2)) as router:
        one = router.submit(job())
        ended = router._run.router.jobs._entries[one].ended
        interrupt_once(router, lambda _: ended.statistics().tasks_waiting == 1)
        with pytest.raises(KeyboardInterrupt):
            router.get_result(one)

        assert router.get_result(one).text == "late"


def test_j2_an_interrupted_iteration_loses_no_delta(own_interrupts: None) -> None:
    with (
        opened(answers("a", "b", every=0.2)) as router,
        router.stream(job()) as deltas,
    ):
        queue = deltas._host._queue
        assert queue is not None
        interrupt_once(router, lambda _: queue._bell._task is not None)
        got: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            got.extend(delta.text for delta in deltas)

        assert got + [delta.text for delta in deltas] == ["a", "b"]


def test_j2_an_interrupted_block_of_a_stream_leaves_nothing_running() -> None:
    with opened(hangs(Head(), Say(("a",)))) as router:
        with pytest.raises(KeyboardInterrupt):
            interrupted_block(router)

        assert at_rest(router)


def interrupted_block(router: SyncRouter) -> None:
    with router.stream(job()) as deltas:
        next(deltas)
        raise KeyboardInterrupt


# -- the end -------------------------------------------------------------------


def test_j2_closing_from_another_thread_ends_the_calls_under_way() -> None:
    begun = threading.Event()
    router = opened(telling(begun, hangs(Head())), slots=1)
    ends: list[type[BaseException]] = []

    def call(method: Callable[[], object]) -> None:
        try:
            method()
        except (RouterClosed, RequestFailed) as end:
            ends.append(type(end))

    waiting = router.submit(job())
    begun.wait(PATIENCE_S)
    threads = [
        run_thread(lambda: call(lambda: router.complete(job()))),
        run_thread(lambda: call(lambda: router.get_result(waiting))),
        run_thread(lambda: call(lambda: next(router.stream(job())))),
        run_thread(lambda: call(lambda: router.complete(job()))),
    ]
    while router.active < 4:
        time.sleep(0)
    closers = [run_thread(router.close) for _ in range(3)]
    for thread in (*threads, *closers):
        thread.join(PATIENCE_S)

    assert not any(thread.is_alive() for thread in (*threads, *closers))
    assert not router._run._thread.is_alive()
    assert len(ends) >= 3
    with pytest.raises(RouterClosed):
        router.submit(job())
    with pytest.raises(RouterClosed):
        router.complete(job())
    router.close()


def test_j2_a_stream_that_outlives_its_router_is_closed_with_it() -> None:
    with opened(hangs(Head(), Say(("a",)))) as router:
        deltas = router.stream(job())
        next(deltas)

    deltas.close()
    with pytest.raises(RouterClosed):
        next(deltas)


def test_j2_a_router_that_nobody_closed_ends_with_its_last_reference() -> None:
    router = opened(hangs(Head()))
    thread = router._run._thread
    router.submit(job())

    del router
    gc.collect()

    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_j2_a_router_that_can_not_open_says_why() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="URL"):
        SyncRouter(workers=[WorkerSettings("w", "ftp://nowhere")])

    assert threading.active_count() == before


def test_j2_a_call_from_the_routers_own_thread_is_refused() -> None:
    raised: list[BaseException] = []
    with opened(echo) as router:

        def call(_: object) -> None:
            try:
                router.complete(job())
            except RuntimeError as error:
                raised.append(error)

        router._run.router.on_request_end = call
        router.complete(job())

    assert len(raised) == 1


class Broken(ScriptedWorker):
    """Ends on a bug when it is told to."""

    def __init__(self) -> None:
        super().__init__("w", hangs(Head()))
        self.breaks = trio.Event()

    async def run(self) -> NoReturn:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            await self.breaks.wait()
            raise ZeroDivisionError


def test_l1_a_bug_that_ends_the_run_is_shown_and_told_to_all_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[object] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    worker = Broken()
    router = SyncRouter(workers=[worker])
    router.wait_ready(within_s=PATIENCE_S)
    one = router.submit(job())
    router._run.soon(worker.breaks.set)

    with pytest.raises((RouterClosed, JobUnknown)):
        take_for_ever(router, one)

    while router._run._thread.is_alive():
        time.sleep(0)
    with pytest.raises(RouterClosed) as raised:
        router.submit(job())
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len(shown) == 1
    router.close()


def take_for_ever(router: SyncRouter, one: RequestId) -> None:
    """The last result may come, of a job that its router has ended."""
    while True:
        assert not router.get_result(one).ok


SCRIPT: Final = """
import sys
from router.engine import SyncRouter
from router.messages import Job
from workers.scripted import Head, Say, ScriptedWorker, hangs

class Worker(ScriptedWorker):
    async def run(self):
        try:
            await super().run()
        finally:
            print("the worker has ended", flush=True)

router = SyncRouter(workers=[Worker("w", hangs(Head(), Say(("a",))))])
router.wait_ready()
job = Job("m", ({"role": "user", "content": "hi"},))
router.submit(job)
print(next(router.stream(job)).text, flush=True)
END
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_j2_a_program_that_forgets_to_close_ends_all_the_same(
    end: str, code: int, says: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.replace("END", end)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert done.stdout == "a\nthe worker has ended\n"
    assert done.returncode == code
    assert says in done.stderr
    assert says or not done.stderr
