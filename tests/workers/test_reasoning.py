"""How a reasoning that goes on for too long is ended, engine by engine."""

import json
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from router.messages import Finished, Kind
from router.openai.upstream import BUDGET
from router.sse import Event
from tests.kit.delivery import RecordingDelivery, assignment
from tests.kit.direct import Bench, bench
from tests.kit.exchange import Exchange
from workers.control import NoAnswer
from workers.reasoning import (
    CONTROL_PATH,
    GRACE,
    NamedReader,
    ReasoningControl,
    ReasoningEnd,
)
from workers.source import DirectSource

LIMITED = {BUDGET: 3}


async def reasons(told: trio.Event, x: Exchange) -> None:
    """Reason until told otherwise, then answer."""
    await x.role()
    await x.reasoning("a", "b", "c", "d")
    await told.wait()
    await x.text("So.")
    await x.finish()
    await x.done()
    await x.end()


async def thinks(x: Exchange) -> None:
    await x.role()
    await x.reasoning("a")
    await x.wait_closed()


async def reasoning_begun(
    bench: Bench, **extras: int
) -> tuple[DirectSource, RecordingDelivery]:
    await bench.worker.probe()
    source, delivery = bench.send(extras=extras)
    await delivery.until("deltas")
    return source, delivery


async def test_j6_llama_server_is_told_through_its_control_endpoint() -> None:
    async with bench() as at:
        at.engine.script = partial(reasons, at.engine.told)
        source, delivery = await reasoning_begun(at, **LIMITED)

        first, again = source.end_reasoning(), source.end_reasoning()
        end = await delivery.ended()

        assert (first, again) == (GRACE, 0)
        assert at.engine.controls == [
            {"id": "chatcmpl-fake", "action": "reasoning_end"}
        ]
        assert isinstance(end, Finished)
        assert [d.text for d in delivery.taken if d.kind is Kind.TEXT] == ["So."]
        body = at.engine.seen[0].body
        assert (body[BUDGET], body["reasoning_control"]) == (3, True)


async def test_j6_vllm_keeps_the_limit_that_it_was_sent() -> None:
    async with bench(thinks, kind="vllm") as at:
        source, _ = await reasoning_begun(at, **LIMITED)

        assert (source.end_reasoning(), source.end_reasoning()) == (GRACE, 0)
        body = at.engine.seen[0].body
        assert body["thinking_token_budget"] == 3
        assert "reasoning_control" not in body
        source.close()


@pytest.mark.parametrize("kind", ["sglang", "generic"])
async def test_j6_an_engine_without_such_a_limit_can_not_be_asked(kind: str) -> None:
    async with bench(thinks, kind=kind) as at:
        source, _ = await reasoning_begun(at, **LIMITED)

        assert source.end_reasoning() == 0
        source.close()


async def test_j6_a_job_without_a_limit_asks_for_nothing() -> None:
    async with bench(thinks) as at:
        source, _ = await reasoning_begun(at)

        assert source.end_reasoning() == 0
        assert not {BUDGET, "reasoning_control"} & at.engine.seen[0].body.keys()
        source.close()


class Endpoint:
    """A control endpoint that fails at first, then hangs, then answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def post(self, path: str, body: bytes) -> object:
        assert path == CONTROL_PATH
        self.asked.append(json.loads(body)["id"])
        await trio.lowlevel.checkpoint()
        if len(self.asked) == 1:
            raise NoAnswer("refused")
        if len(self.asked) == 2:
            await trio.sleep_forever()
        return None


async def test_j6_a_control_endpoint_that_fails_or_hangs_holds_up_nobody(
    autojump_clock: MockClock,
) -> None:
    endpoint = Endpoint()
    control = ReasoningControl(endpoint)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(control.run)
        control.end("first")
        control.end("second")
        await trio.sleep(3)
        control.end("third")
        await trio.sleep(3)

        assert endpoint.asked == ["first", "second", "third"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("data", [b"[DONE]", b"[" * 5_000, b"{}", b'{"id": 3}'])
def test_an_answer_without_a_name_is_read_all_the_same(data: bytes) -> None:
    reader = NamedReader(assignment())

    reader.read(Event(b"", data, False))
    assert reader.reply_id is None
    reader.read(Event(b"", json.dumps({"id": "x", "choices": []}).encode(), False))

    assert reader.reply_id == "x"


def test_j6_an_answer_without_a_name_is_borne_with_and_nobody_is_told() -> None:
    told: list[str] = []
    ending = ReasoningEnd(told.append)
    ending.reader(assignment())

    assert (ending.end(), ending.end()) == (GRACE, 0)
    assert told == []
