"""What a worker's error means: its status and its words, as a ``Fault`` (A4, W7).

Engines wrap the error object, leave it flat, give a bare string, FastAPI's
``detail``, or HTML (PROTOCOLS B.0). All become the same few fields here. What
goes to a client is cut short and holds no address and no key (H8); only
``Fault.body`` keeps the worker's own bytes.
"""

import re
from email.utils import mktime_tz, parsedate_tz
from typing import Any, Final, NamedTuple

import msgspec

from router.errors import Fault, FaultKind

#: Bytes of an error body that are kept (W7).
BODY_MAX: Final = 64 * 1024
#: Characters of a worker's message that are read and shown to a client: room
#: for the list of faults that a validator makes.
MESSAGE_MAX: Final = 2_000
#: Characters of a worker's type, param or code.
WORD_MAX: Final = 100
#: Seconds; a longer Retry-After is cut (A8).
RETRY_AFTER_MAX: Final = 60.0

#: The client's mistakes that keep their status (A4).
OWN_STATUS: Final = frozenset({400, 404, 413, 422})

#: HTTP status of an in-band error that names no status, by its type or code.
_STATUS_OF: Final = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "exceed_context_size_error": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "model_not_found": 404,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "unavailable_error": 503,
    "serviceunavailableerror": 503,
    "service unavailable": 503,
    "overloaded_error": 529,
    "timeout_error": 504,
}

_CONTEXT_WORDS: Final = re.compile(
    r"maximum context length|available context size|model's context length"
)
_LOADING_WORDS: Final = re.compile(r"\bloading\b")
_MODEL_WORDS: Final = re.compile(
    r"\bmodel\b.{0,300}\b(not found|not exist|unknown)\b|\b(unknown|no such) model\b",
    re.DOTALL,
)
#: llama-server's router mode says it with 400, and with nothing else.
_MODEL_WORDS_400: Final = re.compile(r"model \S+ not found\W*", re.DOTALL)

_ADDRESSES: Final = re.compile(
    r"[a-z][a-z0-9+.-]{0,20}://\S*[^\s.,;:!?'\")\]}]"  # a URL
    r"|\[[0-9a-f:.]*:[0-9a-f:.]*\](:\d+)?"  # [v6], [v6]:port
    r"|\b\d{1,3}(\.\d{1,3}){3}\b(:\d+)?"  # v4, v4:port
    r"|\b[a-z0-9][a-z0-9-]{0,62}(\.[a-z0-9-]{1,63}){1,9}:\d{2,5}\b"  # host.name:port
    r"|\blocalhost(:\d+)?\b",
    re.IGNORECASE,
)
_KEYS: Final = re.compile(r"\bbearer\s+[\w.~+/=-]{8,}|\bsk-[\w-]{8,}", re.IGNORECASE)

_decode: Final = msgspec.json.Decoder().decode


class _Said(NamedTuple):
    """What an error body says, whatever its shape."""

    message: str = ""
    error_type: str | None = None
    param: str | None = None
    code: str | None = None


def fault_of_reply(
    status: int,
    body: bytes,
    retry_after: bytes | None = None,
    *,
    now: float | None = None,
) -> Fault:
    """Classify an HTTP reply that is not a stream (A2, A4).

    Args:
        status: the reply's status. A 2xx is judged by the error in its body,
            as if that were in band; without one it is PROTOCOL.
        body: its body, as far as it was read.
        retry_after: the header's value: seconds, or a date.
        now: unix seconds, to read a date by; None: a date is no hint.
    """
    body = body[:BODY_MAX]
    if 200 <= status < 300 and is_error(body):
        return fault_of_frame(body)
    if not 400 <= status < 600:
        return Fault(
            FaultKind.PROTOCOL,
            f"A worker answered with HTTP status {status} instead of a stream.",
            status=status,
            body=body,
        )
    return _fault(status, _read(body), body, seconds_of(retry_after, now))


def fault_of_frame(body: bytes) -> Fault:
    """Classify an in-band error, as the HTTP status that it carries (B47, B65).

    Args:
        body: the data of the event that held it, in any shape. One that names
            no status is taken as 500.
    """
    body = body[:BODY_MAX]
    said = _read(body)
    status = 500
    for word in (said.code, said.error_type):
        if word is None:
            continue
        if len(word) == 3 and word.isdecimal() and word[0] in "45":
            status = int(word)
            break
        if word.lower() in _STATUS_OF:
            status = _STATUS_OF[word.lower()]
            break
    return _fault(status, said, body, None)


def is_error(body: bytes) -> bool:
    """Tell whether a JSON body is an error object of any shape."""
    found = _json(body)
    return isinstance(found, dict) and (
        bool(found.get("error"))
        or found.get("object") == "error"
        or ("detail" in found and "choices" not in found)
    )


