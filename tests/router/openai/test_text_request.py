"""Requests to /v1/completions and /v1/embeddings."""

import json
from typing import Any

import pytest

from router.checks import RequestInvalid
from router.messages import Endpoint
from router.openai.text_request import (
    TextRequest,
    parse_completion,
    parse_embeddings,
)
from router.openai.upstream import build_body

TABLE = {"m": "m", "alias": "m"}


def complete(**fields: Any) -> TextRequest:
    asked = {"model": "m", "prompt": "Once"} | fields
    return parse_completion(json.dumps(asked).encode(), TABLE.get)


def embed(**fields: Any) -> TextRequest:
    asked = {"model": "m", "input": "Once"} | fields
    return parse_embeddings(json.dumps(asked).encode(), TABLE.get)


def test_o2_a_completion_is_a_job_of_its_endpoint() -> None:
    asked = complete(
        model="alias",
        max_tokens=5,
        temperature=0.5,
        stop="X",
        stream=True,
        stream_options={"include_usage": True},
        logprobs=2,
        suffix="!",
        tools=[],
        messages=[],
        max_completion_tokens=9,
        user="u",
    )

    job = asked.job
    assert (asked.stream, asked.include_usage) == (True, True)
    assert (job.endpoint, job.model, job.target) == (
        Endpoint.COMPLETIONS,
        "alias",
        "m",
    )
    assert job.extras == {"logprobs": 2, "suffix": "!"}
    # What is chat's alone is like any other field that is not known here.
    assert job.ignored == ("tools", "messages", "max_completion_tokens", "user")
    assert json.loads(build_body(job, "max_completion_tokens")) == {
        "model": "m",
        "prompt": "Once",
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["X"],
        "logprobs": 2,
        "suffix": "!",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])],
)
def test_o2_one_prompt_is_text_or_token_numbers(prompt: Any, sent: Any) -> None:
    assert complete(prompt=prompt).job.messages == (sent,)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": 3}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"prompt": ["a", "b"]}, "prompt", "unsupported_value"),
        ({"prompt": [[1], [2]]}, "prompt", "unsupported_value"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"echo": True}, "echo", "unsupported_value"),
        ({"echo": 1}, "echo", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stream": 1}, "stream", "invalid_value"),
        ({"model": ""}, "model", "invalid_value"),
        ({"model": "x"}, "model", "model_not_found"),
    ],
)
def test_o2_a_completion_is_refused_by_the_name_of_its_field(
    fields: Any, param: str, code: str
) -> None:
    with pytest.raises(RequestInvalid) as wrong:
        complete(**fields)

    assert (wrong.value.param, wrong.value.code) == (param, code)


@pytest.mark.parametrize(
    "given", ["a", ["a", "b"], [1, 2], [[1], [2, 3]], ["a", [1]], ["a"] * 2048]
)
def test_o2_embeddings_take_one_input_or_many(given: Any) -> None:
    asked = embed(input=given, encoding_format="base64", dimensions=64, user="u")

    assert not asked.stream
    assert asked.job.endpoint is Endpoint.EMBEDDINGS
    assert asked.job.ignored == ("user",)
    assert json.loads(build_body(asked.job)) == {
        "model": "m",
        "input": given,
        "encoding_format": "base64",
        "dimensions": 64,
    }


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"model": "x"}, "model"),
    ],
)
def test_o2_embeddings_are_refused_by_the_name_of_their_field(
    fields: Any, param: str
) -> None:
    with pytest.raises(RequestInvalid) as wrong:
        embed(**fields)

    assert wrong.value.param == param
