"""The order of events of one streamed message (M3).

Rule 1: what may follow what is a row of ``TRANSITIONS``, and nothing is written
that no row names. Rule 2: this file knows no JSON and no delta.

    message_start (block_start block_delta* block_stop)* message_delta message_stop

One block is open at a time. An error ends a message in any state, and nothing
follows it: no ``message_stop``, whatever stood open.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from router.errors import LocalError


class State(Enum):
    """What stands open."""

    #: Nothing was written yet.
    NEW = "new"
    #: The message, and no block of it.
    BETWEEN = "between"
    #: A block of reasoning.
    THINKING = "thinking"
    #: A block of text.
    TEXT = "text"
    #: The block of one tool call.
    TOOL = "tool"
    #: The message has had its last event.
    OVER = "over"


class Step(Enum):
    """What is to be said next."""

    BEGIN = "begin"
    THINK = "think"
    SAY = "say"
    #: Begin the block of another tool call.
    CALL = "call"
    #: Go on with the arguments of the call whose block is open.
    ARGUE = "argue"
    FINISH = "finish"
    BREAK = "break"


class Piece(Enum):
    """One kind of event to write, in the order of its move."""

    MESSAGE_START = "message_start"
    #: Of the block that stands open.
    BLOCK_STOP = "content_block_stop"
    BLOCK_START = "content_block_start"
    BLOCK_DELTA = "content_block_delta"
    MESSAGE_DELTA = "message_delta"
    MESSAGE_STOP = "message_stop"
    ERROR = "error"


class Move(NamedTuple):
    """Where a step leads, and what it writes."""

    to: State
    pieces: tuple[Piece, ...]


_OPEN: Final = (Piece.BLOCK_START, Piece.BLOCK_DELTA)
_CLOSE_AND_OPEN: Final = (Piece.BLOCK_STOP, *_OPEN)
_END: Final = (Piece.MESSAGE_DELTA, Piece.MESSAGE_STOP)
_BREAK: Final = Move(State.OVER, (Piece.ERROR,))
_GO_ON: Final = (Piece.BLOCK_DELTA,)
_FINISH: Final = Move(State.OVER, (Piece.BLOCK_STOP, *_END))
# The arguments of a call may be a long time in coming: its start is no delta.
_CALL: Final = Move(State.TOOL, (Piece.BLOCK_STOP, Piece.BLOCK_START))

TRANSITIONS: Final[Mapping[State, Mapping[Step, Move]]] = {
    State.NEW: {
        Step.BEGIN: Move(State.BETWEEN, (Piece.MESSAGE_START,)),
        Step.BREAK: _BREAK,
    },
    State.BETWEEN: {
        Step.THINK: Move(State.THINKING, _OPEN),
        Step.SAY: Move(State.TEXT, _OPEN),
        Step.CALL: Move(State.TOOL, (Piece.BLOCK_START,)),
        Step.FINISH: Move(State.OVER, _END),
        Step.BREAK: _BREAK,
    },
    State.THINKING: {
        Step.THINK: Move(State.THINKING, _GO_ON),
        Step.SAY: Move(State.TEXT, _CLOSE_AND_OPEN),
        Step.CALL: _CALL,
        Step.FINISH: _FINISH,
        Step.BREAK: _BREAK,
    },
    State.TEXT: {
        Step.THINK: Move(State.THINKING, _CLOSE_AND_OPEN),
        Step.SAY: Move(State.TEXT, _GO_ON),
        Step.CALL: _CALL,
        Step.FINISH: _FINISH,
        Step.BREAK: _BREAK,
    },
    State.TOOL: {
        Step.THINK: Move(State.THINKING, _CLOSE_AND_OPEN),
        Step.SAY: Move(State.TEXT, _CLOSE_AND_OPEN),
        Step.CALL: _CALL,
        Step.ARGUE: Move(State.TOOL, _GO_ON),
        Step.FINISH: _FINISH,
        Step.BREAK: _BREAK,
    },
    State.OVER: {},
}


def move(state: State, step: Step) -> Move:
    """Give the row of *step* in *state*.

    Raises:
        LocalError: there is none.
    """
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise LocalError(f"message: {step.name} while {state.name}") from None
