"""Which route serves which request, and the routes that answer at once.

A path is looked up in a table, as it came: nothing is decoded or joined to
find a route, and ``model`` is only ever looked up (O6, B119).
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from router.checks import shown
from router.edge.chat import chat_route, completions_route, embeddings_route
from router.edge.core import Card, Core
from router.edge.dialect import ANTHROPIC, OPENAI, Dialect, dialect_of
from router.edge.exchange import JSON, Answer, Exchange, failure, refusal
from router.edge.intake import Route
from router.edge.keys import Keys
from router.edge.messages import CountRoute, messages_route
from router.edge.site import Site
from router.errors import Fault, FaultKind
from router.http1 import Head

_encode: Final = msgspec.json.Encoder().encode

UNKNOWN_PATH: Final = refusal(404, "There is nothing at this path.")
NOT_JSON: Final = refusal(415, "Send the body as application/json.")
NO_KEY: Final = refusal(
    401,
    "A valid API key is needed.",
    code="invalid_api_key",
    headers=((b"www-authenticate", b"Bearer"),),
)


def json_answer(value: object, status: int = 200) -> Answer:
    """Give *value* as a JSON reply."""
    return Answer(status, _encode(value))


class Instant:
    """A route that answers at once, from what is in memory."""

    reads_body = False

    def __init__(self, answer: Callable[[Exchange], Answer]) -> None:
        """*answer* neither waits nor raises for what a client sends."""
        self._answer = answer

    async def __call__(self, exchange: Exchange) -> None:
        """Reply. Not a checkpoint: the connection takes care of turns."""
        exchange.reply(self._answer(exchange))


class Endpoint:
    """All routes of one path, by method."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        is_open: bool = False,
        dialect: Dialect | None = OPENAI,
    ) -> None:
        """HEAD comes with GET.

        *is_open*: no client key is asked for. *dialect*: in whose words it fails;
        None: in those of the client that asks, since both dialects have the path.
        """
        self.dialect = dialect
        self.routes = dict(routes)
        if "GET" in routes:
            self.routes["HEAD"] = routes["GET"]
        self.is_open = is_open
        allow = ", ".join(sorted(self.routes)).encode()
        self.wrong_method = refusal(
            405, "This path does not take that method.", headers=((b"allow", allow),)
        )


class RouteTable:
    """Finds the route of a request, or the answer that refuses it."""

    def __init__(
        self,
        exact: Mapping[str, Endpoint],
        tails: Iterable[tuple[str, Endpoint]] = (),
        keys: Keys | None = None,
    ) -> None:
        """Hold the table.

        Args:
            exact: whole paths.
            tails: prefixes that end in ``/``, each followed by a nonempty tail.
            keys: asked of every request but those to open endpoints; None: no
                keys are needed. May be replaced at any time.
        """
        self._exact = dict(exact)
        self._tails = tuple(tails)
        self.keys = keys

    def find(self, exchange: Exchange) -> Route | Answer:
        """Give the route, or a refusal. Sets ``exchange.tail`` where there is one."""
        head = exchange.head
        endpoint = self._exact.get(head.path) or self._with_tail(exchange)
        dialect = None if endpoint is None else endpoint.dialect
        if dialect is None:
            dialect = dialect_of(head.path, head.get(b"anthropic-version"))
        exchange.dialect = dialect
        if endpoint is None:
            return UNKNOWN_PATH
        route = endpoint.routes.get(head.method)
        if route is None:
            return endpoint.wrong_method
        keys = None if endpoint.is_open else self.keys
        if keys is not None and not keys.admit(head):
            return NO_KEY
        if route.reads_body:
            return _unreadable(head) or route
        return route

    def _with_tail(self, exchange: Exchange) -> Endpoint | None:
        path = exchange.head.path
        for prefix, endpoint in self._tails:
            if path.startswith(prefix) and len(path) > len(prefix):
                exchange.tail = unquote(path[len(prefix) :])
                return endpoint
        return None


