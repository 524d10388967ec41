"""The sieve as a whole: what comes out, in which order, and how it ends."""

import json
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import Fault, FaultKind
from router.ids import AssignmentId, RequestId
from router.messages import (
    Delta,
    Finished,
    FinishReason,
    Kind,
    SignalCode,
    ToolPart,
    Usage,
)
from router.sieve import END_REASONING, EXIT_TOOLS, Sieve, SieveRules

ASSIGNMENT = AssignmentId(RequestId("r"), 1)
STOP = Finished(ASSIGNMENT, FinishReason.STOP, Usage(1, 2))
LENGTH = Finished(ASSIGNMENT, FinishReason.LENGTH, Usage(1, 2))
TOOL_CALLS = Finished(ASSIGNMENT, FinishReason.TOOL_CALLS, Usage(1, 2))
CALL = '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}'
TOLD = SieveRules(tools=frozenset({"f", "g", *EXIT_TOOLS}), exits=EXIT_TOOLS)


class Source:
    """Stamps deltas as a worker does, and plays them through a sieve."""

    def __init__(self, rules: SieveRules) -> None:
        self.sieve = Sieve(rules)
        self.index = 0
        self.out: list[Delta] = []

    def say(self, *texts: str, kind: Kind = Kind.TEXT) -> None:
        self.feed([self.delta(text, kind) for text in texts])

    def call(self, index: int, text: str, name: str | None = None) -> None:
        part = ToolPart(index, None if name is None else f"t{index}", name)
        self.feed([self.delta(text, Kind.TOOL_CALL, part)])

    def delta(self, text: str, kind: Kind, tool: ToolPart | None = None) -> Delta:
        delta = Delta(ASSIGNMENT, self.index, kind, text, tool)
        self.index += 1
        return delta

    def feed(self, deltas: Sequence[Delta]) -> None:
        self.out += self.sieve.take(deltas)

    def finish(self, finished: Finished) -> Finished | Fault:
        left, end = self.sieve.finish(finished)
        self.out += left
        assert [d.index for d in self.out] == list(range(len(self.out)))
        return end

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.out if d.kind is Kind.TEXT)

    @property
    def calls(self) -> list[tuple[str | None, str]]:
        return [(d.tool.name, d.text) for d in self.out if d.tool is not None]


def codes(end: Finished | Fault) -> list[SignalCode]:
    assert isinstance(end, Finished)
    return [signal.code for signal in end.signals]


# -- the convention ------------------------------------------------------------


def test_j4_a_told_call_becomes_a_call_of_openai_shape() -> None:
    source = Source(TOLD)
    source.say(*CALL)

    end = source.finish(STOP)

    assert source.text == ""
    (delta,) = source.out
    assert delta.tool == ToolPart(0, "call_r_1_0", "f")
    assert json.loads(delta.text) == {"a": 1}
    assert end == attrs.evolve(STOP, reason=FinishReason.TOOL_CALLS)


def test_j4_text_goes_through_as_soon_as_it_can_be_no_call() -> None:
    source = Source(TOLD)

    source.say(" ", "{", "x")
    assert source.text == " {x"
    source.say("y")
    assert source.text == " {xy"

    assert source.finish(STOP) == STOP


def test_j4_reasoning_goes_through_before_a_call_and_beside_it() -> None:
    source = Source(TOLD)
    source.say("hm", kind=Kind.REASONING)
    source.say(CALL[:9])
    source.say("so", kind=Kind.REASONING)
    source.say(CALL[9:])

    source.finish(STOP)

    assert [d.kind for d in source.out] == [
        Kind.REASONING,
        Kind.REASONING,
        Kind.TOOL_CALL,
    ]


def test_j4_native_calls_are_preferred_and_intact() -> None:
    source = Source(TOLD)
    source.say('{"tool_calls"')
    source.call(3, '{"a"', "f")
    source.call(3, ":1}")
    source.say("after")

    end = source.finish(TOOL_CALLS)

    assert source.text == '{"tool_calls"after'
    assert source.calls == [("f", '{"a"'), (None, ":1}")]
    assert end == TOOL_CALLS


def test_j4_a_call_that_can_not_be_read_is_a_failure_of_the_job() -> None:
    source = Source(TOLD)
    source.say('{"tool_calls": [')

    end = source.finish(STOP)

    assert isinstance(end, Fault)
    assert end.kind is FaultKind.TOOL_PARSE
    assert end.row.reason == "tool_parse_error"
    assert not end.row.counts
    assert source.out == []
    assert [d.text for d in source.sieve.leftover()] == ['{"tool_calls": [']


def test_j4_or_the_signal_for_a_higher_reasoner_where_so_configured() -> None:
    source = Source(attrs.evolve(TOLD, invalid_signals=True))
    source.say('{"tool_calls": [')

    end = source.finish(STOP)

    assert codes(end) == [SignalCode.NEEDS_HIGHER_REASONER]
    assert isinstance(end, Finished)
    assert (end.reason, end.usage) == (FinishReason.STOP, STOP.usage)
    assert source.out == []


