"""Messages requests, and the chat jobs that they become."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.anthropic.errors import THREAD_UNSUPPORTED
from router.anthropic.request import (
    STOPS_MAX,
    MessagesRequest,
    parse_count,
    parse_messages,
)
from router.checks import RequestInvalid
from router.messages import Endpoint, Job
from router.openai.upstream import build_body

TABLE = {"m": "m", "claude-opus": "m"}
USER = {"role": "user", "content": "Hi"}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
IMAGE = {"type": "image", "source": PNG}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": WEATHER["input_schema"],
    },
}
COMPACTION = {"type": "compaction", "content": "All before.", "signature": "s"}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}


def written(**fields: Any) -> bytes:
    asked = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    return json.dumps({k: v for k, v in asked.items() if v is not ...}).encode()


def parse(**fields: Any) -> MessagesRequest:
    return parse_messages(written(**fields), TABLE.get)


def job(**fields: Any) -> Job:
    return parse(**fields).job


def turns(*messages: Any) -> list[Any]:
    return list(job(messages=list(messages)).messages)


def refusal(**fields: Any) -> RequestInvalid:
    with pytest.raises(RequestInvalid) as caught:
        parse(**fields)
    return caught.value


def test_m2_the_smallest_request_becomes_a_chat_job() -> None:
    asked = parse(model="claude-opus")

    assert not asked.stream
    assert asked.job.endpoint is Endpoint.CHAT
    assert (asked.job.model, asked.job.target) == ("claude-opus", "m")
    assert asked.job.messages == (USER,)
    assert asked.job.params.max_tokens == 9
    assert asked.job.extras == {}
    assert asked.job.ignored == ()


def test_m2_parameters_have_their_places() -> None:
    found = job(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_sequences=["X", "Y"],
        metadata={"user_id": "u"},
        service_tier="auto",
    )

    assert found.params.temperature == 0.5
    assert found.params.top_p == 0.9
    assert found.extras == {"top_k": 40}
    assert found.ignored == ()
    assert json.loads(build_body(found))["stop"] == ["X", "Y"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": ...}, "model"),
        ({"model": 3}, "model"),
        ({"messages": ...}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages.0"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "developer", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (
            {"messages": [USER, {"role": "user", "content": [3]}]},
            "messages.1.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [CALL | {"input": "{}"}]}]},
            "messages.0.content.0.input",
        ),
        (
            {"messages": [{"role": "user", "content": [COMPACTION | {"content": 3}]}]},
            "messages.0.content.0.content",
        ),
        ({"system": 3}, "system"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "X"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"stop_sequences": ["X"] * (STOPS_MAX + 1)}, "stop_sequences"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools.0"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": "1"}},
            "thinking.budget_tokens",
        ),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ],
)
def test_m2_a_bad_value_is_refused_by_its_path(fields: Any, param: str) -> None:
    wrong = refusal(**fields)

    assert wrong.status == 400
    assert wrong.type == "invalid_request_error"
    assert wrong.param == param
    assert f"'{param}'" in wrong.message


def test_m2_stop_sequences_are_bounded() -> None:
    assert STOPS_MAX == 64
    assert len(job(stop_sequences=["X"] * STOPS_MAX).params.stop) == STOPS_MAX


@pytest.mark.parametrize(
    "thread",
    [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, {}],
)
def test_m2_a_conversation_that_the_server_is_to_hold_is_refused(thread: Any) -> None:
    """Taken as it is, the second half of one would be all that a model is told."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "dry"}
    wrong = refusal(thread=thread, messages=[{"role": "user", "content": [result]}])

    assert (wrong.status, wrong.param) == (400, "thread")
    assert wrong.code == THREAD_UNSUPPORTED
    with pytest.raises(RequestInvalid):
        parse_count(written(thread=thread), TABLE.get)
    assert job(thread=None).ignored == ()


def test_m2_an_unknown_model_is_not_found_and_asked_for_last() -> None:
    assert refusal(model="gpt-9").status == 404
    assert refusal(model="gpt-9", max_tokens=...).status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 5000])
def test_m2_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestInvalid):
        parse_messages(body, TABLE.get)


def test_b68_system_blocks_are_one_string_and_no_cache_control_is_left() -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    found = job(
        system=[{"type": "text", "text": "a", **cache}, {"type": "text", "text": "b"}],
        tools=[WEATHER | cache],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi", **cache}]},
            {"role": "assistant", "content": [CALL | cache]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "dry", **cache}],
                        **cache,
                    }
                ],
            },
        ],
        **cache,
    )

    assert found.messages[0] == {"role": "system", "content": "a\nb"}
    assert b"cache_control" not in build_body(found)


