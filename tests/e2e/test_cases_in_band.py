"""An error inside an answer of 200 (B47): every shape, place, dialect and status."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from tests.kit.anthropic_events import check_grammar, events_of
from tests.kit.exchange import Exchange
from tests.kit.stack import open_stack
from tests.kit.talk import CHAT, MESSAGES, ask, post, read_reply

Shape = Callable[[int], Mapping[str, Any]]

SHAPES: Final[Mapping[str, Shape]] = {
    "wrapped": lambda code: {"error": {"message": "boom", "code": code}},
    "flat": lambda code: {"object": "error", "message": "boom", "code": code},
    "detail": lambda code: {"detail": "boom", "code": code},
}
#: By route and code of the worker: our status, and the type of the error.
TOLD: Final = {
    (CHAT, 400): (400, "invalid_request_error"),
    (CHAT, 503): (503, "server_error"),
    (MESSAGES, 400): (400, "invalid_request_error"),
    (MESSAGES, 503): (529, "overloaded_error"),
}


@pytest.mark.parametrize("code", [400, 503])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES], ids=["openai", "anthropic"])
@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_b47_an_error_in_band_ends_in_the_clients_own_way(
    shape: str, later: bool, path: str, stream: bool, code: int
) -> None:
    async def breaks(x: Exchange) -> None:
        await x.role()
        if later:
            await x.text("before", " it")
        await x.chunk(SHAPES[shape](code))
        await x.done()
        await x.end()

    async with open_stack(breaks) as stack:
        reply = await read_reply(await ask(stack, post(path, stream=stream)))
        await stack.settle()
        (member,) = stack.router.fleet.members.values()

    status, told = TOLD[path, code]
    assert b"boom" in reply.body or code != 400
    if later and stream:
        assert (reply.status, reply.whole) == (200, False)
        ends_in_an_error(path, reply.body, told)
    else:
        assert (reply.status, reply.whole) == (status, True)
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.json["error"]["type"] == told
        assert "before" not in reply.body.decode()
    # A request that is the client's own mistake is no fault of the worker.
    assert member.faults == 0 or code != 400


def ends_in_an_error(path: str, body: bytes, told: str) -> None:
    """Assert that *body* has the text so far, then one error, and no good end."""
    assert b"before" in body
    if path == MESSAGES:
        events = events_of(body)
        assert not check_grammar(events)
        assert (events[-1].name, events[-1].body["error"]["type"]) == ("error", told)
        return
    assert b"[DONE]" not in body
    *_, last = body.removesuffix(b"\n\n").split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == told
