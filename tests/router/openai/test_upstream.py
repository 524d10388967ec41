import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import Fault, FaultKind
from router.ids import AssignmentId, RequestId
from router.messages import (
    Delta,
    FinishReason,
    GenerationParams,
    Job,
    Kind,
    Usage,
)
from router.openai.fields import OWNED
from router.openai.upstream import (
    OPENAI_FIELDS,
    VARYING,
    AnswerReader,
    build_body,
    unsupported,
)
from router.sse import Event

ASSIGNMENT = AssignmentId(RequestId("r1"), 2)
STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
COUNTED = {"prompt_tokens": 9, "completion_tokens": 2}


def event(body: Any, name: bytes = b"") -> Event:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Event(name, raw, legacy_error=False)


def chunk(finish: Any = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    if logprobs is not None:
        choice["logprobs"] = logprobs
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def call(index: int | None = 0, *, args: Any = None, **fields: Any) -> dict[str, Any]:
    name = fields.pop("name", None)
    if index is not None:
        fields["index"] = index
    return fields | {"function": {"name": name, "arguments": args}}


def read(*bodies: Any) -> AnswerReader:
    """Read events that hold no fault."""
    reader = AnswerReader(ASSIGNMENT)
    for body in bodies:
        assert reader.read(event(body)) is None, body
    return reader


def fault_after(*bodies: Any) -> Fault:
    """Read events of which the last is a fault."""
    reader = read(*bodies[:-1])
    last = bodies[-1]
    fault = reader.read(last if isinstance(last, Event) else event(last))
    assert fault is not None
    return fault


def texts(reader: AnswerReader) -> list[tuple[Kind, str]]:
    assert [delta.index for delta in reader.deltas] == list(range(len(reader.deltas)))
    assert {delta.assignment for delta in reader.deltas} <= {ASSIGNMENT}
    return [(delta.kind, delta.text) for delta in reader.deltas]


def tools(*fragments: dict[str, Any]) -> list[tuple[int, str | None, str | None, str]]:
    """Read each fragment in a chunk of its own; give what the deltas carry."""
    reader = read(*(chunk(tool_calls=[fragment]) for fragment in fragments))
    told = []
    for delta in reader.deltas:
        assert delta.kind is Kind.TOOL_CALL
        assert delta.tool is not None
        told.append((delta.tool.index, delta.tool.id, delta.tool.name, delta.text))
    return told


# -- the body ------------------------------------------------------------------


def test_build_body_always_asks_for_a_stream_with_usage() -> None:
    job = Job(model="alias", target="m", messages=({"role": "user", "content": "Hi"},))

    assert json.loads(build_body(job)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_o1_the_limit_goes_under_the_name_that_the_engine_knows() -> None:
    params = GenerationParams(
        max_tokens=7, temperature=0.0, top_p=0.5, stop=("a",), seed=3
    )
    job = Job(model="m", target="m", messages=(), params=params)

    body = json.loads(build_body(job, "n_predict"))

    assert body["n_predict"] == 7
    assert "max_tokens" not in body
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.0, 0.5, 3)
    assert body["stop"] == ["a"]


ALL_SAMPLING = GenerationParams(
    presence_penalty=0.1,
    frequency_penalty=0.2,
    top_k=40,
    min_p=0.05,
    typical_p=0.9,
    repeat_penalty=1.1,
    repeat_last_n=64,
    min_tokens=2,
    ignore_eos=False,
)


def test_j3_each_parameter_goes_under_the_name_that_the_engine_knows() -> None:
    job = Job(model="m", target="m", messages=(), params=ALL_SAMPLING)
    names = {"repeat_penalty": "repetition_penalty", "ignore_eos": "ignore_eos"}

    body = json.loads(build_body(job, sampling_fields=names))

    asked = body.keys() - {"model", "messages", "stream", "stream_options"}
    assert asked == {"repetition_penalty", "ignore_eos"}
    assert (body["repetition_penalty"], body["ignore_eos"]) == (1.1, False)


def test_j3_what_an_engine_does_not_know_is_named() -> None:
    job = Job(model="m", target="m", messages=(), params=ALL_SAMPLING)

    assert unsupported(job, dict.fromkeys(VARYING, "x")) == ()
    assert unsupported(job, OPENAI_FIELDS) == VARYING[2:]
    assert unsupported(Job("m", ()), {}) == ()


def test_o1_nothing_that_the_router_owns_comes_from_the_extras() -> None:
    extras = dict.fromkeys(OWNED, "evil") | {"top_k": 1}
    job = Job(model="m", target="m", messages=(), extras=extras)

    body = json.loads(build_body(job))

    assert "evil" not in body.values()
    assert body["top_k"] == 1


# -- deltas --------------------------------------------------------------------


def test_f9_deltas_are_stamped_in_the_order_of_their_bytes() -> None:
    reader = read(
        chunk(role="assistant", content=None),
        chunk(reasoning_content="hm"),
        chunk(content="He"),
        chunk(content="llo"),
    )

    assert texts(reader) == [
        (Kind.REASONING, "hm"),
        (Kind.TEXT, "He"),
        (Kind.TEXT, "llo"),
    ]


def test_indices_go_on_when_the_caller_takes_the_list() -> None:
    reader = read(chunk(content="a"))
    reader.deltas = []

    reader.read(event(chunk(content="b")))

    assert [delta.index for delta in reader.deltas] == [1]


def test_b50_null_and_empty_text_is_no_delta() -> None:
    reader = read(
        chunk(role="assistant", content=""),
        chunk(content=None, reasoning_content=None, tool_calls=None, refusal=None),
        chunk(content="", reasoning="", refusal="", tool_calls=[]),
        {"choices": [{"index": 0, "delta": None}]},
        {"choices": [{"index": None, "finish_reason": ""}]},
        chunk(content="x"),
    )

    assert texts(reader) == [(Kind.TEXT, "x")]
    assert reader.finish is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_both_names_of_reasoning_are_read(name: str) -> None:
    assert texts(read(chunk(**{name: "hm"}))) == [(Kind.REASONING, "hm")]


def test_reasoning_under_both_names_is_read_once() -> None:
    reader = read(chunk(reasoning="hm", reasoning_content="hm"))

    assert texts(reader) == [(Kind.REASONING, "hm")]


def test_all_that_one_chunk_holds_becomes_deltas() -> None:
    reader = read(
        chunk(
            reasoning="hm",
            content="so",
            refusal="no",
            tool_calls=[call(id="t", name="f", args="{}")],
        )
    )

    assert texts(reader) == [
        (Kind.REASONING, "hm"),
        (Kind.TEXT, "so"),
        (Kind.REFUSAL, "no"),
        (Kind.TOOL_CALL, "{}"),
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        {"usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        {"choices": None, "usage": {"prompt_tokens": 9, "completion_tokens": 2}},
        STOP | {"usage": {"prompt_tokens": 9, "completion_tokens": 2}},
    ],
)
def test_b48_usage_is_read_wherever_it_comes(body: dict[str, Any]) -> None:
    reader = read(chunk(content="x"), STOP, body, b"[DONE]")

    assert reader.finished().usage == Usage(9, 2)
    assert len(reader.deltas) == 1


def test_the_last_usage_counts_and_counts_once() -> None:
    first = {"prompt_tokens": 9, "completion_tokens": 1}
    last = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}

    reader = read(chunk(content="x") | {"usage": first}, STOP | {"usage": last})

    assert reader.usage == Usage(9, 2)


