"""The sieve: all that a job may ask for between its deltas and its receiver.

Rule 1: what goes in is judged by the fence, in order and without gaps; what comes
out is stamped anew, from 0 without gaps (F1). Rule 2: it never acts: it says in
``wish`` what is to be done, and is asked no more once that is an end.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

import attrs

from router.errors import Fault, FaultKind
from router.ids import AssignmentId
from router.messages import (
    Delta,
    Finished,
    FinishReason,
    Kind,
    Signal,
    SignalCode,
    ToolPart,
)
from router.sieve.convention import CallsInvalid, Convention, Place
from router.sieve.gate import CallGate
from router.sieve.loops import LoopWatch
from router.sieve.signals import Signals

_TEXT: Final = Kind.TEXT
_REASONING: Final = Kind.REASONING
_TOOL_CALL: Final = Kind.TOOL_CALL


class _Wish(Enum):
    END_REASONING = "end_reasoning"


#: The wish that the engine end its reasoning and go on to the answer (J6).
END_REASONING: Final = _Wish.END_REASONING


@attrs.frozen
class SieveRules:
    """What one job asks for; the defaults ask for nothing."""

    tools: frozenset[str] | None = None
    """Names of the tools that are offered by the prompting convention, exit
    tools included; None: calls are native only (J4)."""
    invalid_signals: bool = False
    """A call that can't be read is the signal NEEDS_HIGHER_REASONER, not a
    failure (J4)."""
    exits: Mapping[str, SignalCode] = attrs.field(factory=dict)
    """What the exit tools stand for, by name (J5)."""
    signals_max: int = 8
    tool_calls_max: int = 0
    """0: no limit."""
    thinking_max: int | None = None
    """Deltas of reasoning before it is to end (J6)."""
    loop_repeats_max: int = 0
    """0: nobody looks for loops."""


class Sieve:
    """One job's sieve, over all its attempts."""

    def __init__(self, rules: SieveRules) -> None:
        """Begin with the first attempt."""
        self._rules = rules
        self.restart()

    def restart(self) -> None:
        """Forget everything: a new attempt begins (A3)."""
        rules = self._rules
        #: What is to be done: END_REASONING, or the end of the answer.
        self.wish: _Wish | Finished | Fault | None = None
        self._signals = Signals(rules.signals_max)
        self._gate = CallGate(rules.exits, rules.tool_calls_max, self._signals)
        tools = rules.tools
        self._convention = None if tools is None else Convention(tools)
        self._loops = LoopWatch(rules.loop_repeats_max)
        self._watched: Kind | None = None
        self._thought = 0
        self._may_think = rules.thinking_max
        #: What came with the delta at which the reasoning was to end.
        self._unjudged: Sequence[Delta] = ()
        self._next = 0

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The signals so far, in order."""
        return self._signals.all()

    def take(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Give what goes through now that *deltas* are here; look at ``wish``.

        END_REASONING is to be answered by ``bear`` or ``cut`` before the next.
        """
        out: list[Delta] = []
        coming = iter(deltas)
        for delta in coming:
            kind = delta.kind
            if kind is _REASONING:
                self._think()
                self._emit(delta, out)
            elif kind is _TOOL_CALL:
                self._call(delta, out)
            elif kind is _TEXT and self._convention is not None:
                self._say(self._convention, delta, out)
            else:
                self._emit(delta, out)
            if isinstance(self.wish, Finished | Fault):
                break
            if self._rules.loop_repeats_max and self._repeats(delta):
                break
            if self.wish is END_REASONING:
                # What to do is decided at this delta, whatever came with it.
                self._unjudged = tuple(coming)
                break
        return out

    def finish(self, finished: Finished) -> tuple[list[Delta], Finished | Fault]:
        """Give what goes through at the end of the answer, and how it ends."""
        out: list[Delta] = []
        reason = finished.reason
        for piece in self._gate.finish():
            self._emit(piece, out)
        convention = self._convention
        if convention is not None and convention.held:
            if convention.place is Place.CALL:
                self._parse(convention, finished, out)
                if isinstance(self.wish, Fault):
                    return out, self.wish
                if reason is not FinishReason.LENGTH:
                    reason = self._called()
            else:
                for piece in convention.release():
                    self._emit(piece, out)
        if reason is FinishReason.LENGTH:
            self._limited("The answer ended at its limit of tokens.")
        elif reason is FinishReason.TOOL_CALLS and self._rules.exits:
            reason = self._called()
        signals = self._signals.all()
        return out, attrs.evolve(finished, reason=reason, signals=signals)

    def bear(self, more: int) -> list[Delta]:
        """Let so many *more* deltas of reasoning come: the engine was asked.

        Give what goes through of those that are here already; look at ``wish``.
        """
        self.wish = None
        if self._may_think is not None:
            self._may_think = self._thought + more
        unjudged, self._unjudged = self._unjudged, ()
        return self.take(unjudged)

    def cut(self, assignment: AssignmentId) -> None:
        """Wish the end of an answer whose reasoning does not end (J6)."""
        self._limited("The reasoning reached its limit.")
        self._end(assignment, FinishReason.LENGTH)

    def leftover(self) -> list[Delta]:
        """Give what is held of an answer that has failed."""
        out: list[Delta] = []
        if self._convention is not None:
            for piece in self._convention.release():
                self._emit(piece, out)
        return out

    # --- one delta ---------------------------------------------------------

    def _emit(self, delta: Delta, out: list[Delta]) -> None:
        if delta.index != self._next:
            delta = Delta(
                delta.assignment,
                self._next,
                delta.kind,
                delta.text,
                delta.tool,
                delta.logprobs,
            )
        self._next += 1
        out.append(delta)

    def _think(self) -> None:
        self._thought += 1
        if self._may_think is not None and self._thought > self._may_think:
            self.wish = END_REASONING

    def _say(self, convention: Convention, delta: Delta, out: list[Delta]) -> None:
        try:
            for piece in convention.take(delta):
                self._emit(piece, out)
        except CallsInvalid as invalid:
            self._unreadable(invalid, delta.assignment)

    def _call(self, delta: Delta, out: list[Delta]) -> None:
        if self._convention is not None:
            # The engine knows calls after all: what was said before is text.
            for piece in self._convention.release():
                self._emit(piece, out)
        for piece in self._gate.take(delta):
            self._emit(piece, out)
        if self._gate.over:
            self._end(delta.assignment, self._called())

    def _repeats(self, delta: Delta) -> bool:
        if delta.kind is not self._watched:
            self._watched = delta.kind
            self._loops.reset()
        if not self._loops.feed(delta.text):
            return False
        words = "The answer says the same over and over."
        self._signals.add(SignalCode.LOOP_DETECTED, words)
        self.wish = Fault(FaultKind.LOOP, words)
        return True

    # --- calls by the convention -------------------------------------------

    def _parse(
        self, convention: Convention, finished: Finished, out: list[Delta]
    ) -> None:
        """Turn what is held into calls (J4)."""
        assignment = finished.assignment
        try:
            calls = convention.calls()
        except CallsInvalid as invalid:
            if finished.reason is not FinishReason.LENGTH:
                self._unreadable(invalid, assignment)
                return
            # Cut off by a limit: the answer says so, and what there is (B79).
            for piece in convention.release():
                self._emit(piece, out)
            return
        convention.held.clear()
        request, attempt = assignment
        for number, call in enumerate(calls):
            if self._gate.whole(call.name, call.arguments):
                part = ToolPart(number, f"call_{request}_{attempt}_{number}", call.name)
                self._emit(Delta(assignment, -1, _TOOL_CALL, call.arguments, part), out)
            if self._gate.over:
                break

    def _unreadable(self, invalid: CallsInvalid, assignment: AssignmentId) -> None:
        if self._rules.invalid_signals:
            self._signals.add(SignalCode.NEEDS_HIGHER_REASONER, str(invalid))
            self._end(assignment, FinishReason.STOP)
        else:
            self.wish = Fault(FaultKind.TOOL_PARSE, str(invalid))

    # --- endings -----------------------------------------------------------

    def _called(self) -> FinishReason:
        """Say how an answer with calls ends; signals alone are none."""
        return FinishReason.TOOL_CALLS if self._gate.admitted else FinishReason.STOP

    def _limited(self, words: str) -> None:
        self._signals.add(SignalCode.MAX_TOKENS_REACHED, words)

    def _end(self, assignment: AssignmentId, reason: FinishReason) -> None:
        self.wish = Finished(assignment, reason, signals=self._signals.all())
