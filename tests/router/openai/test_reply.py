import json
from typing import Any

import pytest

from router.errors import Fault, FaultKind
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Kind, ToolPart, Usage
from router.openai.reply import DONE, KEEPALIVE, ReplyAggregate, StreamEncoder

ASSIGNMENT = AssignmentId(RequestId("r1"), 1)
USAGE = Usage(9, 5, cached_tokens=3)
USAGE_OBJECT = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def text(text: str, kind: Kind = Kind.TEXT, logprobs: bytes | None = None) -> Delta:
    return Delta(ASSIGNMENT, 0, kind, text, logprobs=logprobs)


def tool(number: int, args: str, *first: str | None) -> Delta:
    """*first*: the id and the name, in a call's first fragments."""
    part = ToolPart(number, *first)
    return Delta(ASSIGNMENT, 0, Kind.TOOL_CALL, args, part)


def finished(
    reason: FinishReason = FinishReason.STOP, usage: Usage | None = None
) -> Finished:
    return Finished(ASSIGNMENT, reason, usage)


def encoder(*, include_usage: bool = False) -> StreamEncoder:
    return StreamEncoder("chatcmpl-1", 'm"x', 17, include_usage=include_usage)


def aggregate(*deltas: Delta) -> ReplyAggregate:
    whole = ReplyAggregate("chatcmpl-1", "m", 17)
    whole.add(deltas)
    return whole


def reply(whole: ReplyAggregate, end: Finished) -> Any:
    return json.loads(whole.body(end))


def chunks(raw: bytes) -> list[Any]:
    """Cut a stream at its blank lines; each event is one data line."""
    *events, rest = raw.split(b"\n\n")
    assert rest == b""
    found: list[Any] = []
    for each in events:
        assert each.startswith(b"data: ")
        assert b"\n" not in each
        assert b"\r" not in each
        body = each.removeprefix(b"data: ")
        found.append(body if body == b"[DONE]" else json.loads(body))
    return found


def choice(raw: bytes) -> Any:
    (only,) = chunks(raw)
    (found,) = only["choices"]
    return found


# -- the stream ----------------------------------------------------------------


def test_o3_a_stream_is_role_deltas_finish_usage_done() -> None:
    out = encoder(include_usage=True)

    raw = out.first() + out.deltas([text("He"), text("y")])
    raw += out.finish(finished(usage=USAGE))

    *told, usage, done = chunks(raw)
    assert [one["choices"] for one in told] == [
        [{"index": 0, "delta": delta, "finish_reason": finish}]
        for delta, finish in (
            ({"role": "assistant", "content": ""}, None),
            ({"content": "He"}, None),
            ({"content": "y"}, None),
            ({}, "stop"),
        )
    ]
    assert all(one["usage"] is None for one in told)
    assert (usage["choices"], usage["usage"]) == ([], USAGE_OBJECT)
    for one in (*told, usage):
        assert (one["id"], one["created"], one["model"]) == ("chatcmpl-1", 17, 'm"x')
        assert one["object"] == "chat.completion.chunk"
    assert done == b"[DONE]"


def test_o3_usage_is_told_only_if_asked() -> None:
    out = encoder()

    raw = out.first() + out.deltas([text("x")]) + out.finish(finished(usage=USAGE))

    assert b"usage" not in raw
    assert len(chunks(raw)) == 4


def test_usage_that_the_engine_never_told_is_not_made_up() -> None:
    finish, done = chunks(encoder(include_usage=True).finish(finished()))

    assert finish["choices"][0]["finish_reason"] == "stop"
    assert done == b"[DONE]"


@pytest.mark.parametrize("reason", FinishReason)
def test_every_finish_reason_has_openais_name(reason: FinishReason) -> None:
    finish, _ = chunks(encoder().finish(finished(reason)))

    assert finish["choices"][0]["finish_reason"] in {
        "stop",
        "length",
        "tool_calls",
        "content_filter",
    }


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Kind.TEXT, "content"),
        (Kind.REASONING, "reasoning_content"),
        (Kind.REFUSAL, "refusal"),
    ],
)
@pytest.mark.parametrize("words", ["x", '\r\n\n\x00\x7f\u2028"\\', "é🙂", "</s>"])
def test_text_of_every_kind_comes_out_whole(kind: Kind, field: str, words: str) -> None:
    told = choice(encoder().deltas([text(words, kind)]))

    assert told == {"index": 0, "delta": {field: words}, "finish_reason": None}


def test_deltas_taken_together_are_written_as_if_one_by_one() -> None:
    deltas = [text("a"), text("b", Kind.REASONING), tool(3, "", "t", "f"), text("c")]
    together, alone = encoder(), encoder()

    assert together.deltas(deltas) == b"".join(alone.deltas([d]) for d in deltas)
    assert together.deltas([]) == b""


def test_o3_tool_indices_are_dense_and_names_come_once() -> None:
    raw = encoder().deltas(
        [
            tool(7, "", "t1", "f"),
            tool(7, '{"a":', "t1", "f"),
            tool(7, "1}"),
            tool(2, "{", "t2"),
            tool(2, "}", None, "g"),
        ]
    )

    assert [one["choices"][0]["delta"]["tool_calls"] for one in chunks(raw)] == [
        [
            {
                "index": 0,
                "id": "t1",
                "type": "function",
                "function": {"name": "f", "arguments": ""},
            }
        ],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
        [
            {
                "index": 1,
                "id": "t2",
                "type": "function",
                "function": {"arguments": "{"},
            }
        ],
        [{"index": 1, "function": {"arguments": "}", "name": "g"}}],
    ]


