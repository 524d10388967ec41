"""What can keep a daemon from starting."""

from router.errors import RouterError


class StartFailed(RouterError):
    """The daemon can't start; the text is one line and says what to do (D5)."""
