from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.ids import AssignmentId, RequestId
from router.openai.calls import Calls
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

    parts = [calls.part(fragment) for fragment in fragments]

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
        part = calls.part(fragment)
        assert (part.id is not None) is (part.index not in seen)
        seen.add(part.index)
