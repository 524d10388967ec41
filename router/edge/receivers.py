"""What a client's reply is made of: an encoder and the client's sink in one.

A receiver writes from inside the worker's chain of calls, so nothing here
awaits, and nothing raises for what a client does. A stream's head is held until
the first delta or ``commit_after_ms``, so that overload and early loss are real
statuses (O4).
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Protocol

import trio

from router.edge.exchange import Answer, Exchange
from router.errors import AnswerUnfit, Fault
from router.gathered import Gathered
from router.ids import WorkerId
from router.messages import Delta, Finished
from router.ports import Taken

_LAST_CHUNK: Final = b"0\r\n\r\n"
#: Heads of the chunks that most deltas make: formatting one costs three times
#: the look.
_CHUNK_HEADS: Final = tuple(b"%x\r\n" % size for size in range(1024))
_CHUNK_HEADED: Final = len(_CHUNK_HEADS)


class Encoder(Protocol):
    """Writes one streamed reply of a dialect, whole events only."""

    @property
    def keepalive(self) -> bytes:
        """What is written while a stream is silent."""

    def first(self) -> bytes:
        """Write what comes before all deltas and is none; maybe nothing."""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Write *deltas*; maybe nothing.

        Raises:
            AnswerUnfit: the dialect can't say them.
        """

    def finish(self, finished: Finished) -> bytes:
        """Write the end of a whole answer."""

    def error(self, fault: Fault) -> bytes:
        """Write the end of a broken one."""

    def restart(self, *, begun: bool) -> None:
        """Forget deltas that did not go out. *begun*: ``first`` did."""


class Aggregate(Protocol):
    """Gathers one whole reply of a dialect."""

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take deltas, in order."""

    def reset(self) -> None:
        """Forget them: a new attempt begins."""

    def body(self, finished: Finished) -> bytes:
        """Write the reply.

        Raises:
            AnswerUnfit: the dialect can't say it.
        """


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
        exchange = self._exchange
        answer = exchange.failure(fault)
        exchange.reply_routed(answer, self._worker, self._attempts)


class EventStream(_Receiver):
    """A reply as server-sent events, one HTTP chunk a write (O3, M3)."""

    __slots__ = (
        "_chunked",
        "_commit_at",
        "_cork",
        "_encoder",
        "_head_out",
        "_keepalive_s",
        "_now",
        "_plain",
        "_wrote_at",
    )

    buffered = False

    def __init__(
        self,
        exchange: Exchange,
        encoder: Encoder,
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
        #: The head is out, and what follows goes in chunks.
        self._plain = False
        self._cork = exchange.site.cork
        self._wrote_at = 0.0
        # A third of what trio.current_time() costs, and asked for every delta.
        self._now = trio.lowlevel.current_clock().current_time

    def take(self, deltas: Sequence[Delta]) -> Taken | Fault:
        """Write all of *deltas* as events in one chunk."""
        if self.ended:
            return Taken.GONE
        encoder = self._encoder
        try:
            if self._head_out:
                events = encoder.deltas(deltas)
            else:
                events = encoder.first() + encoder.deltas(deltas)
        except AnswerUnfit as unfit:
            encoder.restart(begun=self._head_out)
            return unfit.fault
        size = len(events)
        if self._plain and 0 < size < _CHUNK_HEADED:
            cork = self._cork
            self._wrote_at = cork.now if cork.held else self._now()
            return self._sink.write(_CHUNK_HEADS[size] + events + b"\r\n")
        if not events:
            return Taken.FULL if self._sink.full else Taken.MORE
        return self._write(events)

    def finish(self, finished: Finished) -> Taken:
        """Write the end of the events and of the body."""
        if self.ended:
            return Taken.GONE
        encoder = self._encoder
        first = b"" if self._head_out else encoder.first()
        events = first + encoder.finish(finished)
        # Not before: of a bug in there the client is told by ``fail`` (L1).
        self.ended = True
        self._exchange.whole = True
        return self._write(events, last=True)

    def fail(self, fault: Fault) -> None:
        """Reply with a status, or end the stream uncleanly (A5).

        After the head: one error frame, no mark of a good end, no
        terminating chunk.
        """
        if self.ended:
            return
        self.ended = True
        if self._head_out:
            self._write(self._encoder.error(self._exchange.named(fault)))
        else:
            self._refuse(fault)

    def restart(self) -> None:
        """Begin anew: no delta is out before commit."""
        self._encoder.restart(begun=self._head_out)

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
                return self._write(self._encoder.first())
        elif (
            self._keepalive_s
            and now >= self._wrote_at + self._keepalive_s
            # A client with bytes to read is not kept alive by more of them.
            and not sink.held
        ):
            return self._write(self._encoder.keepalive)
        return Taken.FULL if sink.full else Taken.MORE

    def _write(self, events: bytes, *, last: bool = False) -> Taken:
        """Write *events* as one chunk, the head first if it is due."""
        head = b""
        if not self._head_out:
            self._head_out = True
            self._plain = self._chunked
            head = self._exchange.stream_head(self._worker, self._attempts)
        if not self._chunked:
            head += events
        elif events:
            head = b"%b%x\r\n%b\r\n%b" % (
                head,
                len(events),
                events,
                _LAST_CHUNK if last else b"",
            )
        self._wrote_at = self._now()
        return self._sink.write(head)


class WholeReply(_Receiver):
    """A whole JSON reply: nothing is out before ``finish``."""

    __slots__ = ("_aggregate", "_gathered")

    buffered = True

    def __init__(self, exchange: Exchange, aggregate: Aggregate) -> None:
        """*aggregate* gathers what one attempt says."""
        super().__init__(exchange)
        self._aggregate = aggregate
        self._gathered = Gathered()

    def take(self, deltas: Sequence[Delta]) -> Taken | Fault:
        """Gather *deltas*; a fault: there are too many."""
        if self.ended:
            return Taken.GONE
        fault = self._gathered.add(deltas)
        if fault is not None:
            return fault
        self._aggregate.add(deltas)
        return Taken.MORE

    def finish(self, finished: Finished) -> Taken | Fault:
        """Write the whole reply; a fault: there is none, and ``fail`` is next."""
        if self.ended:
            return Taken.GONE
        try:
            body = self._aggregate.body(finished)
        except AnswerUnfit as unfit:
            return unfit.fault
        self.ended = True
        answer = Answer(200, body)
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
        self._gathered.clear()

    def due(self, now: float) -> float:  # noqa: ARG002  a Receiver's signature
        """Nothing is due by time: the client sees nothing yet."""
        return inf

    def tick(self, now: float) -> Taken:  # noqa: ARG002  a Receiver's signature
        """Say whether the client is still there."""
        return Taken.GONE if self.ended else Taken.MORE
