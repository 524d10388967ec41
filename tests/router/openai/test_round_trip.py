"""What is written is read back the same: by our reader, by a client that
concatenates as the SDKs do, and by the SDK's own types and stream.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Kind, ToolPart, Usage
from router.openai.reply import KEEPALIVE, ReplyAggregate, StreamEncoder
from router.openai.upstream import AnswerReader
from router.sse import Event, Parser

ASSIGNMENT = AssignmentId(RequestId("r1"), 1)

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
LOGPROBS = st.none() | st.builds(
    lambda token: json.dumps(
        {"content": [{"token": token, "logprob": -0.25, "top_logprobs": []}]}
    ).encode(),
    WORDS,
)


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Draw what a reader makes of an answer: numbered calls, ids and names once."""
    deltas: list[Delta] = []
    calls = 0
    for index in range(draw(st.integers(0, 10))):
        kind = draw(st.sampled_from([k for k in Kind if k is not Kind.DOCUMENT]))
        if kind is not Kind.TOOL_CALL:
            logprobs = draw(LOGPROBS)
            deltas.append(
                Delta(ASSIGNMENT, index, kind, draw(WORDS), logprobs=logprobs)
            )
            continue
        number = draw(st.integers(0, calls))
        part = ToolPart(number)
        words = draw(WORDS)
        if number == calls:
            part = ToolPart(number, f"t{number}", draw(WORDS))
            words = draw(st.sampled_from(["", "{}"]) | WORDS)
            calls += 1
        deltas.append(Delta(ASSIGNMENT, index, kind, words, part))
    return deltas


ENDS = st.builds(
    Finished,
    st.just(ASSIGNMENT),
    st.sampled_from(FinishReason),
    st.builds(
        Usage,
        st.integers(0, 2**31),
        st.integers(0, 2**31),
        st.none() | st.integers(0, 2**31),
        st.none() | st.integers(0, 2**31),
    ),
)


def stream(deltas: Sequence[Delta], end: Finished, *, usage: bool = True) -> bytes:
    """Write a whole stream, in batches and with keepalives between events."""
    out = StreamEncoder("chatcmpl-1", "m", 17, include_usage=usage)
    middle = len(deltas) // 2
    parts = [out.first(), out.deltas(deltas[:middle])]
    parts += [out.deltas([delta]) for delta in deltas[middle:]]
    return KEEPALIVE.join([*parts, out.finish(end)])


def events(raw: bytes) -> list[Event]:
    found = Parser().feed(raw)
    assert all(event.name == b"" and not event.legacy_error for event in found)
    return found


def told(deltas: Sequence[Delta]) -> dict[int | None, list[Any]]:
    """Say what they bring, in order: by call, and what is no call by itself."""
    found: dict[int | None, list[Any]] = {}
    for delta in deltas:
        logprobs = None if delta.logprobs is None else json.loads(delta.logprobs)
        call = delta.tool.index if delta.tool else None
        found.setdefault(call, []).append(
            (delta.assignment, delta.kind, delta.text, delta.tool, logprobs)
        )
    return found


@given(answers(), ENDS)
def test_what_the_encoder_writes_the_reader_reads(
    deltas: list[Delta], end: Finished
) -> None:
    reader = AnswerReader(ASSIGNMENT)

    for event in events(stream(deltas, end)):
        assert reader.read(event) is None

    assert told(reader.deltas) == told(deltas)
    assert [delta.index for delta in reader.deltas] == list(range(len(deltas)))
    assert reader.done
    assert reader.finished() == end


def concatenate(into: Any, more: Any) -> Any:
    """Add up two values as the SDKs do: repeats are appended, not replaced."""
    if more is None:
        return into
    if into is None:
        return more
    if isinstance(into, dict):
        for key, value in more.items():
            same = key in {"index", "type"}
            into[key] = value if same else concatenate(into.get(key), value)
        return into
    if isinstance(into, list):
        for item in more:
            if (
                not isinstance(item, dict)
                or "index" not in item
                or item["index"] == len(into)
            ):
                into.append(item)
            else:
                into[item["index"]] = concatenate(into[item["index"]], item)
        return into
    return into + more


