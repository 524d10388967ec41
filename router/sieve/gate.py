"""Which tool calls reach the client: the others are signals, or one too many.

Calls of ordinary tools go through as they came, fragment by fragment (J4);
those of exit tools are taken out of the answer and become signals (J5).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from router.messages import Delta, SignalCode
from router.sieve.signals import STOPPING, Signals, message_of

#: Characters of arguments that are held of one call.
HELD_MAX: Final = 64 * 1024


class _Call:
    """One call that did not go through (yet)."""

    __slots__ = ("arguments", "code", "pieces", "size", "told")

    def __init__(self) -> None:
        self.pieces: list[Delta] = []
        """Held until the call has a name."""
        self.size = 0
        self.code: SignalCode | None = None
        """Set once it is known to be a signal."""
        self.arguments = ""
        self.told = False


class CallGate:
    """Lets calls through, for one attempt."""

    __slots__ = ("_calls", "_calls_max", "_exits", "_signals", "admitted", "over")

    def __init__(
        self, exits: Mapping[str, SignalCode], calls_max: int, signals: Signals
    ) -> None:
        """Gate an answer.

        Args:
            exits: what the exit tools that the model was offered stand for.
            calls_max: ordinary calls that may go through; 0: no limit.
            signals: told of each exit tool that is called, and of the limit.
        """
        self._exits = exits
        self._calls_max = calls_max
        self._signals = signals
        #: By index, None for those that went through.
        self._calls: dict[int, _Call | None] = {}
        #: Ordinary calls that went through.
        self.admitted = 0
        #: The answer ends here: a signal stops the job, or the limit is reached.
        self.over = False

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Give what goes through now that *delta*, a piece of a call, is here."""
        tool = delta.tool
        assert tool is not None
        known = self._calls.get(tool.index, _UNKNOWN)
        if known is None:
            return (delta,)
        if known is _UNKNOWN:
            known = self._calls[tool.index] = _Call()
        if known.code is not None:
            self._read(known, delta.text)
            return ()
        known.pieces.append(delta)
        known.size += len(delta.text)
        if tool.name is None and self._exits and known.size <= HELD_MAX:
            return ()
        return self._named(tool.index, known, tool.name)

    def whole(self, name: str, arguments: str) -> bool:
        """Take one whole call; say whether it goes through."""
        code = self._exits.get(name)
        if code is None:
            return self._admit()
        self._tell(code, message_of(arguments) or "")
        return False

    def finish(self) -> Sequence[Delta]:
        """Give what is still held: no more comes."""
        left: list[Delta] = []
        for index, call in list(self._calls.items()):
            if call is None:
                continue
            if call.code is None:
                left += self._named(index, call, None)
            elif not call.told:
                call.told = True
                self._tell(call.code, call.arguments)
        return left

    def _named(self, index: int, call: _Call, name: str | None) -> Sequence[Delta]:
        """Decide on a call that is called *name*, or has none."""
        code = None if name is None else self._exits.get(name)
        pieces, call.pieces = call.pieces, []
        if code is not None:
            call.code = code
            for piece in pieces:
                self._read(call, piece.text)
            return ()
        if not self._admit():
            return ()
        self._calls[index] = None
        return pieces

    def _admit(self) -> bool:
        if self._calls_max and self.admitted >= self._calls_max:
            if not self.over:
                self.over = True
                self._signals.add(
                    SignalCode.TOOL_LIMIT_REACHED,
                    f"The model made more than {self._calls_max} tool calls.",
                )
            return False
        self.admitted += 1
        return True

    def _read(self, call: _Call, text: str) -> None:
        """Read on in the arguments of an exit tool."""
        if call.told or call.code is None:
            return
        call.arguments = (call.arguments + text)[:HELD_MAX]
        if text.rstrip().endswith("}"):
            message = message_of(call.arguments)
            if message is not None:
                call.told = True
                self._tell(call.code, message)

    def _tell(self, code: SignalCode, message: str) -> None:
        self._signals.add(code, message)
        self.over = self.over or code in STOPPING


_UNKNOWN: Final = _Call()
