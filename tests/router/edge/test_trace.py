"""The trace context of a request (X4)."""

import json

import pytest

from router.edge.trace import STATE_MAX, trace_of
from router.http1.head import judge
from router.messages import Trace
from tests.kit.edge import request
from tests.kit.engine import answers
from tests.kit.stack import open_stack

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def read(*fields: tuple[str, str]) -> Trace | None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    head, _ = judge(f"GET / HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode("latin-1"), 0)
    return trace_of(head)


@pytest.mark.parametrize(
    "parent",
    [
        PARENT,
        f"00-{TRACE}-00f067aa0ba902b7-ff",
        f"cc-{TRACE}-00f067aa0ba902b7-01",
        f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes",
    ],
)
def test_x4_a_whole_trace_context_is_taken_as_it_is(parent: str) -> None:
    found = read(("Traceparent", parent))

    assert found == Trace(parent)
    assert found.id == TRACE


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}0",
        f"{PARENT}-more",
        f"ff{PARENT[2:]}",
        f"cc{PARENT[2:]}0",
        f"cc{PARENT[2:]}-{'a' * 201}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-00f067aa0ba902b7-0g",
        PARENT.replace("-", "_"),
        f"{PARENT}\u00e9",
    ],
)
def test_x4_a_torn_trace_context_is_left_aside(parent: str) -> None:
    assert read(("traceparent", parent), ("tracestate", "k=v")) is None


def test_x4_two_parents_are_none() -> None:
    assert read(("traceparent", PARENT), ("traceparent", PARENT)) is None
    assert read(("tracestate", "k=v")) is None


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        (["k=v, o=w"], "k=v, o=w"),
        (["k=v", "", "o=w"], "k=v,o=w"),
        (["k" * STATE_MAX], "k" * STATE_MAX),
        (["k" * (STATE_MAX + 1)], None),
        (["k" * 300, "o" * 300], None),
        (["k=\u00e9"], None),
        (["k=\tv"], None),
        ([""], None),
    ],
)
def test_x4_a_torn_state_leaves_its_trace(states: list[str], whole: str | None) -> None:
    fields = [("tracestate", state) for state in states]

    assert read(("traceparent", PARENT), *fields) == Trace(PARENT, whole)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"]
)
async def test_x4_the_engine_is_sent_the_trace_context_of_the_client(path: str) -> None:
    asked: dict[str, object] = {"model": "m", "max_tokens": 9, "prompt": "hi"}
    if path != "/v1/completions":
        asked |= {"messages": [{"role": "user", "content": "hi"}]}
        del asked["prompt"]
    body = json.dumps(asked).encode()
    async with open_stack(answers("ok")) as stack:
        client = await stack.edge.connect()
        for parent in (PARENT, PARENT[:-1]):
            fields = {"traceparent": parent, "tracestate": "k=v"}
            await client.send(request("POST", path, body, fields))
            assert (await client.reply()).status == 200
        first, second = stack.engines[0].seen
        records = [
            stack.router.receipt(str(x.headers["x-request-id"].partition("/")[0])) or {}
            for x in (first, second)
        ]

    assert first.headers["traceparent"] == PARENT
    assert first.headers["tracestate"] == "k=v"
    assert "traceparent" not in second.headers
    assert "tracestate" not in second.headers
    assert [record.get("trace_id") for record in records] == [TRACE, None]
