"""One request over a stack, whatever its route, and its reply whatever its framing."""

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs

from tests.kit.edge import RawClient, RawReply, events, request
from tests.kit.stack import Stack

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"

_SAID: Final = [{"role": "user", "content": "hi"}]
#: By route: what a request needs besides its model.
NEEDED: Final[Mapping[str, Mapping[str, Any]]] = {
    CHAT: {"messages": _SAID},
    TEXT: {"prompt": "hi"},
    EMBEDDINGS: {"input": "hi"},
    MESSAGES: {"messages": _SAID, "max_tokens": 9},
    COUNT: {"messages": _SAID},
}


def asking(path: str, **fields: Any) -> dict[str, Any]:
    """Give the body of a request at *path*; *fields* are added, or replace."""
    return {"model": "m", **NEEDED[path], **fields}


def post(path: str, **fields: Any) -> bytes:
    """Write a request with that body."""
    return request("POST", path, json.dumps(asking(path, **fields)).encode())


async def ask(stack: Stack, octets: bytes) -> RawClient:
    """Send *octets* over a connection of their own."""
    client = await stack.edge.connect()
    await client.send(octets)
    return client


@attrs.frozen
class Reply:
    """A reply; *body* without its framing, and whether it came to its own end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> Any:
        """Its body, read."""
        return json.loads(self.body)


async def read_reply(client: RawClient) -> Reply:
    """Read one reply, chunked or with a length."""
    head = RawReply(await client.until(b"\r\n\r\n"))
    length = int(head.headers.get("content-length", -1))
    got, client.got = client.got, b""
    while len(got) < length if length >= 0 else not got.endswith(b"0\r\n\r\n"):
        more = await client.read()
        if not more:
            break
        got += more
    if length >= 0:
        return Reply(head.status, head.headers, got, len(got) == length)
    chunks = events(got)
    whole = bool(chunks) and chunks[-1] == b""
    return Reply(head.status, head.headers, b"".join(chunks), whole)
