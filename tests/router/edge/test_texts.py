"""POST /v1/completions and /v1/embeddings, through the edge (O2)."""

import json
from typing import Any

import pytest

from router.errors import Fault, FaultKind
from router.messages import Delta, Endpoint, Kind, Usage
from router.settings import RouterSettings, Settings
from tests.kit.edge import RawReply, events, request, running
from tests.kit.stub_router import StubRouter

VECTORS = '{"object":"list","data":[{"embedding":[0.5]}],"model":"own"}'


def asked(path: str, **fields: Any) -> bytes:
    return request("POST", path, json.dumps({"model": "m"} | fields).encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/llm/v1/completions"])
async def test_o2_a_completion_streams_as_text(path: str) -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked(path, prompt="Once", stream=True))
        work = await router.next()
        work.route()
        work.text(" upon")
        work.finish()
        head = RawReply(await client.until(b"\r\n\r\n"))
        first, last, zero = events(await client.until(b"0\r\n\r\n"))

    assert work.job.endpoint is Endpoint.COMPLETIONS
    assert head.headers["content-type"].startswith("text/event-stream")
    chunk = json.loads(first.removeprefix(b"data: "))
    assert chunk["object"] == "text_completion"
    assert chunk["id"] == f"cmpl-{work.request}"
    assert chunk["choices"][0]["text"] == " upon"
    assert last.endswith(b"data: [DONE]\n\n")
    assert zero == b""


async def test_o4_a_silent_completion_has_its_head_and_no_empty_chunk() -> None:
    """An empty chunk would end the body."""
    router = StubRouter(
        Settings(router=RouterSettings(commit_after_ms=20, keepalive_ms=20))
    )
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked("/v1/completions", prompt="Once", stream=True))
        work = await router.next()
        head = await client.until(b"\r\n\r\n")
        keepalive = await client.until(b": ka\n\r\n")
        work.text("x")
        work.finish()
        await client.until(b"0\r\n\r\n")

    assert b" 200 OK" in head
    assert events(keepalive) == [b": ka\n"]


async def test_o2_a_completion_whole() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked("/v1/completions", prompt="Once"))
        work = await router.next()
        work.text(" upon", " a")
        work.finish(Usage(1, 2))
        reply = await client.reply()

    assert reply.json["choices"][0]["text"] == " upon a"
    assert reply.json["usage"]["completion_tokens"] == 2


async def test_o2_embeddings_are_one_reply_and_start_over_whole() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked("/v1/embeddings", model="alias", input=["a"]))
        work = await router.next()
        assert work.receiver.buffered
        work.receiver.restart()
        delta = Delta(work.assignment, 0, Kind.DOCUMENT, VECTORS)
        work.receiver.take([delta])
        work.finish()
        reply = await client.reply()

    assert work.job.endpoint is Endpoint.EMBEDDINGS
    assert reply.status == 200
    assert reply.json["data"] == [{"embedding": [0.5]}]
    assert reply.json["model"] == "alias"


@pytest.mark.parametrize(
    ("octets", "param"),
    [
        (asked("/v1/completions", prompt=["a", "b"]), "prompt"),
        (asked("/v1/completions", prompt="a", n=2), "n"),
        (asked("/v1/completions"), "prompt"),
        (asked("/v1/embeddings"), "input"),
        (asked("/v1/embeddings", input="a", model="x"), "model"),
    ],
)
async def test_o2_what_is_wrong_is_named(octets: bytes, param: str) -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(octets)
        reply = await client.reply()

    assert reply.status in {400, 404}
    assert reply.json["error"]["param"] == param
    assert router.started == 0


async def test_o2_failures_are_statuses() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked("/v1/embeddings", input="a"))
        work = await router.next()
        work.fail(Fault(FaultKind.STREAM_CLOSED_EARLY, "Lost."))
        reply = await client.reply()

    assert reply.status == 502
    assert reply.json["error"]["code"] == "worker_lost"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/embeddings", "input"),
    ],
)
async def test_o5_what_is_too_long_has_the_name_that_the_client_gave_it(
    path: str, field: str
) -> None:
    router = StubRouter()
    prompt = [{"role": "user", "content": "hi"}] if field == "messages" else "hi"
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked(path, **{field: prompt}))
        work = await router.next()
        work.fail(Fault(FaultKind.CONTEXT_LENGTH, "too long", param="messages"))
        reply = await client.reply()

    assert reply.status == 400
    assert reply.json["error"]["param"] == field


async def test_o5_a_prompt_too_long_for_a_stream_that_has_begun_is_named_too() -> None:
    router = StubRouter(Settings(router=RouterSettings(commit_after_ms=20)))
    async with running(router) as here:
        client = await here.connect()
        await client.send(asked("/v1/completions", prompt="hi", stream=True))
        work = await router.next()
        await client.until(b"\r\n\r\n")
        work.fail(Fault(FaultKind.CONTEXT_LENGTH, "too long", param="messages"))
        assert b'"param":"prompt"' in await client.rest()
