"""What it costs to write one delta for its client, in nanoseconds.

``python -m bench.encoding`` runs each dialect's encoder alone, on one delta a
call (a stream) and on eight (an engine that answers in batches). No socket, no
parsing.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from router.anthropic.stream import MessageEncoder
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Kind, ToolPart
from router.openai.reply import StreamEncoder
from router.openai.text_reply import TextEncoder

CALLS: Final = 20_000
ROUNDS: Final = 15
BATCH: Final = 8
_A: Final = AssignmentId(RequestId("req_1"), 1)


class Encoder(Protocol):
    """The part that is measured."""

    def first(self) -> bytes:
        """Write what is before all deltas."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Write them."""


def chat() -> Encoder:
    """Make OpenAI's."""
    return StreamEncoder("chatcmpl-1", "m", 1, include_usage=False)


def completions() -> Encoder:
    """Make that of bare text."""
    return TextEncoder("cmpl-1", "m", 1, include_usage=False)


def messages() -> Encoder:
    """Make Anthropic's."""
    return MessageEncoder("msg_1", "m", "req_1")


def text(kind: Kind) -> Delta:
    """Give one word."""
    return Delta(_A, 0, kind, " word")


def fragment() -> Delta:
    """Give one fragment of a tool call that is open."""
    return Delta(_A, 0, Kind.TOOL_CALL, '"a":', ToolPart(0))


#: Name, encoder, what it is opened with, what is measured.
ROWS: Final[Sequence[tuple[str, Callable[[], Encoder], Delta, Delta]]] = (
    ("chat, text", chat, text(Kind.TEXT), text(Kind.TEXT)),
    ("chat, reasoning", chat, text(Kind.REASONING), text(Kind.REASONING)),
    ("completions, text", completions, text(Kind.TEXT), text(Kind.TEXT)),
    ("messages, text", messages, text(Kind.TEXT), text(Kind.TEXT)),
    ("messages, reasoning", messages, text(Kind.REASONING), text(Kind.REASONING)),
    (
        "messages, tool",
        messages,
        Delta(_A, 0, Kind.TOOL_CALL, "{", ToolPart(0, "t1", "f")),
        fragment(),
    ),
)


def measure(encoder: Encoder, batch: Sequence[Delta]) -> float:
    """Give the median of nanoseconds for one delta."""
    encode = encoder.deltas
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            encode(batch)
        rounds.append((time.perf_counter_ns() - began) / CALLS / len(batch))
    return statistics.median(rounds)


def table() -> str:
    """Measure all rows."""
    lines = [f"{'ns per delta':22}{'one a call':>12}{f'{BATCH} a call':>12}"]
    for name, make, opening, delta in ROWS:
        figures = []
        for size in (1, BATCH):
            encoder = make()
            encoder.first()
            encoder.deltas([opening])
            figures.append(measure(encoder, [delta] * size))
        lines.append(f"{name:22}{figures[0]:12.0f}{figures[1]:12.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
