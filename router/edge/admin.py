"""The admin listener (D4): metrics, status, and the operator's commands.

Never on the listener of clients. A browser that some page makes ask us is
refused: it says where it comes from, and no tool of ours does.
"""

from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import attrs

from router.edge.core import Core, Log
from router.edge.exchange import Answer, Exchange, refusal
from router.edge.metrics import CONTENT_TYPE, Metrics
from router.edge.routes import Endpoint, Instant, Probes, RouteTable, json_answer
from router.edge.server import Edge, default_log
from router.edge.site import Patience, Site
from router.settings import ServerSettings

#: An admin request has no body to speak of.
_BODY_MAX: Final = 64 * 1024
_CONNECTIONS_MAX: Final = 64

CROSS_SITE: Final = refusal(403, "Commands are not taken from web pages.")
UNKNOWN: Final = refusal(404, "No such name.")
DONE: Final = json_answer({"done": True})


class Admin:
    """What the admin listener answers, over one router."""

    def __init__(self, core: Core, metrics: Metrics) -> None:
        """Ask *core*; all at once, from memory."""
        self._core = core
        self._metrics = metrics

    def metrics(self, _: Exchange) -> Answer:
        """Give ``/metrics`` (X1)."""
        return Answer(200, self._metrics.render(), CONTENT_TYPE)

    def status(self, _: Exchange) -> Answer:
        """Give ``/status``: everything at this moment."""
        return json_answer(self._core.status())

    def receipt(self, exchange: Exchange) -> Answer:
        """Give ``/status/requests/{id}`` (X3), by our own id."""
        receipt = self._core.receipt(exchange.tail)
        return UNKNOWN if receipt is None else json_answer(receipt)

    def drain(self, exchange: Exchange) -> Answer:
        """Do ``POST /drain/{worker}``, with ``?within_s=`` a deadline (L5)."""
        try:
            within_s = _seconds(exchange.head.query)
        except ValueError:
            return refusal(400, "within_s needs seconds, 0 or more.")
        return _done(exchange, partial(self._core.drain, within_s=within_s))

    def undrain(self, exchange: Exchange) -> Answer:
        """Do ``POST /undrain/{worker}``."""
        return _done(exchange, self._core.undrain)

    def cancel(self, exchange: Exchange) -> Answer:
        """Do ``POST /cancel/{request}``."""
        return _done(exchange, self._core.cancel)


def _seconds(query: bytes) -> float:
    """Read ``within_s``; inf where it is not there.

    Raises:
        ValueError: it is no number, or below 0.
    """
    values = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    seconds = float(values.get("within_s", ["inf"])[-1])
    if not seconds >= 0:
        raise ValueError
    return seconds


def _done(exchange: Exchange, command: Callable[[str], bool]) -> Answer:
    if from_a_page(exchange):
        return CROSS_SITE
    return DONE if command(exchange.tail) else UNKNOWN


def from_a_page(exchange: Exchange) -> bool:
    """Tell whether a browser sent this on behalf of some page."""
    head = exchange.head
    return head.get(b"origin") is not None or head.get(b"sec-fetch-site") is not None


def admin_edge(
    router: Core,
    *,
    log: Log | None = None,
    patience: Patience | None = None,
) -> Edge:
    """Make the edge for operators of *router*; its listeners are the caller's."""
    site = Site(
        attrs.evolve(
            ServerSettings(),
            body_max_bytes=_BODY_MAX,
            connections_max=_CONNECTIONS_MAX,
        ),
        router.tally,
        router.cork,
        router.new_request_id,
        default_log() if log is None else log,
        Patience() if patience is None else patience,
    )
    admin = Admin(router, Metrics(router))
    probes = Probes(router, site)
    routes = RouteTable(
        {
            "/metrics": Endpoint({"GET": Instant(admin.metrics)}),
            "/status": Endpoint({"GET": Instant(admin.status)}),
            "/healthz": Endpoint({"GET": Instant(probes.healthz)}),
            "/readyz": Endpoint({"GET": Instant(probes.readyz)}),
        },
        [
            ("/status/requests/", Endpoint({"GET": Instant(admin.receipt)})),
            ("/drain/", Endpoint({"POST": Instant(admin.drain)})),
            ("/undrain/", Endpoint({"POST": Instant(admin.undrain)})),
            ("/cancel/", Endpoint({"POST": Instant(admin.cancel)})),
        ],
    )
    return Edge(site, routes)
