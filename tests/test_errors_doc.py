"""docs/errors.md says what the openai SDK makes of a failure: ask the SDK."""

import re
from pathlib import Path
from typing import Final

import httpx
import openai
import pytest

from router.errors import FAULTS, Fault, FaultKind
from router.openai.errors import body_of, reply_of
from router.openai.worker_errors import fault_of_reply

DOC: Final = (Path(__file__).parent.parent / "docs/errors.md").read_text()
_ROW: Final = re.compile(r"^\| ([\d, ]+) \| `(\w+)` \| (yes|no) \|$", re.MULTILINE)
SDK: Final = [
    (int(status), exception, retried == "yes")
    for statuses, exception, retried in _ROW.findall(DOC)
    for status in statuses.split(", ")
]


def test_every_status_of_a_fault_has_its_exception() -> None:
    known = {status for status, _, _ in SDK}

    # 401 and 422 come from the edge, and from a worker's own refusal.
    assert known == {row.status for row in FAULTS.values()} | {401, 422}


@pytest.mark.parametrize(("status", "exception", "retried"), SDK)
def test_the_sdk_raises_and_retries_as_told(
    status: int, exception: str, *, retried: bool
) -> None:
    sdk = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")
    reply = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1:1"))

    raised = sdk._make_status_error("", body=None, response=reply)  # type: ignore[arg-type]

    assert type(raised).__name__ == exception
    assert sdk._should_retry(reply) is retried  # type: ignore[arg-type]


def test_a_useless_retry_is_said_where_the_sdk_would_try() -> None:
    for kind, row in FAULTS.items():
        headers = dict(reply_of(Fault(kind, "")).headers)

        assert (headers.get(b"x-should-retry") == b"false") is not row.retry


def test_the_reply_that_is_shown_is_the_one_that_is_given() -> None:
    fault = Fault(
        FaultKind.NO_WORKER, "no worker for this model is available", retry_after=1.0
    )

    assert f"\n{reply_of(fault).body.decode()}\n" in DOC
    assert "HTTP/1.1 503 Service Unavailable" in DOC
    assert reply_of(fault).headers == ((b"retry-after", b"1"),)


def test_the_frame_that_is_shown_is_the_one_that_is_given() -> None:
    fault = Fault(FaultKind.STREAM_CLOSED_EARLY, "The worker's answer broke off.")

    assert f"\ndata: {body_of(fault).decode()}\n" in DOC


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b"{}", FaultKind.REJECTED),
        (404, b"{}", FaultKind.REJECTED),
        (413, b"{}", FaultKind.REJECTED),
        (422, b"{}", FaultKind.REJECTED),
        (400, b"maximum context length", FaultKind.CONTEXT_LENGTH),
        (404, b"The model 'x' does not exist", FaultKind.MODEL_GONE),
        (401, b"{}", FaultKind.UNAUTHORIZED),
        (403, b"{}", FaultKind.UNAUTHORIZED),
        (418, b"{}", FaultKind.REJECTED),
        (500, b"{}", FaultKind.SERVER_ERROR),
        (503, b"Loading model", FaultKind.LOADING),
        (429, b"{}", FaultKind.DECLINED),
        (503, b"{}", FaultKind.DECLINED),
        (599, b"{}", FaultKind.DECLINED),
        (302, b"", FaultKind.PROTOCOL),
        (200, b"{}", FaultKind.PROTOCOL),
        (200, b'{"error": {"code": 503, "message": ""}}', FaultKind.DECLINED),
        (200, b'{"error": "what"}', FaultKind.SERVER_ERROR),
    ],
)
def test_a_workers_answer_is_the_fault_that_the_page_names(
    status: int, body: bytes, kind: FaultKind
) -> None:
    assert fault_of_reply(status, body).kind is kind
    assert f"`{kind.value}`" in DOC.partition("Which of them")[2]
