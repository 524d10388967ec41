"""Deltas as one whole message."""

import json
from typing import Any

import pytest
from anthropic.types import Message

from router.anthropic.reply import MessageAggregate
from router.errors import AnswerUnfit, FaultKind
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Kind, ToolPart, Usage

A = AssignmentId(RequestId("req_1"), 1)
TOKENS = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=9)


def delta(kind: Kind, text: str, tool: ToolPart | None = None) -> Delta:
    return Delta(A, 0, kind, text, tool)


def text(said: str) -> Delta:
    return delta(Kind.TEXT, said)


def thought(said: str) -> Delta:
    return delta(Kind.REASONING, said)


def call(number: int, said: str, name: str | None = None) -> Delta:
    tool = ToolPart(number, f"t{number}" if name else None, name)
    return delta(Kind.TOOL_CALL, said, tool)


def reply(
    *deltas: Delta,
    reason: FinishReason = FinishReason.STOP,
    usage: Usage | None = TOKENS,
    **options: Any,
) -> Any:
    aggregate = MessageAggregate("msg_1", "claude", **options)
    for one in deltas:
        aggregate.add([one])
    body = json.loads(aggregate.body(Finished(A, reason, usage)))
    Message.model_validate(body)
    return body


def test_m8_blocks_come_in_the_order_of_the_answer() -> None:
    body = reply(
        thought("h"),
        thought("m"),
        text("I ask."),
        call(0, "", "f"),
        call(1, "", "g"),
        call(0, '{"a":1}'),
        call(1, '{"b":1.50}'),
        text("Done."),
    )

    assert [b["type"] for b in body["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
        "text",
    ]
    assert body["content"][0]["thinking"] == "hm"
    assert body["content"][2] == {
        "type": "tool_use",
        "id": "t0",
        "name": "f",
        "input": {"a": 1},
    }
    assert body["stop_reason"] == "tool_use"


def test_m8_usage_leaves_out_what_came_from_a_cache() -> None:
    assert reply(text("x"))["usage"] == {
        "input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 9,
        "output_tokens": 4,
    }
    assert reply(text("x"), text("y"), usage=None)["usage"] == {
        "input_tokens": 0,
        "output_tokens": 2,
    }


def test_m8_more_from_a_cache_than_there_is_makes_no_input_negative() -> None:
    odd = Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=9)

    usage = reply(text("x"), usage=odd)["usage"]

    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (0, 3)


def test_b71_an_empty_answer_has_no_block() -> None:
    assert reply(text(""))["content"] == []


def test_m8_a_call_without_arguments_has_an_empty_input() -> None:
    assert reply(call(0, "", "f"))["content"][0]["input"] == {}


def test_m4_a_refusal_is_text_with_its_reason() -> None:
    body = reply(delta(Kind.REFUSAL, "No."))

    assert body["content"] == [{"type": "text", "text": "No."}]
    assert body["stop_reason"] == "refusal"


@pytest.mark.parametrize("arguments", ['{"a": tru', "[1]", '"text"', "{} x", "nul"])
def test_b80_arguments_that_are_no_object_are_a_fault(arguments: str) -> None:
    with pytest.raises(AnswerUnfit) as unfit:
        reply(call(0, arguments, "f"), reason=FinishReason.TOOL_CALLS)

    fault = unfit.value.fault
    assert fault.kind is FaultKind.TOOL_PARSE
    assert fault.row.reason == "tool_parse_error"
    assert not fault.row.counts
    assert not fault.row.moves


@pytest.mark.parametrize("arguments", ["", "{", '{"path":"/a', '{"path":"/a"'])
@pytest.mark.parametrize(
    ("reason", "stop"),
    [
        (FinishReason.LENGTH, "max_tokens"),
        (FinishReason.CONTENT_FILTER, "refusal"),
    ],
)
def test_b79_a_call_that_was_cut_is_left_out(
    arguments: str, reason: FinishReason, stop: str
) -> None:
    body = reply(
        text("I write."), call(0, "{}", "f"), call(1, arguments, "rm"), reason=reason
    )

    assert [b.get("name") for b in body["content"]] == [None, "f"]
    assert body["stop_reason"] == stop


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.TOOL_CALLS])
def test_b79_a_call_without_arguments_that_was_not_cut_stays(
    reason: FinishReason,
) -> None:
    body = reply(call(0, "", "f"), call(1, "", "g"), reason=reason)

    assert [b["input"] for b in body["content"]] == [{}, {}]
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    "arguments",
    [
        '{"n":1.0,"big":12345678901234567890123,"k":1,"k":2}',
        '{ "a" : 1e2,\n "b":"\\u00e9é/\\/" ,"c":-0.0}',
        '{"deep":[{"x":[1.50,{}]}],"e":1E40}',
    ],
)
def test_b80_arguments_of_a_whole_message_stay_byte_for_byte(arguments: str) -> None:
    aggregate = MessageAggregate("msg_1", "claude")
    for piece in arguments:
        aggregate.add([call(0, piece, "f")])

    octets = aggregate.body(Finished(A, FinishReason.TOOL_CALLS, TOKENS))

    assert b'"input":' + arguments.encode() + b"}" in octets


def test_a5_a_reset_leaves_nothing() -> None:
    aggregate = MessageAggregate("msg_1", "claude")
    aggregate.add([thought("old"), call(0, "{", "f")])
    aggregate.reset()
    aggregate.add([text("new")])

    body = json.loads(aggregate.body(Finished(A, FinishReason.STOP, None)))

    assert body["content"] == [{"type": "text", "text": "new"}]
    assert body["usage"]["output_tokens"] == 1


def test_m7_thinking_is_signed_where_asked_for() -> None:
    assert reply(thought("hm"))["content"][0]["signature"] == ""
    signed = reply(thought("hm"), signature="rt1.1")
    assert signed["content"][0]["signature"] == "rt1.1"