@pytest.mark.parametrize(
    ("counted", "usage"),
    [
        (
            {"prompt_tokens_details": {"cached_tokens": 3}},
            Usage(9, 2, cached_tokens=3),
        ),
        ({"prompt_tokens_details": None, "reasoning_tokens": 1}, Usage(9, 2, None, 1)),
        (
            {"completion_tokens_details": {"reasoning_tokens": 2}},
            Usage(9, 2, reasoning_tokens=2),
        ),
    ],
)
def test_what_tokens_are_made_of_is_read(counted: Any, usage: Usage) -> None:
    counted |= {"prompt_tokens": 9, "completion_tokens": 2}

    assert read({"choices": [], "usage": counted}).usage == usage


@pytest.mark.parametrize(
    ("odd", "usage"),
    [
        (COUNTED | {"prompt_tokens_details": []}, Usage(9, 2)),
        (
            COUNTED
            | {
                "prompt_tokens_details": {"cached_tokens": "3"},
                "completion_tokens_details": {"reasoning_tokens": 1},
                "reasoning_tokens": {},
            },
            Usage(9, 2, None, 1),
        ),
        (
            COUNTED | {"completion_tokens_details": "x", "reasoning_tokens": 2},
            Usage(9, 2, None, 2),
        ),
        (COUNTED | {"prompt_tokens": "9"}, None),
        (COUNTED | {"prompt_tokens": True}, None),
        (COUNTED | {"completion_tokens": -2}, None),
        (COUNTED | {"completion_tokens": 2.5}, None),
        ([], None),
        ("none", None),
    ],
)
def test_b48_an_odd_usage_costs_no_answer(odd: Any, usage: Usage | None) -> None:
    said = {"usage": odd}

    reader = read(chunk(content="x") | said, STOP | said, b"[DONE]")

    assert texts(reader) == [(Kind.TEXT, "x")]
    assert reader.finished().usage == usage
    assert reader.done
    assert read(STOP, {"choices": []} | said).usage == usage
    assert read(STOP, said).usage == usage


