import json
from typing import Any

import pytest

from router.errors import FAULTS, Fault, FaultKind
from router.openai.errors import (
    ErrorReply,
    body_of,
    error_body,
    reply_of,
    reply_of_invalid,
)
from router.openai.request import RequestInvalid
from router.openai.worker_errors import fault_of_reply

NO_RETRY = (b"x-should-retry", b"false")


def error_in(reply: ErrorReply) -> Any:
    body = json.loads(reply.body)
    assert list(body) == ["error"]
    return body["error"]


def test_o5_the_error_object_has_four_fields() -> None:
    assert json.loads(error_body("no", "t")) == {
        "error": {"message": "no", "type": "t", "param": None, "code": None}
    }
    assert json.loads(error_body("no", "t", "p", "c"))["error"] == {
        "message": "no",
        "type": "t",
        "param": "p",
        "code": "c",
    }


@pytest.mark.parametrize("kind", FaultKind)
def test_o5_every_fault_has_its_reply(kind: FaultKind) -> None:
    reply = reply_of(Fault(kind, "It failed."))
    row = FAULTS[kind]

    assert reply.status == row.status
    assert error_in(reply) == {
        "message": "It failed.",
        "type": row.error_type,
        "param": None,
        "code": row.code,
    }
    assert (NO_RETRY in reply.headers) is not row.retry


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a4_a_refusal_of_a_worker_reaches_the_client_as_it_was(status: int) -> None:
    inner = {"message": "no", "type": "BadRequestError", "param": "p", "code": status}
    fault = fault_of_reply(status, json.dumps({"error": inner}).encode())

    reply = reply_of(fault)

    assert reply.status == status
    assert error_in(reply) == inner | {"code": str(status)}
    assert reply.headers == (NO_RETRY,)


def test_b23_an_oversized_prompt_is_said_the_openai_way() -> None:
    inner = {"code": 400, "message": "too long", "type": "exceed_context_size_error"}
    fault = fault_of_reply(400, json.dumps({"error": inner}).encode())

    reply = reply_of(fault)

    assert reply.status == 400
    assert error_in(reply) == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_a_workers_own_trouble_is_not_passed_on() -> None:
    inner = {"message": "wrong key k1", "type": "auth", "param": "p", "code": "k1"}
    fault = fault_of_reply(401, json.dumps({"error": inner}).encode())

    reply = reply_of(fault)

    assert (reply.status, error_in(reply)["code"]) == (503, "no_worker_available")
    assert b"k1" not in reply.body


@pytest.mark.parametrize(
    ("seconds", "value"),
    [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (60.0, b"60")],
)
def test_o5_retry_after_is_whole_seconds_and_at_least_one(
    seconds: float, value: bytes
) -> None:
    reply = reply_of(Fault(FaultKind.QUEUE_FULL, "full", retry_after=seconds))

    assert reply.status == 429
    assert reply.headers == ((b"retry-after", value),)


def test_o5_a_refused_request_is_not_worth_a_retry() -> None:
    invalid = RequestInvalid("no", param="n", code="unsupported_value")

    reply = reply_of_invalid(invalid)

    assert reply.status == 400
    assert reply.headers == (NO_RETRY,)
    assert error_in(reply) == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "n",
        "code": "unsupported_value",
    }


def test_a_frame_and_a_reply_say_the_same() -> None:
    fault = Fault(FaultKind.STALLED, "It fell silent.")

    assert body_of(fault) == reply_of(fault).body
