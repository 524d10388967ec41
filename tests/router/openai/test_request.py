import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.messages import GenerationParams
from router.openai.fields import OWNED, PASSED, READ
from router.openai.request import (
    DEPTH_MAX,
    IGNORED_MAX,
    NAME_MAX,
    ChatRequest,
    RequestInvalid,
    parse_chat,
)
from router.openai.upstream import build_body

USER = {"role": "user", "content": "Hi"}
TABLE = {"m": "m", "alias": "m"}


def written(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER]} | fields).encode()


def parse(**fields: Any) -> ChatRequest:
    return parse_chat(written(**fields), TABLE.get)


def refusal(body: bytes) -> RequestInvalid:
    with pytest.raises(RequestInvalid) as caught:
        parse_chat(body, TABLE.get)
    return caught.value


def test_o1_the_smallest_request_becomes_a_job() -> None:
    request = parse()

    assert (request.job.model, request.job.target) == ("m", "m")
    assert request.job.messages == (USER,)
    assert request.job.params == GenerationParams()
    assert (request.job.extras, request.job.ignored) == ({}, ())
    assert (request.stream, request.include_usage) == (False, False)


def test_o3_an_alias_is_resolved_and_the_clients_name_kept() -> None:
    job = parse(model="alias").job

    assert (job.model, job.target) == ("alias", "m")


def test_o1_known_fields_are_read() -> None:
    request = parse(
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_p=1,
        stop="END",
        seed=-1,
        max_tokens=5,
        n=1,
    )

    assert (request.stream, request.include_usage) == (True, True)
    assert request.job.params == GenerationParams(
        max_tokens=5, temperature=0.0, top_p=1.0, stop=("END",), seed=-1
    )
    assert request.job.ignored == ()


def test_o1_null_is_the_same_as_absent() -> None:
    nothing = dict.fromkeys((READ | PASSED) - {"model", "messages"})

    assert parse(**nothing) == parse()


def test_o1_max_completion_tokens_wins_over_its_alias() -> None:
    params = parse(max_completion_tokens=3, max_tokens=9).job.params

    assert params.max_tokens == 3


def test_usage_of_a_whole_reply_needs_no_asking() -> None:
    assert not parse(stream_options={"include_usage": True}).include_usage


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": None}),
        ("model", {"model": ""}),
        ("model", {"model": 7}),
        ("messages", {"messages": None}),
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi"}),
        ("messages[1]", {"messages": [USER, "Hi"]}),
        ("messages[0].role", {"messages": [{"content": "Hi"}]}),
        ("messages[2].role", {"messages": [USER, USER, USER | {"role": "function"}]}),
        ("messages[0].role", {"messages": [USER | {"role": ["user"]}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [USER | {"content": None}]}),
        ("messages[0].content", {"messages": [USER | {"content": 7}]}),
        ("messages[0].content", {"messages": [USER | {"content": []}]}),
        ("messages[0].content[0]", {"messages": [USER | {"content": ["Hi"]}]}),
        ("messages[0].content[0].type", {"messages": [USER | {"content": [{}]}]}),
        (
            "messages[0].content[1].text",
            {
                "messages": [
                    USER | {"content": [{"type": "text", "text": ""}, {"type": "text"}]}
                ]
            },
        ),
        ("messages[0].content", {"messages": [{"role": "assistant"}]}),
        (
            "messages[0].content",
            {"messages": [{"role": "assistant", "content": [], "tool_calls": []}]},
        ),
        (
            "messages[0].content",
            {"messages": [{"role": "assistant", "content": 0, "refusal": "No."}]},
        ),
        (
            "messages[0].content",
            {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
        ),
        (
            "messages[0].tool_calls",
            {"messages": [{"role": "assistant", "tool_calls": ["f"]}]},
        ),
        ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "1"}]}),
        (
            "messages[0].tool_call_id",
            {"messages": [{"role": "tool", "content": "1", "tool_call_id": ""}]},
        ),
        ("temperature", {"temperature": 2.01}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": "1"}),
        ("temperature", {"temperature": True}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": 1.5}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": 1.0}),
        ("max_tokens", {"max_tokens": -1, "max_completion_tokens": 5}),
        ("max_completion_tokens", {"max_completion_tokens": 2**31}),
        ("max_completion_tokens", {"max_completion_tokens": True}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": "1"}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("stop", {"stop": ["a", 1]}),
        ("stop", {"stop": ""}),
        ("stop", {"stop": {}}),
        ("stream", {"stream": 1}),
        ("stream_options", {"stream_options": True}),
        (
            "stream_options.include_usage",
            {"stream_options": {"include_usage": "yes"}},
        ),
        ("n", {"n": 2}),
        ("n", {"n": 0}),
        ("n", {"n": True}),
        ("n", {"n": "1"}),
    ],
)
def test_o1_a_bad_value_is_refused_by_its_name(
    param: str, fields: dict[str, Any]
) -> None:
    error = refusal(written(**fields))

    assert (error.status, error.type) == (400, "invalid_request_error")
    assert error.param == param
    assert param in error.message
    assert error.code in {
        "invalid_value",
        "missing_required_parameter",
        "unsupported_value",
    }


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"m"', b"null", b"{'model': 1}", b'{"model":"\xff"}', b"NaN"],
)
def test_a_body_that_is_no_json_object_is_400(body: bytes) -> None:
    error = refusal(body)

    assert (error.status, error.param, error.code) == (400, None, None)


