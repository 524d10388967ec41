"""Failures as the Anthropic dialect says them (M6).

``{"type": "error", "error": {"type", "message"}, "request_id"}``: the SDKs
choose their exception by the status, and in a stream by the type.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from router.checks import RequestInvalid
from router.errors import ErrorReply, Fault, FaultKind

#: Status of each type, outside of a stream.
STATUSES: Final[Mapping[str, int]] = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_TYPES: Final = {status: name for name, status in STATUSES.items()}
_NO_RETRY: Final = (b"x-should-retry", b"false")

#: Code of a refusal of ``thread``. SDKs look for it in the error's ``details``:
#: told so, they send whole conversations instead.
THREAD_UNSUPPORTED: Final = "thread_unsupported_request"

_encode: Final = msgspec.json.Encoder().encode


def error_body(
    error_type: str,
    message: str,
    request: str,
    details: Mapping[str, object] | None = None,
) -> bytes:
    """Write the error object.

    Args:
        error_type: a key of ``STATUSES``.
        message: for people, and for agents that know some by their words.
        request: our own id of the request.
        details: for programs; None: there are none.
    """
    error: dict[str, object] = {"type": error_type, "message": message}
    if details is not None:
        error["details"] = details
    return _encode({"type": "error", "error": error, "request_id": request})


def type_of(fault: Fault) -> str:
    """Give the type of *fault*: what ``FAULTS`` says, and a worker's own status."""
    if fault.kind is FaultKind.REJECTED:
        return _TYPES.get(fault.status or 400, "invalid_request_error")
    if fault.kind is FaultKind.DECLINED and fault.status == 429:
        return "rate_limit_error"
    return fault.row.anthropic_type


def message_of(fault: Fault) -> str:
    """Give the words of *fault*; agents know a prompt that is too long by them."""
    if fault.kind is FaultKind.CONTEXT_LENGTH:
        return f"prompt is too long: {fault.message}"
    if fault.kind is FaultKind.TOOL_PARSE:
        return f"{fault.row.reason}: {fault.message}"
    return fault.message


def body_of(fault: Fault, request: str) -> bytes:
    """Write the error object of *fault*: a reply's body, or a stream's last frame."""
    return error_body(type_of(fault), message_of(fault), request)


def reply_of(fault: Fault, request: str) -> ErrorReply:
    """Make the reply for a request that failed before its head was sent."""
    headers = [] if fault.row.retry else [_NO_RETRY]
    if fault.retry_after is not None:
        # RFC 9110 §10.2.3: whole seconds. 0 would be read as "no hint".
        seconds = max(1, math.ceil(fault.retry_after))
        headers.append((b"retry-after", b"%d" % seconds))
    status = STATUSES[type_of(fault)]
    return ErrorReply(status, body_of(fault, request), tuple(headers))


def reply_of_invalid(invalid: RequestInvalid, request: str) -> ErrorReply:
    """Make the reply for a request that was refused before it became a job."""
    error_type = _TYPES.get(invalid.status, "invalid_request_error")
    details: dict[str, object] | None = None
    if invalid.code == THREAD_UNSUPPORTED:
        # No other field is to blame: it goes through without the thread alone.
        details = {"error_code": THREAD_UNSUPPORTED, "unsupported": []}
    body = error_body(error_type, invalid.message, request, details)
    return ErrorReply(STATUSES[error_type], body, (_NO_RETRY,))


def refusal(status: int, message: str, request: str) -> tuple[int, bytes]:
    """Say a refusal of the HTTP edge itself: its status here, and its body.

    503 becomes 529, which is this dialect's word for it; statuses that the
    dialect does not know, like 405, stay and are invalid requests.
    """
    status = 529 if status == 503 else status
    error_type = _TYPES.get(status, "invalid_request_error")
    return status, error_body(error_type, message, request)
