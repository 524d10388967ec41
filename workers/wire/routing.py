"""The router's end of an open wire: assignments out, deltas in (P2, P7, F8).

Rule: one read is fanned out in one synchronous chain, and every call into the
engine may close any source. Pure: the clock and the bytes are the caller's.
"""

from collections.abc import Callable
from math import inf
from typing import Final, Protocol

from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Endpoint, Job, Kind
from router.openai.document import DOCUMENT_MAX
from router.ports import Delivery, SourcePhase
from workers.wire.attempt import RemoteSource
from workers.wire.frames import (
    DELTA_COST,
    PART_MAX,
    WINDOW,
    Accepted,
    Bye,
    Cancel,
    Counted,
    Declined,
    Deltas,
    Draining,
    EndReasoning,
    Message,
    Observation,
    Offer,
    Part,
    Piece,
    Reader,
    Reason,
    RichDelta,
    Seen,
    WireError,
    cost_of,
    pack,
)
from workers.wire.jobs import JobUnwritable, encode_job
from workers.wire.opening import heard
from workers.wire.outbox import Outbox
from workers.wire.shapes import is_name

#: Kinds of a delta that has a text and nothing else, by their number.
PLAIN_KINDS: Final = (Kind.TEXT, Kind.REASONING, Kind.REFUSAL)
#: Credit of an answer that is one document: nobody reads a part of it.
DOCUMENT_WINDOW: Final = 4 * 1024 * 1024
#: Deltas of reasoning to bear with after the engine was asked to end it.
REASONING_GRACE: Final = 64
#: The capability of an agent that counts tokens, and of one that ends reasoning.
COUNTS: Final = "count"
ENDS_REASONING: Final = "end_reasoning"

_STREAMING: Final[SourcePhase] = SourcePhase.STREAMING


class Port(Protocol):
    """Who stands behind the router's end of one connection."""

    def now(self) -> float:
        """Give the time, in seconds."""

    def observed(self, observation: Observation) -> None:
        """The agent says what it is."""

    def draining(self) -> None:
        """The agent takes no more."""

    def catch_up(self) -> None:
        """Read what has arrived on this connection."""

    def report_bug(self, where: str, bug: Exception) -> None:
        """Log and count an exception that was kept to one assignment (L1)."""


class _Count:
    """A question for the tokens of a prompt; an outbox's body."""

    def __init__(
        self, number: int, job: bytes, told: Callable[[int | None], None]
    ) -> None:
        self.told = told
        self._number = number
        self._job = job
        self._sent = 0

    def next_part(self) -> bytes:
        """Give the job's next part."""
        at = self._sent
        part = self._job[at : at + PART_MAX]
        self._sent = at + len(part)
        return pack(Part(self._number, at, part)) if part else b""

    def written(self) -> None:
        """Nobody waits for that."""


