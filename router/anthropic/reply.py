"""One whole message, gathered from deltas (M8).

The same blocks in the same order as ``stream`` writes; the arguments of a tool
call have to be a JSON object here, which a stream leaves to its client.
"""

from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec

from router.anthropic.ending import CUTS, stop_of, usage_of
from router.errors import AnswerUnfit, Fault, FaultKind
from router.messages import Delta, Finished, Kind

_encode: Final = msgspec.json.Encoder().encode


@attrs.define
class _Block:
    """One block, as far as it has come; a refusal is text."""

    kind: Kind
    pieces: list[str]
    id: str | None = None
    name: str | None = None


class MessageAggregate:
    """One whole reply; ``reset`` where a new attempt begins (A5)."""

    def __init__(
        self,
        message_id: str,
        model: str,
        *,
        stops: Sequence[str] = (),
        signature: str | None = None,
    ) -> None:
        """Take what ``MessageEncoder`` takes."""
        self._common: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._stops = tuple(stops)
        self._signature = signature
        self.reset()

    def reset(self) -> None:
        """Forget all deltas: a new attempt begins."""
        self._blocks: list[_Block] = []
        self._calls: dict[int, _Block] = {}
        self._refused = False
        self._count = 0

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take deltas, in order."""
        self._count += len(deltas)
        for delta in deltas:
            kind = delta.kind
            if kind is Kind.TOOL_CALL:
                self._add_fragment(delta)
            elif delta.text and kind is not Kind.DOCUMENT:
                if kind is Kind.REFUSAL:
                    self._refused = True
                    kind = Kind.TEXT
                if not self._blocks or self._blocks[-1].kind is not kind:
                    self._blocks.append(_Block(kind, []))
                self._blocks[-1].pieces.append(delta.text)

    def _add_fragment(self, delta: Delta) -> None:
        tool = delta.tool
        assert tool is not None
        call = self._calls.get(tool.index)
        if call is None:
            call = self._calls[tool.index] = _Block(Kind.TOOL_CALL, [], tool.id)
            self._blocks.append(call)
        call.name = call.name or tool.name
        call.pieces.append(delta.text)

    def body(self, finished: Finished) -> bytes:
        """Write the reply.

        Raises:
            AnswerUnfit: a tool call's arguments are no JSON object (B80).
        """
        content = []
        for block in self._blocks:
            written = self._written(block, finished)
            if written is not None:
                content.append(written)
        stop = stop_of(
            finished, self._stops, called=bool(self._calls), refused=self._refused
        )
        usage = {"input_tokens": 0} | usage_of(finished.usage, self._count)
        return _encode(self._common | {"content": content, **stop, "usage": usage})

    def _written(self, block: _Block, finished: Finished) -> dict[str, Any] | None:
        text = "".join(block.pieces)
        if block.kind is Kind.TEXT:
            return {"type": "text", "text": text}
        if block.kind is Kind.REASONING:
            return {
                "type": "thinking",
                "thinking": text,
                "signature": self._signature or "",
            }
        call = {"type": "tool_use", "id": block.id or "", "name": block.name or ""}
        cut = finished.reason in CUTS
        if not text and not cut:
            return call | {"input": {}}
        try:
            if isinstance(msgspec.json.decode(text), dict):
                # As the model wrote it: no number is made another.
                return call | {"input": msgspec.Raw(text.encode())}
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
            pass
        if cut:
            # Nothing is invented to make it whole, also not an empty input (B79).
            return None
        raise AnswerUnfit(
            Fault(
                FaultKind.TOOL_PARSE,
                "The model wrote tool arguments that are no JSON object.",
            )
        )
