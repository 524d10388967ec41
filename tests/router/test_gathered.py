"""The bound of an answer that is gathered whole."""

import pytest

from router.errors import FaultKind
from router.gathered import Gathered
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Kind, ToolPart

ONE = AssignmentId(RequestId("r"), 1)


@pytest.mark.parametrize(
    "delta",
    [
        Delta(ONE, 0, Kind.TEXT, "x" * 500),
        Delta(ONE, 0, Kind.TEXT, "", None, b"x" * 500),
        Delta(ONE, 0, Kind.TOOL_CALL, "", ToolPart(0, "x" * 250, "f" * 250)),
        Delta(ONE, 0, Kind.TOOL_CALL, "", ToolPart(0)),
    ],
)
def test_h5_all_that_a_delta_says_is_counted_and_the_delta_too(
    delta: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.gathered.WHOLE_MAX", 10_000)
    gathered = Gathered()
    for _ in range(2):
        taken = 0
        while (fault := gathered.add([delta])) is None:
            taken += 1
            assert taken <= 200
        assert fault.kind is FaultKind.PROTOCOL
        assert taken > 10
        gathered.clear()
