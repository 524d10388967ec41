"""The retry budget."""

from hypothesis import given
from hypothesis import strategies as st

from router.budget import FLOOR, SHARE, WINDOW_S, RetryBudget


def test_a8_a_quiet_router_may_still_retry_up_to_the_floor() -> None:
    budget = RetryBudget()

    assert [budget.take(0.0) for _ in range(FLOOR + 1)] == [True] * FLOOR + [False]


def test_a8_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.request(5.0)

    assert sum(budget.take(5.5) for _ in range(100)) == 20


def test_a8_what_was_spent_comes_back_after_the_window() -> None:
    budget = RetryBudget()
    for _ in range(FLOOR):
        budget.take(0.0)

    assert not budget.take(WINDOW_S - 0.1)
    assert budget.take(WINDOW_S)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 3.0), st.sampled_from(["request", "retry"])),
        max_size=300,
    )
)
def test_a8_the_share_is_kept_over_any_window(
    steps: list[tuple[float, str]],
) -> None:
    budget, now = RetryBudget(), 0.0
    requests: list[float] = []
    retries: list[float] = []
    for gap, what in steps:
        now += gap
        if what == "request":
            budget.request(now)
            requests.append(now)
        elif budget.take(now):
            retries.append(now)
            spent = sum(at > now - WINDOW_S for at in retries)
            asked = sum(at >= now - WINDOW_S for at in requests)
            assert spent <= max(FLOOR, int(SHARE * asked))
