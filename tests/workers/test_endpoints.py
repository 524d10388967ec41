"""Endpoints besides chat, and counts of prompts, on a direct worker (O2, M8)."""

import json
from typing import Any

import pytest

from router.errors import Fault, FaultKind
from router.messages import Endpoint, Job, Kind
from tests.kit.delivery import JOB
from tests.kit.direct import bench
from tests.kit.exchange import Exchange

VECTORS = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1]}],
    "model": "engines-own",
    "usage": {"prompt_tokens": 3, "total_tokens": 3},
}
EMBED: Any = {"endpoint": Endpoint.EMBEDDINGS, "messages": (["a", "b"],)}
COMPLETE: Any = {"endpoint": Endpoint.COMPLETIONS, "messages": ("Once",)}


async def vectors(x: Exchange) -> None:
    await x.json(200, VECTORS)


async def text_chunks(x: Exchange) -> None:
    for text, reason in (("Once ", None), ("upon", None), ("", "length")):
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        await x.chunk({"object": "text_completion", "choices": [choice]})
    await x.usage(1, 2)
    await x.done()
    await x.end()


async def test_o2_a_completion_is_asked_for_and_read_as_bare_text() -> None:
    async with bench(text_chunks) as here:
        _, delivery = here.send(extras={"suffix": "!"}, **COMPLETE)
        end = await delivery.finish()

    [exchange] = here.engine.seen
    assert exchange.path == "/v1/completions"
    assert exchange.body == {
        "suffix": "!",
        "model": "m",
        "prompt": "Once",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert delivery.text == "Once upon"
    assert end.usage is not None
    assert end.usage.completion_tokens == 2


async def test_o2_embeddings_are_one_document() -> None:
    async with bench(vectors) as here:
        _, delivery = here.send(**EMBED)
        end = await delivery.finish()

    [exchange] = here.engine.seen
    assert exchange.path == "/v1/embeddings"
    assert exchange.body == {"model": "m", "input": ["a", "b"]}
    assert exchange.headers["accept"] == "application/json"
    [delta] = delivery.taken
    assert (delta.kind, delta.index) == (Kind.DOCUMENT, 0)
    assert json.loads(delta.text) == VECTORS
    assert end.usage is not None
    assert end.usage.prompt_tokens == 3
    assert delivery.names == ["accepted", "deltas", "finished"]


async def test_o2_a_connection_that_brought_a_document_serves_again() -> None:
    async with bench(vectors) as here:
        for number in (1, 2):
            _, delivery = here.send(number, **EMBED)
            await delivery.finish()

        assert here.engine.accepted == 1


async def half(x: Exchange) -> None:
    fields = {"Content-Type": "application/json", "Content-Length": "900"}
    await x.head(200, fields, chunked=False)
    await x.raw(b'{"data":[')
    await x.fin()


async def no_list(x: Exchange) -> None:
    await x.json(200, {"embedding": [1]})


async def in_band(x: Exchange) -> None:
    await x.json(200, {"error": {"message": "busy", "code": 503}})


async def absent(x: Exchange) -> None:
    await x.json(501, {"error": {"message": "no", "code": 501, "type": "x"}})


async def unknown(x: Exchange) -> None:
    await x.json(404, {"error": {"message": "The model `m` does not exist."}})


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (half, FaultKind.STREAM_CLOSED_EARLY),
        (no_list, FaultKind.PROTOCOL),
        (in_band, FaultKind.DECLINED),
        (absent, FaultKind.REJECTED),
        (unknown, FaultKind.MODEL_GONE),
    ],
)
async def test_o2_half_a_document_and_a_wrong_one_are_faults(
    script: Any, kind: FaultKind
) -> None:
    async with bench(script) as here:
        _, delivery = here.send(**EMBED)
        fault = await delivery.fault()

    assert isinstance(fault, Fault)
    assert fault.kind is kind
    assert delivery.taken == []


async def test_o2_a_document_without_end_is_cut() -> None:
    from router.openai.document import DOCUMENT_MAX

    async def flood(x: Exchange) -> None:
        await x.head(200, {"Content-Type": "application/json"})
        piece = b" " * 2**20
        for _ in range(DOCUMENT_MAX // len(piece) + 1):
            await x.data(piece)
        await x.wait_closed()

    async with bench(flood) as here:
        _, delivery = here.send(**EMBED)
        fault = await delivery.fault()

    assert fault.kind is FaultKind.PROTOCOL


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "sglang"])
async def test_m8_the_engines_own_tokenizer_counts(kind: str) -> None:
    job = Job(
        model="m",
        target="m",
        messages=({"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]},),
        extras={"tools": [TOOL], "tool_choice": "auto", "top_k": 3},
    )
    async with bench(kind=kind) as here:
        await here.worker.probe()
        here.engine.counts = 31

        assert await here.worker.count_tokens(job) == 31

        here.engine.counts = None
        assert await here.worker.count_tokens(job) is None
        here.engine.refuse = True
        assert await here.worker.count_tokens(job) is None


async def test_m8_a_generic_server_is_not_asked_to_count() -> None:
    async with bench(kind="generic") as here:
        await here.worker.probe()
        here.engine.probes.clear()

        assert await here.worker.count_tokens(JOB) is None
        assert here.engine.probes == []


async def test_b69_a_worker_that_sees_no_images_gets_notes() -> None:
    messages = ({"role": "user", "content": [IMAGE]},)
    async with bench(kind="llama-server") as here:
        for sees in (True, False):
            here.engine.sees = sees
            await here.worker.probe()
            for may_drop in (True, False):
                _, delivery = here.send(messages=messages, may_drop_images=may_drop)
                await delivery.finish()
                content = here.engine.seen[-1].body["messages"][0]["content"]
                assert isinstance(content, str) is (may_drop and not sees)
