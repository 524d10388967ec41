"""Signals: a closed list, in order, not without end."""

from router.messages import Signal, SignalCode
from router.sieve.signals import EXIT_TOOLS, MESSAGE_MAX, Signals


def test_j5_the_list_of_codes_is_closed() -> None:
    assert [code.value for code in SignalCode] == [
        "LOW_CONFIDENCE",
        "NEEDS_EXTERNAL_INFO",
        "NEEDS_HIGHER_REASONER",
        "NEEDS_MANAGER_DECISION",
        "POLICY_RISK",
        "TOOL_LIMIT_REACHED",
        "MAX_TOKENS_REACHED",
        "LOOP_DETECTED",
    ]


def test_j5_the_router_has_no_exit_tool_for_its_own_signals() -> None:
    own = {"TOOL_LIMIT_REACHED", "MAX_TOKENS_REACHED", "LOOP_DETECTED"}

    assert {code.value for code in EXIT_TOOLS.values()} == {
        code.value for code in SignalCode
    } - own
    assert all(name == code.value.lower() for name, code in EXIT_TOOLS.items())


def test_j5_signals_are_numbered_in_their_order() -> None:
    signals = Signals(8)
    signals.add(SignalCode.LOW_CONFIDENCE, "a")
    signals.add(SignalCode.POLICY_RISK, "b" * 2 * MESSAGE_MAX)

    assert signals.all() == (
        Signal(SignalCode.LOW_CONFIDENCE, "a", 0),
        Signal(SignalCode.POLICY_RISK, "b" * MESSAGE_MAX, 1),
    )


def test_j5_there_are_at_most_so_many_and_the_last_word_is_kept() -> None:
    signals = Signals(2)
    for word in "abc":
        signals.add(SignalCode.LOW_CONFIDENCE, word)
    assert [s.message for s in signals.all()] == ["a", "b"]

    signals.add(SignalCode.NEEDS_MANAGER_DECISION, "stop")

    assert [(s.message, s.index) for s in signals.all()] == [("a", 0), ("stop", 1)]
