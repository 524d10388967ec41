"""The request that a client is sending: its route, its body, its clock (H1).

Its route is looked up when the head is here, so that what will be refused is
never held. Pieces of a body are counted for the whole listener while they are.
"""

from math import inf
from typing import Final, Protocol

from router.edge.exchange import Answer, Exchange, refusal
from router.edge.sink import Sink
from router.edge.site import BODY_STEP, Site
from router.http1 import Head

BODIES_FULL: Final = refusal(
    503,
    "Too many bytes of request bodies are held.",
    error_type="server_error",
    headers=((b"retry-after", b"1"),),
)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Route(Protocol):
    """What serves the requests of one path and method."""

    reads_body: bool
    """False: a body is read and thrown away."""

    async def __call__(self, exchange: Exchange) -> None:
        """Give the reply. Returns with it at the sink, or the client gone."""


class Routes(Protocol):
    """Which route serves a request."""

    def find(self, exchange: Exchange) -> Route | Answer:
        """Give the route, or the answer that refuses the request."""


class Intake:
    """The request that is coming in on one connection, if there is one."""

    __slots__ = (
        "_began_at",
        "_grown",
        "_held",
        "_pieces",
        "_route",
        "_routes",
        "_sink",
        "_site",
        "exchange",
        "until",
    )

    def __init__(self, site: Site, routes: Routes, sink: Sink, now: float) -> None:
        """Wait for a first request, from *now*, on Trio's clock."""
        self._site = site
        self._routes = routes
        self._sink = sink
        self._route: Route | Answer | None = None
        #: Pieces of the body, and how many of their bytes the site counts.
        self._pieces: list[bytes] = []
        self._held = 0
        #: Bytes of the body since its clock was set.
        self._grown = 0
        #: When the head that is not whole yet began; inf: there is none.
        self._began_at = inf
        #: The request whose head is here and whose end is not.
        self.exchange: Exchange | None = None
        #: When more must have come.
        self.until = now + site.patience.idle_s

    @property
    def idle(self) -> bool:
        """Not a byte of a request is here."""
        return self.exchange is None and self._began_at == inf

    def begin(self, head: Head, *, is_last: bool) -> Answer | None:
        """Take a head; an answer refuses it, and its body is not to be read.

        *is_last*: nothing of the body came with it.
        """
        self.exchange = exchange = Exchange(self._site, self._sink, head)
        self._route = route = self._routes.find(exchange)
        self._began_at = inf
        self._grown = BODY_STEP
        if isinstance(route, Answer):
            # A body that is on its way is read and dropped, and the
            # connection lives on; one that waits for our word is not.
            return route if head.expect_continue else None
        if route.reads_body and not self._site.has_room_for(head.content_length or 0):
            return BODIES_FULL
        if head.expect_continue and is_last:
            self._sink.write(_CONTINUE)
        return None

    def gather(self, piece: bytes) -> Answer | None:
        """Take a piece of the body; an answer refuses it."""
        size = len(piece)
        self._grown += size
        route = self._route
        if route is None or isinstance(route, Answer) or not route.reads_body:
            return None
        site = self._site
        if not site.has_room_for(size):
            return BODIES_FULL
        self._pieces.append(piece)
        self._held += size
        site.bodies_held += size
        return None

    def whole(self) -> tuple[Exchange, Route | Answer]:
        """Hand over the request that is whole now, and who answers it.

        Its body, still counted for the site, is the exchange's to release.
        """
        exchange, route = self.exchange, self._route
        assert exchange is not None
        assert route is not None
        pieces = self._pieces
        if pieces:
            exchange.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._held = 0
        self.exchange = self._route = None
        return exchange, route

    def set_clock(self, now: float, *, has_partial: bool) -> None:
        """Say how long the next bytes may take, by what is missing (H1).

        *has_partial*: the parser holds a message that is not whole.
        """
        patience = self._site.patience
        if self.exchange is not None:
            if self._grown >= BODY_STEP:
                self._grown = 0
                self.until = now + patience.body_s
        elif not has_partial:
            self._began_at = inf
            self.until = now + patience.idle_s
        elif self._began_at == inf:
            self._began_at = now
            self.until = now + patience.head_s

    def drop(self) -> None:
        """Let go of what is held of a body that will not be whole."""
        self._site.bodies_held -= self._held
        self._held = 0
        self._pieces.clear()