def test_m2_a_billing_line_that_changes_each_time_is_no_part_of_the_prompt() -> None:
    billing = "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"
    found = job(
        system=[{"type": "text", "text": billing}, {"type": "text", "text": "You are"}]
    )

    assert found.messages[0] == {"role": "system", "content": "You are"}


def test_m2_a_tool_call_and_its_result_are_openais() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "dry"}
    found = turns(
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I ask."}, CALL]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    )

    function = {"name": "weather", "arguments": '{"city":"Bern"}'}
    assert found == [
        USER,
        {
            "role": "assistant",
            "content": "I ask.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "dry"},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize("role", ["user", "system"])
def test_m2_a_tool_result_is_right_behind_its_call(role: str) -> None:
    """Also where it comes in a later one of neighbouring turns."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "dry"}
    found = turns(
        USER,
        {"role": "assistant", "content": [CALL]},
        {"role": role, "content": "Hurry."},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    )

    said = "Hurry." if role == "user" else "<system>\nHurry.\n</system>"
    assert [message["role"] for message in found] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert found[-1]["content"] == f"{said}\nAnd now?"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": "no", "is_error": True}, "Error: no"),
        ({"is_error": True}, "Error"),
        ({"content": [{"type": "text", "text": t} for t in "ab"]}, "a\nb"),
    ],
)
def test_m2_a_tool_result_is_one_string(result: Any, text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t1"} | result

    [message] = turns({"role": "user", "content": [block]})

    assert message == {"role": "tool", "tool_call_id": "t1", "content": text}


def test_b69_images_of_tool_results_follow_in_the_users_message() -> None:
    one = {"type": "tool_result", "tool_use_id": "t1", "content": "first"}
    two = {
        "type": "tool_result",
        "tool_use_id": "t2",
        "content": [{"type": "text", "text": "seen"}, IMAGE],
    }
    found = turns({"role": "user", "content": [two, one]})

    assert [m["role"] for m in found] == ["tool", "tool", "user"]
    assert found[0]["content"].startswith("seen\n[1 image(s)")
    assert found[1]["content"] == "first"
    note, image = found[2]["content"]
    assert "t2" in note["text"]
    assert image == IMAGE_PART


def test_b69_a_worker_without_eyes_gets_a_note_in_the_place_of_an_image() -> None:
    asked = job(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]
    )

    seen = json.loads(build_body(asked))["messages"]
    unseen = json.loads(build_body(asked, images=False))["messages"]

    assert seen[0]["content"][1] == IMAGE_PART
    assert unseen[0]["content"] == "x\n[image left out: this model sees none]"


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        (
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "image left out",
        ),
        (
            {"type": "document", "source": {"type": "text", "data": "words"}},
            "words",
        ),
        (
            {
                "type": "document",
                "title": "T",
                "source": {"type": "content", "content": "inner"},
            },
            "T\ninner",
        ),
        (
            {
                "type": "document",
                "title": "T",
                "context": "Of old.",
                "source": {"type": "text", "data": "words"},
            },
            "T\nOf old.\nwords",
        ),
        (
            {
                "type": "document",
                "source": PNG | {"media_type": "application/pdf"},
            },
            "[document (application/pdf) left out",
        ),
        (
            {
                "type": "search_result",
                "title": "T",
                "source": "http://x",
                "content": [{"type": "text", "text": "found"}],
            },
            "T\nhttp://x\nfound",
        ),
        ({"type": "tool_reference", "tool_name": "T"}, "T"),
        ({"type": "container_upload", "file_id": "f"}, "[container_upload left out]"),
    ],
)
def test_b72_what_cannot_be_shown_degrades_and_is_counted(
    block: Any, shown: str
) -> None:
    for content in (
        [block],
        [{"type": "tool_result", "tool_use_id": "t1", "content": [block]}],
    ):
        asked = job(messages=[{"role": "user", "content": content}])

        assert shown in asked.messages[0]["content"]
        if block["type"] != "document" or "pdf" in str(block):
            assert any(name.startswith("block.") for name in asked.ignored)


def test_b72_what_the_server_said_in_the_assistants_turn_is_dropped() -> None:
    found = job(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "zzz"},
                    {"type": "server_tool_use", "id": "s", "name": "n", "input": {}},
                    {"type": "web_search_tool_result", "content": [{"title": "T"}]},
                    {"type": "text", "text": "Found."},
                ],
            },
            USER,
        ]
    )

    assert found.messages == (USER, {"role": "assistant", "content": "Found."}, USER)
    assert len(found.ignored) == 3


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize(
    ("block", "shown", "ignored"),
    [
        (COMPACTION, "All before.", 0),
        ({"type": "of_tomorrow", "text": "All before."}, "All before.", 1),
    ],
)
def test_m2_a_summary_is_told_by_the_user_whosever_turn_has_it(
    role: str, block: Any, shown: str, ignored: int
) -> None:
    """In the assistant's message it would pass for its words, or be gone on with."""
    answer = {"role": "assistant", "content": "Yes."}
    both = {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}
    for history in ([{"role": role, "content": [block]}, answer, USER], [both, USER]):
        found = job(messages=history)

        summary = {"role": "user", "content": shown}
        assert found.messages == (summary, answer, USER)
        assert len(found.ignored) == ignored
    last = job(messages=[USER, {"role": role, "content": [block]}])
    assert last.messages == ({"role": "user", "content": f"Hi\n{shown}"},)
    assert last.extras == {}


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("content", [None, "", ...])
def test_m2_a_summary_that_could_not_be_made_is_nothing(
    role: str, content: Any
) -> None:
    block = {"type": "compaction"}
    if content is not ...:
        block["content"] = content

    assert turns({"role": role, "content": [block]}, USER) == [USER]


def test_b71_empty_text_blocks_are_dropped_and_so_are_empty_turns() -> None:
    empty = {"type": "text", "text": ""}
    found = turns(
        {"role": "user", "content": [empty, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [empty]},
        {"role": "user", "content": "you"},
    )

    assert found == [{"role": "user", "content": "Hi\nyou"}]
    assert refusal(messages=[{"role": "user", "content": ""}]).param == "messages"


def test_b74_echoed_thinking_is_never_text() -> None:
    found = turns(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "SECRET", "signature": "rt1.x"},
                {"type": "text", "text": "Yes."},
                CALL,
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "x"}],
        },
    )

    assert found[1]["content"] == "Yes."
    assert found[1]["reasoning_content"] == "SECRET"


