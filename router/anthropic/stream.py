"""Deltas as an Anthropic client reads them: a stream of events (M3, M5-M7).

``machine`` says what may follow what; here each piece gets its bytes. A delta
goes out as it comes. The one exception: fragments of a later tool call that
come while an earlier one is open wait for it, in at most ``HELD_MAX`` bytes.
"""

from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from router.anthropic.ending import CUTS, stop_of, usage_of
from router.anthropic.errors import body_of
from router.anthropic.machine import Piece, State, Step, move
from router.errors import AnswerUnfit, Fault, FaultKind
from router.messages import Delta, Finished, Kind

#: Bytes of arguments of later tool calls that wait for an earlier one (M3).
HELD_MAX: Final = 1024 * 1024

#: Sent while a stream is silent, never before ``message_start`` (B41).
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

# Attributes of an enum are slow to reach, and it is slow as a key.
_TEXT: Final = Kind.TEXT
_REASONING: Final = Kind.REASONING
_TOOL_CALL: Final = Kind.TOOL_CALL
_REFUSAL: Final = Kind.REFUSAL
_TOOL: Final = State.TOOL

_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta",'
#: End of a delta, from behind the string that it brings.
_DELTA_END: Final = b"}}\n\n"
_DELTA_KINDS: Final = {
    State.THINKING: b'"thinking_delta","thinking":',
    State.TEXT: b'"text_delta","text":',
    State.TOOL: b'"input_json_delta","partial_json":',
}
_BLOCKS: Final = {
    State.THINKING: b'{"type":"thinking","thinking":"","signature":""}',
    State.TEXT: b'{"type":"text","text":""}',
}
_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_encode: Final = msgspec.json.Encoder().encode


@attrs.define
class _Call:
    """A tool call whose block has not begun."""

    id: str | None
    name: str | None
    fragments: list[str]


