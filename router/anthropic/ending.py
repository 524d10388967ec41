"""How a message ends: its stop reason and its tokens (M3, M4)."""

from collections.abc import Sequence
from typing import Any, Final

from router.messages import Finished, FinishReason, Usage

_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
}
#: Ends in the middle of an answer: a call that it holds may be half of one.
CUTS: Final = frozenset({FinishReason.LENGTH, FinishReason.CONTENT_FILTER})


def stop_of(
    finished: Finished, stops: Sequence[str], *, called: bool, refused: bool
) -> dict[str, Any]:
    """Give ``stop_reason`` and ``stop_sequence`` of a whole answer.

    Args:
        finished: how the engine ended it.
        stops: the client's stop sequences; an engine may name one of its own.
        called: the answer holds a tool call, whatever the engine's word (M4).
        refused: the model said that it refuses.
    """
    reason = finished.reason
    matched = finished.stop_sequence
    if reason in CUTS:
        # Nobody is asked to make a call that was cut (B79).
        return {"stop_reason": _REASONS[reason], "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason is FinishReason.STOP and matched is not None and matched in stops:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    if reason is FinishReason.STOP and refused:
        return {"stop_reason": "refusal", "stop_sequence": None}
    return {"stop_reason": _REASONS[reason], "stop_sequence": None}


def usage_of(usage: Usage | None, deltas: int) -> dict[str, int]:
    """Count tokens as this dialect does: input without what came from a cache.

    Where the engine told nothing, the number of *deltas* stands for the output,
    and nothing is said of the input.
    """
    if usage is None:
        return {"output_tokens": deltas}
    cached = min(usage.cached_tokens or 0, usage.prompt_tokens)
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
