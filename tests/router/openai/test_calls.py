import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.ids import AssignmentId, RequestId
from router.messages import Delta, Kind, ToolPart
from router.openai.calls import KEPT_MAX, Calls, InTurn
from router.openai.chunk import Call, Function

FRAGMENTS = st.lists(
    st.builds(
        Call,
        index=st.none() | st.integers(0, 2),
        id=st.none() | st.sampled_from(["", "t1", "t2", "t3"]),
        function=st.none()
        | st.builds(Function, name=st.none() | st.sampled_from(["", "f", "g"])),
    ),
    max_size=12,
)


@given(FRAGMENTS)
def test_o3_ids_and_names_leave_once_and_numbers_are_dense(
    fragments: list[Call],
) -> None:
    calls = Calls(AssignmentId(RequestId("r1"), 1))

    parts = [part for fragment in fragments for part in calls.parts([fragment])]

    ids = Counter(part.index for part in parts if part.id is not None)
    names = Counter(part.index for part in parts if part.name is not None)
    assert set(ids.values()) | set(names.values()) <= {1}
    assert list(dict.fromkeys(part.index for part in parts)) == list(range(len(ids)))
    for part in parts:
        assert part.id != ""
        assert part.name != ""


@given(FRAGMENTS)
def test_the_first_fragment_of_a_call_has_its_id(fragments: list[Call]) -> None:
    calls = Calls(AssignmentId(RequestId("r1"), 1))
    seen: set[int] = set()

    for fragment in fragments:
        [part] = calls.parts([fragment])
        assert (part.id is not None) is (part.index not in seen)
        seen.add(part.index)


def entry(
    name: str | None,
    arguments: str,
    *,
    index: int | None = None,
    call_id: str | None = None,
) -> Call:
    return Call(index, call_id, Function(name, arguments))


def gathered(chunks: Sequence[Sequence[Call]]) -> list[tuple[str, str]]:
    """Read chunks; give name and arguments of each call as a client has them."""
    calls = Calls(AssignmentId(RequestId("r1"), 1))
    found: dict[int, list[str]] = {}
    ids: list[str] = []
    for chunk in chunks:
        for fragment, part in zip(chunk, calls.parts(chunk), strict=True):
            if part.id is not None:
                ids.append(part.id)
                found[part.index] = ["", ""]
            found[part.index][0] += part.name or ""
            assert fragment.function is not None
            found[part.index][1] += fragment.function.arguments or ""
    assert len(set(ids)) == len(ids) == len(found)
    return [(name, arguments) for name, arguments in found.values()]


X, Y = '{"x":1}', '{"y":2}'


@pytest.mark.parametrize(
    ("chunks", "wanted"),
    [
        ([[entry("f", X), entry("g", Y)]], [("f", X), ("g", Y)]),
        ([[entry("f", X), entry("f", Y)]], [("f", X), ("f", Y)]),
        ([[entry("f", ""), entry("f", "")]], [("f", ""), ("f", "")]),
        (
            [[entry("f", "", index=0), entry("f", Y, index=0)]],
            [("f", ""), ("f", Y)],
        ),
        (
            [[entry("f", X, index=0)], [entry("g", Y, index=0)]],
            [("f", X), ("g", Y)],
        ),
        (
            [[entry("f", X, index=0)], [entry("f", Y, index=0)]],
            [("f", X), ("f", Y)],
        ),
        ([[entry("f", X)], [entry("f", Y)]], [("f", X), ("f", Y)]),
        # The name is said again with each piece.
        ([[entry("f", X[:3])], [entry("f", X[3:])], [entry("f", "")]], [("f", X)]),
        # The pieces of one call, its name first.
        (
            [[entry("f", "", index=0)], [entry("f", X, index=0)]],
            [("f", X)],
        ),
        # All calls have the one id.
        (
            [
                [entry("f", X, index=0, call_id="t")],
                [entry("f", Y, index=1, call_id="t")],
                [entry("g", X, index=1, call_id="t")],
            ],
            [("f", X), ("f", Y), ("g", X)],
        ),
        # The id comes with each piece, and nothing else tells them apart.
        (
            [
                [entry("f", X[:3], call_id="t1"), entry("g", Y[:3], call_id="t2")],
                [entry("f", X[3:], call_id="t1"), entry("g", Y[3:], call_id="t2")],
            ],
            [("f", X), ("g", Y)],
        ),
        (
            [
                [entry("f", X[:3], index=0, call_id="t1")],
                [entry("g", Y[:3], index=0, call_id="t2")],
                [entry(None, X[3:], index=0, call_id="t1")],
                [entry(None, Y[3:], index=0, call_id="t2")],
            ],
            [("f", X), ("g", Y)],
        ),
    ],
)
def test_b55_calls_without_index_or_id_are_told_apart(
    chunks: list[list[Call]], wanted: list[tuple[str, str]]
) -> None:
    assert gathered(chunks) == wanted