@pytest.mark.parametrize("signals", [False, True])
def test_j4_a_call_that_is_too_long_ends_the_answer(*, signals: bool) -> None:
    source = Source(attrs.evolve(TOLD, invalid_signals=signals))
    source.say('{"tool_calls": [', "x" * 300_000)

    wish = source.sieve.wish
    if signals:
        assert isinstance(wish, Finished)
        assert codes(wish) == [SignalCode.NEEDS_HIGHER_REASONER]
    else:
        assert isinstance(wish, Fault)
        assert wish.kind is FaultKind.TOOL_PARSE


def test_b79_a_call_cut_off_by_a_limit_is_told_as_cut() -> None:
    source = Source(TOLD)
    source.say('{"tool_calls": [{"name": "f", "argu')

    end = source.finish(LENGTH)

    assert source.text == '{"tool_calls": [{"name": "f", "argu'
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH
    assert codes(end) == [SignalCode.MAX_TOKENS_REACHED]


def test_b79_a_whole_call_at_the_limit_is_a_call_and_the_limit_is_told() -> None:
    source = Source(TOLD)
    source.say(CALL)

    end = source.finish(LENGTH)

    assert [name for name, _ in source.calls] == ["f"]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.LENGTH


@st.composite
def answers(draw: st.DrawFn) -> list[tuple[Kind, str]]:
    """An answer's kinds and texts, as few pieces as it can have."""
    texts = st.sampled_from([CALL, '{"tool_calls": [', "{ a", "Hello", "", " ", CALL])
    parts = st.tuples(st.sampled_from([Kind.TEXT, Kind.REASONING]), texts)
    return draw(st.lists(parts, max_size=4))


@given(st.data(), answers())
def test_j4_the_answer_is_the_same_however_it_is_cut(
    data: st.DataObject, answer: list[tuple[Kind, str]]
) -> None:
    whole, cut = Source(TOLD), Source(TOLD)
    batch: list[Delta] = []
    for kind, text in answer:
        whole.say(text, kind=kind)
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
        for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True):
            batch.append(cut.delta(text[a:b], kind))
            if data.draw(st.booleans()):
                cut.feed(batch)
                batch = []
    cut.feed(batch)

    assert cut.finish(STOP) == whole.finish(STOP)
    assert cut.text == whole.text
    assert cut.calls == whole.calls


# -- signals -------------------------------------------------------------------


def test_j5_told_exit_tools_are_signals_and_no_part_of_the_answer() -> None:
    source = Source(TOLD)
    low = '{"name": "low_confidence", "arguments": {"message": "m"}}'
    source.say(f'{{"tool_calls": [{low}, {{"name": "g", "arguments": {{}}}}]}}')

    end = source.finish(STOP)

    assert codes(end) == [SignalCode.LOW_CONFIDENCE]
    assert source.calls == [("g", "{}")]
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.TOOL_CALLS


def test_j5_signals_alone_leave_no_call_to_be_answered() -> None:
    told, native = Source(TOLD), Source(TOLD)
    low = '{"name": "low_confidence", "arguments": {"message": "m"}}'
    told.say(f'{{"tool_calls": [{low}]}}')
    native.call(0, '{"message": "m"}', "low_confidence")

    for source, finished in ((told, STOP), (native, TOOL_CALLS)):
        end = source.finish(finished)

        assert isinstance(end, Finished)
        assert end.reason is FinishReason.STOP
        assert codes(end) == [SignalCode.LOW_CONFIDENCE]
        assert source.out == []


def test_j5_a_stopping_signal_ends_the_job_and_what_follows_is_dropped() -> None:
    source = Source(TOLD)
    source.say("I ask.")
    ask = ToolPart(0, "t0", "needs_manager_decision")
    source.feed(
        [
            source.delta('{"message": "which?"}', Kind.TOOL_CALL, ask),
            source.delta("more", Kind.TEXT),
        ]
    )

    wish = source.sieve.wish

    assert isinstance(wish, Finished)
    assert wish.reason is FinishReason.STOP
    assert [(s.code.value, s.message) for s in wish.signals] == [
        ("NEEDS_MANAGER_DECISION", "which?")
    ]
    assert source.text == "I ask."


def test_j5_a_call_too_many_ends_the_answer_with_the_calls_so_far() -> None:
    native = Source(SieveRules(tool_calls_max=1))
    native.call(0, "{}", "f")
    native.call(1, "{}", "f")
    told = Source(attrs.evolve(TOLD, tool_calls_max=1))
    one = '{"name": "f", "arguments": {}}'
    told.say(f'{{"tool_calls": [{one}, {one}, {one}]}}')

    for source, end in ((native, native.sieve.wish), (told, told.finish(STOP))):
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.TOOL_CALLS
        assert codes(end) == [SignalCode.TOOL_LIMIT_REACHED]
        assert source.calls == [("f", "{}")]


