import json
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import Fault, FaultKind
from router.openai.worker_errors import (
    BODY_MAX,
    MESSAGE_MAX,
    RETRY_AFTER_MAX,
    fault_of_frame,
    fault_of_reply,
    is_error,
    scrubbed,
    seconds_of,
)

NOW = 1_700_000_000.0


def llama(code: int, message: str, error_type: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "type": error_type}}


def vllm(code: int, message: str, error_type: str, param: str | None = None) -> Any:
    inner = {"message": message, "type": error_type, "param": param, "code": code}
    return {"error": inner}


def sglang(code: int, message: str, error_type: str) -> dict[str, Any]:
    inner = {"message": message, "type": error_type, "param": None, "code": code}
    return {"object": "error"} | inner


def reply(status: int, body: Any = b"") -> Fault:
    return fault_of_reply(
        status, body if isinstance(body, bytes) else json.dumps(body).encode()
    )


def frame(body: Any) -> Fault:
    return fault_of_frame(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("status", "kind", "shown"),
    [
        (400, FaultKind.REJECTED, 400),
        (404, FaultKind.REJECTED, 404),
        (413, FaultKind.REJECTED, 413),
        (422, FaultKind.REJECTED, 422),
        (402, FaultKind.REJECTED, 400),
        (405, FaultKind.REJECTED, 400),
        (408, FaultKind.REJECTED, 400),
        (409, FaultKind.REJECTED, 400),
        (499, FaultKind.REJECTED, 400),
        (401, FaultKind.UNAUTHORIZED, 401),
        (403, FaultKind.UNAUTHORIZED, 403),
        (429, FaultKind.DECLINED, 429),
        (500, FaultKind.SERVER_ERROR, 500),
        (501, FaultKind.DECLINED, 501),
        (502, FaultKind.DECLINED, 502),
        (503, FaultKind.DECLINED, 503),
        (529, FaultKind.DECLINED, 529),
        (599, FaultKind.DECLINED, 599),
        (200, FaultKind.PROTOCOL, 200),
        (204, FaultKind.PROTOCOL, 204),
        (302, FaultKind.PROTOCOL, 302),
        (600, FaultKind.PROTOCOL, 600),
        (999, FaultKind.PROTOCOL, 999),
    ],
)
def test_a4_no_status_is_without_a_row(
    status: int, kind: FaultKind, shown: int
) -> None:
    fault = reply(status, b"<html>no</html>")

    assert (fault.kind, fault.status) == (kind, shown)
    assert fault.body == b"<html>no</html>"
    assert fault.message
    assert "html" not in fault.message


