"""What a Messages stream must be: its grammar, and the official SDK's reading of it.

The grammar is written down here a second time, from the contract (M3), so that
it is not the encoder's own table that is tested with itself.
"""

from typing import Any, NamedTuple

import msgspec
from anthropic import BaseModel
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

_EVENT: "TypeAdapter[Any]" = TypeAdapter(RawMessageStreamEvent)

#: By the type of a block: the types of deltas that may be in it.
_DELTAS = {
    "thinking": {"thinking_delta", "signature_delta"},
    "text": {"text_delta"},
    "tool_use": {"input_json_delta"},
}


class Event(NamedTuple):
    """One server-sent event."""

    name: str
    body: Any


def events_of(octets: bytes) -> list[Event]:
    """Take a stream apart; each frame has exactly ``event:`` and ``data:``."""
    assert octets.endswith(b"\n\n")
    found = []
    for frame in octets[:-2].split(b"\n\n"):
        name, body = frame.split(b"\n")
        assert name.startswith(b"event: ")
        assert body.startswith(b"data: ")
        event = Event(name[7:].decode(), msgspec.json.decode(body[6:]))
        assert event.body["type"] == event.name
        found.append(event)
    return found


def check_grammar(events: list[Event]) -> bool:
    """Assert that *events* obey M3, and tell whether they end well.

    A prefix of a message is fine, if nothing but an error follows it.
    """
    events = [event for event in events if event.name != "ping"]
    if not events:
        return False
    assert events[0].name == "message_start"
    block: str | None = None
    index = -1
    deltas = 0
    ended = stopped = False
    for place, (name, body) in enumerate(events[1:], 2):
        assert not stopped
        if name == "error":
            assert place == len(events)
            return False
        if name == "content_block_start":
            assert block is None
            assert not ended
            index += 1
            deltas = 0
            assert body["index"] == index
            block = body["content_block"]["type"]
        elif name == "content_block_delta":
            assert block is not None
            assert body["index"] == index
            assert body["delta"]["type"] in _DELTAS[block]
            deltas += 1
        elif name == "content_block_stop":
            assert block is not None
            assert body["index"] == index
            assert deltas > 0
            block = None
        elif name == "message_delta":
            assert block is None
            assert not ended
            assert body["delta"]["stop_reason"]
            assert body["usage"]["output_tokens"] >= 0
            ended = True
        else:
            assert name == "message_stop"
            assert ended
            stopped = True
    return stopped


class Accumulated(NamedTuple):
    """What the SDK has at the end: its message, and each tool's JSON as it came."""

    message: Any
    inputs: dict[int, bytes]


def accumulate(events: list[Event]) -> Accumulated:
    """Read *events* with the official SDK's own accumulator."""
    message: Any = None
    inputs: dict[int, bytes] = {}
    for name, body in events:
        if name in {"ping", "error"}:
            continue
        event = _EVENT.validate_python(body)
        assert isinstance(event, BaseModel)
        message = accumulate_event(
            event=event,  # type: ignore[arg-type]
            current_snapshot=message,
            json_bufs=inputs,
        )
    return Accumulated(message, inputs)
