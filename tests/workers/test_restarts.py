from hypothesis import given
from hypothesis import strategies as st

from workers.restarts import BACKOFF_S, Restarts


def test_l8_each_restart_of_a_window_waits_twice_as_long_up_to_a_cap() -> None:
    restarts = Restarts(9, 1_000.0)

    waits = [restarts.ended(float(n)) for n in range(9)]

    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_l8_one_more_than_the_most_is_a_crash_loop() -> None:
    restarts = Restarts(2, 60.0)

    assert [restarts.ended(t) for t in (0.0, 1.0, 2.0)] == [0.5, 1.0, None]
    assert restarts.total == 2


def test_l8_a_window_later_it_is_forgotten() -> None:
    restarts = Restarts(1, 60.0)
    restarts.ended(0.0)

    assert restarts.ended(59.9) is None
    assert restarts.ended(60.0) == 0.5
    assert restarts.total == 2


def test_l8_no_restart_may_be_none() -> None:
    assert Restarts(0, 60.0).ended(0.0) is None


def test_l8_who_is_forgiven_begins_anew() -> None:
    restarts = Restarts(1, 60.0)
    restarts.ended(0.0)
    restarts.forgive()

    assert restarts.ended(1.0) == 0.5


@given(
    st.integers(0, 5),
    st.lists(st.floats(0, 30), max_size=40),
)
def test_l8_no_window_ever_holds_more_than_the_most(
    most: int, gaps: list[float]
) -> None:
    restarts = Restarts(most, 60.0)
    now = 0.0
    granted: list[float] = []
    for gap in gaps:
        now += gap
        wait = restarts.ended(now)
        if wait is not None:
            assert BACKOFF_S[0] <= wait <= BACKOFF_S[1]
            granted.append(now)

    for at in granted:
        assert sum(at - 60.0 < other <= at for other in granted) <= most