SHAPES = {
    "wrapped": (llama(400, "bad field", "invalid_request_error"), "400"),
    "with param": (vllm(400, "bad field", "BadRequestError", "seed"), "400"),
    "flat": (sglang(400, "bad field", "BadRequest"), "400"),
    "string": ({"error": "bad field"}, None),
    "string with code": ({"error": "bad field", "code": "x"}, "x"),
    "flag": ({"error": True, "message": "bad field"}, None),
    "detail": ({"detail": "bad field"}, None),
    "detail object": ({"detail": {"message": "bad field", "code": "x"}}, "x"),
    "bare object": ({"message": "bad field", "code": 17}, "17"),
    "bare string": ("bad field", None),
    "text": (b"bad field\n", None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_o5_every_shape_of_an_error_body_is_understood(shape: str) -> None:
    body, code = SHAPES[shape]

    fault = reply(400, body)

    assert (fault.kind, fault.status) == (FaultKind.REJECTED, 400)
    assert fault.message == "bad field"
    assert fault.code == code


def test_b23_the_workers_own_words_are_kept() -> None:
    fault = reply(422, vllm(422, "seed must be positive", "BadRequestError", "seed"))

    assert (fault.message, fault.status) == ("seed must be positive", 422)
    assert (fault.error_type, fault.param) == ("BadRequestError", "seed")


def test_the_list_of_a_validator_is_read() -> None:
    faults = [
        {"loc": ["body", "messages", 0, "role"], "msg": "no such role", "type": "x"},
        "odd",
        {"loc": None, "msg": "too short"},
        {},
    ]

    fault = reply(422, {"detail": faults})

    assert fault.message == "no such role; too short"
    assert fault.param == "messages.0.role"


@pytest.mark.parametrize(
    "body",
    [
        llama(
            400,
            "request (900 tokens) exceeds the available context size (512 tokens), "
            "try increasing it",
            "exceed_context_size_error",
        ),
        llama(400, "zu lang", "exceed_context_size_error"),
        vllm(
            400,
            "This model's maximum context length is 512 tokens. However, your prompt "
            "contains 900 input tokens",
            "BadRequestError",
            "input_tokens",
        ),
        sglang(
            400,
            "The input (900 tokens) is longer than the model's context length (512 "
            "tokens).",
            "BadRequest",
        ),
        {"error": {"message": "too long", "code": "context_length_exceeded"}},
    ],
)
def test_a4_a_context_length_refusal_is_told_from_other_refusals(body: Any) -> None:
    fault = reply(400, body)

    assert (fault.kind, fault.status) == (FaultKind.CONTEXT_LENGTH, 400)
    assert fault.param == "messages"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, vllm(404, "The model `m` does not exist.", "NotFoundError", "model")),
        (404, {"error": {"message": 'model "m" not found, try pulling it first'}}),
        (404, {"error": {"message": "?", "code": "model_not_found"}}),
        (404, {"error": "Unknown model m"}),
        (400, llama(400, "model 'm' not found", "invalid_request_error")),
    ],
)
def test_a4_a_model_that_a_worker_lost_is_the_workers(status: int, body: Any) -> None:
    assert reply(status, body).kind is FaultKind.MODEL_GONE


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, llama(404, "File Not Found", "not_found_error")),
        (400, vllm(400, "the tool that the model wants was not found", "x")),
    ],
)
def test_a4_what_else_is_not_found_is_the_clients(status: int, body: Any) -> None:
    assert reply(status, body).kind is FaultKind.REJECTED


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (llama(503, "Loading model", "unavailable_error"), FaultKind.LOADING),
        ({"error": "the model is still loading"}, FaultKind.LOADING),
        ({"error": "downloading failed"}, FaultKind.DECLINED),
        ({"error": "The model is currently scaling"}, FaultKind.DECLINED),
        (llama(503, "no slot available", "unavailable_error"), FaultKind.DECLINED),
    ],
)
def test_a3_a_loading_worker_is_told_from_a_full_one(
    body: Any, kind: FaultKind
) -> None:
    assert reply(503, body).kind is kind
    assert frame({"code": 503} | body).kind is kind


def test_a4_a_500_keeps_its_type() -> None:
    fault = reply(500, llama(500, "tools need jinja", "server_error"))

    assert fault.kind is FaultKind.SERVER_ERROR
    assert (fault.error_type, fault.message) == ("server_error", "tools need jinja")


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (vllm(503, "queue is full", "ServiceUnavailable"), FaultKind.DECLINED, 503),
        (sglang(503, "queue is full", "x"), FaultKind.DECLINED, 503),
        (llama(400, "no", "invalid_request_error"), FaultKind.REJECTED, 400),
        ({"error": {"message": "x", "code": "429"}}, FaultKind.DECLINED, 429),
        ({"error": {"type": "overloaded_error"}}, FaultKind.DECLINED, 529),
        ({"error": {"type": "rate_limit_error"}}, FaultKind.DECLINED, 429),
        ({"error": {"type": "BadRequestError"}}, FaultKind.REJECTED, 400),
        ({"error": {"code": "invalid", "type": "NotFoundError"}}, None, 404),
        (llama(503, "Loading model", "unavailable_error"), FaultKind.LOADING, 503),
        ({"error": "it broke"}, FaultKind.SERVER_ERROR, 500),
        ({"detail": "it broke"}, FaultKind.SERVER_ERROR, 500),
        ({"error": {"code": 7}}, FaultKind.SERVER_ERROR, 500),
        ({"error": {"code": 200}}, FaultKind.SERVER_ERROR, 500),
        ({"error": {"code": True}}, FaultKind.SERVER_ERROR, 500),
        ({"error": {"code": "\u0664\u0660\u0664"}}, FaultKind.SERVER_ERROR, 500),
    ],
)
def test_b47_an_error_in_band_is_the_status_that_it_carries(
    body: Any, kind: FaultKind | None, status: int
) -> None:
    fault = frame(body)

    assert fault.kind is (kind or FaultKind.REJECTED)
    assert fault.status == status