def seconds_of(value: bytes | None, now: float | None) -> float | None:
    """Read a Retry-After: seconds from now, 0 to RETRY_AFTER_MAX; None: no hint."""
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    # RFC 9110 §10.2.3 has whole seconds; some send a fraction. No sign, no inf.
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,12})?", text):
        return min(float(text), RETRY_AFTER_MAX)
    try:
        date = parsedate_tz(text)
        if date is None or now is None:
            return None
        return min(max(mktime_tz(date) - now, 0.0), RETRY_AFTER_MAX)
    except (ValueError, OverflowError):
        return None


def _fault(status: int, said: _Said, body: bytes, retry_after: float | None) -> Fault:
    """Give the row of A4 for an error *status*, 400 to 599."""
    kind = _kind(status, said)
    words = scrubbed(said.message)
    if kind is FaultKind.REJECTED and status not in OWN_STATUS:
        status = 400
    message = {
        FaultKind.REJECTED: words or f"The engine refused the request ({status}).",
        FaultKind.CONTEXT_LENGTH: words or "The prompt does not fit the context.",
        FaultKind.SERVER_ERROR: words or "The engine failed on the request (500).",
        FaultKind.LOADING: "A worker is loading the model.",
        FaultKind.MODEL_GONE: "A worker no longer has the model.",
        FaultKind.UNAUTHORIZED: "A worker is not set up for this router.",
    }.get(kind, f"A worker declined the request ({status}).")
    param = said.param
    if kind is FaultKind.CONTEXT_LENGTH:
        # Engines name their own quantity; a client's field is its messages, but
        # where the edge knows another name for them.
        param = "messages"
    elif kind is not FaultKind.REJECTED:
        param = None
    return Fault(
        kind,
        message,
        status=status,
        body=body,
        error_type=said.error_type,
        retry_after=retry_after,
        param=param,
        code=said.code,
    )


def _kind(status: int, said: _Said) -> FaultKind:
    if status in (401, 403):
        return FaultKind.UNAUTHORIZED
    if status == 500:
        return FaultKind.SERVER_ERROR
    words = said.message[:MESSAGE_MAX].lower()
    if status == 503 and _LOADING_WORDS.search(words):
        return FaultKind.LOADING
    if status == 429 or status > 500:
        return FaultKind.DECLINED
    return _kind_of_refusal(status, said, words)


def _kind_of_refusal(status: int, said: _Said, words: str) -> FaultKind:
    """Tell the client's mistakes from what another worker may not mind (A4)."""
    if (
        said.error_type == "exceed_context_size_error"
        or said.code == "context_length_exceeded"
        or _CONTEXT_WORDS.search(words)
    ):
        return FaultKind.CONTEXT_LENGTH
    # The job asked for a model that our table gives to this worker.
    if (
        said.code == "model_not_found"
        or (status == 404 and _MODEL_WORDS.search(words))
        or (status == 400 and _MODEL_WORDS_400.fullmatch(words))
    ):
        return FaultKind.MODEL_GONE
    return FaultKind.REJECTED


def _read(body: bytes) -> _Said:
    """Find message, type, param and code in an error body of any shape."""
    found = _json(body)
    if isinstance(found, dict):
        inner = found.get("error") or found.get("detail")
        if isinstance(inner, list):
            return _read_validation(inner)
        if isinstance(inner, dict):
            found = inner
        return _Said(
            message=_word(inner)
            or _word(found.get("message"))
            or _word(found.get("msg")),
            error_type=_short(found.get("type")),
            param=_short(found.get("param")),
            code=_short(found.get("code")),
        )
    if isinstance(found, str):
        return _Said(found)
    text = body.decode("utf-8", "replace").strip()
    if found is None and text[:1] not in ("", "<", "{", "["):
        return _Said(text)
    return _Said()


def _read_validation(faults: list[Any]) -> _Said:
    """Read FastAPI's list: ``[{"loc": ["body", "messages", 0], "msg": ...}]``."""
    messages = []
    param = None
    for fault in faults:
        if not isinstance(fault, dict):
            continue
        messages.append(_word(fault.get("msg")))
        where = fault.get("loc")
        if param is None and isinstance(where, list):
            param = ".".join(str(step) for step in where[1:])
    return _Said("; ".join(filter(None, messages)), param=_short(param or None))


def _json(body: bytes) -> Any:
    """Decode; None for what is not JSON."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _short(value: object) -> str | None:
    """A short string of a string or an integer code (O5); None for the rest."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return scrubbed(str(value)[: 2 * WORD_MAX])[:WORD_MAX] or None


def scrubbed(text: str) -> str:
    """Give a worker's words without its addresses and keys, cut short (B123)."""
    text = text[: 2 * MESSAGE_MAX]
    text = without_keys(_ADDRESSES.sub("[address]", text))
    return text if len(text) <= MESSAGE_MAX else f"{text[:MESSAGE_MAX]}..."


def without_keys(text: str) -> str:
    """Give *text* without what looks like a key, for people who may see addresses."""
    return _KEYS.sub("[key]", text)