def test_b48_an_odd_usage_takes_no_count_back() -> None:
    odd = COUNTED | {"prompt_tokens": "9"}

    reader = read(STOP | {"usage": COUNTED}, {"choices": [], "usage": odd})

    assert reader.usage == Usage(9, 2)


def test_b47_an_error_with_an_odd_usage_is_an_error() -> None:
    error = {"error": {"message": "boom", "code": 503}, "usage": []}

    assert fault_after(error).kind is not FaultKind.PROTOCOL


@pytest.mark.parametrize("counted", [None, {}, {"prompt_tokens": 9}])
def test_half_a_usage_is_none(counted: Any) -> None:
    assert read({"choices": [], "usage": counted}).usage is None


# -- log probabilities ---------------------------------------------------------


def test_o1_logprobs_come_back_as_they_came() -> None:
    raw = b'{"content":[{"token":"x","logprob":-1.50e-05,"id":9007199254740993}]}'
    body = b'{"choices":[{"delta":{"content":"x"},"logprobs":' + raw + b"}]}"

    (delta,) = read(body).deltas

    assert (delta.kind, delta.text, delta.logprobs) == (Kind.TEXT, "x", raw)


def test_o1_logprobs_without_text_are_not_lost() -> None:
    logprobs = {"content": [{"token": "", "logprob": -1}], "refusal": None}

    reader = read(chunk(content="", logprobs=logprobs), STOP)

    (delta,) = reader.deltas
    assert (delta.kind, delta.text) == (Kind.TEXT, "")
    assert json.loads(delta.logprobs or b"") == logprobs


def test_logprobs_go_with_the_text_of_their_chunk() -> None:
    logprobs = {"content": [{"token": "x"}]}

    told = read(
        chunk(reasoning="hm", content="x", logprobs=logprobs),
        chunk(reasoning="hm", logprobs=logprobs),
    ).deltas

    assert [delta.logprobs is not None for delta in told] == [False, True, True]


@pytest.mark.parametrize("nothing", [{}, {"content": []}, {"content": None}])
def test_b50_logprobs_of_nothing_are_no_delta(nothing: Any) -> None:
    assert read(chunk(content="", logprobs=nothing)).deltas == []


# -- tool calls ----------------------------------------------------------------


def test_o3_id_and_name_of_a_tool_call_come_once() -> None:
    told = tools(
        call(id="t1", type="function", name="f", args=""),
        call(id="t1", name="f", args='{"a"'),
        call(id="", name="", args=":1}"),
        call(args=""),
        call(1, id="t2", name="g"),
    )

    assert told == [
        (0, "t1", "f", ""),
        (0, None, None, '{"a"'),
        (0, None, None, ":1}"),
        (1, "t2", "g", ""),
    ]


def test_b80_arguments_pass_byte_for_byte() -> None:
    told = tools(call(id="t", name="f", args='{"a": tru'), call(args="\n\\u00e9é\x00"))

    assert [text for *_, text in told] == ['{"a": tru', "\n\\u00e9é\x00"]


def test_two_calls_in_turns_are_told_apart() -> None:
    told = tools(
        call(5, id="t1", name="f", args="a"),
        call(2, id="t2", name="g", args="b"),
        call(5, args="c"),
        call(2, args="d"),
    )

    assert [(number, text) for number, _, _, text in told] == [
        (0, "a"),
        (1, "b"),
        (0, "c"),
        (1, "d"),
    ]


def test_calls_without_an_index_are_told_apart_by_their_ids() -> None:
    told = tools(
        call(None, id="t1", name="f", args="a"),
        call(None, args="b"),
        call(None, id="t2", name="g", args="c"),
        call(None, args="d"),
    )

    assert told == [
        (0, "t1", "f", "a"),
        (0, None, None, "b"),
        (1, "t2", "g", "c"),
        (1, None, None, "d"),
    ]


