"""Tool calls in fragments: whose each one is, and in which order they leave.

``Calls`` says which call a fragment belongs to, whatever an engine says of it
(B55). ``InTurn`` lets a client see one call after the other (O7).
"""

from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from router.ids import AssignmentId
from router.messages import Delta, ToolPart
from router.openai.chunk import Call

#: What is kept of a stream's calls so that they leave in turn, in characters;
#: each fragment counts as 64 more than it has.
KEPT_MAX: Final = 1024 * 1024
_FRAGMENT_COST: Final = 64


@attrs.define
class _Known:
    """One call, as far as it has come."""

    number: int
    id: str | None
    """As the engine says it."""
    name: str | None
    bare: ToolPart
    """What every later fragment carries."""
    whole: str | None = None
    """Its arguments while one fragment brought them all; empty: several did."""


class Calls:
    """Tells tool calls apart; id and name leave it once for each call."""

    def __init__(self, assignment: AssignmentId) -> None:
        self._assignment = assignment
        self._count = 0
        self._indices: dict[int, _Known] = {}
        """By the engine's index: the last call that had it."""
        self._ids: dict[str, _Known] = {}
        self._last: _Known | None = None

    def parts(self, fragments: Sequence[Call]) -> list[ToolPart]:
        """Give the call of each of the fragments that one chunk holds.

        Some engines leave the index out, or give every call the same one; a
        fragment with a name and a new id then opens the next call. Some leave
        the id out too: then another name does, and so does the same one where
        what it brings can't belong to the call that is open. Clients need an id
        of its own for each, to answer to.
        """
        named: set[int] = set()
        return [self._part(fragment, named) for fragment in fragments]

    def _part(self, fragment: Call, named: set[int]) -> ToolPart:
        """*named*: the calls that this chunk has named."""
        function = fragment.function
        name = (function and function.name) or None
        arguments = (function and function.arguments) or ""
        call = self._known(fragment, name)
        if call is None or (
            name is not None and _opens(fragment, name, arguments, call, named)
        ):
            call, part = self._open(fragment, name)
        elif name is not None and call.name is None:
            call.name = name
            part = ToolPart(call.number, name=name)
        else:
            part = call.bare
        if arguments:
            call.whole = arguments if call.whole is None else ""
        if name is not None:
            named.add(call.number)
        self._last = call
        return part

    def _known(self, fragment: Call, name: str | None) -> _Known | None:
        """Find the call that index and id say; None: it is a new one."""
        said = fragment.id
        if fragment.index is None:
            return self._ids.get(said) if said else self._last
        call = self._indices.get(fragment.index)
        if call is None:
            return self._ids.get(said) if said and name is None else None
        if said and said != call.id:
            return self._ids.get(said, call if name is None else None)
        return call

    def _open(self, fragment: Call, name: str | None) -> tuple[_Known, ToolPart]:
        number = self._count
        self._count += 1
        call_id = said = fragment.id or None
        if said is None or said in self._ids:
            request, attempt = self._assignment
            call_id = f"call_{request}_{attempt}_{number}"
        call = _Known(number, said, name, ToolPart(number))
        if said is not None:
            self._ids[said] = call
        if fragment.index is not None:
            self._indices[fragment.index] = call
        return call, ToolPart(number, call_id, name)


def _opens(
    fragment: Call, name: str, arguments: str, call: _Known, named: set[int]
) -> bool:
    """Does a fragment with a *name* open the call behind *call*?"""
    if call.name is None:
        return False
    if name != call.name:
        return True
    if fragment.id:
        # Said once more.
        return False
    return call.number in named or (bool(arguments.strip()) and _is_whole(call.whole))


def _is_whole(arguments: str | None) -> bool:
    """Are they one object? Then no more of them can come."""
    if not arguments:
        return False
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return False


class InTurn:
    """Puts fragments of mixed tool calls into the order of the calls.

    The SDKs take a call for ended, and parse it, as soon as a fragment of
    another one comes. So what comes of another call before the open one is a
    whole object waits for the end of the answer. An engine that sends its calls
    one after the other waits for nothing. Beyond ``KEPT_MAX`` nothing waits any
    more: then fragments leave as they come.
    """

    def __init__(self) -> None:
        self._open: int | None = None
        self._arguments: list[str] = []
        """Of the open call, as far as they have come."""
        self._held: dict[int, list[Delta]] = {}
        self._cost = 0

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Give what may leave now that a tool *delta* has come; maybe nothing."""
        if self._cost > KEPT_MAX:
            return (delta,)
        tool = delta.tool
        assert tool is not None
        if tool.index != self._open and self._may_open():
            self._open = tool.index
            self._arguments = []
            self._cost = 0
        self._cost += _FRAGMENT_COST + len(delta.text)
        leaving: tuple[Delta, ...] = ()
        if tool.index == self._open:
            self._arguments.append(delta.text)
            leaving = (delta,)
        else:
            self._held.setdefault(tool.index, []).append(delta)
        return leaving if self._cost <= KEPT_MAX else (*leaving, *self.rest())

    def rest(self) -> list[Delta]:
        """Give what still waits, call by call; nothing is kept."""
        held = [delta for call in self._held.values() for delta in call]
        self._held = {}
        self._arguments = []
        return held

    def _may_open(self) -> bool:
        """Can no more come of the call that is open?"""
        if self._held:
            return False
        return self._open is None or _is_whole("".join(self._arguments))