class MessageEncoder:
    """One streamed message: ``first``, any ``deltas``, then ``finish`` or ``error``.

    Every method gives whole events. The caller writes ``PING`` between them, as
    it likes, once ``first`` is out.
    """

    __slots__ = (
        "_block",
        "_call",
        "_count",
        "_ended_calls",
        "_fixed",
        "_has_delta",
        "_held",
        "_held_bytes",
        "_open_kind",
        "_prefix",
        "_refused",
        "_request",
        "_signature",
        "_state",
        "_stops",
    )

    keepalive = PING

    def __init__(
        self,
        message_id: str,
        model: str,
        request: str,
        *,
        stops: Sequence[str] = (),
        signature: str | None = None,
    ) -> None:
        """Fix what does not depend on the answer.

        Args:
            message_id: the reply's id, ``msg_…``.
            model: the name that the client sent.
            request: our own id of the request, for errors.
            stops: the client's stop sequences.
            signature: what a thinking block ends with; None: with nothing (M7).
        """
        self._fixed = b'"id":%b,"type":"message","role":"assistant","model":%b' % (
            _encode(message_id),
            _encode(model),
        )
        self._request = request
        self._stops = tuple(stops)
        self._signature = signature
        self.restart(begun=False)

    def restart(self, *, begun: bool) -> None:
        """Forget all deltas: a new attempt begins, and none of them went out.

        *begun*: ``first`` did.
        """
        self._state = State.BETWEEN if begun else State.NEW
        #: Number of the next block, or of the one that is open.
        self._block = 0
        #: The kind of delta that only goes on with the open block, tools apart.
        self._open_kind: Kind | None = None
        #: All of a delta of the open block that is before its string.
        self._prefix = b""
        #: The open block has had a delta.
        self._has_delta = False
        #: The tool call whose block is open; -1: none.
        self._call = -1
        self._ended_calls: set[int] = set()
        self._held: dict[int, _Call] = {}
        self._held_bytes = 0
        self._refused = False
        self._count = 0

    def first(self) -> bytes:
        """Write ``message_start``. It is no delta: it may be sent with the head."""
        self._go(Step.BEGIN)
        return (
            b'event: message_start\ndata: {"type":"message_start","message":{%b,'
            b'"content":[],"stop_reason":null,"stop_sequence":null,"usage":'
            b'{"input_tokens":0,"cache_creation_input_tokens":0,'
            b'"cache_read_input_tokens":0,"output_tokens":0}}}\n\n' % self._fixed
        )

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Write the events of each delta, in order; maybe none.

        Raises:
            AnswerUnfit: no message can say them. Then only ``error`` or
                ``restart`` may follow.
        """
        self._count += len(deltas)
        if len(deltas) == 1:
            # Most often one more piece of the open block.
            delta = deltas[0]
            if delta.kind is self._open_kind and delta.text:
                return self._prefix + _encode(delta.text) + _DELTA_END
        return b"".join([self._one(delta) for delta in deltas])

    def finish(self, finished: Finished) -> bytes:
        """Write what is held, the stop of the open block, and the end.

        A call that was cut before its first argument is left out where it was
        held; where its block has begun, the stop reason says it (B79).
        """
        if finished.reason in CUTS:
            self._held = {n: call for n, call in self._held.items() if call.fragments}
        events = self._calls_held()
        called = self._state is _TOOL or bool(self._ended_calls)
        for piece in self._go(Step.FINISH):
            if piece is Piece.BLOCK_STOP:
                events += self._block_stop()
            elif piece is Piece.MESSAGE_DELTA:
                stop = stop_of(
                    finished, self._stops, called=called, refused=self._refused
                )
                events += (
                    b'event: message_delta\ndata: {"type":"message_delta","delta":%b,'
                    b'"usage":%b}\n\n'
                    % (_encode(stop), _encode(usage_of(finished.usage, self._count)))
                )
            else:
                events += _STOP
        return events

    def error(self, fault: Fault) -> bytes:
        """Write the one event that ends a broken stream (M6)."""
        self._go(Step.BREAK)
        return b"event: error\ndata: %b\n\n" % body_of(fault, self._request)

    # ---- pieces ----
    # What only goes on with an open block skips the table: its row leads back.

    def _go(self, step: Step) -> tuple[Piece, ...]:
        """Take *step*; give what it writes."""
        self._state, pieces = move(self._state, step)
        return pieces

    def _one(self, delta: Delta) -> bytes:
        """Write any delta."""
        kind = delta.kind
        if kind is _TOOL_CALL:
            return self._fragment(delta)
        text = delta.text
        if not text:
            # Only its log probabilities came.
            return b""
        if kind is self._open_kind:
            return self._prefix + _encode(text) + _DELTA_END
        if kind is _REFUSAL:
            self._refused = True
            kind = _TEXT
        elif kind is not _TEXT and kind is not _REASONING:
            return b""
        events = self._calls_held() if self._state is _TOOL else b""
        step = Step.THINK if kind is _REASONING else Step.SAY
        events += self._enter(step)
        self._open_kind = kind
        self._has_delta = True
        return events + self._prefix + _encode(text) + _DELTA_END

    def _fragment(self, delta: Delta) -> bytes:
        """Write one fragment of a tool call, or hold it."""
        tool, text = delta.tool, delta.text
        assert tool is not None
        number = tool.index
        if number == self._call:
            if not text:
                return b""
            self._has_delta = True
            return self._prefix + _encode(text) + _DELTA_END
        call = self._held.get(number)
        if call is None:
            if number in self._ended_calls:
                if not text:
                    return b""
                raise _unfit("The engine went on with a tool call that had ended.")
            if tool.name and not self._held and self._state is not _TOOL:
                events = self._call_start(number, tool.id, tool.name)
                return events + self._argue(text) if text else events
            call = self._held[number] = _Call(tool.id, None, [])
        call.name = call.name or tool.name
        if text:
            call.fragments.append(text)
            self._held_bytes += len(text) if text.isascii() else len(text.encode())
            if self._held_bytes > HELD_MAX:
                raise _unfit("The engine mixed tool calls beyond what is held.")
        if self._state is not _TOOL and call.name and len(self._held) == 1:
            # It waited for its name only.
            return self._calls_held()
        return b""

    def _argue(self, text: str) -> bytes:
        self._go(Step.ARGUE)
        self._has_delta = True
        return self._prefix + _encode(text) + _DELTA_END

    def _calls_held(self) -> bytes:
        """Write the calls that were held, each whole but for its stop."""
        if not self._held:
            return b""
        events = b""
        for number, call in self._held.items():
            events += self._call_start(number, call.id, call.name or "")
            if call.fragments:
                events += self._argue("".join(call.fragments))
        self._held.clear()
        self._held_bytes = 0
        return events

    def _call_start(self, number: int, call_id: str | None, name: str) -> bytes:
        block = _encode(
            {"type": "tool_use", "id": call_id or "", "name": name, "input": {}}
        )
        events = self._enter(Step.CALL, block)
        self._call = number
        return events

    def _enter(self, step: Step, block: bytes | None = None) -> bytes:
        """Close the open block, if any, and start that of *step*.

        The block's first delta, where the step has one, is the caller's.
        """
        events = b""
        for piece in self._go(step):
            if piece is Piece.BLOCK_STOP:
                events += self._block_stop()
            elif piece is Piece.BLOCK_START:
                events += self._block_start(block or _BLOCKS[self._state])
        return events

    def _block_start(self, block: bytes) -> bytes:
        self._has_delta = False
        self._prefix = self._delta_head(_DELTA_KINDS[self._state])
        return (
            b'event: content_block_start\ndata: {"type":"content_block_start",'
            b'"index":%d,"content_block":%b}\n\n' % (self._block, block)
        )

    def _delta_head(self, kind: bytes) -> bytes:
        return b'%b"index":%d,"delta":{"type":%b' % (_DELTA, self._block, kind)

    def _block_stop(self) -> bytes:
        """Stop the open block, with what still belongs into it."""
        events = b""
        if self._call >= 0:
            if not self._has_delta:
                events = self._prefix + b'""' + _DELTA_END
            self._ended_calls.add(self._call)
            self._call = -1
        elif self._open_kind is _REASONING and self._signature is not None:
            head = self._delta_head(b'"signature_delta","signature":')
            events = head + _encode(self._signature) + _DELTA_END
        events += (
            b'event: content_block_stop\ndata: {"type":"content_block_stop",'
            b'"index":%d}\n\n' % self._block
        )
        self._block += 1
        self._open_kind = None
        return events


def _unfit(message: str) -> AnswerUnfit:
    return AnswerUnfit(Fault(FaultKind.PROTOCOL, message))