def test_calls_that_share_an_index_are_told_apart_by_their_ids() -> None:
    told = tools(
        call(0, id="t1", name="f", args="a"),
        call(0, id="t2", name="g", args="b"),
        call(0, args="c"),
        call(0, id="t3", args="d"),
    )

    assert told == [
        (0, "t1", "f", "a"),
        (1, "t2", "g", "b"),
        (1, None, None, "c"),
        (1, None, None, "d"),
    ]


def test_a_call_without_an_id_is_given_one() -> None:
    told = tools(call(None, name="f"), call(1, id="", name="g"), call(1, args="x"))

    assert told == [
        (0, "call_r1_2_0", "f", ""),
        (1, "call_r1_2_1", "g", ""),
        (1, None, None, "x"),
    ]


def test_a_name_that_comes_late_is_kept() -> None:
    assert tools(call(id="t"), call(name="f"), {"index": 0}) == [
        (0, "t", None, ""),
        (0, None, "f", ""),
    ]


# -- the end -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("stop", FinishReason.STOP),
        ("STOP", FinishReason.STOP),
        ("eos", FinishReason.STOP),
        ("eos_token", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("repetition", FinishReason.LENGTH),
        ("tool_calls", FinishReason.TOOL_CALLS),
        ("function_call", FinishReason.TOOL_CALLS),
        ("content_filter", FinishReason.CONTENT_FILTER),
    ],
)
def test_f7_the_end_is_composed_of_finish_and_usage(
    word: str, reason: FinishReason
) -> None:
    reader = read(chunk(content="x"), chunk(word))
    assert (reader.finish, reader.done) == (reason, False)

    assert reader.read(event(b"[DONE]")) is None

    assert reader.done
    finished = reader.finished()
    assert (finished.assignment, finished.reason) == (ASSIGNMENT, reason)
    assert (finished.usage, finished.stop_sequence) == (None, None)


def test_b18_last_text_and_finish_in_one_chunk_are_both_read_once() -> None:
    reader = read(chunk("stop", content="end"), b"[DONE]")

    assert texts(reader) == [(Kind.TEXT, "end")]
    assert reader.finish is FinishReason.STOP


def test_b18_nothing_comes_after_the_finish_but_usage() -> None:
    reader = read(
        chunk("length"),
        chunk("stop", content="late", tool_calls=[call(id="t", name="f")]),
        chunk(content="late") | {"usage": {"prompt_tokens": 1, "completion_tokens": 2}},
        b"[DONE]",
        chunk(content="later"),
        {"error": "too late"},
        b"rubbish",
    )

    assert reader.deltas == []
    finished = reader.finished()
    assert (finished.reason, finished.usage) == (FinishReason.LENGTH, Usage(1, 2))


@pytest.mark.parametrize(
    ("fields", "sequence"),
    [
        ({"stop_reason": "END"}, "END"),
        ({"matched_stop": "END"}, "END"),
        ({"stop_reason": 128009}, None),
        ({"stop_reason": None, "matched_stop": 2}, None),
    ],
)
def test_the_stop_sequence_is_told_where_the_engine_says_so(
    fields: Any, sequence: str | None
) -> None:
    body = {"choices": [{"delta": {}, "finish_reason": "stop"} | fields]}

    assert read(body).finished().stop_sequence == sequence


@pytest.mark.parametrize("word", ["abort", "error", "Abort"])
def test_a6_abort_and_error_are_the_engines_failure(word: str) -> None:
    assert fault_after(chunk(content="x"), chunk(word)).kind is FaultKind.ENGINE_ABORT


def test_a6_an_unknown_finish_reason_is_no_success() -> None:
    fault = fault_after(chunk("http://10.0.0.7:80/" + "x" * 999))

    assert fault.kind is FaultKind.PROTOCOL
    assert "10.0.0.7" not in fault.message
    assert len(fault.message) < 100


def test_a6_done_without_a_finish_reason_is_truncation() -> None:
    fault = fault_after(chunk(content="x"), b"[DONE]")

    assert fault.kind is FaultKind.STREAM_CLOSED_EARLY


@pytest.mark.parametrize("word", [b"[DONE]", b" [DONE]", b"[DONE] ", b"\t[DONE]\r"])
def test_done_is_known_with_and_without_spaces(word: bytes) -> None:
    assert read(STOP, word).done