def test_j5_an_answer_that_ends_at_its_limit_says_so() -> None:
    source = Source(SieveRules(loop_repeats_max=9))
    source.say("word")

    assert codes(source.finish(LENGTH)) == [SignalCode.MAX_TOKENS_REACHED]


@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.REASONING])
def test_j5_a_loop_fails_the_job_and_is_a_signal(kind: Kind) -> None:
    source = Source(SieveRules(loop_repeats_max=9))
    for _ in range(1_000):
        source.say("over and over ", kind=kind)
        if source.sieve.wish is not None:
            break

    fault = source.sieve.wish
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.LOOP
    assert fault.row.reason == "loop_detected"
    assert not fault.row.counts
    assert not fault.row.moves
    assert [s.code for s in source.sieve.signals] == [SignalCode.LOOP_DETECTED]
    assert len(source.out) < 60


def test_j5_a_loop_in_what_is_held_is_found_too() -> None:
    source = Source(attrs.evolve(TOLD, loop_repeats_max=9))
    source.say('{"tool_calls": [')
    for _ in range(60):
        source.say("[1, 2], [3, 4], ")

    assert isinstance(source.sieve.wish, Fault)
    assert source.sieve.wish.kind is FaultKind.LOOP


def test_j5_text_and_reasoning_are_watched_apart() -> None:
    source = Source(SieveRules(loop_repeats_max=9))
    for _ in range(400):
        source.say("so ", kind=Kind.REASONING)
        source.say(f"{source.index} ")

    assert source.sieve.wish is None


def test_j5_what_is_thought_and_said_in_turn_is_no_loop() -> None:
    source = Source(SieveRules(loop_repeats_max=9))
    for _ in range(400):
        source.say("over and over ", kind=Kind.REASONING)
        source.say("over and over ")

    assert source.sieve.wish is None


# -- reasoning -----------------------------------------------------------------


def test_j6_reasoning_beyond_its_limit_is_to_end() -> None:
    source = Source(SieveRules(thinking_max=2))
    source.say("a", "b", kind=Kind.REASONING)
    before = source.sieve.wish

    source.say("c", kind=Kind.REASONING)

    assert (before, source.sieve.wish) == (None, END_REASONING)
    assert [d.text for d in source.out] == ["a", "b", "c"]


def test_j6_what_came_with_the_last_that_was_allowed_waits_for_the_decision() -> None:
    source = Source(SieveRules(thinking_max=1))
    source.feed(
        [
            source.delta("a", Kind.REASONING),
            source.delta("b", Kind.REASONING),
            source.delta("The answer", Kind.TEXT),
        ]
    )
    before = [d.text for d in source.out]

    assert (before, source.sieve.wish) == (["a", "b"], END_REASONING)
    source.out += source.sieve.bear(1)
    assert source.text == "The answer"
    assert source.sieve.wish is None


def test_j6_an_engine_that_was_asked_gets_so_many_more() -> None:
    source = Source(SieveRules(thinking_max=0))
    source.say("a", kind=Kind.REASONING)
    source.sieve.bear(2)

    source.say("b", "c", kind=Kind.REASONING)
    before = source.sieve.wish
    source.say("d", kind=Kind.REASONING)

    assert (before, source.sieve.wish) == (None, END_REASONING)


def test_j6_else_the_answer_ends_with_length() -> None:
    source = Source(SieveRules(thinking_max=0))
    source.say("a", kind=Kind.REASONING)

    source.sieve.cut(ASSIGNMENT)

    wish = source.sieve.wish
    assert isinstance(wish, Finished)
    assert wish.reason is FinishReason.LENGTH
    assert codes(wish) == [SignalCode.MAX_TOKENS_REACHED]


# -- attempts ------------------------------------------------------------------


def test_a3_nothing_of_an_earlier_attempt_leaks_into_the_next() -> None:
    source = Source(attrs.evolve(TOLD, thinking_max=1, loop_repeats_max=9))
    source.say("a", "b", "c", kind=Kind.REASONING)
    source.call(0, '{"message": "m"}', "needs_manager_decision")
    source.say('{"tool_calls"')

    source.sieve.restart()

    assert source.sieve.wish is None
    assert source.sieve.signals == ()
    second = AssignmentId(RequestId("r"), 2)
    out = source.sieve.take([Delta(second, 0, Kind.REASONING, "x")])
    assert [(d.assignment, d.index) for d in out] == [(second, 0)]
    assert source.sieve.wish is None
    left, end = source.sieve.finish(attrs.evolve(STOP, assignment=second))
    assert left == []
    assert end == attrs.evolve(STOP, assignment=second)


def test_rules_that_ask_for_nothing_change_nothing() -> None:
    source = Source(SieveRules())
    source.say("hm", kind=Kind.REASONING)
    source.say("Hi")
    source.say("No.", kind=Kind.REFUSAL)
    source.call(0, "{}", "f")
    given_in = list(source.out)

    assert source.finish(STOP) == STOP
    assert source.out == given_in
    assert [d.text for d in source.out] == ["hm", "Hi", "No.", "{}"]
