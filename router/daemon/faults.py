"""How a daemon can fail as a whole."""

from router.errors import RouterError


class StartFailed(RouterError):
    """The daemon can't start; the text is one line and says what to do (D5)."""


class Crashed(RouterError):
    """A broken invariant ended the daemon (L1); the log says where."""

    def __init__(self) -> None:
        """Say no more: what went wrong may hold what clients said (X2)."""
        super().__init__("a bug ended this process: its log says where")