# -- faults --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "full", "type": "x", "code": 503}},
        {"object": "error", "message": "full", "type": "x", "code": 503},
        {"object": "error", "message": "full", "code": "503", "choices": []},
        {"error": {"message": "full", "code": 503}, "choices": [], "usage": "odd"},
        Event(b"error", b'{"code":503,"message":"full"}', legacy_error=False),
        Event(b"error", b'{"choices":[],"code":503}', legacy_error=False),
        Event(b"", b'{"code":503,"message":"full"}', legacy_error=True),
        Event(b"", b'{"choices":[],"code":503}', legacy_error=True),
    ],
)
@pytest.mark.parametrize("before", [(), (chunk(content="a"), chunk(content="b"))])
def test_b47_an_error_in_band_is_a_fault_wherever_it_comes(
    body: Any, before: tuple[Any, ...]
) -> None:
    fault = fault_after(*before, body)

    assert (fault.kind, fault.status) == (FaultKind.DECLINED, 503)


@pytest.mark.parametrize(
    "body",
    [
        {"detail": "it broke"},
        {"error": "it broke"},
        Event(b"error", b"it broke", legacy_error=False),
        Event(b"", b"it broke", legacy_error=True),
    ],
)
def test_b47_an_error_without_a_status_is_a_500(body: Any) -> None:
    fault = fault_after(body)

    assert (fault.kind, fault.status) == (FaultKind.SERVER_ERROR, 500)
    assert fault.message == "it broke"


@pytest.mark.parametrize("nothing", [None, False, ""])
def test_an_error_field_without_an_error_is_fine(nothing: Any) -> None:
    reader = read(chunk(content="x") | {"error": nothing})

    assert texts(reader) == [(Kind.TEXT, "x")]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"rubbish",
        b"[]",
        b"7",
        b'{"choices":7}',
        b'{"choices":[7]}',
        b'{"choices":[{"delta":7}]}',
        b'{"choices":[{"delta":{"content":["x"]}}]}',
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":{}}}]}}]}',
        b'{"choices":[{"index":1,"delta":{"content":"x"}}]}',
        b'{"choices":[{"index":0},{"index":1}]}',
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_w7_what_is_no_chunk_is_a_protocol_fault(body: bytes) -> None:
    fault = fault_after(chunk(content="x"), body)

    assert fault.kind is FaultKind.PROTOCOL


@pytest.mark.parametrize(
    "other",
    [
        Event(b"ping", b"{}", legacy_error=False),
        Event(b"sglext_ids", b"[1,2,3]", legacy_error=False),
        Event(b"", b"", legacy_error=False),
        Event(b"", b" ", legacy_error=False),
        Event(b"", b'{"choices":[],"prompt_progress":{"total":9}}', legacy_error=False),
        Event(b"", b'{"choices":[],"sglext":{}}', legacy_error=False),
    ],
)
def test_events_that_say_nothing_change_nothing(other: Event) -> None:
    reader = read(chunk(content="a"))

    assert reader.read(other) is None
    assert reader.read(event(chunk(content="b"))) is None
    assert texts(reader) == [(Kind.TEXT, "a"), (Kind.TEXT, "b")]


def test_deltas_before_a_fault_are_kept() -> None:
    reader = read(chunk(content="a"))

    fault = reader.read(event(chunk("abort", content="b")))

    assert fault is not None
    assert texts(reader) == [(Kind.TEXT, "a"), (Kind.TEXT, "b")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "content",
                    "reasoning",
                    "tool_calls",
                    "function",
                    "index",
                    "finish_reason",
                    "logprobs",
                    "usage",
                    "error",
                    "detail",
                    "object",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from([b"", b"error", b"ping"]),
        JSON.map(lambda body: json.dumps(body).encode())
        | JSON.map(lambda d: json.dumps({"choices": [{"delta": d}]}).encode())
        | st.binary(max_size=20)
        | st.just(b"[DONE]"),
        st.just(value=False),
    ),
    max_size=6,
)


@given(EVENTS)
def test_whatever_an_engine_sends_its_deltas_are_gapless(events: list[Event]) -> None:
    reader = AnswerReader(ASSIGNMENT)

    for each in events:
        if reader.read(each) is not None:
            break

    texts(reader)
    assert all(isinstance(delta, Delta) for delta in reader.deltas)
    assert not reader.done or reader.finished().reason is reader.finish
