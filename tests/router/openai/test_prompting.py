"""What a model without native tools is told, and what it is not."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from router.messages import Job, SignalCode
from router.openai.prompting import (
    BIOS_MAX,
    checked_bios,
    exit_tool,
    exits_of,
    names_of,
    offered,
    told,
    with_exits,
)
from router.sieve import FOR_MODELS
from router.sieve.convention import Convention

BIOS = 'Tools:\n{tools}\nTo call one, answer {"tool_calls": [{"name": "x", …}]} only.'
USER = {"role": "user", "content": "Weather?"}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": {"type": "object", **parameters}}
    return {"type": "function", "function": function}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def job(*messages: Any, **extras: Any) -> Job:
    return Job("m", messages, target="m", extras=extras)


def contents(job: Job) -> list[tuple[str, Any]]:
    return [(m["role"], m["content"]) for m in job.messages]


def test_j4_the_tools_stand_where_the_bios_wants_them() -> None:
    tools = [tool("f"), tool("g")]
    asked = job(USER, tools=tools, tool_choice="auto", parallel_tool_calls=True, seed=1)

    sent = told(asked, BIOS, offered(asked.extras))

    (role, text), (_, user) = contents(sent)
    lines = text.split("\n")
    assert role == "system"
    assert [json.loads(line)["name"] for line in lines[1:3]] == ["f", "g"]
    assert lines[3].startswith('To call one, answer {"tool_calls"')
    assert user == "Weather?"
    assert sent.extras == {"seed": 1}
    assert asked.messages == (USER,)
    assert "tools" in asked.extras


@pytest.mark.parametrize("role", ["system", "developer"])
def test_j4_the_bios_goes_into_the_system_message_that_is_there(role: str) -> None:
    asked = job({"role": role, "content": "Be kind."}, USER, tools=[tool("f")])

    sent = told(asked, BIOS, offered(asked.extras))

    assert [r for r, _ in contents(sent)] == [role, "user"]
    assert sent.messages[0]["content"].endswith("only.\n\nBe kind.")


def test_j4_a_system_message_in_parts_stays_in_parts() -> None:
    parts = [{"type": "text", "text": "Be kind."}]
    asked = job({"role": "system", "content": parts}, USER, tools=[tool("f")])

    first, last = told(asked, BIOS, offered(asked.extras)).messages[0]["content"]

    assert first["text"].startswith("Tools:\n")
    assert last == parts[0]


def test_j4_calls_and_results_are_told_again_in_the_convention() -> None:
    calls = [call("1", "f", '{"a": [1]}'), call("2", "g", "{}")]
    asked = job(
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "sunny"},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "8"}],
        },
        {"role": "assistant", "content": "18 and sunny."},
    )

    sent = told(asked, BIOS, ())

    (_, user), (said_by, said), (given_by, given), (_, last) = contents(sent)
    assert user == "Weather?"
    assert said_by == "assistant"
    assert json.loads(said) == {
        "tool_calls": [
            {"name": "f", "arguments": {"a": [1]}},
            {"name": "g", "arguments": {}},
        ]
    }
    assert given_by == "user"
    assert json.loads(given) == {
        "tool_results": [
            {"name": "g", "content": "sunny"},
            {"name": "f", "content": "18"},
        ]
    }
    assert last == "18 and sunny."


def test_j4_what_the_model_reads_as_its_own_calls_is_what_the_sieve_reads() -> None:
    calls = [call("1", "f", '{"a": [1]}')]
    asked = job(USER, {"role": "assistant", "content": None, "tool_calls": calls})
    convention = Convention(frozenset({"f"}))

    text = told(asked, BIOS, ()).messages[1]["content"]

    assert convention._look(text).value == "call"


def test_j4_a_result_and_what_the_user_says_next_are_one_turn() -> None:
    calls = [call("1", "f", "{}")]
    asked = job(
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "user", "content": "And now?"},
    )

    _, (role, text) = contents(told(asked, BIOS, ()))

    assert role == "user"
    result, _, user = text.partition("\n\n")
    assert json.loads(result)["tool_results"] == [{"name": "f", "content": "ok"}]
    assert user == "And now?"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [None, {}, {"id": []}]},
        {"role": "assistant", "content": None, "tool_calls": {"a": 1}},
        {"role": "assistant", "content": "", "tool_calls": [call("1", "f", "{bad")]},
        {"role": "tool", "tool_call_id": {"a": 1}, "content": {"any": "thing"}},
        {"role": "tool", "content": [{"type": "image_url"}]},
        "no message",
        None,
    ],
)
def test_j4_whatever_a_conversation_holds_it_can_be_told(message: Any) -> None:
    sent = told(job(message, USER), BIOS, [tool("f")])

    assert json.loads(json.dumps(sent.messages))[0]["role"] == "system"


def test_j4_a_tool_choice_of_none_offers_nothing() -> None:
    asked = job(USER, tools=[tool("f")], tool_choice="none")

    sent = told(asked, BIOS, offered(asked.extras))

    assert sent.messages == (USER,)
    assert sent.extras == {}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
    ],
)
def test_j4_a_call_that_is_required_is_forced_by_the_output_format(
    choice: Any, names: list[str]
) -> None:
    tools = [tool("f", required=["a"]), {"type": "function", "function": {"name": "g"}}]
    asked = job(USER, tools=tools, tool_choice=choice)

    sent = told(asked, BIOS, offered(asked.extras))

    schema = sent.extras["response_format"]["json_schema"]["schema"]
    items = schema["properties"]["tool_calls"]["items"]["anyOf"]
    assert [item["properties"]["name"]["const"] for item in items] == names
    arguments = {item["properties"]["name"]["const"]: item for item in items}
    assert arguments["g"]["properties"]["arguments"] == {"type": "object"}


@pytest.mark.parametrize("parallel", [True, False])
def test_j4_one_call_is_forced_where_no_more_are_wanted(*, parallel: bool) -> None:
    asked = job(
        USER, tools=[tool("f")], tool_choice="required", parallel_tool_calls=parallel
    )

    sent = told(asked, BIOS, offered(asked.extras))

    schema = sent.extras["response_format"]["json_schema"]["schema"]
    most = schema["properties"]["tool_calls"].get("maxItems")
    assert most == (None if parallel else 1)


def test_j4_an_output_format_of_the_request_is_left_to_it() -> None:
    mine = {"type": "json_object"}
    asked = job(USER, tools=[tool("f")], tool_choice="required", response_format=mine)

    assert told(asked, BIOS, [tool("f")]).extras == {"response_format": mine}


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"tools": None},
        {"tools": {"f": 1}},
        {"tools": [None, "f", {"function": 3}, {"function": {"name": 3}}]},
    ],
)
def test_tools_that_are_none_are_not_offered(extras: Mapping[str, Any]) -> None:
    assert list(offered(extras)) == []


# -- exit tools ----------------------------------------------------------------


def test_j5_every_signal_of_the_model_has_its_tool() -> None:
    names = names_of(map(exit_tool, FOR_MODELS))

    assert names == {code.value.lower() for code in FOR_MODELS}
    assert exits_of(FOR_MODELS).keys() == names
    assert all(exit_tool(c)["function"]["description"] for c in FOR_MODELS)


def test_j5_exit_tools_are_offered_beside_the_own_ones() -> None:
    own = tool("low_confidence", mine=True)
    asked = job(USER, tools=[tool("f"), own])
    codes = (SignalCode.LOW_CONFIDENCE, SignalCode.POLICY_RISK)

    tools = with_exits(asked, codes).extras["tools"]

    assert [t["function"]["name"] for t in tools] == [
        "f",
        "low_confidence",
        "policy_risk",
    ]
    assert tools[1] is own
    assert len(asked.extras["tools"]) == 2


def test_j5_a_tool_choice_of_none_offers_no_exit_tools() -> None:
    asked = job(USER, tool_choice="none")

    assert with_exits(asked, FOR_MODELS) is asked


# -- the bios ------------------------------------------------------------------


def test_j4_a_bios_is_taken_as_it_is() -> None:
    assert checked_bios(BIOS) is BIOS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needs a text"),
        (" \n", "needs a text"),
        (BIOS.replace("{tools}", ""), "needs {tools} once, where the tools go: it is"),
        (BIOS + "{tools}", "it is there 2 times"),
        (BIOS + " {date}", "{date} is no place"),
        ("{tools} Just call them.", 'must show the model the key "tool_calls"'),
        (BIOS + "\x00", "takes no control characters"),
        (BIOS + "x" * BIOS_MAX, "takes at most 65536 bytes"),
    ],
)
def test_j4_a_malformed_bios_is_refused_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        checked_bios(text)