@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 900, 100_000])
def test_h1_json_too_deep_is_400(depth: int) -> None:
    tools = "[" * depth + "]" * depth
    body = f'{{"model":"m","messages":[{json.dumps(USER)}],"tools":{tools}}}'

    error = refusal(body.encode())

    assert (error.status, error.type) == (400, "invalid_request_error")


def test_what_is_deep_but_not_too_deep_can_be_written_again() -> None:
    deep: Any = {}
    for _ in range(DEPTH_MAX - 5):
        deep = {"properties": deep}
    wide = [USER] * (2 * DEPTH_MAX)

    job = parse(tools=[deep], messages=wide).job

    assert json.loads(build_body(job))["tools"] == [deep]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "", "name": "ann"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is it?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "t1", "function": {"name": "f", "arguments": ""}}],
        },
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [{"id": "t1", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "reasoning_content": "Hm."},
        {"role": "assistant", "content": None, "reasoning": "Hm."},
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
    ],
)
def test_o1_messages_are_carried_opaquely(message: dict[str, Any]) -> None:
    job = parse(messages=[message]).job

    assert job.messages == (message,)
    assert json.loads(build_body(job))["messages"] == [message]


def test_o1_fields_of_the_engine_pass_through_untouched() -> None:
    passed: dict[str, Any] = {name: {"any": [1, "x", None]} for name in PASSED}

    job = parse(**passed).job

    assert job.extras == passed
    assert job.ignored == ()
    assert passed.items() <= json.loads(build_body(job)).items()


def test_o1_fields_of_the_router_and_unknown_ones_are_dropped_and_named() -> None:
    job = parse(
        id_slot=0,
        user="ann",
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ).job

    assert sorted(job.ignored) == [
        "id_slot",
        "stream_options.continuous_usage_stats",
        "user",
    ]
    assert job.extras == {}


def test_o1_what_the_router_owns_is_never_passed() -> None:
    assert not OWNED & PASSED
    assert READ < OWNED
    assert {
        "id_slot",
        "n_predict",
        "rid",
        "request_id",
        "priority",
        "kv_transfer_params",
        "n",
        "stream_options",
    } <= OWNED


def test_names_of_dropped_fields_are_bounded() -> None:
    names = [f"\x00{i}" + "x" * 10_000 for i in range(3 * IGNORED_MAX)]

    ignored = parse(**dict.fromkeys(names, 1)).job.ignored

    assert len(ignored) == IGNORED_MAX
    assert all(len(name) <= NAME_MAX + 3 and name.isprintable() for name in ignored)


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("../../slots?x=", "'../../slots?x='"),
        ("%2e%2e%2f", "'%2e%2e%2f'"),
        ("a\x00b\r\n", r"'a\x00b\r\n'"),
        ("x" * 10_000, f"'{'x' * NAME_MAX}...'"),
        ("\x00" * NAME_MAX, "...'"),
    ],
)
def test_o6_an_absurd_model_name_is_only_unknown(model: str, shown: str) -> None:
    error = refusal(written(model=model))

    assert (error.status, error.param) == (404, "model")
    assert (error.type, error.code) == ("invalid_request_error", "model_not_found")
    assert shown in error.message
    assert error.message.isprintable()
    assert len(error.message) < 2 * NAME_MAX


def test_o6_only_a_right_request_is_looked_up() -> None:
    asked = []

    def resolve(name: str) -> str | None:
        asked.append(name)
        return None

    for fields in ({"n": 2}, {"temperature": 9}, {"model": "x"}):
        with pytest.raises(RequestInvalid):
            parse_chat(written(**fields), resolve)

    assert asked == ["x"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(sorted(READ | {"tools", "zz"})), JSON)
    | st.dictionaries(st.text(max_size=3), JSON)
)
def test_whatever_comes_it_is_a_job_that_can_be_sent_or_a_refusal(
    fields: dict[str, Any],
) -> None:
    try:
        job = parse_chat(written(**fields), lambda name: name).job
    except RequestInvalid as error:
        refused = error
    else:
        assert json.loads(build_body(job))["stream"] is True
        return

    assert refused.status == 400


@given(st.binary(max_size=100))
def test_whatever_bytes_come_they_are_refused(body: bytes) -> None:
    assert refusal(body).status == 400