def _unreadable(head: Head) -> Answer | None:
    """Refuse a body that is said to be something else than plain JSON."""
    if not _is_json(head):
        return NOT_JSON
    coding = head.get(b"content-encoding")
    if coding is None or coding.lower() in (b"", b"identity"):
        return None
    return refusal(
        415,
        f"Content-Encoding '{shown(coding.decode('latin-1'))}' is not read here:"
        " send the body as it is.",
        # RFC 9110 12.5.3: which codings are read.
        headers=((b"accept-encoding", b"identity"),),
    )


def _is_json(head: Head) -> bool:
    """Tell whether the body is said to be JSON; silence counts as yes."""
    said = head.get(b"content-type")
    if said is None or said == JSON:
        return True
    media = said.partition(b";")[0].strip().lower()
    return media == JSON or media.endswith(b"+json")


def api_routes(core: Core, site: Site, prefixes: Iterable[str]) -> RouteTable:
    """Make the table of the client listener, once under each prefix."""
    probes = Probes(core, site)
    models = Models(core)
    paths = {
        "/v1/chat/completions": Endpoint({"POST": chat_route(core)}),
        "/v1/completions": Endpoint({"POST": completions_route(core)}),
        "/v1/embeddings": Endpoint({"POST": embeddings_route(core)}),
        "/v1/messages": Endpoint({"POST": messages_route(core)}, dialect=ANTHROPIC),
        "/v1/messages/count_tokens": Endpoint(
            {"POST": CountRoute(core)}, dialect=ANTHROPIC
        ),
        "/v1/models": Endpoint({"GET": Instant(models.every)}, dialect=None),
        "/healthz": Endpoint({"GET": Instant(probes.healthz)}, is_open=True),
        "/readyz": Endpoint({"GET": Instant(probes.readyz)}, is_open=True),
    }
    one_model = Endpoint({"GET": Instant(models.one)}, dialect=None)
    roots = [prefix.rstrip("/") for prefix in prefixes]
    return RouteTable(
        {root + path: endpoint for root in roots for path, endpoint in paths.items()},
        [(f"{root}/v1/models/", one_model) for root in roots],
    )


class Probes:
    """Answers for those who watch the process (D4)."""

    def __init__(self, core: Core, site: Site) -> None:
        """Look at *core* for workers and at *site* for a drain."""
        self._core = core
        self._site = site

    def healthz(self, _: Exchange) -> Answer:
        """Say that the process is alive."""
        return json_answer({"status": "ok"})

    def readyz(self, _: Exchange) -> Answer:
        """Say whether new work is welcome."""
        if self._site.draining:
            return json_answer({"status": "draining"}, 503)
        if not self._core.ready:
            return json_answer({"status": "no worker is ready"}, 503)
        return json_answer({"status": "ready"})


class Models:
    """Answers for clients that ask what they may ask for (O2)."""

    def __init__(self, core: Core) -> None:
        """List what *core* serves."""
        self._core = core

    def every(self, exchange: Exchange) -> Answer:
        """List all models."""
        found = self._core.model_cards()
        if exchange.dialect is ANTHROPIC:
            names = [card.id for card in found]
            page = {
                "data": [_shown_to_anthropic(card) for card in found],
                "has_more": False,
                "first_id": names[0] if names else None,
                "last_id": names[-1] if names else None,
            }
            return json_answer(page)
        return json_answer({"object": "list", "data": [_shown(c) for c in found]})

    def one(self, exchange: Exchange) -> Answer:
        """Describe the model that the path's tail names."""
        is_anthropic = exchange.dialect is ANTHROPIC
        show = _shown_to_anthropic if is_anthropic else _shown
        for card in self._core.model_cards():
            if card.id == exchange.tail:
                return json_answer(show(card))
        # The name came from the client: it is not said back.
        return failure(Fault(FaultKind.MODEL_NOT_FOUND, "No such model."))


def _shown(card: Card) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
    }


def _shown_to_anthropic(card: Card) -> dict[str, Any]:
    born = datetime.fromtimestamp(card.created, UTC)
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "lifecycle": "active",
        "created_at": born.isoformat().replace("+00:00", "Z"),
    }
