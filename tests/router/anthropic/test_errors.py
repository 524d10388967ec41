"""Faults as the Anthropic dialect says them."""

import json

import pytest

from router.anthropic.errors import (
    STATUSES,
    THREAD_UNSUPPORTED,
    refusal,
    reply_of,
    reply_of_invalid,
    type_of,
)
from router.checks import RequestInvalid
from router.errors import Fault, FaultKind


@pytest.mark.parametrize("kind", FaultKind)
def test_m6_every_fault_has_its_type_and_status(kind: FaultKind) -> None:
    reply = reply_of(Fault(kind, "So it is."), "req_1")

    body = json.loads(reply.body)
    assert body["type"] == "error"
    assert body["request_id"] == "req_1"
    assert reply.status == STATUSES[body["error"]["type"]]
    assert "So it is." in body["error"]["message"]
    assert ((b"x-should-retry", b"false") in reply.headers) is not kind_retries(kind)


def kind_retries(kind: FaultKind) -> bool:
    return Fault(kind, "").row.retry


@pytest.mark.parametrize(
    ("fault", "error_type"),
    [
        (Fault(FaultKind.REJECTED, "", status=400), "invalid_request_error"),
        (Fault(FaultKind.REJECTED, "", status=422), "invalid_request_error"),
        (Fault(FaultKind.REJECTED, "", status=404), "not_found_error"),
        (Fault(FaultKind.REJECTED, "", status=413), "request_too_large"),
        (Fault(FaultKind.DECLINED, "", status=503), "overloaded_error"),
        (Fault(FaultKind.DECLINED, "", status=529), "overloaded_error"),
        (Fault(FaultKind.DECLINED, "", status=429), "rate_limit_error"),
    ],
)
def test_b65_a_workers_status_is_not_lost(fault: Fault, error_type: str) -> None:
    assert type_of(fault) == error_type


def test_m6_a_prompt_that_is_too_long_is_told_in_the_words_agents_know() -> None:
    fault = Fault(FaultKind.CONTEXT_LENGTH, "9 tokens do not fit.")

    message = json.loads(reply_of(fault, "req_1").body)["error"]["message"]

    assert message == "prompt is too long: 9 tokens do not fit."


def test_m6_retry_after_is_whole_seconds() -> None:
    fault = Fault(FaultKind.QUEUE_FULL, "Full.", retry_after=0.2)

    assert (b"retry-after", b"1") in reply_of(fault, "req_1").headers


@pytest.mark.parametrize(
    ("status", "error_type"), [(400, "invalid_request_error"), (404, "not_found_error")]
)
def test_m6_a_clients_mistake_is_told_by_its_status(
    status: int, error_type: str
) -> None:
    reply = reply_of_invalid(RequestInvalid("No.", status=status), "req_1")

    assert reply.status == status
    assert json.loads(reply.body)["error"] == {"type": error_type, "message": "No."}
    assert reply.headers == ((b"x-should-retry", b"false"),)


def test_m6_a_refused_thread_has_the_details_that_sdks_look_for() -> None:
    invalid = RequestInvalid("No.", code=THREAD_UNSUPPORTED)

    reply = reply_of_invalid(invalid, "req_1")

    assert reply.status == 400
    assert json.loads(reply.body)["error"] == {
        "type": "invalid_request_error",
        "message": "No.",
        "details": {"error_code": "thread_unsupported_request", "unsupported": []},
    }


@pytest.mark.parametrize(
    ("status", "told", "error_type"),
    [
        (401, 401, "authentication_error"),
        (405, 405, "invalid_request_error"),
        (408, 408, "invalid_request_error"),
        (413, 413, "request_too_large"),
        (500, 500, "api_error"),
        (503, 529, "overloaded_error"),
    ],
)
def test_m6_the_edges_own_refusals_have_their_type(
    status: int, told: int, error_type: str
) -> None:
    found, body = refusal(status, "No.", "req_1")

    assert found == told
    assert json.loads(body)["error"]["type"] == error_type
