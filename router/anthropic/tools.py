"""Tools of a Messages request as functions of an OpenAI engine (M2)."""

from collections.abc import Mapping
from typing import Any, Final

from router.anthropic.blocks import Dropped, text_of
from router.checks import bad, flag, missing, unsupported

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def functions_of(tools: object, dropped: Dropped) -> list[dict[str, Any]]:
    """Give the client's own tools as functions.

    Tools that the other side would run itself (web search and their like have
    a type of their own and no schema) can't be had here: they are dropped and
    counted, and the model does without.

    Raises:
        RequestInvalid: a tool is malformed.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise bad("tools", "must be an array")
    functions = []
    for place, tool in enumerate(tools):
        where = f"tools.{place}"
        if not isinstance(tool, dict):
            raise bad(where, "must be an object")
        kind = tool.get("type")
        if kind not in (None, "custom") and "input_schema" not in tool:
            dropped.note(f"tool.{kind}" if isinstance(kind, str) else "tool")
            continue
        functions.append({"type": "function", "function": _function(tool, where)})
    return functions


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if schema is None:
        raise missing(f"{where}.input_schema")
    if not isinstance(schema, dict):
        raise bad(f"{where}.input_schema", "must be an object")
    function: dict[str, Any] = {"name": text_of(tool, where, "name")}
    if tool.get("description") is not None:
        function["description"] = text_of(tool, where, "description")
    function["parameters"] = schema
    if flag(tool, "strict", f"{where}.strict"):
        function["strict"] = True
    return function


def choice_of(
    choice: object, functions: list[dict[str, Any]], dropped: Dropped
) -> dict[str, Any]:
    """Give ``tool_choice`` and ``parallel_tool_calls`` as far as they are said.

    Raises:
        RequestInvalid: the choice is malformed, or forces a tool that is not there.
    """
    if choice is None:
        return {}
    if not isinstance(choice, dict):
        raise bad("tool_choice", "must be an object")
    kind = choice.get("type")
    serial = flag(
        choice, "disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use"
    )
    said: dict[str, Any] = {"parallel_tool_calls": False} if serial else {}
    if kind == "tool":
        name = text_of(choice, "tool_choice", "name")
        if all(function["function"]["name"] != name for function in functions):
            raise unsupported("tool_choice.name", "names no tool that can be called")
        return said | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise bad("tool_choice.type", "must be auto, any, tool or none")
    if not functions:
        if kind == "any":
            raise unsupported("tool_choice.type", "needs a tool that can be called")
        dropped.note("tool_choice")
        return {}
    return said | {"tool_choice": _CHOICES[kind]}
