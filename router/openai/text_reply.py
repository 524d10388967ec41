"""Deltas as a client of ``/v1/completions`` reads them (O2).

The same promises as ``router.openai.reply``; the shapes are older, and there
is text only.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from router.errors import Fault
from router.messages import Delta, Finished, Kind
from router.openai.errors import body_of
from router.openai.reply import DONE, KEEPALIVE, usage_object

_TEXT: Final = Kind.TEXT
_encode: Final = msgspec.json.Encoder().encode


class TextEncoder:
    """One streamed reply; see ``reply.StreamEncoder``."""

    keepalive = KEEPALIVE

    def __init__(
        self, reply_id: str, model: str, created: int, *, include_usage: bool
    ) -> None:
        """Take what ``StreamEncoder`` takes."""
        common = _encode(
            {
                "id": reply_id,
                "object": "text_completion",
                "created": created,
                "model": model,
            }
        )
        self._include_usage = include_usage
        usage_null = b',"usage":null' if include_usage else b""
        self._chunk = b"data: " + common[:-1] + b',"choices":['
        self._choice = self._chunk + b'{"index":0,"text":'
        self._middle = b',"logprobs":'
        self._tail = b',"finish_reason":null}]' + usage_null + b"}\n\n"
        self._plain_tail = b',"logprobs":null' + self._tail
        self._usage_null = usage_null

    def first(self) -> bytes:
        """Write nothing: there is no role to tell."""
        return b""

    def restart(self, *, begun: bool) -> None:
        """Begin anew: nothing of an attempt is kept here."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Write a chunk for each piece of text, in order."""
        return b"".join([self._one(delta) for delta in deltas if delta.kind is _TEXT])

    def _one(self, delta: Delta) -> bytes:
        head = self._choice + _encode(delta.text)
        if delta.logprobs is None:
            return head + self._plain_tail
        # A line break in an engine's JSON would end the event.
        logprobs = msgspec.json.format(delta.logprobs, indent=-1)
        return head + self._middle + logprobs + self._tail

    def finish(self, finished: Finished) -> bytes:
        """Write the finish chunk, the usage chunk if asked, and the end."""
        events = [
            self._choice,
            b'"","logprobs":null,"finish_reason":',
            _encode(finished.reason.value),
            b"}]",
            self._usage_null,
            b"}\n\n",
        ]
        if self._include_usage and finished.usage is not None:
            usage = _encode(usage_object(finished.usage))
            events += (self._chunk, b'],"usage":', usage, b"}\n\n")
        events.append(DONE)
        return b"".join(events)

    def error(self, fault: Fault) -> bytes:
        """Write the one error frame that ends a broken stream (A5): no DONE."""
        return b"data: " + body_of(fault) + b"\n\n"


class TextAggregate:
    """One whole reply, gathered from deltas."""

    def __init__(self, reply_id: str, model: str, created: int) -> None:
        """Take what ``TextEncoder`` takes; usage is always told."""
        self._common = {
            "id": reply_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self.reset()

    def reset(self) -> None:
        """Forget all deltas: a new attempt begins."""
        self._text: list[str] = []
        self._logprobs: list[bytes] = []

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take deltas, in order."""
        for delta in deltas:
            if delta.kind is not _TEXT:
                continue
            self._text.append(delta.text)
            if delta.logprobs is not None:
                self._logprobs.append(delta.logprobs)

    def body(self, finished: Finished) -> bytes:
        """Write the reply."""
        choice = {
            "index": 0,
            "text": "".join(self._text),
            "logprobs": joined_logprobs(self._logprobs),
            "finish_reason": finished.reason.value,
        }
        reply = self._common | {"choices": [choice]}
        if finished.usage is not None:
            reply["usage"] = usage_object(finished.usage)
        return _encode(reply)


def joined_logprobs(pieces: Sequence[bytes]) -> dict[str, Any] | None:
    """Join the ``logprobs`` of a reply's chunks, list by list; None: none came.

    Engines differ in the lists that they have (``tokens``, ``content`` …). A
    piece that is no object of lists is left out.
    """
    joined: dict[str, Any] = {}
    for piece in pieces:
        try:
            found = msgspec.json.decode(piece, type=dict[str, list[msgspec.Raw] | None])
        except msgspec.MsgspecError:
            continue
        for name, entries in found.items():
            if entries is not None:
                joined.setdefault(name, []).extend(entries)
    return joined or None
