"""Which tool call a fragment belongs to, whatever an engine says of it."""

from router.ids import AssignmentId
from router.messages import ToolPart
from router.openai.chunk import Call


class Calls:
    """Tells tool calls apart; id and name leave it once for each call."""

    def __init__(self, assignment: AssignmentId) -> None:
        self._assignment = assignment
        self._numbers: dict[int, int] = {}
        """By the engine's index: the last call that had it."""
        self._ids: list[str] = []
        self._named: list[bool] = []
        self._bare: list[ToolPart] = []
        """What every later fragment of a call carries."""
        self._last: int | None = None

    def part(self, call: Call) -> ToolPart:
        """Give the call that a fragment belongs to.

        Some engines leave the index out, or give every call the same one; a
        fragment with a name and a new id then opens the next call. Some leave
        the id out: clients need one to answer to.
        """
        name = call.function.name or None if call.function else None
        if call.index is not None:
            number = self._numbers.get(call.index)
        else:
            number = None if call.id else self._last
        if number is None or (call.id and name and call.id != self._ids[number]):
            return self._open(call, name)
        self._last = number
        if name is not None and not self._named[number]:
            self._named[number] = True
            return ToolPart(number, name=name)
        return self._bare[number]

    def _open(self, call: Call, name: str | None) -> ToolPart:
        number = len(self._ids)
        request, attempt = self._assignment
        call_id = call.id or f"call_{request}_{attempt}_{number}"
        self._ids.append(call_id)
        self._named.append(name is not None)
        self._bare.append(ToolPart(number))
        if call.index is not None:
            self._numbers[call.index] = number
        self._last = number
        return ToolPart(number, call_id, name)
