"""A client's chat request, checked and turned into a ``Job`` (O1, O6).

* A known field with a bad value is named and refused; an unknown one is
  dropped and its name kept for the counter.
* Nothing of a request but field names, and its model's name cut short, is ever
  in an error message.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import msgspec

from router.errors import RouterError
from router.messages import GenerationParams, Job
from router.openai.fields import PASSED, READ

#: Levels of JSON in a body. Tool schemas reach 20; CPython's own limit, 1000,
#: is shared with the frames that are on the stack when a body is built again.
DEPTH_MAX: Final = 100
#: Names of dropped fields kept of one request, and characters of each.
IGNORED_MAX: Final = 16
NAME_MAX: Final = 64
#: llama-server holds token counts in 32 bits.
TOKENS_MAX: Final = 2**31 - 1
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
_MISSING: Final = "missing_required_parameter"
_BAD_VALUE: Final = "invalid_value"

_decode: Final = msgspec.json.Decoder().decode


class RequestInvalid(RouterError):
    """The client's mistake, as the OpenAI error object says it (O5)."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        """*message* is shown to the client; *param* names the field at fault."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = "invalid_request_error"
        self.param = param
        self.code = code


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
    fields = _object(body)
    model = fields.get("model")
    if model is None:
        raise _missing("model")
    if not isinstance(model, str) or not model:
        raise _bad("model", "must be a nonempty string")
    messages = _messages(fields.get("messages"))
    if fields.get("n") not in (None, 1) or fields.get("n") is True:
        raise RequestInvalid(
            "'n' must be 1: each choice would take a slot of its own.",
            param="n",
            code="unsupported_value",
        )
    ignored: list[str] = []
    stream = _flag(fields, "stream")
    include_usage = _include_usage(fields.get("stream_options"), ignored) and stream
    params = _params(fields)
    extras = {}
    for name, value in fields.items():
        if name in PASSED:
            if value is not None:
                extras[name] = value
        elif name not in READ:
            _ignore(name, ignored)
    target = resolve(model)
    if target is None:
        raise RequestInvalid(
            f"The model '{_shown(model)}' does not exist.",
            param="model",
            code="model_not_found",
            status=404,
        )
    job = Job(
        model=model,
        target=target,
        messages=messages,
        params=params,
        extras=extras,
        ignored=tuple(ignored),
    )
    return ChatRequest(job=job, stream=stream, include_usage=include_usage)


def _object(body: bytes) -> dict[str, Any]:
    """Decode *body* as one JSON object of bounded depth."""
    try:
        fields = _decode(body)
    except msgspec.MsgspecError as error:
        # The parser's words name a byte position, never the bytes.
        raise RequestInvalid(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(fields, dict):
        raise RequestInvalid("The body must be a JSON object.")
    # Depth needs as many opening brackets; most bodies have fewer.
    if body.count(b"{") + body.count(b"[") > DEPTH_MAX and _is_deep(fields):
        raise _too_deep()
    return fields


def _is_deep(value: object) -> bool:
    """Tell whether *value* nests deeper than DEPTH_MAX, without recursion."""
    level = [value]
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for parent in level:
            if isinstance(parent, dict):
                below += parent.values()
            elif isinstance(parent, list):
                below += parent
        if not below:
            return False
        level = below
    return True


def _messages(value: object) -> tuple[Any, ...]:
    """Check the roles and the outline of each message (O1)."""
    if value is None:
        raise _missing("messages")
    if not isinstance(value, list) or not value:
        raise _bad("messages", "must be a nonempty array")
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return tuple(value)


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise _bad(where, "must be an object")
    role = message.get("role")
    if role is None:
        raise _missing(f"{where}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    if role == "assistant":
        _check_assistant(message, where)
    else:
        _check_content(message.get("content"), f"{where}.content")
    if role == "tool":
        call = message.get("tool_call_id")
        if call is None:
            raise _missing(f"{where}.tool_call_id")
        if not isinstance(call, str) or not call:
            raise _bad(f"{where}.tool_call_id", "must be a nonempty string")


def _check_assistant(message: Mapping[str, Any], where: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None and (
        not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls)
    ):
        raise _bad(f"{where}.tool_calls", "must be an array of objects")
    content = message.get("content")
    if content is not None or not any(message.get(n) for n in _INSTEAD_OF_CONTENT):
        _check_content(content, f"{where}.content")


def _check_content(content: object, where: str) -> None:
    """Text, or parts: text parts are checked, others are the engine's."""
    if isinstance(content, str):
        return
    if content is None:
        raise _missing(where)
    if not isinstance(content, list) or not content:
        raise _bad(where, "must be a string or a nonempty array of parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise _bad(f"{where}[{index}]", "must be an object")
        kind = part.get("type")
        if not isinstance(kind, str):
            raise _bad(f"{where}[{index}].type", "must be a string")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise _bad(f"{where}[{index}].text", "must be a string")


def _params(fields: Mapping[str, Any]) -> GenerationParams:
    limit = _integer(fields, "max_completion_tokens", 1, TOKENS_MAX)
    alias = _integer(fields, "max_tokens", 1, TOKENS_MAX)
    top_p = _number(fields, "top_p", 1)
    if top_p == 0:
        raise _bad("top_p", "must be a number above 0, at most 1")
    return GenerationParams(
        max_tokens=alias if limit is None else limit,
        temperature=_number(fields, "temperature", 2),
        top_p=top_p,
        stop=_stop(fields.get("stop")),
        seed=_integer(fields, "seed", -(2**63), 2**63 - 1),
    )


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, "must be an integer")
    if not low <= value <= high:
        raise _bad(name, f"must be between {low} and {high}")
    return value


def _number(fields: Mapping[str, Any], name: str, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _bad(name, "must be a number")
    if not 0 <= value <= high:
        raise _bad(name, f"must be between 0 and {high}")
    return float(value)


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise _bad("stop", f"must be a string or at most {STOPS_MAX} strings")
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad("stop", "must hold nonempty strings only")
    return tuple(stops)


def _include_usage(options: object, ignored: list[str]) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _bad("stream_options", "must be an object")
    for name in options:
        if name != "include_usage":
            _ignore(f"stream_options.{name}", ignored)
    return _flag(options, "include_usage", "stream_options.include_usage")


def _flag(fields: Mapping[str, Any], name: str, param: str | None = None) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _bad(param or name, "must be true or false")
    return bool(value)


def _ignore(name: str, ignored: list[str]) -> None:
    if len(ignored) < IGNORED_MAX:
        ignored.append(_shown(name))


def _shown(name: str) -> str:
    """A client's word, safe to show: escaped, and cut short."""
    shown = name[:NAME_MAX].encode("unicode_escape").decode()
    return f"{shown[:NAME_MAX]}..." if max(len(name), len(shown)) > NAME_MAX else shown


def _missing(param: str) -> RequestInvalid:
    return RequestInvalid(f"'{param}' is required.", param=param, code=_MISSING)


def _bad(param: str, rule: str) -> RequestInvalid:
    return RequestInvalid(f"'{param}' {rule}.", param=param, code=_BAD_VALUE)


def _too_deep() -> RequestInvalid:
    return RequestInvalid(f"The body nests deeper than {DEPTH_MAX} levels.")
