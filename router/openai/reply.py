"""Deltas as an OpenAI client reads them: a stream of chunks, or one reply (O3).

``StreamEncoder`` writes, ``ReplyAggregate`` gathers; neither waits nor raises.
Role, tool id and tool name are written once, since the SDKs concatenate what is
repeated (PROTOCOLS C.1.3). Tool calls are numbered anew, from 0 without gaps, and
in a stream one follows the other, however an engine mixes them (O7).
"""

from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec

from router.errors import Fault
from router.messages import Delta, Finished, Kind, Usage
from router.openai.calls import InTurn
from router.openai.errors import body_of

#: A comment of one line. A blank line behind it would end an event, which
#: crashes widespread clients when the event has no data (PROTOCOLS C.1.3).
KEEPALIVE: Final = b": ka\n"
DONE: Final = b"data: [DONE]\n\n"

# Attributes of an enum are slow to reach, and it is slow as a key.
_TEXT: Final = Kind.TEXT
_REASONING: Final = Kind.REASONING
_TOOL_CALL: Final = Kind.TOOL_CALL

_encode: Final = msgspec.json.Encoder().encode


class StreamEncoder:
    """One streamed reply: ``first``, any ``deltas``, then ``finish`` or ``error``.

    Every method gives whole events. The caller writes ``KEEPALIVE`` between
    them, as it likes.
    """

    keepalive = KEEPALIVE

    def __init__(
        self, reply_id: str, model: str, created: int, *, include_usage: bool
    ) -> None:
        """Fix what all chunks have in common.

        Args:
            reply_id: the reply's id, ``chatcmpl-…``.
            model: the name that the client sent.
            created: unix seconds.
            include_usage: end with a usage chunk; all others then carry
                ``"usage":null`` (C.1.2).
        """
        common = _encode(
            {
                "id": reply_id,
                "object": "chat.completion.chunk",
                "created": created,
                "model": model,
            }
        )
        self._include_usage = include_usage
        self._chunk = b"data: " + common[:-1] + b',"choices":['
        self._choice = self._chunk + b'{"index":0,"delta":{'
        self._usage_null = b',"usage":null' if include_usage else b""
        #: Ends of a chunk, from behind the value of its delta's only field.
        self._tail = b'},"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._text = self._choice + b'"content":'
        self._reasoning = self._choice + b'"reasoning_content":'
        self._refusal = self._choice + b'"refusal":'
        self._calls = _CallNumbers()
        self._turns = InTurn()

    def first(self) -> bytes:
        """Write the role chunk. It is no delta: it may be sent with the head."""
        return self._choice + b'"role":"assistant","content":""' + self._tail

    def restart(self, *, begun: bool) -> None:
        """Begin anew: before a delta went out no other one waits for it."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Write a chunk for each delta, in order; tool calls in theirs."""
        if len(deltas) == 1:
            # Most often one text: no list, no other call than the encoder's.
            delta = deltas[0]
            if delta.kind is _TEXT and delta.logprobs is None:
                return self._text + _encode(delta.text) + self._tail
        return b"".join([self._one(delta) for delta in deltas])

    def finish(self, finished: Finished) -> bytes:
        """Write calls that still wait, the finish chunk, usage if asked, the end.

        Without usage from the engine there is no usage chunk: zeros would be
        a lie that is billed by.
        """
        reason = _encode(finished.reason.value)
        ending = b'},"finish_reason":' + reason + b"}]" + self._usage_null + b"}\n\n"
        events = [self._call(delta) for delta in self._turns.rest()]
        events += (self._choice, ending)
        if self._include_usage and finished.usage is not None:
            usage = _encode(usage_object(finished.usage))
            events += (self._chunk, b'],"usage":', usage, b"}\n\n")
        events.append(DONE)
        return b"".join(events)

    def error(self, fault: Fault) -> bytes:
        """Write the one error frame that ends a broken stream (A5): no DONE."""
        return b"data: " + body_of(fault) + b"\n\n"

    def _one(self, delta: Delta) -> bytes:
        """Write any delta; nothing, where it waits for its turn."""
        kind = delta.kind
        if kind is _TEXT:
            head = self._text + _encode(delta.text)
        elif kind is _REASONING:
            head = self._reasoning + _encode(delta.text)
        elif kind is _TOOL_CALL:
            return b"".join([self._call(one) for one in self._turns.take(delta)])
        else:
            head = self._refusal + _encode(delta.text)
        if delta.logprobs is None:
            return head + self._tail
        return self._with_logprobs(head, delta.logprobs)

    def _call(self, delta: Delta) -> bytes:
        """Write a fragment of a tool call whose turn it is."""
        fragment = _encode(self._calls.fragment(delta))
        head = self._choice + b'"tool_calls":[' + fragment + b"]"
        if delta.logprobs is None:
            return head + self._tail
        return self._with_logprobs(head, delta.logprobs)

    def _with_logprobs(self, head: bytes, logprobs: bytes) -> bytes:
        """End the chunk that *head* begins."""
        # A line break in an engine's JSON would end the event.
        line = msgspec.json.format(logprobs, indent=-1)
        return head + b'},"logprobs":' + line + self._tail[1:]


