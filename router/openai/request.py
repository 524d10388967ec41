"""A client's chat request, checked and turned into a ``Job`` (O1, O6).

* A known field with a bad value is named and refused; an unknown one is
  dropped and its name kept for the counter.
* Nothing of a request but field names, and its model's name cut short, is ever
  in an error message.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from router.checks import (
    DEPTH_MAX,
    IGNORED_MAX,
    NAME_MAX,
    TOKENS_MAX,
    RequestInvalid,
    bad,
    flag,
    ignore,
    integer,
    json_object,
    missing,
    model_of,
    number,
    target_of,
    top_p_of,
    unsupported,
)
from router.messages import GenerationParams, Job
from router.openai.fields import PASSED, READ

__all__ = [
    "DEPTH_MAX",
    "IGNORED_MAX",
    "NAME_MAX",
    "TOKENS_MAX",
    "ChatRequest",
    "RequestInvalid",
    "parse_chat",
]

STOPS_MAX: Final = 4

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
#: What makes an assistant message whole without ``content``.
_INSTEAD_OF_CONTENT: Final = (
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
    "reasoning_content",
    "reasoning",
)


@attrs.frozen
class ChatRequest:
    """One accepted request: the job, and how its answer is to be written."""

    job: Job
    stream: bool
    include_usage: bool
    """The stream ends with a usage chunk; False for a non-stream reply, which
    always holds its usage."""


def parse_chat(body: bytes, resolve: Callable[[str], str | None]) -> ChatRequest:
    """Check a ``/v1/chat/completions`` body and take the wire off it.

    Args:
        body: the whole request body.
        resolve: gives the name in our table for a client's model name, aliases
            resolved; None: no such model (O6). Called last, once, and only for
            a request that is otherwise right.

    Raises:
        RequestInvalid: the client's mistake; answer with its status.
    """
    fields = json_object(body)
    model = model_of(fields)
    messages = _messages(fields.get("messages"))
    one_choice(fields, "n")
    ignored: list[str] = []
    stream = flag(fields, "stream")
    include_usage = include_usage_of(fields.get("stream_options"), ignored) and stream
    params = _params(fields)
    extras = extras_of(fields, PASSED, READ, ignored)
    job = Job(
        model=model,
        target=target_of(model, resolve),
        messages=messages,
        params=params,
        extras=extras,
        ignored=tuple(ignored),
    )
    return ChatRequest(job=job, stream=stream, include_usage=include_usage)


def extras_of(
    fields: Mapping[str, Any],
    passed: frozenset[str],
    read: frozenset[str],
    ignored: list[str],
) -> dict[str, Any]:
    """Give the fields that go to the engine as they are (O1); the names of those
    that are neither passed nor read go to *ignored*."""
    extras = {}
    for name, value in fields.items():
        if name in passed:
            if value is not None:
                extras[name] = value
        elif name not in read:
            ignore(name, ignored)
    return extras


def one_choice(fields: Mapping[str, Any], name: str) -> None:
    """Refuse more than one choice, each of which would take a slot of its own.

    Raises:
        RequestInvalid: the client asks for several.
    """
    if fields.get(name) not in (None, 1) or fields.get(name) is True:
        raise unsupported(name, "must be 1: each choice would take a slot of its own")


def _messages(value: object) -> tuple[Any, ...]:
    """Check the roles and the outline of each message (O1)."""
    if value is None:
        raise missing("messages")
    if not isinstance(value, list) or not value:
        raise bad("messages", "must be a nonempty array")
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return tuple(value)


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise bad(where, "must be an object")
    role = message.get("role")
    if role is None:
        raise missing(f"{where}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    if role == "assistant":
        _check_assistant(message, where)
    else:
        _check_content(message.get("content"), f"{where}.content")
    if role == "tool":
        call = message.get("tool_call_id")
        if call is None:
            raise missing(f"{where}.tool_call_id")
        if not isinstance(call, str) or not call:
            raise bad(f"{where}.tool_call_id", "must be a nonempty string")


def _check_assistant(message: Mapping[str, Any], where: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None and (
        not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls)
    ):
        raise bad(f"{where}.tool_calls", "must be an array of objects")
    content = message.get("content")
    # Some clients write no text as no parts.
    nothing = content is None or content == []
    if not nothing or not any(message.get(n) for n in _INSTEAD_OF_CONTENT):
        _check_content(content, f"{where}.content")


def _check_content(content: object, where: str) -> None:
    """Text, or parts: text parts are checked, others are the engine's."""
    if isinstance(content, str):
        return
    if content is None:
        raise missing(where)
    if not isinstance(content, list) or not content:
        raise bad(where, "must be a string or a nonempty array of parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise bad(f"{where}[{index}]", "must be an object")
        kind = part.get("type")
        if not isinstance(kind, str):
            raise bad(f"{where}[{index}].type", "must be a string")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise bad(f"{where}[{index}].text", "must be a string")


def _params(fields: Mapping[str, Any]) -> GenerationParams:
    limit = integer(fields, "max_completion_tokens", 1, TOKENS_MAX)
    alias = integer(fields, "max_tokens", 1, TOKENS_MAX)
    return params_of(fields, alias if limit is None else limit)


def params_of(fields: Mapping[str, Any], max_tokens: int | None) -> GenerationParams:
    """Check what a request asks of the sampler.

    Raises:
        RequestInvalid: a value is none of its field's.
    """
    return GenerationParams(
        max_tokens=max_tokens,
        temperature=number(fields, "temperature", 2),
        top_p=top_p_of(fields),
        stop=_stop(fields.get("stop")),
        seed=integer(fields, "seed", -(2**63), 2**63 - 1),
    )


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise bad("stop", f"must be a string or at most {STOPS_MAX} strings")
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise bad("stop", "must hold nonempty strings only")
    return tuple(stops)


def include_usage_of(options: object, ignored: list[str]) -> bool:
    """Check ``stream_options``; other options go to *ignored*.

    Raises:
        RequestInvalid: they are no options.
    """
    if options is None:
        return False
    if not isinstance(options, dict):
        raise bad("stream_options", "must be an object")
    for name in options:
        if name != "include_usage":
            ignore(f"stream_options.{name}", ignored)
    return flag(options, "include_usage", "stream_options.include_usage")
