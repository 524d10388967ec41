"""How much of an answer is gathered before it is an engine that never ends (H5)."""

from collections.abc import Sequence
from typing import Final

from router.errors import Fault, FaultKind
from router.messages import Delta

#: Of one answer: a hundred times the longest context there is. Embeddings of many
#: texts come near it, no text does.
WHOLE_MAX: Final = 65 * 1024 * 1024
#: What a delta costs beside what it says.
_DELTA_COST: Final = 64


class Gathered:
    """The size of what one attempt has said so far: characters, and bytes of JSON."""

    __slots__ = ("_size",)

    def __init__(self) -> None:
        """Nothing was said."""
        self._size = 0

    def add(self, deltas: Sequence[Delta]) -> Fault | None:
        """Count *deltas*; a fault: no engine means an answer this long."""
        size = self._size
        for delta in deltas:
            size += _DELTA_COST + len(delta.text)
            if delta.tool is not None:
                size += len(delta.tool.id or "") + len(delta.tool.name or "")
            if delta.logprobs is not None:
                size += len(delta.logprobs)
        self._size = size
        if size > WHOLE_MAX:
            return Fault(FaultKind.PROTOCOL, "The answer grew beyond all bounds.")
        return None

    def clear(self) -> None:
        """Forget it: another attempt begins."""
        self._size = 0
