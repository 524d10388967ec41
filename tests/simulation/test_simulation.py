"""The promise, over seeded worlds of faults (T2, T8.1)."""

import pytest

from tests.kit.deep import size
from tests.simulation.world import BEHAVIOURS, play

PER_SEED = 200
SEEDS = range(size(100_000, least=1_600) // PER_SEED)


@pytest.mark.deep
@pytest.mark.parametrize("seed", SEEDS)
def test_t2_no_seed_breaks_the_promise(seed: int) -> None:
    books = play(seed, requests=PER_SEED)

    assert books.breaches == []
    assert sum(books.outcomes.values()) == PER_SEED


def test_t2_the_same_seed_gives_the_same_trace() -> None:
    one, two = (play(7, requests=60) for _ in range(2))

    assert one.trace.hexdigest() == two.trace.hexdigest()
    assert one.outcomes == two.outcomes


def test_t2_another_seed_gives_another_trace() -> None:
    assert (
        play(1, requests=20).trace.hexdigest() != play(2, requests=20).trace.hexdigest()
    )


def test_t2_ten_kinds_of_fault_and_more_are_drawn() -> None:
    books = play(3, requests=200)

    assert set(BEHAVIOURS) <= set(books.faults)
    assert len(books.faults) >= 10
    assert books.outcomes["whole"] > 50


def test_t2_without_faults_everything_finishes() -> None:
    books = play(5, requests=200, faulty=False)

    assert books.outcomes == {"whole": 200}
    assert books.breaches == []
