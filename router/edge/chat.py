"""The OpenAI endpoints that take a job: chat, completions, embeddings (O1, O2)."""

from router.edge.core import Core
from router.edge.exchange import Exchange
from router.edge.jobs import JobRoute, Pace
from router.edge.receivers import EventStream, WholeReply
from router.openai.document import DocumentReply
from router.openai.reply import ReplyAggregate, StreamEncoder
from router.openai.request import ChatRequest, parse_chat
from router.openai.text_reply import TextAggregate, TextEncoder
from router.openai.text_request import TextRequest, parse_completion, parse_embeddings


def chat_route(core: Core) -> JobRoute[ChatRequest]:
    """Make ``POST /v1/chat/completions``."""
    pace = Pace(core)

    def receiver(exchange: Exchange, asked: ChatRequest) -> EventStream | WholeReply:
        reply_id = f"chatcmpl-{exchange.request}"
        model, created = asked.job.model, exchange.site.now_unix
        if not asked.stream:
            return WholeReply(exchange, ReplyAggregate(reply_id, model, created))
        encoder = StreamEncoder(
            reply_id, model, created, include_usage=asked.include_usage
        )
        return EventStream(exchange, encoder, pace.commit_after_s, pace.keepalive_s)

    return JobRoute(core, parse_chat, receiver)


def completions_route(core: Core) -> JobRoute[TextRequest]:
    """Make ``POST /v1/completions``."""
    pace = Pace(core)

    def receiver(exchange: Exchange, asked: TextRequest) -> EventStream | WholeReply:
        reply_id = f"cmpl-{exchange.request}"
        model, created = asked.job.model, exchange.site.now_unix
        if not asked.stream:
            return WholeReply(exchange, TextAggregate(reply_id, model, created))
        encoder = TextEncoder(
            reply_id, model, created, include_usage=asked.include_usage
        )
        return EventStream(exchange, encoder, pace.commit_after_s, pace.keepalive_s)

    return JobRoute(core, parse_completion, receiver)


def embeddings_route(core: Core) -> JobRoute[TextRequest]:
    """Make ``POST /v1/embeddings``."""

    def receiver(exchange: Exchange, asked: TextRequest) -> WholeReply:
        return WholeReply(exchange, DocumentReply(asked.job.model))

    return JobRoute(core, parse_embeddings, receiver)
