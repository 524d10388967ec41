"""Native tool calls: ordinary ones, exit tools, and one too many."""

from collections.abc import Mapping

import pytest

from router.ids import AssignmentId, RequestId
from router.messages import Delta, Kind, Signal, SignalCode, ToolPart
from router.sieve.gate import HELD_MAX, CallGate
from router.sieve.signals import EXIT_TOOLS, MESSAGE_MAX, Signals

ASSIGNMENT = AssignmentId(RequestId("r"), 1)
MANAGER = "needs_manager_decision"


def part(index: int, text: str = "", name: str | None = None) -> Delta:
    call_id = f"t{index}" if name is not None else None
    return Delta(ASSIGNMENT, 0, Kind.TOOL_CALL, text, ToolPart(index, call_id, name))


def gate(
    exits: Mapping[str, SignalCode] = EXIT_TOOLS, calls_max: int = 0, most: int = 8
) -> tuple[CallGate, Signals]:
    signals = Signals(most)
    return CallGate(exits, calls_max, signals), signals


def test_j4_ordinary_calls_go_through_as_they_came() -> None:
    calls, signals = gate()
    fragments = [part(0, "", "f"), part(0, '{"a"'), part(1, "", "g"), part(0, ":1}")]

    assert [list(calls.take(piece)) for piece in fragments] == [[p] for p in fragments]
    assert calls.finish() == []
    assert (calls.admitted, calls.over, signals.all()) == (2, False, ())


def test_j5_a_call_of_an_exit_tool_is_a_signal_and_no_call() -> None:
    calls, signals = gate()

    assert list(calls.take(part(0, "", "low_confidence"))) == []
    assert list(calls.take(part(0, '{"message": "no '))) == []
    assert signals.all() == ()
    assert list(calls.take(part(0, 'source"}'))) == []

    assert signals.all() == (Signal(SignalCode.LOW_CONFIDENCE, "no source", 0),)
    assert (calls.admitted, calls.over) == (0, False)


@pytest.mark.parametrize("name", [MANAGER, "needs_higher_reasoner"])
def test_j5_a_signal_that_stops_the_job_ends_the_answer_at_once(name: str) -> None:
    calls, signals = gate()

    calls.take(part(0, '{"message": "which?"}', name))

    assert calls.over
    assert [s.code for s in signals.all()] == [EXIT_TOOLS[name]]


def test_j5_a_call_without_a_name_is_held_until_it_has_one() -> None:
    calls, signals = gate()
    first, second = part(0, '{"message"'), part(1, "{")

    assert list(calls.take(first)) == []
    assert list(calls.take(second)) == []
    assert list(calls.take(part(0, ':"x"}', "policy_risk"))) == []
    named = part(1, "}", "f")
    assert list(calls.take(named)) == [second, named]

    assert [s.message for s in signals.all()] == ["x"]


def test_a_call_that_is_never_named_goes_through_at_the_end() -> None:
    calls, _ = gate()
    piece = part(0, "{}")
    calls.take(piece)

    assert calls.finish() == [piece]


def test_a_call_that_is_never_named_is_not_held_without_end() -> None:
    calls, _ = gate()
    piece = part(0, "x" * (HELD_MAX + 1))

    assert list(calls.take(piece)) == [piece]
    assert list(calls.take(part(0, "y"))) != []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"message": "why"}', "why"),
        ('{"reason": "why"}', '{"reason": "why"}'),
        ('{"message": 3}', '{"message": 3}'),
        ("{}", "{}"),
        ("", ""),
        ('{"message": "wh', '{"message": "wh'),
        ("no json", "no json"),
        ('{"message": "' + "x" * 3_000 + '"}', "x" * MESSAGE_MAX),
        ("x" * 2 * HELD_MAX, "x" * MESSAGE_MAX),
    ],
)
def test_j5_the_message_is_what_the_model_said(arguments: str, message: str) -> None:
    calls, signals = gate()
    calls.take(part(0, "", "low_confidence"))
    calls.take(part(0, arguments))
    calls.finish()

    assert [s.message for s in signals.all()] == [message]


def test_j5_a_brace_within_the_message_does_not_end_it() -> None:
    calls, signals = gate()
    calls.take(part(0, '{"message": "{a}', "low_confidence"))
    assert signals.all() == ()
    calls.take(part(0, ' and {b}"}'))

    assert [s.message for s in signals.all()] == ["{a} and {b}"]


def test_j5_one_call_too_many_ends_the_answer() -> None:
    calls, signals = gate(calls_max=2)
    first, second = part(0, "{}", "f"), part(1, "{}", "f")

    assert list(calls.take(first)) == [first]
    assert list(calls.take(second)) == [second]
    before = calls.over
    assert list(calls.take(part(2, "{}", "f"))) == []

    assert (before, calls.over) == (False, True)
    assert [s.code for s in signals.all()] == [SignalCode.TOOL_LIMIT_REACHED]


def test_j5_exit_tools_do_not_count_as_tool_calls() -> None:
    calls, _ = gate(calls_max=1)
    calls.take(part(0, "{}", "low_confidence"))
    ordinary = part(1, "{}", "f")

    assert list(calls.take(ordinary)) == [ordinary]
    assert not calls.over


def test_whole_calls_are_judged_like_those_in_pieces() -> None:
    calls, signals = gate(calls_max=1)

    assert calls.whole("f", "{}")
    assert not calls.whole("low_confidence", '{"message":"m"}')
    before = calls.over
    assert not calls.whole("f", "{}")

    assert (before, calls.over) == (False, True)
    assert [s.code.value for s in signals.all()] == [
        "LOW_CONFIDENCE",
        "TOOL_LIMIT_REACHED",
    ]
