"""``POST /v1/chat/completions``: the route and its two receivers.

A receiver is an encoder and the client's sink in one. It writes from inside
the worker's chain of calls, so nothing here awaits, and nothing raises for
what a client does. A head is held until the first delta or ``commit_after_ms``,
so that overload and early loss are real statuses (O4).
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

import trio

from router.edge.core import Core
from router.edge.exchange import INTERNAL_FAULT, Answer, Exchange, failure, said
from router.errors import Fault, LocalError, RequestFailed
from router.ids import WorkerId
from router.messages import Delta, Finished
from router.openai.errors import reply_of_invalid
from router.openai.reply import KEEPALIVE, ReplyAggregate, StreamEncoder
from router.openai.request import RequestInvalid, parse_chat
from router.ports import Taken

_LAST_CHUNK: Final = b"0\r\n\r\n"


class _Receiver:
    """What both kinds of reply do alike."""

    __slots__ = ("_attempts", "_exchange", "_on_gone", "_sink", "_worker", "ended")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._sink = exchange.sink
        self._on_gone: Callable[[], None] | None = None
        self._worker: WorkerId | None = None
        self._attempts = 0
        #: Finished, failed, or the client is gone: nothing more is taken.
        self.ended = False

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """Take the engine's calls for room and for a client that left."""
        self._sink.on_room = on_room
        self._on_gone = on_gone

    def routed(self, worker: WorkerId, attempts: int) -> None:
        """Note where the job went, for the reply's head (X3)."""
        self._worker = worker
        self._attempts = attempts

    def gone(self) -> None:
        """Tell the engine that the client left, once; its work ends here."""
        if self.ended:
            return
        self.ended = True
        if self._on_gone is not None:
            self._on_gone()

    def _refuse(self, fault: Fault) -> None:
        """Reply with *fault* as a real status: no head is out yet."""
        answer = failure(fault)
        self._exchange.reply_routed(answer, self._worker, self._attempts)


class ChatStream(_Receiver):
    """A reply as server-sent events, one HTTP chunk a write (O3)."""

    __slots__ = (
        "_chunked",
        "_commit_at",
        "_encoder",
        "_head_out",
        "_keepalive_s",
        "_wrote_at",
    )

    buffered = False

    def __init__(
        self,
        exchange: Exchange,
        encoder: StreamEncoder,
        commit_after_s: float,
        keepalive_s: float,
    ) -> None:
        """*commit_after_s* counts from the request's arrival; a *keepalive_s*
        of 0 is off."""
        super().__init__(exchange)
        self._encoder = encoder
        self._commit_at = exchange.arrived + commit_after_s
        self._keepalive_s = keepalive_s
        self._chunked = exchange.head.minor != 0
        self._head_out = False
        self._wrote_at = 0.0

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """Write all of *deltas* as events in one chunk."""
        if self.ended:
            return Taken.GONE
        return self._write(self._encoder.deltas(deltas))

    def finish(self, finished: Finished) -> Taken:
        """Write the finish chunk, usage if asked, ``[DONE]`` and the end."""
        if self.ended:
            return Taken.GONE
        self.ended = True
        self._exchange.whole = True
        return self._write(self._encoder.finish(finished), last=True)

    def fail(self, fault: Fault) -> None:
        """Reply with a status, or end the stream uncleanly (A5).

        After the head: one error frame, no ``[DONE]``, no terminating chunk.
        """
        if self.ended:
            return
        self.ended = True
        if self._head_out:
            self._write(self._encoder.error(fault))
        else:
            self._refuse(fault)

    def restart(self) -> None:
        """Nothing is gathered here, and nothing is out before commit."""

    def due(self, now: float) -> float:
        """Give when the head, a keepalive or a look at the client is due."""
        if self.ended:
            return inf
        if not self._head_out:
            return self._commit_at
        stall_s = self._exchange.site.stall_s
        if self._sink.held:
            return self._sink.moved_at + stall_s
        if self._keepalive_s:
            return self._wrote_at + self._keepalive_s
        return now + stall_s

    def tick(self, now: float) -> Taken:
        """Commit the head, keep alive, or cut a client that does not read."""
        if self.ended:
            return Taken.GONE
        sink = self._sink
        if sink.stalled(now, self._exchange.site.stall_s):
            self.ended = True
            sink.cut()
            return Taken.GONE
        if not self._head_out:
            if now >= self._commit_at:
                return self._write(b"")
        elif (
            self._keepalive_s
            and now >= self._wrote_at + self._keepalive_s
            # A client with bytes to read is not kept alive by more of them.
            and not sink.held
        ):
            return self._write(KEEPALIVE)
        return Taken.FULL if sink.full else Taken.MORE

    def _write(self, events: bytes, *, last: bool = False) -> Taken:
        """Write *events* as one chunk, the head and role chunk first if due."""
        head = b""
        if not self._head_out:
            self._head_out = True
            head = self._exchange.stream_head(self._worker, self._attempts)
            events = self._encoder.first() + events
        if self._chunked:
            head = b"%b%x\r\n%b\r\n%b" % (
                head,
                len(events),
                events,
                _LAST_CHUNK if last else b"",
            )
        else:
            head += events
        self._wrote_at = trio.current_time()
        return self._sink.write(head)


