"""Keys and prompts are nowhere that they need not be (B109, B123).

A whole daemon, with keys for its clients and a key of its own for its worker, which
says that key back in every error. What is secret has one word in common.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.kit.daemon import Daemon, open_daemon, until, write_config
from tests.kit.engine import answers, open_engine
from tests.kit.exchange import Exchange
from tests.kit.talk import CHAT, COUNT, EMBEDDINGS, MESSAGES, NEEDED, TEXT, asking

pytestmark = pytest.mark.slow

SECRET: Final = "canary"
OURS: Final = f"Bearer {SECRET}-client"
THEIRS: Final = f"Bearer {SECRET}-worker"
WRONG: Final = f"Bearer {SECRET}-wrong"
PROMPT: Final = f"my {SECRET} prompt"
#: What clients may send along that is nobody else's business.
ALONG: Final = {
    "Cookie": f"{SECRET}-cookie",
    "Proxy-Authorization": f"{SECRET}-proxy",
    "X-Forwarded-For": f"{SECRET}-address",
    "X-Custom": f"{SECRET}-custom",
}
#: Where the prompt is, by route.
PROMPTS: Final[Mapping[str, Mapping[str, Any]]] = {
    CHAT: {"messages": [{"role": "user", "content": PROMPT}]},
    TEXT: {"prompt": PROMPT},
    EMBEDDINGS: {"input": PROMPT},
    MESSAGES: {"messages": [{"role": "user", "content": PROMPT}]},
    COUNT: {"messages": [{"role": "user", "content": PROMPT}]},
}


class Indiscreet:
    """A script that keeps the keys it was sent, and says them in errors of a kind."""

    def __init__(self) -> None:
        self.mood = "good"
        self.heads: list[str] = []

    async def __call__(self, x: Exchange) -> None:
        self.heads.append(x.request_head.decode())
        key = x.headers["authorization"]
        error = {"error": {"message": f"bad key {key}", "type": key, "code": self.mood}}
        match self.mood:
            case "good" if x.path.endswith("/embeddings"):
                item = {"object": "embedding", "index": 0, "embedding": [0.5]}
                await x.json(200, {"object": "list", "data": [item]})
            case "good" if x.path.endswith("/chat/completions"):
                await answers("ok", usage=(1, 1))(x)
            case "good":
                choice = {"index": 0, "text": "ok", "finish_reason": "stop"}
                await x.chunk({"choices": [choice]})
                await x.done()
                await x.end()
            case "in band" if not x.path.endswith("/embeddings"):
                choice = {"index": 0, "text": "ok", "delta": {"content": "ok"}}
                await x.chunk({"choices": [choice]})
                await x.chunk(error)
                await x.end()
            case "in band":
                await x.json(200, error)
            case status:
                await x.json(int(status), error)


async def fetch(
    client: httpx.AsyncClient, path: str, key: str, stream: bool
) -> tuple[int, str]:
    """Give status, and head and body in one; a body may end early."""
    body = asking(path, **PROMPTS[path])
    if path not in {EMBEDDINGS, COUNT}:
        body["stream"] = stream
    headers = {**ALONG, "Authorization": key}
    told = ""
    async with client.stream("POST", path, json=body, headers=headers) as reply:
        try:
            async for text in reply.aiter_text():
                told += text
        except httpx.RemoteProtocolError:
            told += "(cut)"
    return reply.status_code, repr(reply.headers.multi_items()) + told


async def told_to_operators(daemon: Daemon, folder: Path) -> str:
    """Gather the log, and every page of the admin listener."""
    told = json.dumps(daemon.lines) + repr(daemon.noise)
    transport = httpx.AsyncHTTPTransport(uds=str(folder / "admin.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as admin:
        told += (await admin.get("/status")).text
        told += (await admin.get("/metrics")).text
        for line in daemon.events("request"):
            receipt = await admin.get(f"/status/requests/{line['request']}")
            told += receipt.text
    return told


async def test_b123_what_is_secret_stays_with_those_who_have_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(f"{SECRET}-client".encode()).hexdigest() + "\n")
    script = Indiscreet()
    async with open_engine(script, kind="llama-server") as engine:
        engine.counts = 7
        config = write_config(
            tmp_path,
            [engine.url],
            server=f'api_keys_file = "{keys}"',
            worker='api_key_env = "WORKER_KEY"\n[router]\nsuspect_after = 1000',
        )
        async with open_daemon(
            ["--config", str(config)],
            environ={"WORKER_KEY": THEIRS.removeprefix("Bearer ")},
        ) as daemon:
            await daemon.ready()
            asked = 0
            async with daemon.client() as client:
                for path in NEEDED:
                    for stream in (False, True):
                        status, told = await fetch(client, path, WRONG, stream)
                        assert (status, SECRET in told) == (401, False)
                for mood in ("good", "400", "500", "in band"):
                    script.mood = mood
                    for path in NEEDED:
                        for stream in (False, True):
                            status, told = await fetch(client, path, OURS, stream)
                            assert (status, SECRET in told) == (
                                status_of(mood, path, stream),
                                False,
                            ), told
                            asked += path != COUNT  # which is no job
                # It is taken out by this one, so this comes last.
                script.mood = "401"
                status, told = await fetch(client, CHAT, OURS, stream=False)
                assert (status >= 500, SECRET in told) == (True, False)

            await until_logged(daemon, asked + 1)
            assert SECRET not in await told_to_operators(daemon, tmp_path)

    assert daemon.noise == []
    # The worker hears its own key, and nothing of what clients have sent along.
    assert len(script.heads) == asked + 1
    for head in script.heads:
        assert head.count(SECRET) == head.count(THEIRS) == 1


async def until_logged(daemon: Daemon, requests: int) -> None:
    """Wait for the log's lines of so many requests."""

    async def are_logged() -> bool:
        return len(daemon.events("request")) >= requests

    await until(are_logged)


def status_of(mood: str, path: str, stream: bool) -> int:
    """Give the status that a client is to get of a worker in that mood."""
    if mood == "good" or path == COUNT:
        return 200
    if mood == "in band":
        return 200 if stream and path != EMBEDDINGS else 500
    return int(mood)
