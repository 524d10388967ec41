"""The Anthropic endpoints: messages, and the count of their tokens (M1, M8)."""

import msgspec

from router.anthropic.estimate import tokens_at_most, tokens_of_images
from router.anthropic.reply import MessageAggregate
from router.anthropic.request import MessagesRequest, parse_count, parse_messages
from router.anthropic.stream import MessageEncoder
from router.edge.core import Core
from router.edge.exchange import Answer, Exchange
from router.edge.jobs import JobRoute, Pace, parsed
from router.edge.receivers import EventStream, WholeReply

#: What ``thinking_signature = "opaque"`` puts before a request's own number.
SIGNATURE = "rt1."


def messages_route(core: Core) -> JobRoute[MessagesRequest]:
    """Make ``POST /v1/messages``."""
    pace = Pace(core)
    signs = core.settings.router.thinking_signature == "opaque"

    def receiver(
        exchange: Exchange, asked: MessagesRequest
    ) -> EventStream | WholeReply:
        request, job = exchange.request, asked.job
        number = request.removeprefix("req_")
        signature = f"{SIGNATURE}{number}" if signs else None
        stops = job.params.stop
        if not asked.stream:
            aggregate = MessageAggregate(
                f"msg_{number}", job.model, stops=stops, signature=signature
            )
            return WholeReply(exchange, aggregate)
        encoder = MessageEncoder(
            f"msg_{number}", job.model, request, stops=stops, signature=signature
        )
        return EventStream(exchange, encoder, pace.commit_after_s, pace.keepalive_s)

    return JobRoute(core, parse_messages, receiver)


class CountRoute:
    """``POST /v1/messages/count_tokens``, over one router; it takes no slot."""

    reads_body = True

    def __init__(self, core: Core) -> None:
        """*core* asks the workers."""
        self._core = core

    async def __call__(self, exchange: Exchange) -> None:
        """Count one prompt. A checkpoint, unless it is refused.

        By the worker's tokenizer, and an upper bound for its images; where no
        worker says, an upper bound for all of it.
        """
        job = parsed(exchange, self._core, parse_count)
        if job is None or exchange.hung_up:
            return
        counted = await self._core.count_tokens(job)
        if counted is None:
            counted = tokens_at_most(self._core.as_sent(job))
        else:
            counted += tokens_of_images(job)
        body = msgspec.json.encode({"input_tokens": counted})
        exchange.reply(Answer(200, body))
