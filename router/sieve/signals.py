"""The signals of one attempt: out of band, in order, and not without end (J5)."""

from collections.abc import Mapping
from typing import Final

import msgspec

from router.messages import Signal, SignalCode

#: Characters of a signal's message that are kept.
MESSAGE_MAX: Final = 2_000

#: The job ends with these.
STOPPING: Final = frozenset(
    {SignalCode.NEEDS_MANAGER_DECISION, SignalCode.NEEDS_HIGHER_REASONER}
)
#: What the model may say; the others are the router's own.
FOR_MODELS: Final = (
    SignalCode.LOW_CONFIDENCE,
    SignalCode.NEEDS_EXTERNAL_INFO,
    SignalCode.NEEDS_HIGHER_REASONER,
    SignalCode.NEEDS_MANAGER_DECISION,
    SignalCode.POLICY_RISK,
)
#: By the name of the exit tool: its code in small letters.
EXIT_TOOLS: Final[Mapping[str, SignalCode]] = {
    code.value.lower(): code for code in FOR_MODELS
}

_decode: Final = msgspec.json.Decoder(dict).decode


class Signals:
    """Gathers signals, at most so many; one that stops the job is always kept."""

    __slots__ = ("_found", "_most")

    def __init__(self, most: int) -> None:
        """*most*: at least 1."""
        self._most = most
        self._found: list[Signal] = []

    def add(self, code: SignalCode, message: str) -> None:
        """Keep one more, if there is room.

        One that ends the job takes the last place where there is none: a
        caller must learn why its job has ended.
        """
        if len(self._found) == self._most:
            if code not in STOPPING and code not in _ENDINGS:
                return
            self._found.pop()
        index = len(self._found)
        self._found.append(Signal(code, message[:MESSAGE_MAX], index))

    def all(self) -> tuple[Signal, ...]:
        """Give them in order."""
        return tuple(self._found)


_ENDINGS: Final = frozenset(
    {
        SignalCode.TOOL_LIMIT_REACHED,
        SignalCode.MAX_TOKENS_REACHED,
        SignalCode.LOOP_DETECTED,
    }
)


def message_of(arguments: str) -> str | None:
    """Find what an exit tool was called with: its ``message``, else all of it.

    None: *arguments* are no JSON object (yet).
    """
    try:
        fields = _decode(arguments)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    message = fields.get("message")
    return message if isinstance(message, str) else arguments
