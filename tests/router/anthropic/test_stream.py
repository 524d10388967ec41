"""Deltas as a stream of Messages events."""

import json
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.anthropic.machine import TRANSITIONS, Piece, State, Step, move
from router.anthropic.stream import HELD_MAX, PING, MessageEncoder
from router.errors import AnswerUnfit, Fault, FaultKind, LocalError
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Kind, ToolPart, Usage
from router.openai.upstream import AnswerReader
from router.sse import Event as Frame
from tests.kit.anthropic_events import (
    Event,
    accumulate,
    check_grammar,
    events_of,
)

A = AssignmentId(RequestId("req_1"), 1)
LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "The worker was lost.")
TOKENS = Usage(prompt_tokens=12, completion_tokens=7, cached_tokens=3)


def encoder(**options: Any) -> MessageEncoder:
    return MessageEncoder("msg_1", "claude", "req_1", **options)


def say(*texts: str, kind: Kind = Kind.TEXT) -> list[Delta]:
    return [Delta(A, 0, kind, text) for text in texts]


def think(*texts: str) -> list[Delta]:
    return say(*texts, kind=Kind.REASONING)


def call(
    index: int, text: str = "", call_id: str | None = None, name: str | None = None
) -> list[Delta]:
    return [Delta(A, 0, Kind.TOOL_CALL, text, ToolPart(index, call_id, name))]


def finished(
    reason: FinishReason = FinishReason.STOP, usage: Usage | None = TOKENS, **more: Any
) -> Finished:
    return Finished(A, reason, usage, **more)


def whole(
    *batches: list[Delta], end: Finished | None = None, **options: Any
) -> list[Event]:
    """Encode batches to a good end."""
    writer = encoder(**options)
    octets = writer.first()
    for batch in batches:
        octets += writer.deltas(batch)
    octets += writer.finish(end or finished())
    events = events_of(octets)
    assert check_grammar(events)
    return events


def names(events: Sequence[Event]) -> list[str]:
    """Event names, a run of deltas once."""
    found: list[str] = []
    for event in events:
        if event.name != "content_block_delta" or found[-1] != event.name:
            found.append(event.name)
    return found


BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
END = ["message_delta", "message_stop"]


def test_m3_reasoning_then_text_is_two_blocks_one_after_the_other() -> None:
    events = whole(think("Let", " me"), say("Hi"), say(" there"))

    assert names(events) == ["message_start", *BLOCK, *BLOCK, *END]
    stop = events.index(
        Event("content_block_stop", {"type": "content_block_stop", "index": 0})
    )
    assert all(e.body.get("index") != 1 for e in events[:stop])
    message = accumulate(events).message
    assert [b.type for b in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Let me"
    assert message.content[1].text == "Hi there"


def test_m3_text_alone_is_index_0() -> None:
    events = whole(say("Hi"))

    assert names(events) == ["message_start", *BLOCK, *END]
    assert events[1].body == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }


def test_m3_reasoning_alone_is_closed_before_the_end() -> None:
    assert names(whole(think("hm"))) == ["message_start", *BLOCK, *END]


def test_m3_an_empty_completion_starts_no_block() -> None:
    for batches in ((), (say(""),), ([],)):
        events = whole(*batches)

        assert names(events) == ["message_start", *END]
        assert accumulate(events).message.content == []


def test_m3_message_start_names_the_clients_model() -> None:
    start = whole(say("Hi"))[0].body["message"]

    assert start["id"] == "msg_1"
    assert start["model"] == "claude"
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0


def test_m3_message_delta_carries_the_true_tokens() -> None:
    delta = whole(say("Hi"))[-2].body

    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"] == {
        "input_tokens": 9,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 7,
    }


def test_m3_without_usage_deltas_are_counted_and_no_input_is_made_up() -> None:
    events = whole(say("a"), say("b", "c"), end=finished(usage=None))

    assert events[-2].body["usage"] == {"output_tokens": 3}
    assert accumulate(events).message.usage.output_tokens == 3


def test_m3_a_tool_call_is_a_block_of_json_fragments() -> None:
    events = whole(
        say("I ask."),
        call(0, call_id="t1", name="weather"),
        call(0, '{"city":'),
        call(0, ' "Bern"}'),
        end=finished(FinishReason.TOOL_CALLS),
    )

    assert names(events) == ["message_start", *BLOCK, *BLOCK, *END]
    message, inputs = accumulate(events)
    block = message.content[1]
    assert (block.id, block.name, block.input) == ("t1", "weather", {"city": "Bern"})
    assert inputs[1] == b'{"city": "Bern"}'
    assert message.stop_reason == "tool_use"


