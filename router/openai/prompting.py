"""Tools for models that know none: what they are told, in plain messages (J4).

The operator's text for a model (``bios``) says how to call; the request's tools
take the place of ``{tools}`` in it. A conversation that holds calls and their
results is told again in the words of the convention, which ``router.sieve`` reads
back. Nothing here looks at what a message says.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import msgspec

from router.messages import Job, SignalCode
from router.sieve import EXIT_TOOLS

#: Where the request's tools stand in a bios.
PLACE: Final = "{tools}"
#: Bytes of a bios.
BIOS_MAX: Final = 64 * 1024
_KEY: Final = '"tool_calls"'
#: A word in braces. JSON, which a bios shows, has other things in its braces.
_WORD: Final = re.compile(r"\{([a-z_]+)\}")
#: What a model is told of each exit tool.
_PURPOSE: Final[Mapping[SignalCode, str]] = {
    SignalCode.LOW_CONFIDENCE: "Say that your answer may be wrong, and why.",
    SignalCode.NEEDS_EXTERNAL_INFO: "Say which information you lack.",
    SignalCode.NEEDS_HIGHER_REASONER: (
        "Give up: the task is too hard for you. Say what is too hard."
    ),
    SignalCode.NEEDS_MANAGER_DECISION: (
        "Stop: someone must decide before you go on. Say what is to be decided."
    ),
    SignalCode.POLICY_RISK: "Say that the task may break a rule, and which.",
}
_TOOL_FIELDS: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls"})

_encode: Final = msgspec.json.Encoder().encode


def checked_bios(text: str) -> str:
    """Give *text* back, if it can be a model's bios.

    Raises:
        ValueError: it can't; the message is a sentence that says why.
    """
    if not text.strip():
        raise ValueError("needs a text that is not empty")
    if len(text.encode()) > BIOS_MAX:
        raise ValueError(f"takes at most {BIOS_MAX} bytes")
    if any(ord(c) < ord(" ") and c not in "\n\t" for c in text):
        raise ValueError("takes no control characters but new lines and tabs")
    places = text.count(PLACE)
    if places != 1:
        found = "it is missing" if not places else f"it is there {places} times"
        raise ValueError(f"needs {PLACE} once, where the tools go: {found}")
    for word in _WORD.findall(text):
        if word != PLACE[1:-1]:
            raise ValueError(f"{{{word}}} is no place: only {PLACE} is")
    if _KEY not in text:
        raise ValueError(
            f"must show the model the key {_KEY}: calls are read from "
            f'{{{_KEY}: [{{"name": …, "arguments": {{…}}}}]}} alone'
        )
    return text


def exit_tool(code: SignalCode) -> Mapping[str, Any]:
    """Define the exit tool of a signal, as an OpenAI tool (J5)."""
    return {
        "type": "function",
        "function": {
            "name": code.value.lower(),
            "description": _PURPOSE[code],
            "parameters": {
                "type": "object",
                "properties": {"message": {"type": "string"}},
                "required": ["message"],
            },
        },
    }


def names_of(tools: Iterable[object]) -> frozenset[str]:
    """Give the names of function *tools*; what is none is left out."""
    names = (_function(tool).get("name") for tool in tools)
    return frozenset(name for name in names if isinstance(name, str))


def offered(extras: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Give the function tools that a request offers, its ``tool_choice`` heeded."""
    tools = extras.get("tools")
    choice = extras.get("tool_choice")
    if not isinstance(tools, list) or choice == "none":
        return ()
    found = [tool for tool in tools if isinstance(_function(tool).get("name"), str)]
    wanted = _function(choice).get("name")
    if wanted is not None:
        found = [tool for tool in found if _function(tool)["name"] == wanted]
    return found


def with_exits(job: Job, codes: Iterable[SignalCode]) -> Job:
    """Offer *job*'s model the exit tools of *codes* as native tools (J5).

    A tool of the same name that the job brings is left as it is.
    """
    if job.extras.get("tool_choice") == "none":
        return job
    tools = job.extras.get("tools")
    own = list(tools) if isinstance(tools, list) else []
    taken = names_of(own)
    more = [exit_tool(c) for c in codes if c.value.lower() not in taken]
    return attrs.evolve(job, extras={**job.extras, "tools": own + more})