def test_m7_a_turn_of_thinking_alone_is_no_turn() -> None:
    thinking = {"type": "thinking", "thinking": "SECRET", "signature": ""}

    found = turns(USER, {"role": "assistant", "content": [thinking]}, USER)

    assert found == [{"role": "user", "content": "Hi\nHi"}]


def test_m2_a_last_turn_of_the_assistant_is_gone_on_with() -> None:
    found = job(messages=[USER, {"role": "assistant", "content": "The answer is ("}])

    assert found.extras == {
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    body = json.loads(build_body(found))
    assert body["messages"][-1] == {"role": "assistant", "content": "The answer is ("}
    assert "continue_final_message" not in job(messages=[USER]).extras


@pytest.mark.parametrize(
    "content", [[CALL], [{"type": "text", "text": "I ask."}, CALL]]
)
def test_m2_a_call_without_its_result_is_not_gone_on_with(content: Any) -> None:
    assert job(messages=[USER, {"role": "assistant", "content": content}]).extras == {}


def thought(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def test_m2_neighbours_of_one_role_are_one_message() -> None:
    text = {"type": "text", "text": "b"}
    found = turns(
        USER,
        USER,
        {"role": "assistant", "content": [thought("so"), {**text, "text": "a"}]},
        {"role": "assistant", "content": [thought(" it is"), text, CALL]},
        USER,
    )

    assert [m["role"] for m in found] == ["user", "assistant", "user"]
    assert found[1]["content"] == "ab"
    assert found[1]["reasoning_content"] == "so it is"
    assert len(found[1]["tool_calls"]) == 1


def test_m2_a_late_system_turn_goes_with_the_users() -> None:
    found = turns(
        {"role": "system", "content": "first"},
        USER,
        {"role": "system", "content": "later"},
    )

    assert found == [
        {"role": "system", "content": "first"},
        {"role": "user", "content": "Hi\n<system>\nlater\n</system>"},
    ]


@pytest.mark.parametrize(
    ("choice", "extras"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_m2_tools_and_their_choice(choice: Any, extras: Any) -> None:
    found = job(tools=[WEATHER], tool_choice=choice)

    assert found.extras == {"tools": [FUNCTION], **extras}


def test_m2_tools_that_their_server_would_run_are_dropped_and_counted() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    found = job(tools=[search, WEATHER | {"type": "custom"}])

    assert found.extras["tools"] == [FUNCTION]
    assert found.ignored == ("tool.web_search_20250305",)
    assert "tools" not in job(tools=[search], tool_choice={"type": "auto"}).extras


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"type": "bash_20250124"}, {}),
        ({"strict": True}, {"strict": True}),
        ({"strict": False}, {}),
    ],
)
def test_m2_a_tool_with_a_schema_is_a_function(more: Any, kept: Any) -> None:
    """Whatever its type: the client can run it."""
    found = job(tools=[WEATHER | more])

    [tool] = found.extras["tools"]
    assert tool["function"] == FUNCTION["function"] | kept
    assert found.ignored == ()


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("thinking_budget_tokens", "thinking_budget_tokens"),
        ("thinking_token_budget", "thinking_token_budget"),
        (None, None),
    ],
)
def test_m2_the_thinking_budget_has_the_engines_name(
    field: str | None, name: str | None
) -> None:
    found = job(thinking={"type": "enabled", "budget_tokens": 2048})

    body = json.loads(build_body(found, budget_field=field))

    budgets = {k: v for k, v in body.items() if "budget" in k}
    assert budgets == ({} if name is None else {name: 2048})
    assert body["chat_template_kwargs"]["enable_thinking"] is True