@given(answers(), ENDS)
def test_o3_a_client_that_concatenates_sees_the_whole_reply(
    deltas: list[Delta], end: Finished
) -> None:
    *chunks, done = (event.data for event in events(stream(deltas, end)))
    message: Any = {}
    finishes: list[str] = []
    for raw in chunks[:-1]:
        (choice,) = json.loads(raw)["choices"]
        assert finishes == []
        concatenate(message, choice["delta"])
        finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    for call in message.get("tool_calls", ()):
        call.pop("index")
    whole = ReplyAggregate("chatcmpl-1", "m", 17)
    whole.add(deltas)

    reply = json.loads(whole.body(end))

    expected = reply["choices"][0]["message"]
    expected["content"] = expected["content"] or ""
    assert message == {k: v for k, v in expected.items() if v is not None}
    assert finishes == [end.reason.value]
    assert json.loads(chunks[-1])["usage"] == reply["usage"]
    assert json.loads(chunks[-1])["choices"] == []
    assert done == b"[DONE]"


@given(answers(), ENDS, st.booleans())
def test_o7_the_sdk_accepts_every_chunk_and_every_reply(
    deltas: list[Delta], end: Finished, usage: bool
) -> None:
    *chunks, _ = (event.data for event in events(stream(deltas, end, usage=usage)))
    whole = ReplyAggregate("chatcmpl-1", "m", 17)
    whole.add(deltas)

    for raw in chunks:
        chunk = ChatCompletionChunk.model_validate_json(raw, strict=True)
        assert (chunk.id, chunk.model, chunk.created) == ("chatcmpl-1", "m", 17)
    reply = ChatCompletion.model_validate_json(whole.body(end), strict=True)

    assert reply.choices[0].finish_reason == end.reason.value
    assert reply.usage is not None
    assert reply.usage.completion_tokens == end.usage.completion_tokens  # type: ignore[union-attr]


def calls_and_text() -> Iterator[Delta]:
    """Give an answer of all kinds."""
    pieces: tuple[tuple[Kind, str, ToolPart | None], ...] = (
        (Kind.REASONING, "hm", None),
        (Kind.TEXT, "He", None),
        (Kind.TEXT, "y", None),
        (Kind.TOOL_CALL, "", ToolPart(4, "t1", "f")),
        (Kind.TOOL_CALL, '{"a":', ToolPart(4)),
        (Kind.TOOL_CALL, "{}", ToolPart(9, "t2", "g")),
        (Kind.TOOL_CALL, "1}", ToolPart(4)),
    )
    for index, (kind, words, part) in enumerate(pieces):
        yield Delta(ASSIGNMENT, index, kind, words, part)


@pytest.mark.parametrize("usage", [True, False])
def test_o7_the_sdks_own_accumulator_gives_the_reply(usage: bool) -> None:
    deltas = list(calls_and_text())
    end = Finished(ASSIGNMENT, FinishReason.TOOL_CALLS, Usage(9, 5))
    *chunks, _ = (event.data for event in events(stream(deltas, end, usage=usage)))
    state = ChatCompletionStreamState()

    for raw in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(raw))

    seen = state.get_final_completion()
    message = seen.choices[0].message
    assert (message.role, message.content) == ("assistant", "Hey")
    assert message.model_extra == {"reasoning_content": "hm"}
    assert message.tool_calls is not None
    assert [
        (call.id, call.type, call.function.name, call.function.arguments)
        for call in message.tool_calls
    ] == [("t1", "function", "f", '{"a":1}'), ("t2", "function", "g", "{}")]
    assert seen.choices[0].finish_reason == "tool_calls"
    assert (seen.usage.total_tokens if seen.usage else None) == (14 if usage else None)


class City(BaseModel):
    city: str


def test_o7_the_sdk_parses_calls_that_the_engine_mixed() -> None:
    pieces = (
        ("", ToolPart(0, "t0", "City")),
        ('{"city":', ToolPart(0)),
        ("", ToolPart(1, "t1", "City")),
        (' "Bern"}', ToolPart(0)),
        ('{"city": "Ulm"}', ToolPart(1)),
    )
    deltas = [
        Delta(ASSIGNMENT, index, Kind.TOOL_CALL, words, part)
        for index, (words, part) in enumerate(pieces)
    ]
    end = Finished(ASSIGNMENT, FinishReason.TOOL_CALLS, None)
    *chunks, _ = (event.data for event in events(stream(deltas, end, usage=False)))
    state = ChatCompletionStreamState(input_tools=[openai.pydantic_function_tool(City)])

    for raw in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(raw))

    calls = state.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [
        City(city="Bern"),
        City(city="Ulm"),
    ]
