"""The promise, with routers and agents over a bad network (T2, T8.1).

Both ends are the real ones, on logical time, over byte streams; what a byte
stream cannot do to a message (lose, double, swap) is ``tests.kit.wire_world``'s.
"""

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from tests.kit.deep import size
from tests.simulation.far_clients import Books
from tests.simulation.far_layout import ROUTERS
from tests.simulation.far_trouble import TROUBLES
from tests.simulation.far_world import STARVED_S, play, replay
from tests.simulation.world import BEHAVIOURS

PER_SEED = 400
SEEDS = range(size(100_000, least=800) // PER_SEED)


@cache
def played(seed: int) -> Books:
    return play(seed, requests=PER_SEED)


@pytest.mark.deep
@pytest.mark.parametrize("seed", SEEDS)
def test_t2_no_seed_breaks_the_promise_over_the_wire(seed: int) -> None:
    books = played(seed)

    assert books.breaches == [], replay(seed, PER_SEED)
    # One more at each router, when all is well again.
    assert sum(books.outcomes.values()) == PER_SEED + ROUTERS


@pytest.mark.slow
def test_t2_a_seed_of_agents_replays_in_another_process() -> None:
    """Nothing of it hangs on hashes, addresses, threads or a wall clock."""
    here = play(11, requests=60).trace.hexdigest()
    there = subprocess.run(
        [sys.executable, *replay(11, 60).split()[1:]],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert there.stdout.split()[-1] == here
    assert play(12, requests=60).trace.hexdigest() != here


@pytest.mark.deep
def test_t2_troubles_of_many_kinds_are_drawn() -> None:
    faults: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in SEEDS[:2]:
        books = played(seed)
        faults += books.faults
        outcomes += books.outcomes

    assert set(BEHAVIOURS) <= set(faults)
    assert len(set(TROUBLES) & set(faults)) >= 15
    assert {"whole", "left", "stalled", "stream_closed_early"} <= set(outcomes)
    assert outcomes["whole"] > PER_SEED / 2


@pytest.mark.slow
def test_t2_without_faults_every_answer_over_the_wire_is_whole() -> None:
    books = play(5, requests=150, faulty=False)

    assert books.outcomes == {"whole": 150 + ROUTERS}
    assert books.breaches == []


@pytest.mark.slow
def test_p3_a_router_with_a_long_queue_starves_no_other() -> None:
    books = play(1, requests=180, faulty=False, flooded=True)

    assert books.outcomes == {"whole": 180 + ROUTERS}
    assert books.breaches == []
    # Its own queue is that long.
    assert books.waited["r0"] > 20
    assert books.waited["r1"] < STARVED_S
