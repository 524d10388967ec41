"""What programs hand in: workers and jobs, looked at before anything is begun."""

import json
import random
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from router.config import ConfigInvalid, parse
from router.engine import Router, open_router
from router.engine.arguments import check_job, check_worker
from router.errors import RequestFailed
from router.messages import GenerationParams, Job, SignalCode
from router.settings import WorkerSettings
from workers.scripted import ScriptedWorker, answers

URL = "http://127.0.0.1:1"
USER = {"role": "user", "content": "hi"}
JOB = Job("m", (USER,), target="m")


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("name", "", "letters, digits"),
        ("name", "a b", "letters, digits"),
        ("name", "a\n", "letters, digits"),
        ("name", None, "letters, digits"),
        ("slots", 0, "from 1 to 65536"),
        ("slots", -1, "from 1 to 65536"),
        ("slots", True, "from 1 to 65536"),
        ("slots", "4", "from 1 to 65536"),
        ("models", "m", "tuple of strings"),
        ("models", ("m", 3), "tuple of strings"),
        ("command", "sleep 1", "tuple of strings"),
    ],
)
async def test_e1_settings_that_no_file_could_have_are_refused_with_their_name(
    autojump_clock: MockClock, setting: str, value: Any, words: str
) -> None:
    worker = attrs.evolve(WorkerSettings(name="a", url=URL), **{setting: value})

    with pytest.raises(ValueError, match=words) as raised:
        async with open_router(workers=[worker]):
            pass
    assert f": {setting}: " in str(raised.value)


@pytest.mark.parametrize("worker", [3, None, b"http://h:1", ["http://h:1"], object()])
async def test_e1_what_is_no_worker_is_refused_with_what_one_is(
    autojump_clock: MockClock, worker: Any
) -> None:
    with pytest.raises(ValueError, match="a URL, WorkerSettings or an adapter"):
        async with open_router(workers=[worker]):
            pass


async def test_e1_one_url_is_no_list_of_workers(autojump_clock: MockClock) -> None:
    with pytest.raises(ValueError, match="a list"):
        async with open_router(workers=URL):
            pass


async def test_e1_a_worker_that_is_added_later_is_looked_at_too(
    autojump_clock: MockClock,
) -> None:
    async with open_router() as router:
        with pytest.raises(ValueError, match="slots"):
            await router.add_worker(WorkerSettings(name="a", url=URL, slots=0))

        assert router.status()["workers"] == []


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "-a", "a b", "a/b", "a\n", "ä", ""])
@pytest.mark.parametrize("slots", [0, 1, 65_536, 65_537])
def test_e1_a_program_may_name_what_a_file_may(name: str, slots: int) -> None:
    document = (
        f"[[worker]]\nname = {json.dumps(name)}\nurl = {URL!r}\nslots = {slots}\n"
    )
    worker = WorkerSettings(name=name, url=URL, slots=slots)

    assert accepts(lambda: check_worker(worker)) == accepts(
        lambda: parse(document, environ={}, directory=Path())
    )


def accepts(look: Any) -> bool:
    try:
        look()
    except (ValueError, ConfigInvalid):
        return False
    return True


UNFIT = [
    attrs.evolve(JOB, messages=({"role": "user", "content": "\ud800"},)),
    attrs.evolve(JOB, messages=(object(),)),
    attrs.evolve(JOB, messages=(deep(100_000),)),
    attrs.evolve(JOB, extras={"a": object()}),
    attrs.evolve(JOB, extras={"\ud800": 1}),
    attrs.evolve(JOB, params=GenerationParams(stop=("\ud800",))),
]


@pytest.mark.parametrize("job", UNFIT, ids=range(len(UNFIT)))
async def test_j7_a_job_that_can_not_be_written_down_is_rejected_and_no_bug(
    autojump_clock: MockClock, job: Job
) -> None:
    worker = ScriptedWorker("a", answers("x"))
    async with open_router(workers=[worker], rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        for ask in (complete, stream, submit, count):
            with pytest.raises(RequestFailed) as raised:
                await ask(router, job)
            assert raised.value.reason == "rejected"
            assert "are no JSON" in raised.value.fault.message
            assert "ud800" not in raised.value.fault.message

        assert not router.tally.bugs
        assert not router.flights
        assert worker.sources == []


async def complete(router: Router, job: Job) -> None:
    await router.complete(job)


async def stream(router: Router, job: Job) -> None:
    async with router.stream(job):
        pass


async def submit(router: Router, job: Job) -> None:
    router.submit(job)


async def count(router: Router, job: Job) -> None:
    await router.count_tokens(job)


def test_j7_what_can_be_written_down_is_let_be() -> None:
    extras = MappingProxyType({"a": 2**80, "b": (1, 2.5, None)})

    check_job(attrs.evolve(JOB, extras=extras))


@pytest.mark.parametrize(
    "exit_tools",
    [("LOW_CONFIDENCE",), ["LOW_CONFIDENCE"], (SignalCode.LOW_CONFIDENCE,)],
)
async def test_j5_a_program_may_spell_a_signal_as_a_file_does(
    autojump_clock: MockClock, exit_tools: Any
) -> None:
    worker = ScriptedWorker("a", answers("x"))
    async with open_router(workers=[worker], rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        sent = router.as_sent(attrs.evolve(JOB, exit_tools=exit_tools))

    names = [tool["function"]["name"] for tool in sent.extras["tools"]]
    assert names == ["low_confidence"]


@pytest.mark.parametrize(
    "exit_tools", ["LOW_CONFIDENCE", ("NOPE",), ("low_confidence",), (3,), 3]
)
async def test_j5_what_is_no_tuple_of_signals_is_rejected_with_those_there_are(
    autojump_clock: MockClock, exit_tools: Any
) -> None:
    worker = ScriptedWorker("a", answers("x"))
    async with open_router(workers=[worker], rng=random.Random(1)) as router:
        await wait_all_tasks_blocked()
        with pytest.raises(RequestFailed) as raised:
            await router.complete(attrs.evolve(JOB, exit_tools=exit_tools))

    assert raised.value.reason == "rejected"
    assert "a tuple of signals" in raised.value.fault.message
    assert "LOW_CONFIDENCE" in raised.value.fault.message
