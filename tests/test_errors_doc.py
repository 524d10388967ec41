"""docs/errors.md says what the SDKs make of a failure: ask them."""

import random
import re
from pathlib import Path
from typing import Any, Final

import anthropic
import httpx
import openai
import pytest

from router.anthropic import errors as messages
from router.anthropic.errors import STATUSES
from router.commands import Refuse
from router.errors import FAULTS, Fault, FaultKind
from router.fleet import Fleet
from router.ids import RequestId
from router.openai.errors import body_of, reply_of
from router.openai.worker_errors import fault_of_reply
from router.settings import RouterSettings, WaitSettings

DOC: Final = (Path(__file__).parent.parent / "docs/errors.md").read_text()
_ROW: Final = re.compile(r"^\| ([\d, ]+) \| `(\w+)` \| (yes|no) \|$", re.MULTILINE)


def rows(sdk: str) -> list[tuple[str, int, str, bool]]:
    """What the page says of one SDK: its name, status, exception, retried."""
    table = DOC.partition(f"## What the {sdk} SDK makes of it")[2].partition("\n## ")[0]
    return [
        (sdk, int(status), exception, retried == "yes")
        for statuses, exception, retried in _ROW.findall(table)
        for status in statuses.split(", ")
    ]


def client(sdk: str) -> Any:
    if sdk == "openai":
        return openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")
    return anthropic.Anthropic(base_url="http://127.0.0.1:1", api_key="none")


def test_every_status_of_a_fault_has_its_exception() -> None:
    # 401 and 422 come from the edge, and from a worker's own refusal.
    statuses = {row.status for row in FAULTS.values()} | {401, 422}
    assert {status for _, status, _, _ in rows("openai")} == statuses

    types = {STATUSES[row.anthropic_type] for row in FAULTS.values()}
    # A worker's own 413 and 429 keep their status.
    assert {status for _, status, _, _ in rows("anthropic")} == types | {401, 413, 429}


@pytest.mark.parametrize(
    ("sdk", "status", "exception", "retried"), rows("openai") + rows("anthropic")
)
def test_the_sdk_raises_and_retries_as_told(
    sdk: str, status: int, exception: str, *, retried: bool
) -> None:
    reply = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1:1"))

    raised = client(sdk)._make_status_error("", body=None, response=reply)

    assert type(raised).__name__ == exception
    assert client(sdk)._should_retry(reply) is retried


def test_a_useless_retry_is_said_where_the_sdk_would_try() -> None:
    for kind, row in FAULTS.items():
        headers = dict(reply_of(Fault(kind, "")).headers)

        assert (headers.get(b"x-should-retry") == b"false") is not row.retry


def refused() -> Fault:
    """What a fleet without workers says to a request."""
    fleet = Fleet(RouterSettings(), WaitSettings(), random.Random(1))
    (command,) = fleet.submit(RequestId("r"), "m", 0.0)
    assert isinstance(command, Refuse)
    return command.fault


def test_the_reply_that_is_shown_is_the_one_that_is_given() -> None:
    fault = refused()

    assert f"\n{reply_of(fault).body.decode()}\n" in DOC
    assert "HTTP/1.1 503 Service Unavailable" in DOC
    assert reply_of(fault).headers == ((b"retry-after", b"1"),)


def test_the_message_error_that_is_shown_is_the_one_that_is_given() -> None:
    fault = refused()

    assert f"\n{messages.body_of(fault, 'req_01a2…').decode()}\n" in DOC


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
