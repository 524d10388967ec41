"""What clients of /v1/completions and /v1/embeddings read."""

import json
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse

from router.errors import Fault, FaultKind
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Kind, Usage
from router.openai.document import DocumentReply, fault_of_absence, read_document
from router.openai.reply import DONE
from router.openai.text_reply import TextAggregate, TextEncoder, joined_logprobs

A = AssignmentId(RequestId("r1"), 1)
END = Finished(A, FinishReason.LENGTH, Usage(3, 2))


def text(said: str, logprobs: bytes | None = None) -> Delta:
    return Delta(A, 0, Kind.TEXT, said, None, logprobs)


def encoder(*, include_usage: bool = False) -> TextEncoder:
    return TextEncoder("cmpl-1", "m", 7, include_usage=include_usage)


def chunks(octets: bytes) -> list[Any]:
    frames = octets.removesuffix(DONE).split(b"\n\n")[:-1]
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def test_o2_a_completion_stream_is_text_finish_and_done() -> None:
    writer = encoder()
    octets = writer.first() + writer.deltas([text("Once "), text("upon")])
    octets += writer.finish(END)

    assert octets.endswith(DONE)
    found = chunks(octets)
    for chunk in found:
        assert {k: chunk[k] for k in ("id", "object", "created", "model")} == {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 7,
            "model": "m",
        }
        assert "usage" not in chunk
    assert [c["choices"][0]["text"] for c in found] == ["Once ", "upon", ""]
    assert [c["choices"][0]["finish_reason"] for c in found] == [None, None, "length"]


def test_o2_usage_comes_last_and_only_if_asked() -> None:
    writer = encoder(include_usage=True)
    found = chunks(writer.deltas([text("a")]) + writer.finish(END))

    assert [c["usage"] for c in found[:-1]] == [None, None]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["total_tokens"] == 5


def test_o2_other_deltas_than_text_have_no_place_and_logprobs_have() -> None:
    piece = b'{"tokens":["a"],\n"token_logprobs":[-1.5]}'
    thought = Delta(A, 0, Kind.REASONING, "hm")

    [chunk] = chunks(encoder().deltas([thought, text("a", piece)]))

    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-1.5],
    }


def test_o2_a_broken_completion_ends_without_done() -> None:
    octets = encoder().error(Fault(FaultKind.STALLED, "Stalled."))

    assert json.loads(octets[6:])["error"]["code"] == "upstream_stalled"
    assert DONE not in octets


def test_o2_a_whole_completion_is_one_text() -> None:
    aggregate = TextAggregate("cmpl-1", "m", 7)
    aggregate.add([text("old")])
    aggregate.reset()
    aggregate.add([text("Once ", b'{"tokens":["Once"]}')])
    aggregate.add([Delta(A, 0, Kind.REASONING, "hm"), text("upon")])

    body = json.loads(aggregate.body(END))

    Completion.model_validate(body)
    [choice] = body["choices"]
    assert choice == {
        "index": 0,
        "text": "Once upon",
        "logprobs": {"tokens": ["Once"]},
        "finish_reason": "length",
    }
    assert body["usage"]["total_tokens"] == 5


@pytest.mark.parametrize(
    ("pieces", "joined"),
    [
        ([], None),
        ([b"3", b"[]", b'{"tokens":3}'], None),
        ([b'{"tokens":["a"]}', b'{"tokens":["b"],"content":null}'], {"tokens": "ab"}),
        ([b'{"content":[{"t":1}]}', b'{"content":[]}'], {"content": [{"t": 1}]}),
    ],
)
def test_o2_logprobs_are_joined_list_by_list(pieces: Any, joined: Any) -> None:
    found = joined_logprobs(pieces)

    plain = None if found is None else json.loads(_json(found))
    if joined is not None:
        joined = {name: list(entries) for name, entries in joined.items()}
    assert plain == joined


def _json(value: Any) -> bytes:
    import msgspec

    return msgspec.json.encode(value)


VECTORS = (
    b'{"object": "list", "data": [{"embedding": [0.10, -1e-3], "index": 0, '
    b'"object": "embedding"}], "model": "engines-own", '
    b'"usage": {"prompt_tokens": 3,  "total_tokens": 3, "own": 1e0}}'
)


def test_o2_vectors_pass_byte_for_byte_with_the_clients_model() -> None:
    read = read_document(A, VECTORS)
    assert not isinstance(read, Fault)
    delta, finished = read
    reply = DocumentReply("mine")
    reply.add([delta])

    body = reply.body(finished)

    assert b'"embedding": [0.10, -1e-3]' in body
    assert body.endswith(
        b'"usage":{"prompt_tokens": 3,  "total_tokens": 3, "own": 1e0}}'
    )
    assert CreateEmbeddingResponse.model_validate(json.loads(body)).model == "mine"
    assert finished.usage == Usage(3, 0)


def test_o2_a_reset_forgets_the_document() -> None:
    reply = DocumentReply("mine")
    reply.add([Delta(A, 0, Kind.DOCUMENT, '{"data":[1]}')])
    reply.reset()
    reply.add([Delta(A, 0, Kind.DOCUMENT, '{"data":[2]}')])

    body = json.loads(reply.body(END))

    assert body["data"] == [2]
    assert body["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"data":{}}', b'{"data":[]}\xff', b'{"object":"list"}']
)
def test_o2_what_is_no_list_of_vectors_is_a_protocol_fault(body: bytes) -> None:
    fault = read_document(A, body)

    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.PROTOCOL


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        (b"[]", None),
        (b'"3"', None),
        (b'{"prompt_tokens":"3"}', None),
        (b'{"prompt_tokens":-3}', None),
        (b'{"prompt_tokens":3,"prompt_tokens_details":[]}', Usage(3, 0)),
    ],
)
def test_b48_an_odd_usage_costs_no_vectors(usage: bytes, read: Usage | None) -> None:
    found = read_document(A, b'{"data":[],"usage":' + usage + b"}")

    assert not isinstance(found, Fault)
    assert found[1].usage == read


def test_o2_an_error_in_the_place_of_vectors_is_judged_by_its_status() -> None:
    fault = read_document(A, b'{"error":{"message":"too long","code":400}}')

    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.REJECTED


@pytest.mark.parametrize("status", [404, 405, 501])
def test_o2_a_worker_without_the_endpoint_is_not_to_blame(status: int) -> None:
    fault = fault_of_absence(status, b'{"error":{"message":"File Not Found"}}')

    assert fault is not None
    assert (fault.kind, fault.code) == (FaultKind.REJECTED, "unsupported_endpoint")
    assert not fault.row.counts


def test_o2_a_worker_without_the_model_is() -> None:
    assert fault_of_absence(404, b'{"error":{"message":"model x not found"}}') is None
    assert fault_of_absence(503, b"") is None
