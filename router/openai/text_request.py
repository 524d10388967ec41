"""Requests to ``/v1/completions`` and ``/v1/embeddings``, checked (O2).

Each takes one slot and gives one answer, so what would need several is refused:
several prompts, ``n``, ``best_of``.
"""

from collections.abc import Callable
from typing import Final

import attrs

from router.checks import (
    TOKENS_MAX,
    bad,
    flag,
    integer,
    json_object,
    missing,
    model_of,
    target_of,
    unsupported,
)
from router.messages import Endpoint, Job
from router.openai.fields import PASSED, READ
from router.openai.request import extras_of, include_usage_of, one_choice, params_of

#: Inputs of one embeddings request; OpenAI's own limit.
INPUTS_MAX: Final = 2048

#: Chat's alone; everything else that chat passes on, completions do too.
_CHAT_ONLY: Final = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "top_logprobs"}
)
_COMPLETION_PASSED: Final = (PASSED - _CHAT_ONLY) | {"suffix"}
_COMPLETION_READ: Final = (READ - {"messages", "max_completion_tokens"}) | {
    "prompt",
    "best_of",
    "echo",
}
_EMBEDDING_PASSED: Final = frozenset(
    {"encoding_format", "dimensions", "truncate_prompt_tokens", "embd_normalize"}
)
_EMBEDDING_READ: Final = frozenset({"model", "input"})

_Resolve = Callable[[str], str | None]


@attrs.frozen
class TextRequest:
    """One accepted request: the job, and how its answer is to be written."""

    job: Job
    stream: bool = False
    include_usage: bool = False


def parse_completion(body: bytes, resolve: _Resolve) -> TextRequest:
    """Check a ``/v1/completions`` body; arguments as ``parse_chat`` takes them.

    Raises:
        RequestInvalid: the client's mistake; answer with its status.
    """
    fields = json_object(body)
    model = model_of(fields)
    prompt = _prompt(fields.get("prompt"))
    one_choice(fields, "n")
    one_choice(fields, "best_of")
    if flag(fields, "echo"):
        raise unsupported("echo", "is not offered: a reply holds new text only")
    ignored: list[str] = []
    stream = flag(fields, "stream")
    include_usage = include_usage_of(fields.get("stream_options"), ignored) and stream
    params = params_of(fields, integer(fields, "max_tokens", 1, TOKENS_MAX))
    job = Job(
        model=model,
        messages=(prompt,),
        params=params,
        extras=extras_of(fields, _COMPLETION_PASSED, _COMPLETION_READ, ignored),
        ignored=tuple(ignored),
        endpoint=Endpoint.COMPLETIONS,
        target=target_of(model, resolve),
    )
    return TextRequest(job, stream, include_usage)


def parse_embeddings(body: bytes, resolve: _Resolve) -> TextRequest:
    """Check a ``/v1/embeddings`` body; arguments as ``parse_chat`` takes them.

    Raises:
        RequestInvalid: the client's mistake; answer with its status.
    """
    fields = json_object(body)
    model = model_of(fields)
    asked = _input(fields.get("input"))
    if fields.get("encoding_format") not in (None, "float", "base64"):
        raise bad("encoding_format", "must be 'float' or 'base64'")
    integer(fields, "dimensions", 1, TOKENS_MAX)
    ignored: list[str] = []
    job = Job(
        model=model,
        messages=(asked,),
        extras=extras_of(fields, _EMBEDDING_PASSED, _EMBEDDING_READ, ignored),
        ignored=tuple(ignored),
        endpoint=Endpoint.EMBEDDINGS,
        target=target_of(model, resolve),
    )
    return TextRequest(job)


def _prompt(value: object) -> object:
    """Give the one prompt: text, or token numbers."""
    if value is None:
        raise missing("prompt")
    if isinstance(value, list) and value and not _is_tokens(value):
        if len(value) > 1:
            raise unsupported(
                "prompt", "must be one: each prompt would take a slot of its own"
            )
        value = value[0]
    if (isinstance(value, str) and value) or _is_tokens(value):
        return value
    raise bad("prompt", "must be a nonempty string or array of token numbers")


def _input(value: object) -> object:
    if value is None:
        raise missing("input")
    if (isinstance(value, str) and value) or _is_tokens(value):
        return value
    if not isinstance(value, list) or not value or len(value) > INPUTS_MAX:
        raise bad(
            "input", f"must be a nonempty string or an array of at most {INPUTS_MAX}"
        )
    for place, one in enumerate(value):
        if not ((isinstance(one, str) and one) or _is_tokens(one)):
            rule = "must be a nonempty string or array of token numbers"
            raise bad(f"input[{place}]", rule)
    return value


def _is_tokens(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and token >= 0 for token in value)
    )
