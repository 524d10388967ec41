"""Bodies of requests, and checks of the fields in them.

Both dialects refuse in the same words (O5, M6): a field is named, its value
never is, and what a client wrote is in no message but a model's name cut short.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from router.errors import RouterError

#: Levels of JSON in a body. Tool schemas reach 20; CPython's own limit, 1000,
#: is shared with the frames that are on the stack when a body is built again.
DEPTH_MAX: Final = 100
#: Names of dropped fields kept of one request, and characters of each.
IGNORED_MAX: Final = 16
NAME_MAX: Final = 64
#: llama-server holds token counts in 32 bits.
TOKENS_MAX: Final = 2**31 - 1

_MISSING: Final = "missing_required_parameter"
_BAD_VALUE: Final = "invalid_value"

#: The escape of a high surrogate, with no low one behind it nor the beginning of one.
_LONE_SURROGATE: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u|\\?\Z)"
)
#: Bytes at the end of a body that are looked at for it.
_TAIL: Final = 64
_HALF_A_PAIR: Final = "a string in it holds half of a surrogate pair"

_decode: Final = msgspec.json.Decoder().decode


class RequestInvalid(RouterError):
    """The client's mistake, fit for the error object of either dialect."""

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


def json_object(body: bytes) -> dict[str, Any]:
    """Decode *body* as one JSON object of bounded depth.

    Raises:
        RequestInvalid: it is not one.
    """
    try:
        fields = _decode(body)
    except msgspec.MsgspecError as error:
        # The parser's words name a byte position, never the bytes.
        words = _HALF_A_PAIR if _has_half_a_pair(body) else str(error)
        raise RequestInvalid(f"The body is not valid JSON: {words}.") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(fields, dict):
        raise RequestInvalid("The body must be a JSON object.")
    # Depth needs as many opening brackets; most bodies have fewer.
    if body.count(b"{") + body.count(b"[") > DEPTH_MAX and _is_deep(fields):
        raise _too_deep()
    return fields


def _has_half_a_pair(body: bytes) -> bool:
    """Tell whether *body* ends with half of a surrogate pair, and some bytes.

    The parser wants the other half's six bytes before it looks at what they are,
    and says of a body that has fewer left that it was cut short.
    """
    return _LONE_SURROGATE.search(body, max(0, len(body) - _TAIL)) is not None


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


def model_of(fields: Mapping[str, Any]) -> str:
    """Give the model's name as the client sent it.

    Raises:
        RequestInvalid: there is none.
    """
    model = fields.get("model")
    if model is None:
        raise missing("model")
    if not isinstance(model, str) or not model:
        raise bad("model", "must be a nonempty string")
    return model


def target_of(model: str, resolve: Callable[[str], str | None]) -> str:
    """Give what a client's name for a model means; what *resolve* raises passes.

    Raises:
        RequestInvalid: *model* is in no table (O6).
    """
    target = resolve(model)
    if target is None:
        raise RequestInvalid(
            f"The model '{shown(model)}' does not exist.",
            param="model",
            code="model_not_found",
            status=404,
        )
    return target


def integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Give a whole number within its bounds; None: not said.

    Raises:
        RequestInvalid: it is something else.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad(name, "must be an integer")
    if not low <= value <= high:
        raise bad(name, f"must be between {low} and {high}")
    return value


def number(fields: Mapping[str, Any], name: str, high: float) -> float | None:
    """Give a number from 0 to *high*; None: not said.

    Raises:
        RequestInvalid: it is something else.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise bad(name, "must be a number")
    if not 0 <= value <= high:
        raise bad(name, f"must be between 0 and {high}")
    return float(value)


def top_p_of(fields: Mapping[str, Any]) -> float | None:
    """Give ``top_p``, above 0 and at most 1; None: not said.

    Raises:
        RequestInvalid: it is something else.
    """
    top_p = number(fields, "top_p", 1)
    if top_p == 0:
        raise bad("top_p", "must be a number above 0, at most 1")
    return top_p


def flag(fields: Mapping[str, Any], name: str, param: str | None = None) -> bool:
    """Give a boolean; False where it is not said.

    Raises:
        RequestInvalid: it is something else; *param* is then named.
    """
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(param or name, "must be true or false")
    return bool(value)


def ignore(name: str, ignored: list[str]) -> None:
    """Keep the name of a field that is dropped, for the counter."""
    if len(ignored) < IGNORED_MAX:
        ignored.append(shown(name))


def shown(name: str) -> str:
    """A client's word, safe to show: escaped, and cut short."""
    escaped = name[:NAME_MAX].encode("unicode_escape").decode()
    cut = max(len(name), len(escaped)) > NAME_MAX
    return f"{escaped[:NAME_MAX]}..." if cut else escaped


def missing(param: str) -> RequestInvalid:
    """Say that *param* is not there."""
    return RequestInvalid(f"'{param}' is required.", param=param, code=_MISSING)


def bad(param: str, rule: str) -> RequestInvalid:
    """Say that *param* breaks *rule*."""
    return RequestInvalid(f"'{param}' {rule}.", param=param, code=_BAD_VALUE)


def unsupported(param: str, why: str) -> RequestInvalid:
    """Say that *param* asks for what is not offered."""
    return RequestInvalid(f"'{param}' {why}.", param=param, code="unsupported_value")


def _too_deep() -> RequestInvalid:
    return RequestInvalid(f"The body nests deeper than {DEPTH_MAX} levels.")
