"""Answers that are one document and no stream: embeddings (O2)."""

from typing import Any, Final

import msgspec

from router.errors import Fault, FaultKind
from router.ids import AssignmentId
from router.messages import Delta, Finished, FinishReason, Kind, Usage
from router.openai.chunk import counted
from router.openai.worker_errors import fault_of_frame, fault_of_reply, is_error

#: Bytes of a document that are waited for: 2 048 vectors of 4 096 numbers in
#: base64 are 45 MB.
DOCUMENT_MAX: Final = 64 * 1024 * 1024

#: Statuses by which a server says that it has no such endpoint.
_ABSENT: Final = frozenset({404, 405, 501})


class _Document(msgspec.Struct):
    """As far as it is looked at: that it is one, and what it cost."""

    data: list[msgspec.Raw]
    usage: msgspec.Raw = msgspec.Raw(b"null")


class _Renamed(msgspec.Struct):
    data: msgspec.Raw
    usage: msgspec.Raw = msgspec.Raw(b'{"prompt_tokens":0,"total_tokens":0}')


_decode_document: Final = msgspec.json.Decoder(_Document).decode
_decode_parts: Final = msgspec.json.Decoder(_Renamed).decode
_encode: Final = msgspec.json.Encoder().encode


def read_document(
    assignment: AssignmentId, body: bytes
) -> tuple[Delta, Finished] | Fault:
    """Read a whole reply: its one delta and its end, or what is wrong with it."""
    if is_error(body):
        return fault_of_frame(body)
    try:
        found = _decode_document(body)
        text = body.decode()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        message = "The engine sent something else than a list of embeddings."
        return Fault(FaultKind.PROTOCOL, message)
    told = counted(found.usage)
    usage = None
    if told is not None and told.prompt_tokens is not None:
        usage = Usage(told.prompt_tokens, 0)
    delta = Delta(assignment, 0, Kind.DOCUMENT, text)
    return delta, Finished(assignment, FinishReason.STOP, usage)


def fault_of_absence(status: int, body: bytes) -> Fault | None:
    """Say that the worker has no such endpoint; None: it says something else.

    The client's mistake, since the model can't do it; a worker that only
    chats is not to blame, nor to be rested.
    """
    if status not in _ABSENT:
        return None
    if status == 404 and fault_of_reply(status, body).kind is FaultKind.MODEL_GONE:
        return None
    return Fault(
        FaultKind.REJECTED,
        "The model is served by a worker without this endpoint.",
        status=400,
        body=body,
        error_type="invalid_request_error",
        param="model",
        code="unsupported_endpoint",
    )


class DocumentReply:
    """One whole reply, passed on with the client's name for the model."""

    def __init__(self, model: str) -> None:
        """*model*: the name that the client sent."""
        self._model = model
        self._text = ""

    def reset(self) -> None:
        """Forget what came: a new attempt begins."""
        self._text = ""

    def add(self, deltas: Any) -> None:
        """Take the document."""
        for delta in deltas:
            if delta.kind is Kind.DOCUMENT:
                self._text = delta.text

    def body(self, finished: Finished) -> bytes:
        """Write the reply; vectors and usage stay byte for byte as they came."""
        del finished
        parts = _decode_parts(self._text)
        return b'{"object":"list","data":%b,"model":%b,"usage":%b}' % (
            bytes(parts.data),
            _encode(self._model),
            bytes(parts.usage),
        )
