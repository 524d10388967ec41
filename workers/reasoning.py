"""Ends a reasoning that goes on for too long, where an engine can be told to (J6).

An engine that has a limit of its own was sent it with the request, and is borne
with for a while; llama-server is told through its control endpoint as well.
Rule: nobody is asked twice; an answer that goes on after that is cut by the router.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn, Protocol

import msgspec
import trio

from router.errors import Fault
from router.ids import AssignmentId
from router.openai.upstream import AnswerReader
from router.sse import Event
from workers.control import NoAnswer

#: Deltas of reasoning to bear with beyond the limit: the words with which an
#: engine closes the reasoning, and what is on its way meanwhile.
GRACE: Final = 64
CONTROL_PATH: Final = "/v1/chat/completions/control"
#: Seconds that the control endpoint has for its answer.
_WITHIN_S: Final = 5.0


class _Named(msgspec.Struct):
    id: str | None = None


_decode: Final = msgspec.json.Decoder(_Named).decode


class NamedReader(AnswerReader):
    """An answer's reader that notes what the engine calls the answer."""

    __slots__ = ("reply_id",)

    def __init__(self, assignment: AssignmentId) -> None:
        """Start at index 0 of *assignment*."""
        super().__init__(assignment)
        self.reply_id: str | None = None

    def read(self, event: Event) -> Fault | None:
        """See ``AnswerReader.read``."""
        if self.reply_id is None:
            with suppress(msgspec.MsgspecError, RecursionError):
                self.reply_id = _decode(event.data).id
        return super().read(event)


class ReasoningEnd:
    """How the reasoning of one attempt is ended."""

    __slots__ = ("_ask", "_asked", "_reader")

    def __init__(self, ask: Callable[[str], None] | None) -> None:
        """*ask*: tells the engine by the answer's name; None: it can't be told,
        and keeps the limit that it was sent by itself."""
        self._ask = ask
        self._asked = False
        self._reader: NamedReader | None = None

    def reader(self, assignment: AssignmentId) -> AnswerReader:
        """Make the reader of the attempt's answer."""
        if self._ask is None:
            return AnswerReader(assignment)
        self._reader = NamedReader(assignment)
        return self._reader

    def end(self) -> int:
        """See ``ports.EndsReasoning``."""
        if self._asked:
            return 0
        self._asked = True
        reader = self._reader
        if self._ask is not None and reader is not None and reader.reply_id:
            self._ask(reader.reply_id)
        return GRACE


class Control(Protocol):
    """What is needed of ``workers.control.Control``."""

    async def post(self, path: str, body: bytes) -> object:
        """Send JSON. A checkpoint.

        Raises:
            NoAnswer: nothing of use came back.
        """


class ReasoningControl:
    """Speaks to one worker's control endpoint, apart from all streams."""

    def __init__(self, control: Control) -> None:
        """Ask through *control*; nothing is sent before ``run``."""
        self._control = control
        #: At most one for each live attempt.
        self._waiting: deque[str] = deque()
        self._some = trio.Event()

    def end(self, reply_id: str) -> None:
        """End the reasoning of the answer of that name. Not a checkpoint.

        Nothing comes back: the answer's own deltas tell.
        """
        self._waiting.append(reply_id)
        self._some.set()

    async def run(self) -> NoReturn:
        """Send what is asked, in order. Returns only when cancelled."""
        while True:
            await self._some.wait()
            while self._waiting:
                body = {"id": self._waiting.popleft(), "action": "reasoning_end"}
                with suppress(NoAnswer), trio.move_on_after(_WITHIN_S):
                    await self._control.post(CONTROL_PATH, msgspec.json.encode(body))
            self._some = trio.Event()