def test_b65_a_200_that_holds_an_error_is_judged_by_it() -> None:
    assert reply(200, vllm(503, "full", "x")).kind is FaultKind.DECLINED


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": None, "choices": []}, False),
        ({"error": {"message": "x"}}, True),
        ({"object": "error"}, True),
        ({"detail": "x"}, True),
        ({"object": "chat.completion"}, False),
        ([], False),
    ],
)
def test_b47_errors_have_three_shapes(body: Any, expected: bool) -> None:
    assert is_error(json.dumps(body).encode()) is expected


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (b"", None),
        (b"0", 0.0),
        (b" 7 ", 7.0),
        (b"1.5", 1.5),
        (b"3600", RETRY_AFTER_MAX),
        (b"9" * 12, RETRY_AFTER_MAX),
        (b"9" * 400, None),
        (b"-1", None),
        (b"inf", None),
        (b"nan", None),
        (b"soon", None),
        (b"\xff", None),
        (formatdate(NOW + 30, usegmt=True).encode(), 30.0),
        (formatdate(NOW + 3600, usegmt=True).encode(), RETRY_AFTER_MAX),
        (formatdate(NOW - 30, usegmt=True).encode(), 0.0),
        (b"Mon, 99 Foo 9999 99:99:99 GMT", None),
        (b"Mon, 32 Jan 99999999999 00:00:00 GMT", None),
    ],
)
def test_a8_retry_after_is_seconds_or_a_date_up_to_a_minute(
    value: bytes | None, seconds: float | None
) -> None:
    assert seconds_of(value, NOW) == seconds
    assert fault_of_reply(503, b"", value, now=NOW).retry_after == seconds


def test_a_date_without_a_clock_is_no_hint() -> None:
    assert seconds_of(formatdate(NOW, usegmt=True).encode(), None) is None


CANARIES = [
    "http://10.0.0.7:8000/v1/chat/completions",
    "https://user:secret@gpu7.internal/v1",
    "unix:///run/engine.sock",
    "10.0.0.7",
    "10.0.0.7:8000",
    "[::1]:8000",
    "[fe80::1]",
    "gpu7.internal:8000",
    "localhost:8000",
    "localhost",
    "Bearer abcdefgh12345678",
    "sk-abcdefgh12345678",
]


@pytest.mark.parametrize("canary", CANARIES)
def test_b123_no_address_and_no_key_of_a_worker_is_shown(canary: str) -> None:
    told = f"cannot reach {canary}, retry; ({canary})."
    body = {"error": {"message": told, "type": canary, "code": canary}}

    for fault in (reply(400, body), reply(500, body), frame(body)):
        shown = f"{fault.message} {fault.error_type} {fault.code} {fault.param}"
        assert canary not in shown
        assert fault.message.startswith("cannot reach [")


@pytest.mark.parametrize(
    "words",
    [
        "temperature must be between 0.0 and 2.0: got 3.5",
        "max_tokens is 1.5e3, e.g. 12:30 o'clock, messages[0].role: no",
        "the bearer of bad news, basic understanding",
    ],
)
def test_ordinary_words_are_left_alone(words: str) -> None:
    assert scrubbed(words) == words


def test_w7_bodies_and_messages_are_cut() -> None:
    long = json.dumps({"error": {"message": "x" * 10_000, "type": "y" * 10_000}})

    fault = reply(400, long.encode())
    cut = reply(400, b'{"error":{"message":"' + b"x" * 100_000)

    assert fault.message == "x" * MESSAGE_MAX + "..."
    assert fault.error_type is not None
    assert len(fault.error_type) == 100
    assert (len(cut.body), cut.status) == (BODY_MAX, 400)


@pytest.mark.parametrize("seed", ["a.", "model ", "1.", "[:", "a://", "bearer ", "é"])
def test_hostile_words_take_no_time(seed: str) -> None:
    body = {"error": {"message": seed * 30_000, "code": seed * 30_000}}

    assert reply(404, body).status == 404
    assert frame(body).status == 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "error",
                    "detail",
                    "object",
                    "message",
                    "type",
                    "param",
                    "code",
                    "msg",
                    "loc",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=9,
)


@given(st.integers(0, 999), JSON.map(lambda x: json.dumps(x).encode()) | st.binary())
def test_whatever_a_worker_says_it_is_one_fault(status: int, body: bytes) -> None:
    for fault in (fault_of_reply(status, body), fault_of_frame(body)):
        assert isinstance(fault.kind, FaultKind)
        assert fault.message
        assert all(
            word is None or isinstance(word, str)
            for word in (fault.error_type, fault.param, fault.code)
        )