class _CallNumbers:
    """Numbers tool calls by their first fragment; names each call once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._named: set[int] = set()

    def fragment(self, delta: Delta) -> dict[str, Any]:
        """Give the fragment of ``delta.tool_calls`` for a tool delta."""
        tool = delta.tool
        assert tool is not None
        number = self._numbers.get(tool.index)
        function: dict[str, Any] = {"arguments": delta.text}
        fragment: dict[str, Any] = {"index": number, "function": function}
        if number is None:
            number = fragment["index"] = len(self._numbers)
            self._numbers[tool.index] = number
            fragment |= {"id": tool.id, "type": "function"}
        if tool.name is not None and number not in self._named:
            self._named.add(number)
            function["name"] = tool.name
        return fragment


@attrs.define
class _Call:
    """One tool call, as far as it has come."""

    id: str | None
    name: str | None
    arguments: list[str]


class ReplyAggregate:
    """One whole reply, gathered from deltas (A5, B.0: upstreams always stream)."""

    def __init__(self, reply_id: str, model: str, created: int) -> None:
        """Take what ``StreamEncoder`` takes; usage is always told."""
        self._common = {
            "id": reply_id,
            "object": "chat.completion",
            "created": created,
            "model": model,
        }
        self.reset()

    def reset(self) -> None:
        """Forget all deltas: a new attempt begins."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._logprobs: list[bytes] = []

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take deltas, in order."""
        for delta in deltas:
            kind = delta.kind
            if kind is _TEXT:
                self._text.append(delta.text)
            elif kind is _REASONING:
                self._reasoning.append(delta.text)
            elif kind is _TOOL_CALL:
                self._add_fragment(delta)
            else:
                self._refusal.append(delta.text)
            if delta.logprobs is not None:
                self._logprobs.append(delta.logprobs)

    def _add_fragment(self, delta: Delta) -> None:
        tool = delta.tool
        assert tool is not None
        call = self._calls.get(tool.index)
        if call is None:
            call = self._calls[tool.index] = _Call(tool.id, tool.name, [])
        elif call.name is None:
            call.name = tool.name
        call.arguments.append(delta.text)

    def body(self, finished: Finished) -> bytes:
        """Write the reply."""
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": merged_logprobs(self._logprobs),
            "finish_reason": finished.reason.value,
        }
        reply = self._common | {"choices": [choice]}
        if finished.usage is not None:
            reply["usage"] = usage_object(finished.usage)
        return _encode(reply)

    def _message(self) -> dict[str, Any]:
        text = "".join(self._text)
        refusal = "".join(self._refusal)
        reasoning = "".join(self._reasoning)
        instead = refusal or self._calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if instead and not text else text,
            "refusal": refusal or None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": "".join(call.arguments),
                    },
                }
                for call in self._calls.values()
            ]
        return message


class _Logprobs(msgspec.Struct):
    """``choices[].logprobs``; its entries stay as they came."""

    content: list[msgspec.Raw] | None = None
    refusal: list[msgspec.Raw] | None = None


def merged_logprobs(pieces: Sequence[bytes]) -> _Logprobs | None:
    """Join the ``logprobs`` of a reply's chunks; None: there were none.

    A piece that is not of OpenAI's shape is left out.
    """
    if not pieces:
        return None
    merged = _Logprobs()
    for piece in pieces:
        try:
            found = msgspec.json.decode(piece, type=_Logprobs)
        except msgspec.MsgspecError:
            continue
        if found.content is not None:
            merged.content = (merged.content or []) + found.content
        if found.refusal is not None:
            merged.refusal = (merged.refusal or []) + found.refusal
    return merged


def usage_object(usage: Usage) -> dict[str, Any]:
    """Write tokens as OpenAI counts them; details only where the engine told."""
    counted: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens is not None:
        counted["completion_tokens_details"] = {
            "reasoning_tokens": usage.reasoning_tokens
        }
    return counted
