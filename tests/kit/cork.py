"""A cork for tests, in which no bug is kept to one client."""

import pytest

from router.cork import Cork


def strict_cork() -> Cork:
    """Make one that fails the test at the first bug."""
    return Cork(lambda where, bug: pytest.fail(f"{where}: {bug!r}"))