def test_o7_a_call_that_waits_comes_before_the_finish() -> None:
    out = encoder()
    raw = out.deltas(
        [
            tool(7, "{", "t1", "f"),
            tool(2, "{", "t2", "g"),
            text("x"),
            tool(7, "}"),
            tool(2, "}"),
        ]
    )

    *_, first, second, finish, done = chunks(raw + out.finish(finished()))

    assert [c["choices"][0]["delta"]["tool_calls"] for c in (first, second)] == [
        [
            {
                "index": 1,
                "id": "t2",
                "type": "function",
                "function": {"arguments": "{", "name": "g"},
            }
        ],
        [{"index": 1, "function": {"arguments": "}"}}],
    ]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert done == b"[DONE]"


def test_o1_logprobs_come_back_intact_in_one_line() -> None:
    told = choice(
        encoder(include_usage=True).deltas(
            [text("x", logprobs=b'{\r\n "content": [\n{"logprob":-1.50e-05}]}')]
        )
    )

    assert told["logprobs"] == {"content": [{"logprob": -1.5e-05}]}
    assert told["delta"] == {"content": "x"}


def test_a5_a_broken_stream_ends_in_one_error_frame() -> None:
    raw = encoder().error(Fault(FaultKind.STREAM_CLOSED_EARLY, "The worker is gone."))

    assert chunks(raw) == [
        {
            "error": {
                "message": "The worker is gone.",
                "type": "server_error",
                "param": None,
                "code": "worker_lost",
            }
        }
    ]
    assert DONE not in raw


def test_o3_a_keepalive_is_a_comment_that_ends_no_event() -> None:
    assert KEEPALIVE == b": ka\n"


# -- the whole reply -----------------------------------------------------------


def test_a_whole_reply_has_all_fields_that_a_client_needs() -> None:
    whole = aggregate(text("hm", Kind.REASONING), text("He"), text("y"))

    assert reply(whole, finished(usage=USAGE)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 17,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hey",
                    "refusal": None,
                    "reasoning_content": "hm",
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE_OBJECT,
    }


def test_content_is_null_where_there_are_only_tool_calls() -> None:
    whole = aggregate(
        tool(4, "", "t1", "f"),
        tool(1, "[", "t2"),
        tool(4, '{"a": tru'),
        tool(1, "]", None, "g"),
    )

    told = reply(whole, finished(FinishReason.TOOL_CALLS))["choices"][0]

    assert told["message"]["content"] is None
    assert told["message"]["tool_calls"] == [
        {
            "id": "t1",
            "type": "function",
            "function": {"name": "f", "arguments": '{"a": tru'},
        },
        {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "[]"}},
    ]
    assert told["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("deltas", "content", "refusal"),
    [
        ((), "", None),
        ((text("hm", Kind.REASONING),), "", None),
        ((text("No", Kind.REFUSAL), text(".", Kind.REFUSAL)), None, "No."),
        ((text("x"), tool(0, "", "t", "f")), "x", None),
    ],
)
def test_content_and_refusal(
    deltas: tuple[Delta, ...], content: str | None, refusal: str | None
) -> None:
    message = reply(aggregate(*deltas), finished())["choices"][0]["message"]

    assert (message["content"], message["refusal"]) == (content, refusal)


def test_b79_a_call_cut_by_length_stays_cut() -> None:
    whole = aggregate(tool(0, '{"path":"/a', "t", "f"))

    told = reply(whole, finished(FinishReason.LENGTH))["choices"][0]

    assert told["finish_reason"] == "length"
    call = told["message"]["tool_calls"][0]
    assert call["function"]["arguments"] == '{"path":"/a'


def test_a5_a_new_attempt_starts_from_nothing() -> None:
    whole = aggregate(
        text("a", logprobs=b'{"content":[1]}'),
        text("b", Kind.REASONING),
        text("c", Kind.REFUSAL),
        tool(0, "d", "t", "f"),
    )

    whole.reset()

    assert whole.body(finished()) == aggregate().body(finished())


def test_o1_logprobs_of_all_chunks_are_joined() -> None:
    whole = aggregate(
        text("a", logprobs=b'{"content":[{"logprob":-1.50}],"refusal":null}'),
        text("b", logprobs=b'{"content":[2,3]}'),
        text("c", logprobs=b'{"content":null,"refusal":[4]}'),
        text("d", logprobs=b'{"refusal":[5]}'),
        text("e", logprobs=b'"of another shape"'),
    )

    body = whole.body(finished())

    assert b'"content":[{"logprob":-1.50},2,3],"refusal":[4,5]' in body


def test_reasoning_tokens_are_told_where_they_are_known() -> None:
    usage = Usage(1, 2, reasoning_tokens=1)

    assert reply(aggregate(), finished(usage=usage))["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert "usage" not in reply(aggregate(), finished())
