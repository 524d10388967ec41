"""Choosing a worker."""

import attrs

from router.ids import WorkerId
from router.placement import choose

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


@attrs.define
class Shown:
    """A worker as placement sees it."""

    id: WorkerId
    busy: int = 0
    limit: int = 4
    rest_until: float = 0.0
    last_grant: int = 0


def test_the_least_loaded_is_chosen_by_share_not_by_count() -> None:
    big, small = Shown(A, busy=3, limit=8), Shown(B, busy=1, limit=2)

    assert choose([small, big], (), 1.0) is big


def test_b07_ties_go_to_who_was_chosen_longest_ago() -> None:
    assert choose([Shown(A, last_grant=2), Shown(B, last_grant=1)], (), 1.0) == Shown(
        B, last_grant=1
    )


def test_a3_a_tried_worker_is_never_chosen() -> None:
    assert choose([Shown(A)], {A}, 1.0) is None


def test_s1_a_full_worker_is_never_chosen() -> None:
    assert choose([Shown(A, busy=4), Shown(B, limit=0)], (), 1.0) is None


def test_a8_a_resting_worker_is_not_chosen_until_its_rest_is_over() -> None:
    resting = Shown(A, rest_until=5.0)

    assert choose([resting], (), 4.9) is None
    assert choose([resting], (), 5.0) is resting
