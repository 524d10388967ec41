"""Calls told from text at the beginning of a reply, at every split."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ids import AssignmentId, RequestId
from router.messages import Delta, Kind
from router.sieve.convention import (
    HELD_MAX,
    TRANSITIONS,
    CallsInvalid,
    CallText,
    Convention,
    Place,
    Sign,
)

ASSIGNMENT = AssignmentId(RequestId("r"), 1)
NAMES = frozenset({"f", "g"})
CALL = '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]}'


def pieces(*texts: str) -> list[Delta]:
    return [Delta(ASSIGNMENT, n, Kind.TEXT, text) for n, text in enumerate(texts)]


def through(convention: Convention, texts: Sequence[str]) -> str:
    """Feed *texts*; give what went through."""
    return "".join(
        passed.text for piece in pieces(*texts) for passed in convention.take(piece)
    )


def held(convention: Convention) -> str:
    return "".join(piece.text for piece in convention.held)


@st.composite
def splits(draw: st.DrawFn, text: str) -> list[str]:
    """*text* cut anywhere, empty pieces included."""
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    ends = [*cuts, len(text)]
    return [text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]


BEGINNINGS = st.sampled_from(
    [
        "",
        " \n\t",
        "{",
        '{"tool_',
        '{ "tool_calls"',
        '{"tool_calls" \n',
        CALL,
        f"\n {CALL} \n",
        '{"tool_calls": tru',
        '{"tool_call": 1}',
        '{"tool_calls"; []}',
        "{'tool_calls': []}",
        'Sure! {"tool_calls": []}',
        '[{"tool_calls": []}]',
        '{"tool _calls": []}',
        '{"a": {"tool_calls": []}}',
        "{}",
        "```json\n{}\n```",
    ]
) | st.text(st.sampled_from('{}[]":tol_cas \nx\u00e9'), max_size=30)


@given(st.data(), BEGINNINGS)
def test_j4_a_reply_is_the_same_call_or_text_however_it_is_cut(
    data: st.DataObject, text: str
) -> None:
    whole = Convention(NAMES)
    cut = Convention(NAMES)

    passed = through(whole, [text])

    assert through(cut, data.draw(splits(text))) == passed
    assert (held(cut), cut.place) == (held(whole), whole.place)
    assert passed + held(whole) == text


@given(st.data(), st.sampled_from([CALL, f" \n{CALL}\n", CALL.replace(" ", "")]))
def test_j4_a_call_is_read_however_it_is_cut(data: st.DataObject, text: str) -> None:
    convention = Convention(NAMES)

    assert through(convention, data.draw(splits(text))) == ""
    (call,) = convention.calls()
    assert (call.name, json.loads(call.arguments)) == ("f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", Place.START),
        ("\r\n\t ", Place.START),
        (" {", Place.OBJECT),
        ('{ "tool', Place.KEY),
        ('{"tool_calls"', Place.COLON),
        ('{"tool_calls" :', Place.CALL),
        ("x", Place.TEXT),
        ("{ x", Place.TEXT),
        ('{"toolcalls', Place.TEXT),
        ('{"tool_calls"x', Place.TEXT),
        ('{"tool_calls "', Place.TEXT),
        ("\u00a0{", Place.TEXT),
    ],
)
def test_j4_the_beginning_is_read_by_its_table(text: str, place: Place) -> None:
    convention = Convention(NAMES)

    through(convention, [text])

    assert convention.place is place


def test_j4_no_row_leads_out_of_a_decision() -> None:
    assert set(TRANSITIONS) == set(Place) - {Place.CALL, Place.TEXT}
    assert {sign for row in TRANSITIONS.values() for sign in row} == set(Sign)


def test_j4_several_calls_keep_their_order_and_their_own_json() -> None:
    convention = Convention(NAMES)
    one = '{"name":"g","arguments":{ "x" : [1, 2.50] }}'
    two = '{"arguments":{},"name":"f"}'
    through(convention, [f'{{"tool_calls":[{one},{two}]}}'])

    assert convention.calls() == [
        CallText("g", '{ "x" : [1, 2.50] }'),
        CallText("f", "{}"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"tool_calls": [{"name": "f", "arguments": {"a": tru}}]}',
        '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]',
        '{"tool_calls": [{"name": "f", "arguments": {"a": 1}}]} Done.',
        '{"tool_calls": [{"name": "f", "arguments": {"a": 1},}]}',
        '{"tool_calls": [{"name": "f", "arguments": {a: 1}}]}',
        '{"tool_calls": [{"name": "f", "arguments": "{}"}]}',
        '{"tool_calls": [{"name": "f", "arguments": []}]}',
        '{"tool_calls": [{"name": "f"}]}',
        '{"tool_calls": [{"name": 1, "arguments": {}}]}',
        '{"tool_calls": [{"name": "f", "arguments": {}, "id": "x"}]}',
        '{"tool_calls": [{"name": "other", "arguments": {}}]}',
        '{"tool_calls": {"name": "f", "arguments": {}}}',
        '{"tool_calls": [], "text": "hi"}',
        '{"tool_calls": []}',
        '{"tool_calls": null}',
        '{"tool_calls": ["f"]}',
        '{"tool_calls": [{"name": "f", "arguments": {"a": "\ud800"}}]}',
        '{"tool_calls": ' + "[" * 5_000,
    ],
)
def test_j4_what_is_not_strict_json_of_the_shape_is_no_call(text: str) -> None:
    convention = Convention(NAMES)
    through(convention, [text])

    with pytest.raises(CallsInvalid) as raised:
        convention.calls()

    assert "other" not in str(raised.value).replace("another", "")


def test_j4_what_may_be_a_call_is_held_up_to_256_kib() -> None:
    convention = Convention(NAMES)
    begin = '{"tool_calls": ['
    room = HELD_MAX - len(begin)

    assert through(convention, [begin, "x" * room]) == ""
    with pytest.raises(CallsInvalid):
        convention.take(pieces("x")[0])


def test_j4_space_without_end_is_text() -> None:
    convention = Convention(NAMES)

    assert through(convention, [" " * HELD_MAX]) == ""
    assert through(convention, [" "]) == " " * (HELD_MAX + 1)
    assert convention.place is Place.TEXT


def test_j4_sizes_are_bytes() -> None:
    convention = Convention(NAMES)
    through(convention, ['{"tool_calls": ['])

    with pytest.raises(CallsInvalid):
        convention.take(pieces("\u20ac" * (HELD_MAX // 3))[0])


def test_logprobs_of_held_text_come_out_with_it() -> None:
    convention = Convention(NAMES)
    first, last = pieces("{", "x")
    first.logprobs = b'{"content":[]}'

    assert convention.take(first) == ()
    assert convention.take(last) == [first, last]
