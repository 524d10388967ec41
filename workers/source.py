"""One attempt on a worker that speaks HTTP: its bytes become deltas here.

Rule 1: what one read brings is judged and handed over in one synchronous
chain, in order, and every call into the engine may close this source. Rule 2:
an end is reported once, and an answer with its finish reason is a success
whatever the connection does after it (F7, A6).
"""

import time
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from router.errors import EXHAUSTED, Fault, FaultKind
from router.http1 import ProtocolError, ResponseHead, ResponseParser
from router.ids import AssignmentId
from router.messages import Endpoint, FinishReason
from router.openai.document import DOCUMENT_MAX, fault_of_absence, read_document
from router.openai.upstream import AnswerReader, fault_of_reply
from router.ports import Delivery, SourcePhase
from router.sse import Parser, SseError
from router.waiting import WaitState
from workers.reasoning import ReasoningEnd
from workers.transport import Address
from workers.upstream import Upstream

#: Bytes of an error body that are waited for (W7).
ERROR_BODY_MAX: Final = 64 * 1024

# Typed wide: the engine may close a source in any call into it.
_CLOSED: Final[SourcePhase] = SourcePhase.CLOSED
_EVENT_STREAM: Final = b"text/event-stream"


class Dialler(Protocol):
    """The worker, as a source needs it."""

    def address(self, tried: Sequence[Address]) -> Address | None:
        """Give the best address that is not in *tried*; None: none is left."""

    def dial(self, address: Address) -> Upstream:
        """Begin a fresh connection.

        Raises:
            OSError: there is none, and will be none.
        """

    def doubt(self, address: Address) -> None:
        """Try *address* last from now on: it did not connect."""

    def failed(self, source: "DirectSource", fault: Fault) -> None:
        """Have *source* report *fault*, or another that explains it better; at
        once or a little later. It holds no connection any more."""


