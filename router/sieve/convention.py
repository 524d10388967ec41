"""The tool convention: a reply that is one JSON object and nothing else (J4).

``{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}``

Rule 1: what a reply is, is decided at its beginning, character by character, by
the rows of ``TRANSITIONS``; until then, and while it is a call, its text is held.
Rule 2: a call is strict JSON of exactly this shape, or it is none.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from router.errors import RouterError
from router.messages import Delta
from router.words import Word

#: Bytes of text that are held while they may be a call (J4).
HELD_MAX: Final = 256 * 1024
_KEY: Final = '"tool_calls"'


class Place(Word):
    """How far the beginning of a reply has been read."""

    #: Nothing but space.
    START = "start"
    #: ``{``
    OBJECT = "object"
    #: In the key.
    KEY = "key"
    #: Behind the key.
    COLON = "colon"
    #: It is a call: everything is held to its end.
    CALL = "call"
    #: It is text: everything goes through.
    TEXT = "text"


class Sign(Word):
    """What one character of a beginning is."""

    #: Space as JSON has it.
    SPACE = "space"
    BRACE = "brace"
    #: The next character of the key, and its last one.
    KEY = "key"
    KEY_END = "key end"
    COLON = "colon"


#: A sign without a row makes it text.
TRANSITIONS: Final[Mapping[Place, Mapping[Sign, Place]]] = {
    Place.START: {Sign.SPACE: Place.START, Sign.BRACE: Place.OBJECT},
    Place.OBJECT: {Sign.SPACE: Place.OBJECT, Sign.KEY: Place.KEY},
    Place.KEY: {Sign.KEY: Place.KEY, Sign.KEY_END: Place.COLON},
    Place.COLON: {Sign.SPACE: Place.COLON, Sign.COLON: Place.CALL},
}
_DECIDED: Final = frozenset({Place.CALL, Place.TEXT})
_SIGNS: Final[Mapping[str, Sign]] = {
    **dict.fromkeys(" \t\r\n", Sign.SPACE),
    "{": Sign.BRACE,
    ":": Sign.COLON,
}


class CallsInvalid(RouterError):
    """A reply that begins as a call and is none; the message holds none of it."""


class CallText(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object."""


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw


class _Reply(msgspec.Struct, forbid_unknown_fields=True):
    tool_calls: list[_Call]


_decode: Final = msgspec.json.Decoder(_Reply).decode


class Convention:
    """Tells calls from text, and holds what may be a call. For one attempt."""

    __slots__ = ("_matched", "_names", "_size", "held", "place")

    def __init__(self, names: frozenset[str]) -> None:
        """Know nothing of the reply yet; *names* are those of the tools."""
        self._names = names
        self.place = Place.START
        self.held: list[Delta] = []
        """In order; empty once it is text."""
        self._size = 0
        self._matched = 0

    def take(self, delta: Delta) -> Sequence[Delta]:
        """Give what may go through now that *delta*, a piece of text, is here.

        Raises:
            CallsInvalid: a call is longer than ``HELD_MAX``.
        """
        if self.place is Place.TEXT:
            return (delta,)
        self.held.append(delta)
        self._size += len(delta.text.encode(errors="surrogatepass"))
        place = self.place = self._look(delta.text)
        if place is Place.TEXT:
            return self.release()
        if self._size <= HELD_MAX:
            return ()
        if place is Place.CALL:
            raise CallsInvalid(f"The model's tool call has more than {HELD_MAX} bytes.")
        return self.release()

    def release(self) -> Sequence[Delta]:
        """Give all that is held: it is text after all, and so is what follows."""
        self.place = Place.TEXT
        held, self.held = self.held, []
        return held

    def calls(self) -> Sequence[CallText]:
        """Read what is held as calls.

        Raises:
            CallsInvalid: it is not strict JSON of this shape, holds no call,
                or calls another tool.
        """
        text = "".join(delta.text for delta in self.held)
        try:
            reply = _decode(text.encode())
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            raise CallsInvalid(
                "The model's tool call is not strict JSON of its shape."
            ) from None
        if not reply.tool_calls:
            raise CallsInvalid("The model's tool call calls nothing.")
        found = []
        for call in reply.tool_calls:
            arguments = bytes(call.arguments)
            if not arguments.startswith(b"{"):
                raise CallsInvalid("The model called a tool with no object.")
            if call.name not in self._names:
                raise CallsInvalid("The model called a tool that was not offered.")
            found.append(CallText(call.name, arguments.decode()))
        return found

    def _look(self, text: str) -> Place:
        """Read on in the beginning of the reply; say how far that leads."""
        place = self.place
        for character in text:
            if place in _DECIDED:
                break
            sign = self._sign(character)
            place = TRANSITIONS[place].get(sign, Place.TEXT) if sign else Place.TEXT
        return place

    def _sign(self, character: str) -> Sign | None:
        if character == _KEY[self._matched : self._matched + 1]:
            self._matched += 1
            return Sign.KEY_END if self._matched == len(_KEY) else Sign.KEY
        return _SIGNS.get(character)
