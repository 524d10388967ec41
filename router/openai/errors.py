"""Failures as the OpenAI dialect says them (O5).

``{"error": {"message", "type", "param", "code"}}`` in every case, ``code`` a
string or null: the SDKs find their fields there and nowhere else.
"""

import math
from typing import Final

import msgspec

from router.checks import RequestInvalid
from router.errors import ErrorReply, Fault, FaultKind

__all__ = ["ErrorReply", "body_of", "error_body", "reply_of", "reply_of_invalid"]

_NO_RETRY: Final = (b"x-should-retry", b"false")

_encode: Final = msgspec.json.Encoder().encode


def error_body(
    message: str, error_type: str, param: str | None = None, code: str | None = None
) -> bytes:
    """Write the error object."""
    return _encode(
        {
            "error": {
                "message": message,
                "type": error_type,
                "param": param,
                "code": code,
            }
        }
    )


def body_of(fault: Fault) -> bytes:
    """Write the error object of *fault*: a reply's body, or a stream's last frame.

    What a worker said of the client's mistake is passed on (A4, B23); of its
    own troubles only what ``FAULTS`` says.
    """
    row = fault.row
    if fault.kind is FaultKind.REJECTED:
        error_type = fault.error_type or row.error_type
        return error_body(fault.message, error_type, fault.param, fault.code)
    return error_body(fault.message, row.error_type, fault.param, row.code)


def reply_of(fault: Fault) -> ErrorReply:
    """Make the reply for a request that failed before its head was sent (O4)."""
    row = fault.row
    status = row.status
    if fault.kind is FaultKind.REJECTED and fault.status is not None:
        status = fault.status
    headers = []
    if not row.retry:
        headers.append(_NO_RETRY)
    if fault.retry_after is not None:
        # RFC 9110 §10.2.3: whole seconds. 0 would be read as "no hint".
        seconds = max(1, math.ceil(fault.retry_after))
        headers.append((b"retry-after", b"%d" % seconds))
    return ErrorReply(status, body_of(fault), tuple(headers))


def reply_of_invalid(invalid: RequestInvalid) -> ErrorReply:
    """Make the reply for a request that was refused before it became a job."""
    body = error_body(invalid.message, invalid.type, invalid.param, invalid.code)
    return ErrorReply(invalid.status, body, (_NO_RETRY,))
