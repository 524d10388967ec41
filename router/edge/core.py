"""What the edge asks of a router, as protocols; ``router.engine.Router`` is one.

Named here so that the edge runs over anything that keeps these promises, a
double in its own tests included.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Protocol

from router.cork import Cork
from router.errors import Fault
from router.ids import RequestId
from router.messages import Job
from router.ports import Receiver
from router.settings import Settings
from router.tally import Tally


class Card(Protocol):
    """A model, as a client may ask for it."""

    @property
    def id(self) -> str:
        """The name a client sends."""

    @property
    def created(self) -> int:
        """Unix seconds."""

    @property
    def owned_by(self) -> str:
        """Whose model it is, for show."""


class Core(Protocol):
    """A running router, seen from the edge. Its async calls are checkpoints."""

    settings: Settings
    tally: Tally
    cork: Cork

    @property
    def ready(self) -> bool:
        """Can at least one worker serve?"""

    def new_request_id(self) -> RequestId:
        """Make a name for one more request."""

    def resolve(self, model: str) -> str | None:
        """Give the table's name for what a client calls *model*; None: unknown.

        Raises:
            RequestFailed: models may still be unknown (O6); answer with its fault.
        """

    def model_cards(self) -> Sequence[Card]:
        """Every name that a client may send (O2)."""

    async def serve(
        self,
        job: Job,
        receiver: Receiver,
        *,
        request: RequestId,
        client_ref: str | None = None,
    ) -> None:
        """Have *job* done, its answer given to *receiver*.

        Returns once the receiver was told ``finish`` or ``fail``, or the
        client is gone. Cancelling it says that the client is gone.
        """

    async def count_tokens(self, job: Job) -> int | None:
        """Count the prompt tokens of a chat *job*, images left out; None: no
        worker said. A checkpoint that takes no slot (M8)."""

    def as_sent(self, job: Job) -> Job:
        """Give *job* as workers get it: with the tools that its model is told.

        Raises:
            RequestFailed: as ``serve`` would fail it for what it asks.
        """

    def status(self) -> Mapping[str, Any]:
        """All that an operator may see, as JSON values."""

    def receipt(self, request: str) -> Mapping[str, Any] | None:
        """What became of one request (X3); None: not known."""

    def drain(self, worker: str, *, within_s: float = inf) -> bool:
        """Give *worker* no new work, and cut what runs after *within_s* seconds;
        False: no such worker."""

    def undrain(self, worker: str) -> bool:
        """Give *worker* work again; False: no such worker."""

    def cancel(self, request: str) -> bool:
        """End a live request; False: it is not alive."""

    def refuse_new(self, fault: Fault) -> None:
        """Fail what waits, and all that comes, with *fault* (D3)."""

    def cut_all(self, fault: Fault) -> None:
        """Fail every live request with *fault* (D3)."""


class Log(Protocol):
    """The part of a structlog logger that the edge uses."""

    def warning(self, event: str, /, **fields: Any) -> Any:
        """Say what an operator may want to look at."""

    def error(self, event: str, /, **fields: Any) -> Any:
        """Say what went wrong here."""
