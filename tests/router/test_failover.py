"""Whether a failed job moves."""

import pytest

from router.assignment import Attempts
from router.errors import FAULTS, Fault, FaultKind
from router.failover import UNCHARGED, over_at_once, verdict
from router.ids import RequestId, WorkerId

#: A set has no order that two processes agree on.
UNCHARGED_IN_ORDER = [kind for kind in FaultKind if kind in UNCHARGED]


def trail(*faults: Fault, was_ready: bool = True, committed: bool = False) -> Attempts:
    """A request whose attempts failed with *faults* and that runs once more."""
    attempts = Attempts(RequestId("r"))
    attempts.queue()
    for number, fault in enumerate(faults):
        attempts.offer(WorkerId(f"w{number}"), 0.0, was_ready=was_ready)
        attempts.move(fault, tried=True)
    attempts.offer(WorkerId("last"), 0.0, was_ready=was_ready)
    if committed:
        attempts.accept()
        attempts.commit()
    return attempts


def judge(
    attempts: Attempts,
    fault: Fault,
    *,
    budget: bool = True,
    wider: bool = False,
    loading: bool = True,
) -> tuple[Fault | None, bool]:
    """Return the verdict, and whether the budget was asked."""
    asked: list[bool] = []

    def spend() -> bool:
        asked.append(True)
        return budget

    assert attempts.current is not None
    ends = verdict(
        attempts,
        attempts.current,
        fault,
        attempts_max=3,
        may_wait_for_loading=loading,
        has_wider=wider,
        spend=spend,
    )
    return ends, bool(asked)


@pytest.mark.parametrize("kind", [k for k in FaultKind if FAULTS[k].moves])
def test_a2_nothing_moves_after_commit(kind: FaultKind) -> None:
    fault = Fault(kind, "x")

    assert judge(trail(committed=True), fault)[0] is fault


@pytest.mark.parametrize("kind", [k for k in FaultKind if not FAULTS[k].moves])
def test_a4_what_is_not_the_workers_never_moves(kind: FaultKind) -> None:
    fault = Fault(kind, "x")

    assert judge(trail(), fault) == (fault, False)


@pytest.mark.parametrize("kind", UNCHARGED_IN_ORDER)
def test_a8_a_first_move_off_a_lost_worker_is_not_charged(kind: FaultKind) -> None:
    assert judge(trail(), Fault(kind, "x"), budget=False) == (None, False)


@pytest.mark.parametrize("kind", UNCHARGED_IN_ORDER)
def test_a8_a_move_off_a_worker_that_was_no_longer_trusted_is_charged(
    kind: FaultKind,
) -> None:
    fault = Fault(kind, "x")

    assert judge(trail(was_ready=False), fault, budget=False) == (fault, True)


def test_a8_a_second_move_is_charged_and_shows_the_first_cause() -> None:
    first = Fault(FaultKind.CONNECT, "first")

    ends = judge(trail(first), Fault(FaultKind.CONNECT, "second"), budget=False)

    assert ends == (first, True)


def test_a3_attempts_are_bounded_and_the_first_cause_is_shown() -> None:
    first = Fault(FaultKind.DECLINED, "first")
    attempts = trail(first, Fault(FaultKind.CONNECT, "second"))

    assert judge(attempts, Fault(FaultKind.STALLED, "third"))[0] is first


def test_a4_the_same_500_twice_is_the_requests_own_fault() -> None:
    first = Fault(FaultKind.SERVER_ERROR, "one", status=500, error_type="t")
    again = Fault(FaultKind.SERVER_ERROR, "two", status=500, error_type="t")

    ends, _ = judge(trail(first), again)

    assert ends is not None
    assert (ends.kind, ends.status) == (FaultKind.REJECTED, 500)


def test_a4_another_500_ends_the_request_with_the_first() -> None:
    first = Fault(FaultKind.SERVER_ERROR, "one", status=500, error_type="t")
    other = Fault(FaultKind.SERVER_ERROR, "two", status=500, error_type="u")

    assert judge(trail(first), other)[0] is first


def test_a4_one_other_worker_is_tried_after_a_500() -> None:
    fault = Fault(FaultKind.SERVER_ERROR, "one", status=500)

    assert judge(trail(), fault) == (None, True)


def test_a4_a_prompt_too_long_moves_once_to_a_wider_worker() -> None:
    fault = Fault(FaultKind.CONTEXT_LENGTH, "too long", status=400)

    assert judge(trail(), fault, wider=True)[0] is None
    assert judge(trail(), fault, wider=False)[0] is fault
    assert judge(trail(fault), fault, wider=True)[0] is fault


def test_w4_loading_is_waited_out_uncharged_until_its_time_is_over() -> None:
    fault = Fault(FaultKind.LOADING, "loading", status=503)

    assert judge(trail(), fault, budget=False) == (None, False)
    assert judge(trail(), fault, loading=False)[0] is fault


def test_s3_a_slot_is_free_at_once_only_if_the_engine_is_known_to_be_done() -> None:
    assert over_at_once(Fault(FaultKind.CONNECT, "x"))
    assert over_at_once(Fault(FaultKind.DECLINED, "x", status=503))
    assert not over_at_once(Fault(FaultKind.STALLED, "x"))
    assert not over_at_once(Fault(FaultKind.STREAM_CLOSED_EARLY, "x"))