class RouterEnd:
    """All that one open connection carries, seen from its router."""

    def __init__(
        self,
        port: Port,
        reader: Reader,
        epoch: int,
        capabilities: frozenset[str],
        ring: Callable[[], None],
    ) -> None:
        """*reader* and *epoch* are the opening's; *ring*: see `Outbox`."""
        self.port = port
        self.outbox = Outbox(ring)
        self.sources: dict[int, RemoteSource] = {}
        self.capabilities = capabilities
        self.closed = False
        #: Messages for assignments that are over (F4).
        self.late = 0
        self._reader = reader
        self._epoch = epoch
        self._numbers = 0
        self._counts: dict[int, _Count] = {}

    # ---- attempt.End ----

    def now(self) -> float:
        """Give the time."""
        return self.port.now()

    def put(self, message: Message) -> None:
        """Queue *message*, if the connection is still there."""
        if not self.closed:
            self.outbox.put(message)

    def forget(self, source: RemoteSource) -> None:
        """*source* is over."""
        self.sources.pop(source.number, None)
        self.outbox.drop_body(source)

    def crash(self, source: RemoteSource, bug: Exception) -> None:
        """End this attempt, and nothing else, for a bug of ours (L1)."""
        self.port.report_bug("workers.wire", bug)
        try:
            source.fail(Fault(FaultKind.INTERNAL, "The router failed on this request."))
        except LocalError:
            raise
        except Exception as second:  # noqa: BLE001 - the same request, again (L1)
            self.port.report_bug("workers.wire", second)

    def catch_up(self) -> None:
        """Read what has arrived."""
        self.port.catch_up()

    def end_reasoning(self, source: RemoteSource) -> int:
        """Have the engine of *source* reason no longer, where that can be asked."""
        if ENDS_REASONING not in self.capabilities:
            return 0
        self.put(EndReasoning(source.number))
        return REASONING_GRACE

    # ---- calls from the router ----

    def offer(
        self, assignment: AssignmentId, job: Job, delivery: Delivery, waiting: int
    ) -> RemoteSource:
        """Begin an attempt: its offer and its parts are queued.

        Args:
            assignment: new, and never offered before.
            job: what is to be done.
            delivery: the engine's end.
            waiting: jobs for the same model that wait behind it.

        Raises:
            WorkerFailed: the wire has no name for its model, or no bytes for *job*.
        """
        if not is_name(job.target):
            raise WorkerFailed(
                Fault(FaultKind.MODEL_GONE, "The worker has no such model.")
            )
        try:
            octets = encode_job(job)
        except JobUnwritable as why:
            words = f"The request holds {why}, which its worker cannot be told."
            raise WorkerFailed(Fault(FaultKind.REJECTED, words, status=400)) from None
        whole = job.endpoint is Endpoint.EMBEDDINGS
        window = DOCUMENT_WINDOW if whole else WINDOW
        number = self._numbers = self._numbers + 1
        source = RemoteSource(
            self, number, assignment, delivery, octets, window, self.port.now()
        )
        if whole:
            source.pieces_max += DOCUMENT_MAX
        self.sources[number] = source
        self._send_offer(number, assignment, job.target, len(octets), window, waiting)
        self.outbox.put_body(source)
        return source

    def count(self, job: Job, told: Callable[[int | None], None]) -> int:
        """Ask for the tokens of *job*'s prompt; give a number to drop it by."""
        number = self._numbers = self._numbers + 1
        try:
            octets = encode_job(job) if is_name(job.target) else b""
        except JobUnwritable:
            octets = b""
        if not octets:
            told(None)
            return number
        counting = self._counts[number] = _Count(number, octets, told)
        # It is nobody's assignment.
        assignment = AssignmentId(RequestId(f"count-{number}"), 1)
        self._send_offer(number, assignment, job.target, len(octets), 0, 0, purpose=1)
        self.outbox.put_body(counting)
        return number

    def drop_count(self, number: int) -> None:
        """Want the count of this number no more. Idempotent."""
        if self._end_count(number) is not None:
            self.put(Cancel(number))

    def silence(self) -> None:
        """Nothing that was heard here is a sign of life any more."""
        for source in self.sources.values():
            source.last_byte_at = -inf

    def end(self, fault: Fault) -> None:
        """The connection is gone: everything on it ends with *fault*, at once."""
        self.closed = True
        for source in list(self.sources.values()):
            try:
                source.lose(fault)
            except LocalError:
                raise
            except Exception as bug:  # noqa: BLE001 - L1: the others end all the same
                self.crash(source, bug)
        for number in list(self._counts):
            self._tell_count(number, None)

    # ---- bytes from the agent ----

    def received(self, octets: bytes, now: float) -> None:
        """Take one read; all that it holds is delivered when this returns.

        When it raises, so is what came whole before the reason.

        Raises:
            WireError: the connection is of no more use.
            ByeHeard: the agent closes it.
        """
        decode = self._reader.decode
        steps: list[Deltas] = []
        try:
            for frame in self._reader.split(octets):
                message = decode(frame)
                if type(message) is Deltas:
                    steps.append(message)
                    continue
                if steps:
                    # What came first is delivered first.
                    self._fan_out(steps, now)
                    steps.clear()
                self.take(message)
        except WireError:
            if steps:
                self._fan_out(steps, now)
            raise
        if steps:
            self._fan_out(steps, now)

    def take(self, message: Message) -> None:
        """Take one message that is no `Deltas`. Raises as ``received``."""
        number = getattr(message, "stream", None)
        if number is not None:
            if isinstance(message, Counted):
                self._tell_count(number, message.tokens)
                return
            source = self.sources.get(number)
            if source is not None:
                self._guarded(source, message)
            elif number in self._counts and isinstance(message, Declined):
                self._tell_count(number, None)
            else:
                self.late += 1
                if isinstance(message, Accepted):
                    # Whatever became of our word, it must not work for nobody.
                    self.put(Cancel(number))
        elif isinstance(message, Observation):
            if message.epoch != self._epoch:
                raise WireError(Reason.OUT_OF_ORDER, "an observation of another epoch")
            self.put(Seen(message.sequence))
            self.port.observed(message)
        elif isinstance(message, Draining):
            self.port.draining()
        elif isinstance(message, Bye):
            raise heard(message)
        else:
            raise WireError(
                Reason.OUT_OF_ORDER, f"{type(message).__name__} on an open connection"
            )

    def _fan_out(self, steps: list[Deltas], now: float) -> None:
        """Deliver the plain deltas that one read brought (P7)."""
        if len(steps) == 1:
            self._step(steps[0].entries, now)
            return
        # Behind by some steps: each stream gets what all of them have for it in
        # one go, which is one write to its client.
        runs: dict[int, list[tuple[int, int, int, str]]] = {}
        for step in steps:
            for entry in step.entries:
                runs.setdefault(entry[0], []).append(entry)
        for run in runs.values():
            self._step(run, now)

    def _step(self, entries: list[tuple[int, int, int, str]], now: float) -> None:
        """Deliver *entries*, of which those of one stream stand together.

        The hottest loop of the wire.
        """
        get = self.sources.get
        kinds = PLAIN_KINDS
        source: RemoteSource | None = None
        deltas: list[Delta] = []
        for number, index, kind, text in entries:
            if source is not None:
                if source.number == number:
                    self._gather(source, deltas, index, kinds[kind], text)
                    continue
                self._deliver(source, deltas, now)
            source = get(number)
            if source is None:
                self.late += 1
                continue
            source.spent += DELTA_COST + (
                len(text) if text.isascii() else len(text.encode())
            )
            deltas = [Delta(source.assignment, index, kinds[kind], text)]
        if source is not None:
            self._deliver(source, deltas, now)

    def _gather(
        self,
        source: RemoteSource,
        deltas: list[Delta],
        index: int,
        kind: Kind,
        text: str,
    ) -> None:
        """Add one more delta to those of *source* that go together."""
        source.spent += DELTA_COST + len(text.encode())
        deltas.append(Delta(source.assignment, index, kind, text))

    def _deliver(self, source: RemoteSource, deltas: list[Delta], now: float) -> None:
        """Hand *deltas* over; a bug of ours ends this attempt and no other (L1)."""
        try:
            if (
                source.phase is _STREAMING and not source.paused and not source.pieces
            ) or source.begin_deltas(deltas, now):
                # See `RemoteSource.recount`; this is what it comes to when all is well.
                index = deltas[-1].index
                if index == source.count + len(deltas) - 1:
                    source.last_byte_at = now
                    source.count = index + 1
                else:
                    source.recount(deltas, now)
                source.deliver(source.assignment, deltas)
            if source.spent >= source.refill_at:
                source.refill()
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: kept to one assignment
            self.crash(source, bug)

    def _guarded(self, source: RemoteSource, message: Message) -> None:
        try:
            if isinstance(message, RichDelta | Piece):
                source.spent += cost_of(message)
            source.take(message)
            if source.spent >= source.refill_at:
                source.refill()
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: kept to one assignment
            self.crash(source, bug)

    def _tell_count(self, number: int, tokens: int | None) -> None:
        counting = self._end_count(number)
        if counting is not None:
            counting.told(tokens)

    def _end_count(self, number: int) -> _Count | None:
        counting = self._counts.pop(number, None)
        if counting is not None:
            self.outbox.drop_body(counting)
        return counting

    def _send_offer(
        self,
        number: int,
        assignment: AssignmentId,
        target: str,
        size: int,
        credit: int,
        waiting: int,
        *,
        purpose: int = 0,
    ) -> None:
        self.put(
            Offer(
                number,
                assignment.request,
                assignment.attempt,
                self._epoch,
                target,
                size,
                credit,
                waiting,
                purpose,
            )
        )
