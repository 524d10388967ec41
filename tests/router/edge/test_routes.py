"""Which request reaches what, and the answers given at once."""

import hashlib
from pathlib import Path

import pytest

from router.settings import ServerSettings
from tests.kit.edge import RawClient, chat, request, running
from tests.kit.stub_router import StubRouter


async def test_o2_models_are_listed_and_described() -> None:
    router = StubRouter()
    router.models = {"m": "m", "org/model name": "m"}
    async with running(router) as here:
        client = await here.connect()
        await client.send(request("GET", "/v1/models"))
        listed = (await client.reply()).json
        await client.send(request("GET", "/v1/models/org/model%20name"))
        one = (await client.reply()).json

    assert listed == {
        "object": "list",
        "data": [
            {"id": "m", "object": "model", "created": 7, "owned_by": "stub"},
            {
                "id": "org/model name",
                "object": "model",
                "created": 7,
                "owned_by": "stub",
            },
        ],
    }
    assert one == listed["data"][1]


@pytest.mark.parametrize("tail", ["none", "..%2F..%2Fslots", "m%00", "%FF", "m?x=1"])
async def test_b119_a_model_is_only_ever_looked_up(tail: str) -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request("GET", f"/v1/models/{tail}"))
        reply = await client.reply()

    expected = 200 if tail.startswith("m?") else 404
    assert reply.status == expected
    if expected == 404:
        assert reply.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/models/", "/v1/../v1/models", "/v1//models", "/V1/models"]
)
async def test_o5_a_path_that_is_not_there_is_404_in_the_openai_shape(
    path: str,
) -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request("GET", path))
        reply = await client.reply()

    assert reply.status == 404
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/m", "GET, HEAD"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
    ],
)
async def test_o5_a_wrong_method_is_405_and_says_what_is_right(
    method: str, path: str, allow: str
) -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request(method, path))
        reply = await client.reply()

    assert reply.status == 405
    assert reply.headers["allow"] == allow


@pytest.mark.parametrize(
    ("media", "status"),
    [
        ("application/json", 400),
        ("application/json; charset=utf-8", 400),
        ("Application/JSON ;x=y", 400),
        ("application/vnd.x+json", 400),
        (None, 400),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_o5_only_json_is_read(media: str | None, status: int) -> None:
    head = {} if media is None else {"Content-Type": media}
    octets = request(
        "POST", "/v1/chat/completions", None, head | {"Content-Length": "2"}
    )
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(octets + b"{}")
        assert (await client.reply()).status == status


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("coding", "status"),
    [("identity", 400), ("Identity", 400), ("gzip", 415), ("x\xe9\x85", 415)],
)
async def test_h1_a_body_that_is_encoded_is_415_and_says_so(
    path: str, coding: str, status: int
) -> None:
    octets = request("POST", path, b"[]", {"Content-Encoding": "CODING"})
    octets = octets.replace(b"CODING", coding.encode("latin-1"))
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(octets)
        reply = await client.reply()
    assert reply.status == status
    if status == 415:
        shown = coding.encode("unicode_escape").decode()
        assert f"'{shown}'" in reply.json["error"]["message"]
        assert reply.headers["accept-encoding"] == "identity"
        assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/v1/models", "sk-2", 401),
        ("GET", "/v1/models/m", "sk-2", 401),
        ("POST", "/v1/models", "sk-1", 405),
        ("DELETE", "/v1/models/m", "sk-1", 405),
        ("GET", "/v1/models/none", "sk-1", 404),
        ("GET", "/v1/files", "sk-1", 404),
    ],
)
@pytest.mark.parametrize("version", [None, "2023-06-01"])
async def test_m6_a_path_of_both_dialects_fails_in_the_words_of_who_asks(
    version: str | None, method: str, path: str, key: str, status: int, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"sk-1").hexdigest())
    headers = {"x-api-key": key}
    if version is not None:
        headers["anthropic-version"] = version
    settings = ServerSettings(api_keys_file=str(keys))
    async with running(StubRouter(), settings) as here:
        client = await here.connect()
        await client.send(request(method, path, headers=headers))
        reply = await client.reply()

    assert reply.status == status
    if version is None:
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}
        assert "request-id" not in reply.headers
    else:
        assert reply.json["type"] == "error"
        assert reply.json["request_id"] == reply.headers["request-id"]


@pytest.mark.parametrize(
    ("octets", "status"),
    [
        (request("POST", "/v1/messages", b"{}", {"Expect": "more"}), 417),
        (request("BREW", "/v1/messages", b"{}"), 501),
    ],
)
async def test_m6_a_refused_head_is_told_in_the_dialect_of_its_path(
    octets: bytes, status: int
) -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(octets)
        reply = await client.reply()

    assert reply.status == status
    assert reply.json["request_id"] == reply.headers["request-id"]


async def test_m1_every_prefix_serves_every_route() -> None:
    router = StubRouter()
    settings = ServerSettings(prefixes=("", "/llm", "/a/b/"))
    async with running(router, settings) as here:
        client = await here.connect()
        for prefix in ("", "/llm", "/a/b"):
            for path in ("/v1/models", "/v1/models/m", "/healthz", "/readyz"):
                await client.send(request("GET", prefix + path))
                assert (await client.reply()).status == 200
            await client.send(
                chat(stream=False).replace(b"/v1", prefix.encode() + b"/v1")
            )
            (await router.next()).finish()
            assert (await client.reply()).status == 200


async def test_d4_ready_means_that_a_worker_is() -> None:
    router = StubRouter()
    async with running(router) as here:
        client = await here.connect()
        router.ready = False
        await client.send(request("GET", "/readyz") + request("GET", "/healthz"))
        assert (await client.reply()).status == 503
        assert (await client.reply()).status == 200
        router.ready = True
        await client.send(request("GET", "/readyz"))
        assert (await client.reply()).status == 200


async def test_head_is_get_without_its_body() -> None:
    async with running(StubRouter()) as here:
        client = await here.connect()
        await client.send(request("GET", "/v1/models"))
        whole = await client.reply()
        await client.send(request("HEAD", "/v1/models") + request("GET", "/healthz"))
        head = await client.until(b"\r\n\r\n")
        # Not a byte of a body is between them.
        line = await client.until(b"\r\n")
        assert line == b"HTTP/1.1 200 OK\r\n"
        client.got = line + client.got
        after = await client.reply()

    assert f"content-length: {len(whole.body)}\r\n".encode() in head
    assert after.json == {"status": "ok"}


async def test_a_query_is_not_part_of_the_path(tmp_path: Path) -> None:
    async with running(StubRouter(), unix=tmp_path / "s") as here:
        client: RawClient = await here.connect()
        await client.send(request("GET", "/v1/models?key=canary"))
        assert (await client.reply()).status == 200