def test_m2_thinking_can_be_off_or_as_the_model_likes() -> None:
    off = job(thinking={"type": "disabled"})

    assert off.extras["chat_template_kwargs"]["enable_thinking"] is False
    assert job(thinking={"type": "adaptive"}).extras == {}
    assert job(thinking={"type": "of_tomorrow"}).ignored == ("thinking.of_tomorrow",)


@pytest.mark.parametrize(
    ("effort", "told"),
    [
        ("low", "low"),
        ("medium", "medium"),
        ("high", "high"),
        ("xhigh", "high"),
        ("max", "high"),
    ],
)
def test_m2_effort_is_told_in_the_engines_words(effort: str, told: str) -> None:
    found = job(output_config={"effort": effort})

    assert found.extras == {"reasoning_effort": told}
    assert found.ignored == ()


def test_m2_output_has_its_effort_and_its_format() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    found = job(output_config={"effort": "max", "format": form})

    assert found.extras["reasoning_effort"] == "high"
    assert found.extras["response_format"]["json_schema"]["schema"] == schema
    assert job(output_format=form).extras["response_format"]["type"] == "json_schema"


def test_m2_unknown_fields_are_dropped_and_counted() -> None:
    found = job(mcp_servers=[], context_management={})

    assert found.ignored == ("mcp_servers", "context_management")


def test_m8_a_count_needs_no_limit() -> None:
    found = parse_count(written(max_tokens=...), TABLE.get)

    assert found.params.max_tokens is None


BLOCKS = st.sampled_from(
    [
        {"type": "text", "text": "a"},
        {"type": "text", "text": ""},
        IMAGE,
        CALL,
        {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]},
        {"type": "thinking", "thinking": "SECRET", "signature": "x"},
        {"type": "of_tomorrow", "content": [{"type": "text", "text": "b"}]},
        COMPACTION,
        {"type": "document", "source": {"type": "url", "url": "u"}},
    ]
)
MESSAGES = st.lists(
    st.builds(
        lambda role, blocks: {"role": role, "content": blocks},
        st.sampled_from(["user", "assistant", "system"]),
        st.lists(BLOCKS, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


@given(MESSAGES)
def test_m2_any_conversation_becomes_one_that_engines_take(messages: Any) -> None:
    """Or is refused with a path: never anything else."""
    try:
        found = job(messages=messages).messages
    except RequestInvalid as wrong:
        if wrong.param is None:
            raise
        return

    roles = [message["role"] for message in found]
    for before, after in pairwise(roles):
        assert after != "system"
        assert before != after or before == "tool"
        # Nothing of the user's comes between a call and its result.
        assert (before, after) != ("user", "tool")
    for message in found:
        content = message["content"]
        assert content or message["role"] == "tool" or "tool_calls" in message
        assert isinstance(content, str) or message["role"] == "user"
        assert "SECRET" not in str(content)