class ChatReply(_Receiver):
    """A whole JSON reply: nothing is out before ``finish``."""

    __slots__ = ("_aggregate",)

    buffered = True

    def __init__(self, exchange: Exchange, aggregate: ReplyAggregate) -> None:
        """*aggregate* gathers what one attempt says."""
        super().__init__(exchange)
        self._aggregate = aggregate

    def take(self, deltas: Sequence[Delta]) -> Taken:
        """Gather *deltas*."""
        if self.ended:
            return Taken.GONE
        self._aggregate.add(deltas)
        return Taken.MORE

    def finish(self, finished: Finished) -> Taken:
        """Write the whole reply."""
        if self.ended:
            return Taken.GONE
        self.ended = True
        answer = Answer(200, self._aggregate.body(finished))
        return self._exchange.reply_routed(answer, self._worker, self._attempts)

    def fail(self, fault: Fault) -> None:
        """Reply with the status of *fault*."""
        if self.ended:
            return
        self.ended = True
        self._refuse(fault)

    def restart(self) -> None:
        """Forget what was gathered: the next attempt starts empty (A5)."""
        self._aggregate.reset()

    def due(self, now: float) -> float:  # noqa: ARG002  a Receiver's signature
        """Nothing is due by time: the client sees nothing yet."""
        return inf

    def tick(self, now: float) -> Taken:  # noqa: ARG002  a Receiver's signature
        """Say whether the client is still there."""
        return Taken.GONE if self.ended else Taken.MORE


class ChatRoute:
    """``POST /v1/chat/completions``, over one router."""

    reads_body = True

    def __init__(self, core: Core) -> None:
        """*core* resolves models and serves jobs."""
        self._core = core
        settings = core.settings.router
        self._commit_after_s = settings.commit_after_ms / 1000
        self._keepalive_s = settings.keepalive_ms / 1000

    async def __call__(self, exchange: Exchange) -> None:
        """Serve one chat request. A checkpoint, unless it is refused.

        Returns with the reply with the sink, or the client gone.
        """
        site = exchange.site
        try:
            chat = parse_chat(exchange.body, self._core.resolve)
        except RequestInvalid as wrong:
            exchange.reply(said(reply_of_invalid(wrong)))
            return
        except RequestFailed as failed:
            exchange.reply(failure(failed.fault))
            return
        except LocalError as bug:
            # Met while reading one client's bytes: theirs alone (L1).
            site.bug("edge.parse", bug)
            exchange.reply(failure(INTERNAL_FAULT))
            return
        finally:
            exchange.release_body()
        if exchange.hung_up:
            # It left before there was anything to end (A7).
            site.tally.disconnects["received"] += 1
            return
        job = chat.job
        request = exchange.request
        receiver: ChatStream | ChatReply
        if chat.stream:
            encoder = StreamEncoder(
                f"chatcmpl-{request}",
                job.model,
                site.now_unix,
                include_usage=chat.include_usage,
            )
            receiver = ChatStream(
                exchange, encoder, self._commit_after_s, self._keepalive_s
            )
        else:
            receiver = ChatReply(
                exchange,
                ReplyAggregate(f"chatcmpl-{request}", job.model, site.now_unix),
            )
        exchange.receiver = receiver
        client_id = exchange.client_id
        await self._core.serve(
            job,
            receiver,
            request=request,
            client_ref=client_id.decode() if client_id else None,
        )