def test_b56_a_tool_call_first_is_index_0_behind_message_start() -> None:
    events = whole(call(0, "{}", "t1", "f"))

    assert names(events) == ["message_start", *BLOCK, *END]
    assert events[1].body["content_block"] == {
        "type": "tool_use",
        "id": "t1",
        "name": "f",
        "input": {},
    }


def test_m3_a_call_without_arguments_gets_one_empty_delta() -> None:
    events = whole(call(0, "", "t1", "f"), call(1, "", "t2", "g"))

    deltas = [e.body["delta"] for e in events if e.name == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": ""}] * 2
    assert [b.input for b in accumulate(events).message.content] == [{}, {}]


@pytest.mark.parametrize(
    ("reason", "called"),
    [
        (FinishReason.LENGTH, ["f"]),
        (FinishReason.CONTENT_FILTER, ["f"]),
        (FinishReason.TOOL_CALLS, ["f", "g"]),
    ],
)
def test_b79_a_call_that_was_cut_while_it_was_held_is_left_out(
    reason: FinishReason, called: list[str]
) -> None:
    events = whole(
        call(0, "{", "t1", "f"), call(1, "", "t2", "g"), end=finished(reason)
    )

    starts = [e.body for e in events if e.name == "content_block_start"]
    assert [start["content_block"]["name"] for start in starts] == called


def test_b55_fragments_of_a_later_call_wait_for_the_earlier_one() -> None:
    events = whole(
        call(0, "", "t1", "f") + call(1, "", "t2", "g"),
        call(0, '{"a":'),
        call(1, '{"b":'),
        call(0, "1}"),
        call(1, "2}"),
        end=finished(FinishReason.TOOL_CALLS),
    )

    message, inputs = accumulate(events)
    assert [(b.id, b.name, b.input) for b in message.content] == [
        ("t1", "f", {"a": 1}),
        ("t2", "g", {"b": 2}),
    ]
    assert inputs == {0: b'{"a":1}', 1: b'{"b":2}'}


def test_m5_the_open_call_goes_out_as_it_comes() -> None:
    writer = encoder()
    writer.first()
    writer.deltas(call(0, "", "t1", "f") + call(1, "x", "t2", "g"))

    assert b'"partial_json":"{"' in writer.deltas(call(0, "{"))
    assert writer.deltas(call(1, "y")) == b""


def test_m3_what_is_held_is_bounded() -> None:
    writer = encoder()
    writer.first()
    writer.deltas(call(0, "", "t1", "f") + call(1, "", "t2", "g"))
    half = "é" * (HELD_MAX // 4)
    writer.deltas(call(1, half))
    writer.deltas(call(1, half))

    with pytest.raises(AnswerUnfit) as unfit:
        writer.deltas(call(1, "x"))

    assert unfit.value.fault.kind is FaultKind.PROTOCOL
    assert events_of(writer.error(unfit.value.fault))[0].name == "error"


def test_m3_what_was_held_and_went_out_leaves_its_room() -> None:
    part = "x" * (HELD_MAX * 2 // 3)
    # Those held go out before the text: the second time there is room again.
    batches = [
        call(0, "{}", "t0", "f") + call(1, part, "t1", "f"),
        say("and"),
        call(2, "{}", "t2", "f") + call(3, part, "t3", "f"),
    ]
    events = whole(*batches)

    starts = [e.body for e in events if e.name == "content_block_start"]
    calls = [start["content_block"].get("id") for start in starts]
    assert calls == ["t0", "t1", None, "t2", "t3"]


def test_m3_a_call_that_has_ended_can_not_go_on() -> None:
    writer = encoder()
    writer.first()
    writer.deltas(call(0, "{", "t1", "f"))
    writer.deltas(say("text"))

    assert writer.deltas(call(0, "")) == b""
    with pytest.raises(AnswerUnfit):
        writer.deltas(call(0, "}"))


def test_m3_a_call_waits_for_its_name() -> None:
    events = whole(call(0, "{", "t1"), call(0, "", name="f"), call(0, "}"))

    message, inputs = accumulate(events)
    assert message.content[0].name == "f"
    assert inputs[0] == b"{}"


def test_m3_a_call_that_never_has_a_name_is_told_all_the_same() -> None:
    [block] = accumulate(whole(call(0, "{}", "t1"))).message.content

    assert (block.name, block.id) == ("", "t1")


def test_b50_empty_pieces_open_nothing() -> None:
    events = whole(think(""), say(""), say("", "Hi"), think(""))

    assert names(events) == ["message_start", *BLOCK, *END]


@pytest.mark.parametrize(
    ("batches", "end", "reason", "sequence"),
    [
        ([say("x")], finished(), "end_turn", None),
        ([say("x")], finished(FinishReason.LENGTH), "max_tokens", None),
        ([say("x")], finished(FinishReason.CONTENT_FILTER), "refusal", None),
        ([say("no", kind=Kind.REFUSAL)], finished(), "refusal", None),
        ([say("x")], finished(FinishReason.TOOL_CALLS), "tool_use", None),
        ([call(0, "{}", "t", "f")], finished(), "tool_use", None),
        ([call(0, "{}", "t", "f"), say("x")], finished(), "tool_use", None),
        ([call(0, "{", "t", "f")], finished(FinishReason.LENGTH), "max_tokens", None),
        ([call(0, "", "t", "f")], finished(FinishReason.LENGTH), "max_tokens", None),
        (
            [call(0, "", "t", "f")],
            finished(FinishReason.CONTENT_FILTER),
            "refusal",
            None,
        ),
        ([call(0, "{}", "t")], finished(), "tool_use", None),
        ([say("x")], finished(stop_sequence="END"), "stop_sequence", "END"),
        ([say("x")], finished(stop_sequence="</s>"), "end_turn", None),
    ],
)
def test_m4_the_stop_reason_follows_the_answer(
    batches: list[list[Delta]], end: Finished, reason: str, sequence: str | None
) -> None:
    events = whole(*batches, end=end, stops=("END",))

    assert events[-2].body["delta"] == {
        "stop_reason": reason,
        "stop_sequence": sequence,
    }


def test_m4_a_streamed_refusal_is_text() -> None:
    events = whole(think("hm"), say("No", kind=Kind.REFUSAL), say(".", kind=Kind.TEXT))

    thinking, *texts = accumulate(events).message.content
    assert thinking.thinking == "hm"
    assert [block.type for block in texts] == ["text"] * len(texts)
    assert "".join(block.text for block in texts) == "No."


def test_m6_an_error_ends_a_message_without_its_stop() -> None:
    writer = encoder()
    octets = writer.first() + writer.deltas(say("Hi")) + writer.error(LOST)

    events = events_of(octets)

    assert names(events) == ["message_start", *BLOCK[:2], "error"]
    assert events[-1].body == {
        "type": "error",
        "error": {"type": "api_error", "message": "The worker was lost."},
        "request_id": "req_1",
    }


def test_m7_a_thinking_block_has_a_signature_only_where_it_is_asked_for() -> None:
    plain = whole(think("hm"), say("Hi"))
    signed = whole(think("hm"), say("Hi"), signature="rt1.1")

    assert b"signature_delta" not in json.dumps([e.body for e in plain]).encode()
    assert [e.body["delta"]["type"] for e in signed if e.name == BLOCK[1]] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
    ]
    assert accumulate(signed).message.content[0].signature == "rt1.1"


def test_m5_a_ping_is_an_event_of_its_own() -> None:
    assert events_of(PING) == [Event("ping", {"type": "ping"})]


def test_a5_a_restart_forgets_what_did_not_go_out() -> None:
    writer = encoder()
    first = writer.first()
    writer.deltas(call(0, "", "t0", "f") + call(1, "x", "t2", "g"))
    writer.restart(begun=True)

    events = events_of(first + writer.deltas(say("Hi")) + writer.finish(finished()))

    assert check_grammar(events)
    assert names(events) == ["message_start", *BLOCK, *END]
    writer.restart(begun=False)
    assert writer.first() == first


# ---- the table ----


def test_m3_what_no_row_names_is_refused() -> None:
    for state in State:
        for step in Step:
            if step not in TRANSITIONS[state]:
                with pytest.raises(LocalError):
                    move(state, step)


@pytest.mark.parametrize("state", State)
def test_m3_each_row_closes_what_it_leaves_and_opens_what_it_enters(
    state: State,
) -> None:
    blocks = {State.THINKING, State.TEXT, State.TOOL}
    for step, (to, pieces) in TRANSITIONS[state].items():
        if step is Step.BREAK:
            assert (to, pieces) == (State.OVER, (Piece.ERROR,))
            continue
        stays = to is state and step is not Step.CALL
        assert (Piece.BLOCK_STOP in pieces) == (state in blocks and not stays)
        assert (Piece.BLOCK_START in pieces) == (to in blocks and not stays)
        assert (Piece.MESSAGE_STOP in pieces) == (to is State.OVER)
        order = list(Piece)
        assert [order.index(p) for p in pieces] == sorted(map(order.index, pieces))


# ---- at random ----


@attrs.frozen
class Said:
    """One thing that an engine sends, and what of it a client must have."""

    chunk: dict[str, Any]
    kind: str = ""
    text: str = ""
    number: int = 0


TEXT = st.text(max_size=6)


def chunk_of(delta: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


def fragment(number: int, text: str) -> Said:
    """One piece of the *number*-th call; what its first has besides comes later.

    All pieces together are the beginning of an object, for the SDK parses what
    it has after each.
    """
    return Said({}, "tool", text, number)


ARGUMENTS = '{"a":"'


SAID = st.one_of(
    st.just(Said(chunk_of({"role": "assistant", "content": ""}), "")),
    st.just(Said(chunk_of({"content": None, "reasoning_content": None}), "")),
    st.just(Said({"choices": [], "usage": None}, "")),
    TEXT.map(lambda t: Said(chunk_of({"content": t}), "text", t)),
    TEXT.map(lambda t: Said(chunk_of({"reasoning_content": t}), "thinking", t)),
    TEXT.map(lambda t: Said(chunk_of({"reasoning": t}), "thinking", t)),
    st.builds(fragment, st.integers(0, 3), st.text("abcß ", max_size=6)),
    st.just(Said({}, "comment")),
    st.just(Said({}, "ping")),
)
ENDS = st.sampled_from(["stop", "length", "tool_calls", "fault", "cut"])


def engine_chunk(said: Said, opened: set[int]) -> dict[str, Any]:
    if said.kind != "tool":
        return said.chunk
    piece: dict[str, Any] = {
        "index": said.number,
        "function": {"arguments": said.text},
    }
    if said.number not in opened:
        opened.add(said.number)
        piece["id"] = f"t{said.number}"
        piece["function"]["name"] = f"f{said.number}"
        piece["function"]["arguments"] = ARGUMENTS + said.text
    return chunk_of({"tool_calls": [piece]})


@given(
    script=st.lists(SAID, max_size=25),
    batch=st.integers(1, 4),
    end=ENDS,
    with_usage=st.booleans(),
    signature=st.sampled_from([None, "rt1.1"]),
)
def test_m3_any_interleaving_obeys_the_grammar_and_reads_as_what_went_in(
    script: list[Said], batch: int, end: str, with_usage: bool, signature: str | None
) -> None:
    """From engine chunks through reader and encoder to the SDK's accumulator."""
    reader, writer = AnswerReader(A), encoder(signature=signature)
    octets = writer.first()
    opened: set[int] = set()
    put: list[Said] = []
    pending: list[Delta] = []
    fault: Fault | None = None
    for place, said in enumerate(script):
        if said.kind == "ping":
            octets += PING
            continue
        if said.kind != "comment":
            chunk = json.dumps(engine_chunk(said, opened)).encode()
            assert reader.read(Frame(b"", chunk, False)) is None
            pending += reader.deltas
            reader.deltas = []
        put.append(said)
        if place % batch == 0 and pending:
            try:
                octets += writer.deltas(pending)
            except AnswerUnfit as unfit:
                fault = unfit.fault
                break
            pending = []
    if fault is None and pending:
        try:
            octets += writer.deltas(pending)
        except AnswerUnfit as unfit:
            fault = unfit.fault
    if fault is None and end == "fault":
        fault = LOST
    if fault is not None:
        octets += writer.error(fault)
    elif end != "cut":
        octets += writer.finish(
            finished(FinishReason(end), TOKENS if with_usage else None)
        )

    events = events_of(octets)
    ended_well = check_grammar(events)

    assert b"[DONE]" not in octets
    assert ended_well == (fault is None and end not in {"fault", "cut"})
    if fault is not None:
        # Only a call that other output has ended can make a stream unfit.
        assert fault is LOST or went_back(put)
    check_content(events, put, complete=ended_well)


def went_back(put: list[Said]) -> bool:
    """Tell whether a call goes on behind other output."""
    ended: set[int] = set()
    live: set[int] = set()
    for said in put:
        if said.kind == "tool":
            if said.number in ended and said.text:
                return True
            live.add(said.number)
        elif said.kind in {"text", "thinking"} and said.text:
            ended |= live
    return False


def check_content(events: list[Event], put: list[Said], *, complete: bool) -> None:
    """Hold what the SDK has against what went in."""
    message, inputs = accumulate(events)
    got = {"text": "", "thinking": ""}
    calls: dict[str, str] = {}
    for index, block in enumerate(message.content):
        if block.type == "tool_use":
            calls[block.id] = inputs.get(index, b"").decode()
        else:
            got[block.type] += getattr(block, block.type)
    for kind, text in got.items():
        sent = "".join(said.text for said in put if said.kind == kind)
        assert sent == text if complete else sent.startswith(text)
    sent_calls: dict[str, str] = {}
    for said in put:
        if said.kind == "tool":
            name = f"t{said.number}"
            sent_calls[name] = sent_calls.get(name, ARGUMENTS) + said.text
    if complete:
        assert calls == sent_calls
    for name, text in calls.items():
        assert sent_calls[name].startswith(text)
