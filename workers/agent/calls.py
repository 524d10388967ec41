"""What an agent knows of a router that it announces itself to."""

import logging
from typing import Final

import attrs

from workers.wire.frames import WireError
from workers.wire.opening import ByeHeard

log: Final = logging.getLogger("fencepost.workers")


@attrs.define
class Call:
    """How it went with one router."""

    address: str
    connected: bool = False
    reason: str | None = None
    """Why there was no connection the last time; None: not tried yet."""
    words: str = ""
    _told: str | None = None

    def ended(self, why: WireError, *, was_in: bool) -> None:
        """There is no connection; the log hears of each reason once in a row.

        *was_in*: there had been one for long, so its end is news.
        """
        self.connected = False
        self.reason, self.words = why.reason.value, why.words
        if self.reason == self._told and not was_in:
            return
        self._told = self.reason
        log.warning(
            "router %s %s (%s): %s; it is tried again and again",
            self.address,
            "lets us in no more" if isinstance(why, ByeHeard) else "is not connected",
            self.reason,
            self.words,
        )
