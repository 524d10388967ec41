"""A client's Messages request, checked and turned into a ``Job`` (M1, M2).

The job is a chat like any other: ``messages`` are OpenAI's, and what has no
place among the parameters is in ``extras`` under the names of OpenAI's engines.
Everything is written anew, so no ``cache_control`` reaches a worker (B68).
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from router.anthropic.blocks import Dropped
from router.anthropic.conversation import Conversation
from router.anthropic.errors import THREAD_UNSUPPORTED
from router.anthropic.tools import choice_of, functions_of
from router.checks import (
    TOKENS_MAX,
    RequestInvalid,
    bad,
    flag,
    integer,
    json_object,
    missing,
    model_of,
    number,
    target_of,
    top_p_of,
)
from router.messages import GenerationParams, Job

#: Stop sequences of one request; each is looked for in every token.
STOPS_MAX: Final = 64

_READ: Final = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "system",
        "stream",
        "stop_sequences",
        "temperature",
        "top_p",
        "top_k",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "thread",
    }
)
#: Asked by every client and of no consequence here: not worth counting.
_OF_NO_USE: Final = frozenset({"metadata", "service_tier", "cache_control"})

#: ``output_config.effort`` as engines know it.
_EFFORTS: Final = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}

_Resolve = Callable[[str], str | None]


@attrs.frozen
class MessagesRequest:
    """One accepted request: the job, and how its answer is to be written."""

    job: Job
    stream: bool


def parse_messages(body: bytes, resolve: _Resolve) -> MessagesRequest:
    """Check a ``/v1/messages`` body and take the wire off it.

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
    max_tokens = integer(fields, "max_tokens", 1, TOKENS_MAX)
    if max_tokens is None:
        raise missing("max_tokens")
    stream = flag(fields, "stream")
    return MessagesRequest(_job(fields, model, max_tokens, resolve), stream)


def parse_count(body: bytes, resolve: _Resolve) -> Job:
    """Check a ``/v1/messages/count_tokens`` body (M8); see ``parse_messages``.

    Raises:
        RequestInvalid: the client's mistake; answer with its status.
    """
    fields = json_object(body)
    return _job(fields, model_of(fields), None, resolve)


def _job(
    fields: Mapping[str, Any], model: str, max_tokens: int | None, resolve: _Resolve
) -> Job:
    _refuse_thread(fields)
    dropped = Dropped()
    conversation = _conversation(fields, dropped)
    params = GenerationParams(
        max_tokens=max_tokens,
        temperature=number(fields, "temperature", 2),
        top_p=top_p_of(fields),
        stop=_stops(fields.get("stop_sequences")),
    )
    extras = _extras(fields, dropped)
    if conversation.is_prefilled:
        # llama-server does so unasked; the others have to be told.
        extras |= {"continue_final_message": True, "add_generation_prompt": False}
    messages = conversation.messages()
    if not messages:
        raise bad("messages", "must hold at least one message that is not empty")
    for name in fields:
        if name not in _READ and name not in _OF_NO_USE:
            dropped.note(name)
    return Job(
        model=model,
        target=target_of(model, resolve),
        messages=messages,
        params=params,
        extras=extras,
        ignored=tuple(dropped.names),
        may_drop_images=True,
    )


def _refuse_thread(fields: Mapping[str, Any]) -> None:
    """Refuse a conversation that the server is to hold.

    Nothing is kept here from one request to the next, so one that goes on with
    a thread lacks all that was said before. Its beginning is refused too: then
    the SDKs' tool runners send whole conversations from there on.
    """
    if fields.get("thread") is not None:
        raise RequestInvalid(
            "'thread' is not offered: send the whole conversation without it.",
            param="thread",
            code=THREAD_UNSUPPORTED,
        )


def _conversation(fields: Mapping[str, Any], dropped: Dropped) -> Conversation:
    messages = fields.get("messages")
    if messages is None:
        raise missing("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "must be a nonempty array")
    conversation = Conversation(dropped)
    if fields.get("system") is not None:
        conversation.system(fields["system"])
    for place, message in enumerate(messages):
        conversation.turn(message, f"messages.{place}")
    return conversation


def _extras(fields: Mapping[str, Any], dropped: Dropped) -> dict[str, Any]:
    """Give what the engine is told beyond messages and parameters."""
    functions = functions_of(fields.get("tools"), dropped)
    extras: dict[str, Any] = {"tools": functions} if functions else {}
    extras |= choice_of(fields.get("tool_choice"), functions, dropped)
    extras |= _thinking(fields.get("thinking"), dropped)
    extras |= _output(fields, dropped)
    top_k = integer(fields, "top_k", 0, TOKENS_MAX)
    if top_k is not None:
        extras["top_k"] = top_k
    return extras


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > STOPS_MAX:
        raise bad("stop_sequences", f"must be an array of at most {STOPS_MAX} strings")
    for place, stop in enumerate(value):
        if not isinstance(stop, str) or not stop:
            raise bad(f"stop_sequences.{place}", "must be a nonempty string")
    return tuple(value)


def _thinking(thinking: object, dropped: Dropped) -> dict[str, Any]:
    """Say whether to think, and for how many tokens; not said: as the model likes."""
    if thinking is None:
        return {}
    if not isinstance(thinking, dict):
        raise bad("thinking", "must be an object")
    kind = thinking.get("type")
    if not isinstance(kind, str):
        raise bad("thinking.type", "must be a string")
    if kind == "disabled":
        return {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    if kind == "enabled":
        budget = integer(
            {"thinking.budget_tokens": thinking.get("budget_tokens")},
            "thinking.budget_tokens",
            1,
            TOKENS_MAX,
        )
        if budget is None:
            raise missing("thinking.budget_tokens")
        return {
            "thinking_budget_tokens": budget,
            "chat_template_kwargs": {"enable_thinking": True, "thinking": True},
        }
    if kind not in {"adaptive", "between_tools"}:
        dropped.note(f"thinking.{kind}")
    return {}


def _output(fields: Mapping[str, Any], dropped: Dropped) -> dict[str, Any]:
    """Give effort and format of the output; the format has an older place too."""
    output = fields.get("output_config")
    if output is None:
        output = {}
    if not isinstance(output, dict):
        raise bad("output_config", "must be an object")
    extras: dict[str, Any] = {}
    effort = output.get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise bad("output_config.effort", "must be a string")
        if effort in _EFFORTS:
            extras["reasoning_effort"] = _EFFORTS[effort]
        else:
            dropped.note("output_config.effort")
    where = "output_config.format"
    form = output.get("format")
    if form is None:
        where, form = "output_format", fields.get("output_format")
    if form is None:
        return extras
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise bad(where, "must be an object of type json_schema")
    if not isinstance(form.get("schema"), dict):
        raise bad(f"{where}.schema", "must be an object")
    named = {"name": "output", "schema": form["schema"], "strict": True}
    return extras | {"response_format": {"type": "json_schema", "json_schema": named}}
