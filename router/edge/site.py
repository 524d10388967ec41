"""What all connections of one listener share: limits, counts, the wall clock."""

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Final

import attrs

from router.cork import Cork
from router.edge.core import Log
from router.ids import RequestId
from router.settings import ServerSettings
from router.tally import Tally


@attrs.frozen
class Patience:
    """How long the edge waits for a client's bytes, in seconds (H1)."""

    head_s: float = 10.0
    """For a whole head, from its first byte."""
    body_s: float = 30.0
    """For the next ``BODY_STEP`` bytes of a body."""
    idle_s: float = 75.0
    """Between requests: longer than the 60 s of common proxies, so that they
    are the ones to close."""
    linger_s: float = 1.0
    """For the client to read an unclean end before its socket is closed."""
    sweep_s: float = 0.5
    """Between two looks at the clocks above: how late a cut may come."""


#: Bytes of a body that count as progress; a trickle does not.
BODY_STEP: Final = 1024


class Site:
    """The shared part of one listener's connections."""

    def __init__(
        self,
        settings: ServerSettings,
        tally: Tally,
        cork: Cork,
        new_request_id: Callable[[], RequestId],
        log: Log,
        patience: Patience,
    ) -> None:
        """Nothing here is a global: two routers keep apart (E3)."""
        self.settings = settings
        self.tally = tally
        self.cork = cork
        self.new_request_id = new_request_id
        self.log = log
        self.patience = patience
        self.stall_s = settings.client_stall_ms / 1000
        #: Replies say ``connection: close``, readiness is refused (D3).
        self.draining = False
        #: Bytes of request bodies held by all connections (H1).
        self.bodies_held = 0
        #: Unix seconds and the Date field, at most one sweep old.
        self.now_unix = 0
        self.date = b""
        self.read_wall_clock()

    def read_wall_clock(self) -> None:
        """Renew what replies say of the time of day."""
        now = datetime.now(UTC)
        self.now_unix = int(now.timestamp())
        self.date = b"date: %b\r\n" % format_datetime(now, usegmt=True).encode()

    def has_room_for(self, body: int) -> bool:
        """Tell whether *body* more bytes of request bodies may be held."""
        return self.bodies_held + body <= self.settings.bodies_max_bytes

    def refused(self, status: int) -> None:
        """Count a request that reached no route."""
        self.tally.refused[str(status)] += 1

    def bug(self, place: str, bug: BaseException) -> None:
        """Count and log our own fault, once, where it was kept to one client (L1)."""
        self.tally.bugs[place] += 1
        with contextlib.suppress(Exception):  # a log that fails stops nobody
            self.log.error("bug", place=place, exc_info=bug)

    def warn(self, event: str, **fields: object) -> None:
        """Log what an operator may want to look at; a failing log stops nobody."""
        with contextlib.suppress(Exception):
            self.log.warning(event, **fields)