ARGUMENTS = st.dictionaries(
    st.text(max_size=3), st.integers() | st.text(max_size=4), max_size=3
).map(json.dumps)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[list[Call]], list[tuple[str, str]]]:
    """Calls one after another, each in a shape of its own: whole or in pieces, by
    an id or none, under the one index or none."""
    chunks: list[list[Call]] = []
    wanted: list[tuple[str, str]] = []
    for number in range(draw(st.integers(0, 5))):
        name, arguments = draw(st.sampled_from("fg")), draw(ARGUMENTS)
        index = draw(st.sampled_from([None, 0]))
        call_id = draw(st.sampled_from([None, f"t{number}"]))
        cut = draw(st.integers(0, len(arguments)))
        whole = draw(st.booleans())
        if whole:
            cut = len(arguments)
        else:
            # Behind a call in pieces, only another name tells of the next.
            name += str(number)
        first = entry(name, arguments[:cut], index=index, call_id=call_id)
        with_last = draw(st.booleans())
        if chunks and with_last:
            chunks[-1].append(first)
        else:
            chunks.append([first])
        if cut < len(arguments):
            chunks.append([entry(None, arguments[cut:], index=index)])
        wanted.append((name, arguments))
    return chunks, wanted


@given(answers())
def test_b55_each_call_keeps_its_name_and_its_arguments(
    answer: tuple[list[list[Call]], list[tuple[str, str]]],
) -> None:
    chunks, wanted = answer

    assert gathered(chunks) == wanted


@given(st.data())
def test_b55_calls_in_turns_keep_theirs(data: st.DataObject) -> None:
    said = data.draw(
        st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), min_size=1, max_size=4)
    )
    shared = data.draw(st.sampled_from([None, 0]))
    by_index, by_id, again = (data.draw(st.booleans()) for _ in range(3))
    left = [
        [(name, text[:cut]), (name if again else None, text[cut:])]
        for name, text in said
        for cut in [data.draw(st.integers(0, len(text)))]
    ]
    chunks = []
    order = [number for number, _ in enumerate(said)]
    order += data.draw(st.permutations(order))
    for number in order:
        name, text = left[number].pop(0)
        chunks.append(
            [
                entry(
                    name,
                    text,
                    index=number if by_index else shared,
                    call_id=f"t{number}" if by_id or not by_index else None,
                )
            ]
        )

    assert gathered(chunks) == said


# -- one call after the other --------------------------------------------------


def fragment(call: int, text: str) -> Delta:
    return Delta(
        AssignmentId(RequestId("r1"), 1), 0, Kind.TOOL_CALL, text, ToolPart(call)
    )


def said(deltas: Sequence[Delta]) -> dict[int, str]:
    """Join what they bring, call by call in the order of their beginning."""
    words: dict[int, str] = {}
    for delta in deltas:
        assert delta.tool is not None
        words[delta.tool.index] = words.get(delta.tool.index, "") + delta.text
    return words


MIXED = st.lists(
    st.builds(
        fragment, st.integers(0, 3), st.sampled_from(["", "{", "}", "{}", '"}"', " "])
    ),
    max_size=12,
)


def goes_on(mixed: Sequence[Delta]) -> bool:
    """Say whether a call has more to say when its object is whole: it is none then."""
    return any(
        delta.text.strip() and is_object(said(mixed[:n]).get(delta.tool.index, ""))
        for n, delta in enumerate(mixed)
        if delta.tool is not None
    )


@given(MIXED)
def test_o7_no_call_begins_behind_one_that_may_go_on(mixed: list[Delta]) -> None:
    assume(not goes_on(mixed))
    turns = InTurn()
    left: list[Delta] = []

    for delta in mixed:
        for leaving in turns.take(delta):
            assert leaving.tool is not None
            before = said(left)
            last = left[-1].tool if left else None
            if last is not None and last.index != leaving.tool.index:
                assert is_object(before[last.index])
            left.append(leaving)
    left += turns.rest()

    assert said(left) == said(mixed)
    assert turns.rest() == []


@given(MIXED)
def test_o7_nothing_of_mixed_calls_is_lost_whatever_they_are(
    mixed: list[Delta],
) -> None:
    turns = InTurn()
    left = [leaving for delta in mixed for leaving in turns.take(delta)]

    assert said([*left, *turns.rest()]) == said(mixed)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_o7_calls_that_come_in_turn_wait_for_nothing() -> None:
    turns = InTurn()

    for delta in (
        fragment(0, ""),
        fragment(0, '{"a":'),
        fragment(0, "1}"),
        fragment(1, ""),
        fragment(1, "{}"),
        fragment(2, "{"),
    ):
        assert list(turns.take(delta)) == [delta]
    assert turns.rest() == []


def test_o7_calls_that_are_mixed_leave_call_by_call() -> None:
    turns = InTurn()
    a, b, c, d, e = (fragment(call, "{") for call in (4, 9, 7, 4, 9))

    left = [list(turns.take(delta)) for delta in (a, b, c, d, e)]

    assert left == [[a], [], [], [d], []]
    assert turns.rest() == [b, e, c]


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("grows", [0, 1])
def test_o7_no_more_than_a_bound_is_kept_of_calls(size: int, grows: int) -> None:
    turns = InTurn()
    first, second = fragment(0, "{"), fragment(1, "[")
    assert [*turns.take(first), *turns.take(second)] == [first]
    more = fragment(grows, "x" * size)

    kept = 2 * (1 + 64)
    while kept <= KEPT_MAX:
        left = list(turns.take(more))
        kept += size + 64
        assert (second in left) == (kept > KEPT_MAX)

    assert list(turns.take(first)) == [first]
    assert list(turns.take(second)) == [second]
    assert turns.rest() == []


def test_o7_the_bound_counts_from_the_call_that_is_open() -> None:
    turns = InTurn()
    for call in range(3):
        turns.take(fragment(call, '{"a":"' + "x" * (KEPT_MAX // 2) + '"}'))
    turns.take(fragment(3, "{"))

    assert list(turns.take(fragment(4, "{}"))) == []
