"""A job as bytes: what an offer's parts carry (O8: never a dialect's JSON).

msgpack of the job's own fields by name, so that a field which one end does
not know yet is its default there.
"""

from typing import Final

import msgspec

from router.errors import RouterError
from router.messages import Endpoint, Job

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Job).decode


class JobUnreadable(RouterError):
    """Bytes that are no job."""


def encode_job(job: Job) -> bytes:
    """Write *job*, of any size."""
    return _encode(job)


def decode_job(octets: bytes) -> Job:
    """Read a job.

    Raises:
        JobUnreadable: it is none; the text holds nothing of it.
    """
    try:
        return _decode(octets)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError):
        raise JobUnreadable("not a job") from None


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
