"""Show one seed again, line by line: what happened, the breaches, the trace's hash::

python -m tests.simulation.far_replay SEED [REQUESTS]
"""

import sys
from collections.abc import Sequence

from tests.simulation.far_world import play


def main(arguments: Sequence[str]) -> None:
    """Play the seed in *arguments*."""
    seed, requests = int(arguments[0]), int((*arguments, "400")[1])
    books = play(seed, requests=requests, tell=tell)
    for line in (*books.breaches, dict(books.outcomes), dict(books.faults)):
        tell(str(line))
    tell(books.trace.hexdigest())


def tell(line: str) -> None:
    """Write one line."""
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
