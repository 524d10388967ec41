"""A job as bytes: what an offer's parts carry (O8: never a dialect's JSON).

msgpack of the job's own fields by name, so that a field which one end does
not know yet is its default there.
"""

from collections.abc import Collection
from typing import Any, Final

import msgspec

from router.errors import RouterError
from router.messages import Endpoint, Job

_encode: Final = msgspec.msgpack.Encoder().encode
_NESTED: Final = frozenset({list, dict})
_JSON: Final = _NESTED | {str, int, float, bool, type(None)}
_decode: Final = msgspec.msgpack.Decoder(Job).decode


class JobUnreadable(RouterError):
    """Bytes that are no job."""


class JobUnwritable(RouterError):
    """JSON has numbers that msgpack has not: integers beyond 64 bits."""


def encode_job(job: Job) -> bytes:
    """Write *job*, of any size.

    Raises:
        JobUnwritable: it holds what no agent could be told.
    """
    try:
        return _encode(job)
    except OverflowError:
        raise JobUnwritable("an integer beyond 64 bits") from None


def decode_job(octets: bytes) -> Job:
    """Read a job.

    Raises:
        JobUnreadable: it is none; the text holds nothing of it.
    """
    try:
        job = _decode(octets)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError):
        raise JobUnreadable("not a job") from None
    if not _is_json([list(job.messages), dict(job.extras)]):
        raise JobUnreadable("what JSON does not have")
    return job


def _is_json(value: list[Any]) -> bool:
    """Tell whether *value*, whatever is in it, could have been read from JSON."""
    left: list[Collection[Any]] = [value]
    while left:
        values = left.pop()
        if isinstance(values, dict):
            if not set(map(type, values)) <= {str}:
                return False
            values = values.values()
        kinds = set(map(type, values))
        if not kinds <= _JSON:
            return False
        if kinds & _NESTED:
            left += [inner for inner in values if type(inner) in _NESTED]
    return True


def known_tokens(job: Job) -> int | None:
    """Count what a job needs of a context, where that is plain to see.

    None: only the engine's own tokenizer could say. A prompt of token ids is
    counted, with what may be generated behind it.
    """
    if job.endpoint is not Endpoint.COMPLETIONS or len(job.messages) != 1:
        return None
    prompt = job.messages[0]
    if not isinstance(prompt, list) or not all(type(t) is int for t in prompt):
        return None
    return len(prompt) + (job.params.max_tokens or 1)
