"""The Messages routes: what a client reads, byte for byte."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from router.errors import Fault, FaultKind
from router.messages import Delta, Kind, ToolPart, Usage
from router.settings import RouterSettings, ServerSettings, Settings
from tests.kit.anthropic_events import Event, check_grammar, events_of
from tests.kit.edge import RawClient, RawReply, events, request, running
from tests.kit.stub_router import StubRequest, StubRouter

LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "The worker was lost.")
PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
KEY = {"x-api-key": "sk-1"}


def router_with(**settings: Any) -> StubRouter:
    return StubRouter(Settings(router=RouterSettings(**settings)))


def messages(
    *,
    path: str = PATH,
    headers: Mapping[str, str] | None = None,
    version: str = "1.1",
    **fields: Any,
) -> bytes:
    asked = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        **fields,
    }
    return request("POST", path, json.dumps(asked).encode(), headers, version)


async def head_of(client: RawClient) -> RawReply:
    return RawReply(await client.until(b"\r\n\r\n"))


async def served(
    router: StubRouter, client: RawClient, octets: bytes | None = None
) -> StubRequest:
    await client.send(octets or messages())
    found = await router.next()
    found.route()
    return found


def thought(served: StubRequest, text: str, index: int) -> None:
    delta = Delta(served.assignment, index, Kind.REASONING, text)
    served.receiver.take([delta])


def names(octets: bytes) -> list[str]:
    return [event.name for event in events_of(octets)]


@pytest.mark.parametrize("path", [PATH, "/llm/v1/messages", f"{PATH}?beta=true"])
async def test_m3_a_stream_is_events_and_ends_whole(path: str) -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client, messages(path=path, model="alias"))
        work.text("He", "y")
        work.finish(Usage(3, 2))
        head = await head_of(client)
        body = b"".join(events(await client.until(b"0\r\n\r\n")))

    assert head.headers["content-type"].startswith("text/event-stream")
    assert head.headers["request-id"] == work.request
    found = events_of(body)
    assert check_grammar(found)
    assert found[0].body["message"]["model"] == "alias"
    assert b"[DONE]" not in body


async def test_m5_each_delta_leaves_at_once_as_one_chunk() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        work.text("one")
        await head_of(client)
        first = await client.until(b'"one"}}\n\n\r\n')
        assert names(b"".join(events(first))) == [
            "message_start",
            "content_block_start",
            "content_block_delta",
        ]
        work.text("two")
        [second] = events(await client.until(b'"two"}}\n\n\r\n'))
        assert names(second) == ["content_block_delta"]
        work.finish()


async def test_m5_head_and_message_start_wait_for_the_first_delta() -> None:
    """So that what fails before it is a status, and moves unseen (O4, B11)."""
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        work.fail(Fault(FaultKind.STALLED, "Stalled."))
        reply = await client.reply()

    assert reply.status == 504
    assert reply.json["error"]["type"] == "timeout_error"


async def test_m5_pings_come_while_silent_and_never_before_message_start() -> None:
    router = router_with(commit_after_ms=30, keepalive_ms=20)
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        await head_of(client)
        seen = await client.until(b'event: ping\ndata: {"type":"ping"}\n\n\r\n')
        work.text("Hi")
        work.finish()
        seen += await client.until(b"0\r\n\r\n")

    found = events_of(b"".join(events(seen)))
    assert [e.name for e in found[:2]] == ["message_start", "ping"]
    assert check_grammar(found)


async def test_b12_a_job_can_move_after_message_start_is_out() -> None:
    router = router_with(commit_after_ms=20, keepalive_ms=0)
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        await head_of(client)
        start = await client.until(b"\n\n\r\n")
        work.receiver.restart()
        work.route(2)
        work.text("Hi")
        work.finish()
        rest = await client.until(b"0\r\n\r\n")

    found = events_of(b"".join(events(start + rest)))
    assert check_grammar(found)
    assert [e.name for e in found].count("message_start") == 1


async def test_m6_a_failure_after_message_start_is_an_event_and_an_unclean_end() -> (
    None
):
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        work.text("Hi")
        work.fail(LOST)
        await head_of(client)
        rest = await client.rest()

    assert not rest.endswith(b"0\r\n\r\n")
    found = events_of(b"".join(events(rest)))
    assert found[-1] == Event(
        "error",
        {
            "type": "error",
            "error": {"type": "api_error", "message": "The worker was lost."},
            "request_id": work.request,
        },
    )
    assert "message_stop" not in [e.name for e in found]


@pytest.mark.parametrize(
    ("kind", "status", "error_type"),
    [
        (FaultKind.QUEUE_FULL, 529, "overloaded_error"),
        (FaultKind.QUEUE_TIMEOUT, 529, "overloaded_error"),
        (FaultKind.NO_WORKER, 529, "overloaded_error"),
        (FaultKind.MODEL_LOADING, 529, "overloaded_error"),
        (FaultKind.STALLED, 504, "timeout_error"),
        (FaultKind.CONNECT, 500, "api_error"),
        (FaultKind.INTERNAL, 500, "api_error"),
        (FaultKind.CONTEXT_LENGTH, 400, "invalid_request_error"),
    ],
)
async def test_m6_a_failure_before_it_is_a_status(
    kind: FaultKind, status: int, error_type: str
) -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        work.fail(Fault(kind, "So it is.", retry_after=1.5))
        reply = await client.reply()

    assert reply.status == status
    assert reply.json["type"] == "error"
    assert reply.json["error"]["type"] == error_type
    assert "So it is." in reply.json["error"]["message"]
    assert reply.json["request_id"] == reply.headers["request-id"] == work.request
    assert reply.headers["retry-after"] == "2"


async def test_m6_the_edges_own_refusals_speak_the_dialect(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'sk-1').hexdigest()} alice\n")
    settings = ServerSettings(api_keys_file=str(keys), body_max_bytes=2048)
    router = StubRouter()
    big = b'{"x":"' + b"y" * 4000 + b'"}'
    cases = [
        (messages(), 401, "authentication_error"),
        (messages(headers={"x-api-key": "sk-2"}), 401, "authentication_error"),
        (request("GET", PATH, headers=KEY), 405, "invalid_request_error"),
        (request("POST", f"{PATH}/batches", b"{}"), 404, "not_found_error"),
        (
            request("POST", PATH, big, {"x-api-key": "sk-1"}),
            413,
            "request_too_large",
        ),
        (
            messages(headers={"x-api-key": "sk-1"}, model="gpt-9"),
            404,
            "not_found_error",
        ),
        (
            messages(headers={"Authorization": "Bearer sk-1"}, max_tokens=0),
            400,
            "invalid_request_error",
        ),
        (messages(path=COUNT), 401, "authentication_error"),
        (request("GET", COUNT, headers=KEY), 405, "invalid_request_error"),
        (messages(path=COUNT, headers=KEY, messages=[]), 400, "invalid_request_error"),
        (messages(path=COUNT, headers=KEY, model="gpt-9"), 404, "not_found_error"),
    ]
    async with running(router, settings) as here:
        for octets, status, error_type in cases:
            client = await here.connect()
            await client.send(octets)
            reply = await client.reply()

            assert reply.status == status
            assert reply.headers["request-id"] == reply.json["request_id"]
            assert reply.json["error"]["type"] == error_type


async def test_m6_a_thread_is_refused_in_the_words_that_sdks_know() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(messages(thread={"type": "create"}))
        reply = await client.reply()

    assert reply.status == 400
    assert reply.json["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": [],
    }
    assert router.started == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "sk-1"},
        {"Authorization": "Bearer sk-1"},
        {"Authorization": "Bearer other", "x-api-key": "sk-1"},
    ],
)
async def test_m1_a_key_is_taken_from_either_header(
    tmp_path: Path, headers: Mapping[str, str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(b'sk-1').hexdigest()} alice\n")
    router = StubRouter()
    async with running(router, ServerSettings(api_keys_file=str(keys))) as here:
        client = await here.connect()
        work = await served(router, client, messages(headers=headers, stream=False))
        work.finish(Usage(3, 2))

        assert (await client.reply()).status == 200


async def test_m6_a_bug_is_an_api_error() -> None:
    router = StubRouter()
    router.bug = RuntimeError("oops")
    async with running(router) as here:
        client = await here.connect()
        await client.send(messages())
        reply = await client.reply()

    assert reply.status == 500
    assert reply.json["error"]["type"] == "api_error"
    assert "oops" not in reply.json["error"]["message"]


async def test_m8_a_whole_reply_is_one_message() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client, messages(stream=False))
        thought(work, "hm", 0)
        work.text("Hi")
        work.finish(Usage(9, 4, cached_tokens=2))
        reply = await client.reply()

    assert reply.headers["request-id"] == work.request
    assert reply.json == {
        "id": f"msg_{work.request.removeprefix('req_')}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Hi"},
        ],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 4,
        },
    }


async def test_m7_the_opaque_signature_is_the_same_streamed_and_whole() -> None:
    router = router_with(thinking_signature="opaque")
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client, messages(stream=False))
        thought(work, "hm", 0)
        work.finish()
        whole = (await client.reply()).json["content"][0]["signature"]
        assert whole == f"rt1.{work.request.removeprefix('req_')}"
        work = await served(router, client)
        thought(work, "hm", 0)
        work.finish()
        await head_of(client)
        body = b"".join(events(await client.until(b"0\r\n\r\n")))

    signature = f"rt1.{work.request.removeprefix('req_')}"
    deltas = [e.body["delta"] for e in events_of(body) if "delta" in e.body]
    assert {"type": "signature_delta", "signature": signature} in deltas


async def test_b80_arguments_that_are_no_object_are_a_typed_error() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client, messages(stream=False))
        tool = ToolPart(0, "t1", "f")
        work.receiver.take(
            [Delta(work.assignment, 0, Kind.TOOL_CALL, '{"a": tru', tool)]
        )
        fault = work.finish()
        assert isinstance(fault, Fault)
        assert fault.kind is FaultKind.TOOL_PARSE
        work.fail(fault)
        reply = await client.reply()

    assert reply.status == 500
    assert reply.json["error"]["type"] == "api_error"
    assert reply.json["error"]["message"].startswith("tool_parse_error")


async def test_b80_a_stream_passes_them_on_as_they_are() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        tool = ToolPart(0, "t1", "f")
        work.receiver.take(
            [Delta(work.assignment, 0, Kind.TOOL_CALL, '{"a": tru', tool)]
        )
        work.finish()
        await head_of(client)
        body = b"".join(events(await client.until(b"0\r\n\r\n")))

    assert check_grammar(events_of(body))
    assert b'"partial_json":"{\\"a\\": tru"' in body


async def test_m3_an_answer_that_no_message_can_say_is_given_back() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        name = work.assignment
        work.text("Hi")
        batch = [
            Delta(name, 1, Kind.TOOL_CALL, "", ToolPart(0, "t1", "f")),
            Delta(name, 2, Kind.TOOL_CALL, "x" * 2**21, ToolPart(1, "t2", "g")),
        ]
        fault = work.receiver.take(batch)
        assert isinstance(fault, Fault)
        work.fail(fault)
        await head_of(client)
        rest = await client.rest()

    assert names(b"".join(events(rest)))[-1] == "error"


async def test_m5_http_1_0_gets_the_same_events_without_chunks() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client, messages(version="1.0"))
        work.text("Hi")
        work.finish()
        await head_of(client)

        assert check_grammar(events_of(await client.rest()))


async def test_h4_a_client_that_leaves_is_told_of_at_once() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        work = await served(router, client)
        work.text("Hi")
        client.reset()
        with trio.fail_after(0.5):
            await work.gone.wait()


async def test_m8_tokens_are_counted_by_a_worker_and_images_on_top() -> None:
    router = StubRouter()
    router.counts = 42
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    async with running(router) as here:
        client = await here.connect()
        count = f"{PATH}/count_tokens?beta=true"
        await client.send(messages(path=count, max_tokens=None))
        assert (await client.reply()).json == {"input_tokens": 42}
        asked = [{"role": "user", "content": [image]}]
        await client.send(messages(path=count, messages=asked))
        assert (await client.reply()).json["input_tokens"] > 42
        router.counts = None
        await client.send(messages(path=count))
        assert (await client.reply()).json["input_tokens"] > 500
        router.told = ({"role": "system", "content": "t" * 9_000},)
        await client.send(messages(path=count))
        assert (await client.reply()).json["input_tokens"] > 9_000
        await client.send(messages(path=count, messages=[]))
        assert (await client.reply()).status == 400
        assert router.started == 0


async def test_m1_models_are_listed_in_the_dialect_of_who_asks() -> None:
    version = {"anthropic-version": "2023-06-01"}
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        await client.send(request("GET", "/v1/models?limit=1000", headers=version))
        page = (await client.reply()).json
        await client.send(request("GET", "/v1/models/m", headers=version))
        one = (await client.reply()).json
        await client.send(request("GET", "/v1/models/x", headers=version))
        unknown = await client.reply()

    assert (page["first_id"], page["last_id"], page["has_more"]) == (
        "m",
        "alias",
        False,
    )
    assert page["data"][0] == one
    assert one == {
        "type": "model",
        "id": "m",
        "display_name": "m",
        "lifecycle": "active",
        "created_at": "1970-01-01T00:00:07Z",
    }
    assert unknown.status == 404
    assert unknown.json["error"]["type"] == "not_found_error"
    assert unknown.headers["request-id"]


async def test_m1_any_version_is_taken() -> None:
    router = StubRouter()
    async with running(router) as here:
        for version in ("2023-06-01", "2099-01-01"):
            client = await here.connect()
            asked = messages(headers={"anthropic-version": version}, stream=False)
            work = await served(router, client, asked)
            work.finish()
            assert (await client.reply()).status == 200
