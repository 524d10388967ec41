"""How large the sized tests are: a share of what a release must show (T8).

``FENCEPOST_DEEP`` is that share: 1 before a release, 0.05 in CI, and unset
(0) in the runs between, which only show that the tests work.
"""

import os


def size(at_release: int, *, least: int) -> int:
    """Scale a count by FENCEPOST_DEEP, to not less than *least*."""
    share = float(os.environ.get("FENCEPOST_DEEP") or 0)
    return max(least, int(at_release * share))
