"""Names, sizes and depths that nobody means well, over every route (B119, B120)."""

import json
from typing import Final

import pytest

from router.checks import DEPTH_MAX
from router.settings import ServerSettings
from tests.kit.edge import request, running
from tests.kit.engine import answers
from tests.kit.exchange import Exchange
from tests.kit.stack import open_stack
from tests.kit.talk import (
    CHAT,
    COUNT,
    EMBEDDINGS,
    MESSAGES,
    NEEDED,
    TEXT,
    ask,
    asking,
    post,
    read_reply,
)

every_route = pytest.mark.parametrize("path", NEEDED)

#: JSON, by what is wrong with it as a model's name.
NAMES: Final = {
    "a way up": b'"../../slots?x="',
    "a way up, escaped": b'"%2e%2e%2fslots"',
    "a way through": b'"m/../m"',
    "no text at all": b'""',
    "lines": b'"\\n\\r\\nGET /slots"',
    "a NUL": b'"m\\u0000"',
    "long": b'"%b"' % (b"x" * 10_000),
    "long in bytes": b'"%b"' % ("\U0001f4a5" * 300).encode(),
    "half a character": b'"\\ud800"',
    "turned around": b'"\\u202em"',
    "null": b"null",
    "a number": b"5",
    "a list": b'["m"]',
    "an object": b'{"m": "m"}',
}


def with_raw(path: str, field: str, raw: bytes) -> bytes:
    """Write a request one *field* of which is that JSON, whatever it is."""
    fields = {k: v for k, v in asking(path).items() if k != field}
    body = json.dumps(fields).encode()
    return request("POST", path, body[:-1] + b', "%b": %b}' % (field.encode(), raw))


async def answers_all(x: Exchange) -> None:
    """Answer as the route of the engine would."""
    if x.path.endswith("/embeddings"):
        item = {"object": "embedding", "index": 0, "embedding": [0.5]}
        await x.json(200, {"object": "list", "data": [item]})
    elif x.path.endswith("/chat/completions"):
        await answers("ok")(x)
    else:
        await x.chunk(
            {"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}]}
        )
        await x.done()
        await x.end()


@every_route
async def test_the_kits_request_is_one_that_is_answered(path: str) -> None:
    async with open_stack(answers_all) as stack:
        assert (await read_reply(await ask(stack, post(path)))).status == 200


# ---- names of models ----


@every_route
async def test_b119_a_hostile_name_is_refused_and_no_worker_hears_it(path: str) -> None:
    async with open_stack(answers_all, kind="llama-server") as stack:
        (engine,) = stack.engines
        engine.counts = 7
        client = await stack.edge.connect()
        for what, raw in NAMES.items():
            await client.send(with_raw(path, "model", raw))
            reply = await read_reply(client)
            assert reply.status in {400, 404}, what
            assert reply.json["error"]["message"], what
            assert len(reply.body) < 2_000, what
        await client.send(post(path))
        assert (await read_reply(client)).status == 200

        assert len(engine.seen) == (path != COUNT)
        counted = engine.probes.count("/v1/chat/completions/input_tokens")
        assert counted == (path == COUNT)
        assert not any(odd in p for p in engine.probes for odd in ("..", "%", "x="))
        assert not stack.router.tally.bugs


# ---- depth ----

DEEP: Final = {
    "a level too many": b"[" * DEPTH_MAX + b"]" * DEPTH_MAX,
    "lists": b"[" * 50_000 + b"]" * 50_000,
    "objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
}
#: The body itself is a level.
AT_LIMIT: Final = b"[" * (DEPTH_MAX - 1) + b"]" * (DEPTH_MAX - 1)
NESTED: Final = f"nests deeper than {DEPTH_MAX} levels"
#: By route: fields that hold what nests, and one that we know nothing of.
NESTS: Final = {
    CHAT: ("messages", "tools", "response_format", "metadata", "unknown"),
    TEXT: ("prompt", "logit_bias", "unknown"),
    EMBEDDINGS: ("input", "unknown"),
    MESSAGES: ("messages", "system", "tools", "metadata", "unknown"),
    COUNT: ("messages", "system", "tools", "unknown"),
}


@pytest.mark.parametrize("nested", DEEP)
@every_route
async def test_b120_json_that_nests_too_deep_is_refused(path: str, nested: str) -> None:
    async with open_stack(answers_all) as stack:
        client = await stack.edge.connect()
        for field in NESTS[path]:
            await client.send(with_raw(path, field, DEEP[nested]))
            reply = await read_reply(client)
            assert reply.status == 400, field
            assert reply.json["error"]["type"] == "invalid_request_error", field
            assert NESTED in reply.json["error"]["message"], field
        await client.send(with_raw(path, "unknown", AT_LIMIT))
        assert (await read_reply(client)).status == 200
        assert len(stack.engines[0].seen) == (path != COUNT)
        assert not stack.router.tally.bugs


# ---- size ----

MOST: Final = 1_000


def framed(path: str, body: bytes, chunk: int) -> bytes:
    """Write a request whose body is chunked so; 0: with its length."""
    if not chunk:
        return request("POST", path, body)
    pieces = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    head = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    return request("POST", path, headers=head) + b"".join(
        b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""]
    )


@pytest.mark.parametrize("chunk", [0, 2 * MOST, 100], ids=["length", "chunk", "chunks"])
@every_route
async def test_b120_a_body_at_the_limit_passes_and_one_byte_more_does_not(
    path: str, chunk: int
) -> None:
    body = json.dumps(asking(path)).encode().ljust(MOST)
    limit = ServerSettings(body_max_bytes=MOST)
    async with (
        open_stack(answers_all) as stack,
        running(stack.router, limit) as edge,
    ):
        client = await edge.connect()
        await client.send(framed(path, body, chunk))
        assert (await read_reply(client)).status == 200

        await client.send(framed(path, body + b" ", chunk))
        reply = await read_reply(client)
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        error = reply.json["error"]
        kind = "type" if path in {MESSAGES, COUNT} else "code"
        assert error[kind] == "request_too_large"
        assert len(stack.engines[0].seen) == (path != COUNT)