class DirectSource:
    """Implements ``ports.Source`` over one connection at a time."""

    __slots__ = (
        "_accepted",
        "_assignment",
        "_delivery",
        "_dialler",
        "_early_head",
        "_endpoint",
        "_events",
        "_gathered",
        "_head",
        "_heard",
        "_parser",
        "_reader",
        "_reasoning",
        "_reported",
        "_request",
        "_tried",
        "_upstream",
        "last_byte_at",
        "partial_head",
        "paused",
        "phase",
        "since",
    )

    def __init__(
        self,
        dialler: Dialler,
        assignment: AssignmentId,
        delivery: Delivery,
        request: tuple[bytes, ...],
        now: float,
        *,
        early_head: bool,
        endpoint: Endpoint = Endpoint.CHAT,
        reasoning: ReasoningEnd | None = None,
    ) -> None:
        """Hold *request*, the whole of it in order, for *assignment*.

        Args:
            dialler: makes the connections that are not taken from the pool.
            assignment: stamps every delta (F9).
            delivery: the engine's end of it.
            request: head and body, as they go to the socket.
            now: on Trio's clock.
            early_head: this engine answers 200 before it has looked at the
                request, so the head accepts nothing (W8).
            endpoint: what the answer is to look like.
            reasoning: ends its reasoning; None: that can't be done.
        """
        self.phase = SourcePhase.CONNECTING
        self.since = now
        self.last_byte_at = now
        self.partial_head = False
        self.paused = False
        self._dialler = dialler
        self._assignment = assignment
        self._delivery = delivery
        self._request = request
        self._early_head = early_head
        self._endpoint = endpoint
        self._reasoning = reasoning
        self._upstream: Upstream | None = None
        self._parser: ResponseParser | None = None
        self._head: ResponseHead | None = None
        self._reader: AnswerReader | None = None
        self._events = Parser()
        self._gathered = bytearray()
        self._accepted = False
        self._reported = False
        #: A byte of the answer has come: no other connection will be tried.
        self._heard = False
        #: Addresses dialled; the last one may still connect.
        self._tried: list[Address] = []

    # ---- the start: nothing is reported from here ----

    def board(self, upstream: Upstream, now: float) -> bool:
        """Send the request on a pooled connection; False: it was dead."""
        self._adopt(upstream)
        upstream.reuse(self)
        self._begin(now)
        if upstream.broken:
            self._upstream = None
            upstream.close()
            self._enter(SourcePhase.CONNECTING, now)
            return False
        return True

    def launch(self, now: float) -> Fault | None:
        """Connect afresh, and send at once where that is done; or say why not."""
        while True:
            address = self._dialler.address(self._tried)
            if address is None:
                return Fault(FaultKind.CONNECT, "The worker takes no connections.")
            self._tried.append(address)
            try:
                upstream = self._dialler.dial(address)
            except OSError as error:
                if error.errno in EXHAUSTED:
                    return Fault(
                        FaultKind.DECLINED, "The router has no room for a connection."
                    )
            else:
                if self._board_fresh(upstream, now):
                    return None
            self._dialler.doubt(address)

    def _board_fresh(self, upstream: Upstream, now: float) -> bool:
        try:
            ready = upstream.connect(self)
        except OSError:
            upstream.close()
            return False
        self._adopt(upstream)
        if ready:
            self._begin(now)
        return True

    def _adopt(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = upstream.parser

    def _begin(self, now: float) -> None:
        upstream = self._upstream
        if upstream is None:
            return
        sent = upstream.begin(self._request)
        self._enter(
            SourcePhase.AWAITING_HEAD if sent else SourcePhase.SENDING,
            now,
        )
        self.last_byte_at = now

    # ---- the engine's calls ----

    def pause(self) -> None:
        """Stop reading. Not a checkpoint."""
        if self._upstream is not None and not self.paused:
            self.paused = True
            self._upstream.read(False)

    def resume(self) -> None:
        """Read on; the silence so far was ours (W6). Not a checkpoint."""
        if self._upstream is not None and self.paused:
            self.paused = False
            self.last_byte_at = trio.current_time()
            self._upstream.read(True)

    def end_reasoning(self) -> int:
        """See ``ports.EndsReasoning``. Not a checkpoint."""
        return 0 if self._reasoning is None else self._reasoning.end()

    @property
    def said(self) -> WaitState | None:
        """Nothing: the worker is asked."""
        return None

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ends, once that was read."""
        return None if self._reader is None else self._reader.finish

    def catch_up(self) -> None:
        """Do nothing: no clock of a direct source is that short."""

    def finish_now(self) -> None:
        """Report Finished without waiting for usage. Not a checkpoint."""
        if self.phase is SourcePhase.FINISHING:
            self._finish(trio.current_time())

    def close(self) -> None:
        """Abandon the attempt; nothing is reported. Not a checkpoint."""
        upstream = self._upstream
        if self.phase is SourcePhase.CONNECTING and self._tried:
            self._dialler.doubt(self._tried[-1])
        self.phase = _CLOSED
        self._upstream = None
        self._request = ()
        self._reported = True
        if upstream is not None:
            upstream.close()

    # ---- the worker's calls ----

    def report(self, fault: Fault) -> None:
        """Tell the engine that the attempt is over, unless it knows by now."""
        if not self._reported:
            self._reported = True
            self._delivery.failed(self._assignment, fault)

    def lose(self, fault: Fault) -> None:
        """End the attempt: its server is no more."""
        self._let_go(trio.current_time(), reusable=False)
        self.report(fault)

    # ---- the connection's calls ----

    def connected(self, now: float) -> None:
        """Send the request."""
        self._begin(now)
        self._delivery.progress(self._assignment)

    def refused(self, now: float) -> None:
        """Try the next address, if there is one."""
        self._upstream = None
        self._dialler.doubt(self._tried[-1])
        fault = self.launch(now)
        if fault is not None:
            self._fail(fault, now)

    def moved(self, now: float) -> None:
        """Some of the request went."""
        self.last_byte_at = now

    def sent(self, now: float) -> None:
        """All of the request went."""
        if self.phase is SourcePhase.SENDING:
            self._enter(SourcePhase.AWAITING_HEAD, now)
            self._delivery.progress(self._assignment)

    def received(self, octets: bytes, now: float) -> None:
        """Take one read of the answer."""
        self._heard = True
        self.last_byte_at = now
        broken: ProtocolError | None = None
        parser = self._parser
        if parser is None:
            return
        try:
            parser.feed(octets)
        except ProtocolError as error:
            broken = error
        if self._head is None and not self._open_head(parser, now):
            if broken is not None and self.phase is not _CLOSED:
                self._fail(_protocol_fault("a head that is not HTTP"), now)
            return
        if self._reader is None:
            self._gather(parser, now, over=broken is not None)
        else:
            self._read(self._reader, parser, broken, now)

    def ended(self, now: float, *, clean: bool) -> None:
        """See what the answer is without another byte."""
        if not self._heard and self._retry(now):
            return
        parser = self._parser
        if self._head is None or parser is None:
            self._fail(
                _early("The worker closed the connection before it answered."), now
            )
            return
        broken: ProtocolError | None = None
        try:
            if clean:
                parser.eof()
        except ProtocolError as error:
            broken = error
        if self._reader is None:
            self._gather(parser, now, over=True)
        else:
            self._read(self._reader, parser, broken, now, over=True)

    def crashed(self, bug: Exception, now: float) -> None:
        """End this attempt, and nothing else, for a bug of ours (L1)."""
        del bug, now
        self.close()
        self._delivery.failed(
            self._assignment,
            Fault(FaultKind.INTERNAL, "The router failed on this request."),
        )

    # ---- pieces ----

    def _enter(self, phase: SourcePhase, now: float) -> None:
        self.phase = phase
        self.since = now

    def _retry(self, now: float) -> bool:
        """Start over on a fresh connection where a pooled one has died unused.

        The worker may close an idle connection in the moment in which we send
        (B89). A fresh one that does so has no such excuse.
        """
        upstream = self._upstream
        if upstream is None or not upstream.used:
            return False
        self._upstream = None
        upstream.close()
        self._enter(SourcePhase.CONNECTING, now)
        fault = self.launch(now)
        if fault is None:
            self._delivery.progress(self._assignment)
        else:
            self._fail(fault, now)
        return True

    def _open_head(self, parser: ResponseParser, now: float) -> bool:
        """Look at the head, once it is whole; False: wait, or it is all over."""
        head = parser.head
        if head is None:
            self.partial_head = parser.partial_head
            return False
        self._head = head
        self._request = ()
        self.partial_head = False
        kind = head.get(b"content-type")
        streams = kind is not None and kind[:17].lower() == _EVENT_STREAM
        if head.status == 200 and self._endpoint is Endpoint.EMBEDDINGS:
            self._accept(now)
        elif head.status == 200 and streams:
            ending = self._reasoning
            self._reader = (
                AnswerReader(self._assignment)
                if ending is None
                else ending.reader(self._assignment)
            )
            if not self._early_head:
                self._accept(now)
        else:
            self._enter(SourcePhase.STREAMING, now)
            self._delivery.progress(self._assignment)
        return self.phase is not _CLOSED

    def _accept(self, now: float) -> None:
        self._accepted = True
        self._enter(SourcePhase.STREAMING, now)
        self._delivery.accepted(self._assignment)

    def _read(
        self,
        reader: AnswerReader,
        parser: ResponseParser,
        broken: ProtocolError | None,
        now: float,
        *,
        over: bool = False,
    ) -> None:
        """Hand over what the body now holds; see whether it has ended."""
        fault = self._read_events(reader, parser, now)
        if self.phase is _CLOSED:
            return
        deltas = reader.deltas
        if deltas:
            reader.deltas = []
            self._delivery.deltas(self._assignment, deltas)
            if self.phase is _CLOSED:
                return
        over = over or broken is not None or parser.complete
        if reader.finish is not None:
            # Whole, whatever the connection did behind it (PROTOCOLS B.4).
            if over or reader.done or fault is not None:
                self._finish(now, reusable=broken is None)
            elif self.phase is not SourcePhase.FINISHING:
                self._enter(SourcePhase.FINISHING, now)
                self._delivery.progress(self._assignment)
        elif fault is not None:
            self._fail(fault, now)
        elif broken is not None and not broken.truncated:
            self._fail(_protocol_fault(str(broken)), now)
        elif over:
            self._fail(_early("The worker's answer broke off."), now)

    def _read_events(
        self, reader: AnswerReader, parser: ResponseParser, now: float
    ) -> Fault | None:
        """Read the events that the body now holds; give the fault among them."""
        pieces = parser.body
        if not pieces:
            return None
        # One feed for all that came: its usual case is whole events.
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        try:
            events = self._events.feed(body)
        except SseError as error:
            return _protocol_fault(str(error))
        if events and not self._accepted:
            self._accept(now)
            if self.phase is _CLOSED:
                return None
        for event in events:
            fault = reader.read(event)
            if fault is not None:
                return fault
        return None

    def _gather(self, parser: ResponseParser, now: float, *, over: bool) -> None:
        """Collect an answer that is no stream, and judge it when it is here."""
        head = self._head
        for piece in parser.body:
            self._gathered += piece
        parser.body.clear()
        if head is None:
            return
        if head.status == 200 and self._endpoint is Endpoint.EMBEDDINGS:
            self._gather_document(parser, now, over=over)
            return
        full = len(self._gathered) >= ERROR_BODY_MAX
        if not (over or full or parser.complete):
            return
        body = bytes(self._gathered[:ERROR_BODY_MAX])
        # The wall clock, for a Retry-After that is a date (A8).
        now_unix = time.time_ns() / 1e9
        fault = fault_of_reply(
            head.status, body, head.get(b"retry-after"), now=now_unix
        )
        if self._endpoint is not Endpoint.CHAT:
            fault = fault_of_absence(head.status, body) or fault
        self._fail(fault, now, reusable=parser.complete)

    def _gather_document(
        self, parser: ResponseParser, now: float, *, over: bool
    ) -> None:
        """Hand over a document once it is whole, and never a part of it (A5)."""
        if len(self._gathered) > DOCUMENT_MAX:
            self._fail(_protocol_fault(f"more than {DOCUMENT_MAX} bytes"), now)
            return
        if not parser.complete:
            if over:
                self._fail(_early("The worker's answer broke off."), now)
            return
        read = read_document(self._assignment, bytes(self._gathered))
        self._gathered.clear()
        if isinstance(read, Fault):
            self._fail(read, now, reusable=True)
            return
        delta, finished = read
        self._delivery.deltas(self._assignment, [delta])
        if self.phase is not _CLOSED:
            self._let_go(now, reusable=True)
            self._delivery.finished(finished)

    def _finish(self, now: float, *, reusable: bool = True) -> None:
        reader = self._reader
        if reader is not None:
            self._let_go(now, reusable=reusable)
            self._delivery.finished(reader.finished())

    def _fail(self, fault: Fault, now: float, *, reusable: bool = False) -> None:
        self._let_go(now, reusable=reusable)
        self._dialler.failed(self, fault)

    def _let_go(self, now: float, *, reusable: bool) -> None:
        """Part with the connection before the engine hears of the end: it may
        want it for the next request at once."""
        upstream = self._upstream
        self.phase = _CLOSED
        self._upstream = None
        self._request = ()
        if upstream is None:
            return
        if reusable:
            upstream.release(now)
        else:
            upstream.close()


def _early(message: str) -> Fault:
    return Fault(FaultKind.STREAM_CLOSED_EARLY, message)


def _protocol_fault(what: str) -> Fault:
    return Fault(FaultKind.PROTOCOL, f"The worker sent {what}.")
