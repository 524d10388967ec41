"""Routes that have a router do a job: parse, serve, and nothing between.

One class serves every endpoint, so that admission, fencing and failover can't
differ between them; an endpoint brings its parser and its receivers.
"""

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import attrs

from router.checks import RequestInvalid
from router.edge.core import Core
from router.edge.exchange import INTERNAL_FAULT, Exchange
from router.edge.receivers import EventStream, WholeReply
from router.edge.trace import trace_of
from router.errors import LocalError, RequestFailed
from router.messages import Endpoint, Job

#: What the prompt of each endpoint is called.
_PROMPT_FIELDS: Final = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
}

Resolve = Callable[[str], str | None]


class Asked(Protocol):
    """One accepted request."""

    @property
    def job(self) -> Job:
        """What is to be done."""


AskedT = TypeVar("AskedT", bound=Asked)
ParsedT = TypeVar("ParsedT")

#: Body and model table in, request out; raises RequestInvalid, and what
#: ``Core.resolve`` raises.
Parser = Callable[[bytes, Resolve], ParsedT]


def parsed(
    exchange: Exchange, core: Core, parse: Callable[[bytes, Resolve], ParsedT]
) -> ParsedT | None:
    """Parse the body, and let go of it; None: the client has its reply already."""
    try:
        return parse(exchange.body, core.resolve)
    except RequestInvalid as wrong:
        exchange.reply(exchange.invalid(wrong))
    except RequestFailed as failed:
        exchange.reply(exchange.failure(failed.fault))
    except LocalError as bug:
        # Met while reading one client's bytes: theirs alone (L1).
        exchange.site.bug("edge.parse", bug)
        exchange.reply(exchange.failure(INTERNAL_FAULT))
    finally:
        exchange.release_body()
    return None


class JobRoute(Generic[AskedT]):
    """One endpoint, over one router."""

    reads_body = True

    def __init__(
        self,
        core: Core,
        parse: Callable[[bytes, Resolve], AskedT],
        receiver_of: Callable[[Exchange, AskedT], EventStream | WholeReply],
    ) -> None:
        """*core* resolves models and serves jobs."""
        self._core = core
        self._parse = parse
        self._receiver_of = receiver_of

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one request. A checkpoint, unless it is refused.

        Returns with the reply with the sink, or the client gone.
        """
        asked = parsed(exchange, self._core, self._parse)
        if asked is None:
            return
        if exchange.hung_up:
            # It left before there was anything to end (A7).
            exchange.site.tally.disconnects["received"] += 1
            return
        job, trace = asked.job, trace_of(exchange.head)
        if trace is not None:
            job = attrs.evolve(job, trace=trace)
        exchange.prompt_field = _PROMPT_FIELDS[job.endpoint]
        receiver = self._receiver_of(exchange, asked)
        exchange.receiver = receiver
        client_id = exchange.client_id
        await self._core.serve(
            job,
            receiver,
            request=exchange.request,
            client_ref=client_id.decode() if client_id else None,
        )


class Pace:
    """When streams commit and keep alive; the same for all endpoints."""

    def __init__(self, core: Core) -> None:
        """Take the settings of *core*."""
        settings = core.settings.router
        self.commit_after_s = settings.commit_after_ms / 1000
        self.keepalive_s = settings.keepalive_ms / 1000