def told(job: Job, bios: str, tools: Sequence[Mapping[str, Any]]) -> Job:
    """Tell *job* to a model that has no native tools (J4).

    Args:
        job: is not changed.
        bios: a checked one.
        tools: what is offered, exit tools included; none: *bios* is left out.
    """
    extras = {k: v for k, v in job.extras.items() if k not in _TOOL_FIELDS}
    messages = list(_retold(job.messages))
    if tools:
        listed = "\n".join(_encode(_function(tool)).decode() for tool in tools)
        _prepend(messages, bios.replace(PLACE, listed))
        choice = job.extras.get("tool_choice")
        must = choice == "required" or isinstance(choice, dict)
        if must and "response_format" not in extras:
            one = job.extras.get("parallel_tool_calls") is False
            extras["response_format"] = _forced(tools, one=one)
    return attrs.evolve(job, messages=tuple(messages), extras=extras)


def exits_of(codes: Iterable[SignalCode]) -> Mapping[str, SignalCode]:
    """Give what the exit tools of *codes* stand for, by name."""
    wanted = set(codes)
    return {name: code for name, code in EXIT_TOOLS.items() if code in wanted}


def _function(tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _forced(tools: Sequence[Mapping[str, Any]], *, one: bool) -> Mapping[str, Any]:
    """Write the output format that leaves a model nothing but to call."""
    calls = []
    for tool in tools:
        function = _function(tool)
        arguments = function.get("parameters")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": arguments
                    if isinstance(arguments, dict)
                    else {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    several = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    schema = {
        "type": "object",
        "properties": {"tool_calls": several | ({"maxItems": 1} if one else {})},
        "required": ["tool_calls"],
        "additionalProperties": False,
    }
    return {
        "type": "json_schema",
        "json_schema": {"name": "tool_calls", "schema": schema},
    }


def _prepend(messages: list[Any], text: str) -> None:
    """Put *text* before all else, into the system message where there is one:
    many templates take only one, and only at the beginning."""
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": text})
        return
    content = first.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": f"{text}\n\n"}, *content]
    else:
        content = f"{text}\n\n{content}"
    messages[0] = {**first, "content": content}


def _retold(messages: Sequence[Any]) -> Iterable[Any]:
    """Tell calls and their results in the convention's words.

    Results go to the model as the user's; with a text of the user that
    follows, as one message: many templates want turns to alternate.
    """
    names: dict[str, object] = {}
    results: list[Mapping[str, Any]] = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "tool":
            name = names.get(str(message.get("tool_call_id")))
            results.append({"name": name, "content": _text(message.get("content"))})
            continue
        if results:
            said = _encode({"tool_results": results}).decode()
            results = []
            content = message.get("content") if role == "user" else None
            if isinstance(content, str):
                yield {**message, "content": f"{said}\n\n{content}"}
                continue
            yield {"role": "user", "content": said}
        calls = message.get("tool_calls") if role == "assistant" else None
        if isinstance(calls, list) and calls:
            yield _calls_told(calls, names)
        else:
            yield message
    if results:
        said = _encode({"tool_results": results}).decode()
        yield {"role": "user", "content": said}


def _calls_told(calls: Sequence[Any], names: dict[str, object]) -> Mapping[str, Any]:
    """Tell a message with calls as the model would have; note who has which id.

    Words beside the calls are left out: the model must not learn to say them.
    """
    said = []
    for call in calls:
        function = _function(call)
        if isinstance(call, dict):
            names[str(call.get("id"))] = function.get("name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # What is no JSON stays as it is: the model sees what it did.
            with suppress(msgspec.MsgspecError, RecursionError):
                arguments = msgspec.json.decode(arguments)
        said.append({"name": function.get("name"), "arguments": arguments})
    content = _encode({"tool_calls": said}).decode()
    return {"role": "assistant", "content": content}


def _text(content: object) -> object:
    """Give a tool's result as text, where it is text in parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if all(isinstance(text, str) for text in texts):
        return "".join(str(text) for text in texts)
    return content
