"""The admin listener: what operators ask, and what web pages may not."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.edge.admin import admin_edge
from tests.kit.edge import PATIENT, QuietLog, RawClient, RawReply, request, running
from tests.kit.stub_router import WORKER, StubRouter


@asynccontextmanager
async def asked(router: StubRouter) -> AsyncIterator[RawClient]:
    edge = admin_edge(router, log=QuietLog(), patience=PATIENT)
    async with running(router, edge=edge) as here:
        yield await here.connect()


async def ask(client: RawClient, octets: bytes) -> RawReply:
    await client.send(octets)
    return await client.reply()


async def test_d4_status_is_json() -> None:
    router = StubRouter()
    async with asked(router) as client:
        reply = await ask(client, request("GET", "/status"))

    assert reply.json == router.status()


async def test_d4_metrics_are_prometheus_text() -> None:
    router = StubRouter()
    router.tally.requests["m", "completed"] += 2
    async with asked(router) as client:
        reply = await ask(client, request("GET", "/metrics"))

    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    line = b'fencepost_requests_total{model="m",outcome="completed"} 2.0\n'
    assert line in reply.body


async def test_x3_a_receipt_is_found_by_our_own_id() -> None:
    router = StubRouter()
    router.receipts["req_7"] = {"request": "req_7", "outcome": "completed"}
    async with asked(router) as client:
        found = await ask(client, request("GET", "/status/requests/req_7"))
        missing = await ask(client, request("GET", "/status/requests/req_8"))

    assert found.json["outcome"] == "completed"
    assert missing.status == 404


@pytest.mark.parametrize(
    ("verb", "known"), [("drain", "w1"), ("undrain", "w1"), ("cancel", "req_7")]
)
async def test_d1_commands_are_posts_by_name(verb: str, known: str) -> None:
    router = StubRouter()
    async with asked(router) as client:
        done = await ask(client, request("POST", f"/{verb}/{known}"))
        unknown = await ask(client, request("POST", f"/{verb}/a%2Fb%20c"))
        wrong = await ask(client, request("GET", f"/{verb}/{known}"))

    assert done.status == 200
    assert unknown.status == 404
    assert wrong.status == 405
    assert router.commands == [(verb, known), (verb, "a/b c")]


@pytest.mark.parametrize(
    "header",
    [{"Origin": "http://evil"}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-origin"}],
)
async def test_a_web_page_can_command_nothing(header: dict[str, str]) -> None:
    router = StubRouter()
    async with asked(router) as client:
        reply = await ask(client, request("POST", "/drain/w1", headers=header))

    assert reply.status == 403
    assert router.commands == []


async def test_d4_the_api_is_not_on_the_admin_listener_nor_the_reverse() -> None:
    router = StubRouter()
    async with asked(router) as client:
        assert (await ask(client, request("GET", "/v1/models"))).status == 404
        assert (await ask(client, request("GET", "/healthz"))).status == 200
    async with running(router) as here:
        client = await here.connect()
        for path in ("/metrics", "/status", "/status/requests/x"):
            assert (await ask(client, request("GET", path))).status == 404
        assert (await ask(client, request("POST", "/drain/w1"))).status == 404
    assert router.commands == []


async def test_l5_a_drain_may_have_a_deadline() -> None:
    router = StubRouter()
    async with asked(router) as client:
        path = f"/drain/{WORKER}?within_s="
        assert (await ask(client, request("POST", f"{path}2.5"))).status == 200
        assert router.drained_within_s == 2.5

        for wrong in ("-1", "soon", "nan", ""):
            assert (await ask(client, request("POST", path + wrong))).status == 400
