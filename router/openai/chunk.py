"""One event of an engine's stream, as far as the router looks at it.

Tolerant of what engines leave out or send as null (B48, B50); fields that are
not named here are skipped unread. Decoded once per token: plain structs.
"""

from typing import Annotated, Any, Final

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class Function(msgspec.Struct, gc=False):
    """The function part of a tool call fragment."""

    name: str | None = None
    arguments: str | None = None


class Call(msgspec.Struct, gc=False):
    """One fragment of one tool call."""

    index: int | None = None
    id: str | None = None
    function: Function | None = None


class Fields(msgspec.Struct, gc=False):
    """``choices[].delta``; fields that are not named here are not looked at."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's name for it."""
    refusal: str | None = None
    tool_calls: list[Call] | None = None


class Choice(msgspec.Struct, gc=False):
    """One of ``choices``."""

    index: int | None = None
    delta: Fields | None = None
    text: str | None = None
    """In place of ``delta``, where the answer is bare text."""
    finish_reason: str | None = None
    logprobs: dict[str, msgspec.Raw] | None = None
    stop_reason: Any = None
    """What matched: the client's string, or a token's number (vLLM)."""
    matched_stop: Any = None
    """The same (SGLang)."""


class Details(msgspec.Struct, gc=False):
    """What the token counts are made of."""

    cached_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class Counted(msgspec.Struct, gc=False):
    """``usage``."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None
    reasoning_tokens: Count | None = None
    """SGLang has it here."""


class Chunk(msgspec.Struct, gc=False):
    """One ``data:`` of a stream, or an error in its place."""

    choices: list[Choice] | None = None
    usage: Counted | None = None
    error: Any = None
    object: str | None = None
    detail: Any = None


#: Raises msgspec.MsgspecError, and RecursionError for what nests too deep.
decode_chunk: Final = msgspec.json.Decoder(Chunk).decode


class _Uncounted(msgspec.Struct):
    """A ``Chunk`` whose usage is not looked at yet."""

    choices: list[Choice] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: Any = None
    object: str | None = None
    detail: Any = None


_decode_uncounted: Final = msgspec.json.Decoder(_Uncounted).decode


def oddly_counted(body: bytes) -> Chunk | None:
    """Decode what ``decode_chunk`` can't for its usage; None: that is not why.

    An answer stands, whatever is said of its tokens (B48).
    """
    try:
        odd = _decode_uncounted(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return Chunk(odd.choices, counted(odd.usage), odd.error, odd.object, odd.detail)


def counted(usage: msgspec.Raw) -> Counted | None:
    """Read what can be read of *usage*; a count that is no count is none."""
    try:
        told = msgspec.json.decode(usage)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    prompt, completion = (
        told.get(f"{part}_tokens_details") for part in ("prompt", "completion")
    )
    return Counted(
        _count(told, "prompt_tokens"),
        _count(told, "completion_tokens"),
        Details(cached_tokens=_count(prompt, "cached_tokens")),
        Details(reasoning_tokens=_count(completion, "reasoning_tokens")),
        _count(told, "reasoning_tokens"),
    )


def _count(told: object, name: str) -> int | None:
    count = told.get(name) if isinstance(told, dict) else None
    return count if type(count) is int and count >= 0 else None
