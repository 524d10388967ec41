"""The joints between the rooms: what a worker adapter, the engine and a
receiver promise each other.

Every call here is synchronous unless it says otherwise: tokens flow through
calls (DESIGN, rule 1). None of them raises a worker's or a client's fault
into its caller, ``Worker.open`` alone excepted.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NoReturn, Protocol, runtime_checkable

from router.errors import Fault
from router.ids import AssignmentId, WorkerId
from router.messages import Delta, Finished, FinishReason, Job, Probe, SlotView
from router.waiting import WaitState


class Taken(Enum):
    """A receiver's answer to what it was handed."""

    #: Taken; more is welcome.
    MORE = "more"
    #: Taken, and its buffer is above the high mark: pause the source (H5).
    FULL = "full"
    #: Not taken: the client is gone or was cut. Nothing more may come.
    GONE = "gone"
    #: Taken, and the sieve in front of the receiver has a wish (J4-J6).
    STEER = "steer"


class Receiver(Protocol):
    """Where one request's answer goes: encoder and sink, aggregate, channel.

    The engine calls it; it never calls the engine, except through the two
    functions it got by ``attach``.
    """

    @property
    def buffered(self) -> bool:
        """True: the client has seen nothing, and sees nothing before ``finish``
        (a non-stream reply) or while all is held; so a loss until then starts
        over with ``restart`` (A5). Once False it stays so for the attempt."""

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """Take the calls for "there is room again" and "the client is gone"."""

    def take(self, deltas: Sequence[Delta]) -> Taken | Fault:
        """Take all of *deltas*, judged NEXT and in order, or none (GONE).

        A fault: none was taken, for the client's dialect can't say them; it
        ends the attempt as the worker's.
        """

    def finish(self, finished: Finished) -> Taken | Fault:
        """End the answer as a success; the last call with content.

        A fault: the whole answer is none in the client's dialect. The request
        ends with it (``fail`` follows), the worker has done its part.
        """

    def routed(self, worker: WorkerId, attempts: int) -> None:
        """Learn where the job went, for the reply's head (X3); called at each
        grant, before anything is taken."""

    def fail(self, fault: Fault) -> None:
        """End the answer as a failure: a status if no head is out, else the
        dialect's error frame and an unclean end (A5)."""

    def restart(self) -> None:
        """Forget what a buffered receiver gathered: a new attempt begins."""

    def due(self, now: float) -> float:
        """Seconds on Trio's clock at which ``tick`` is next needed; inf: never."""

    def tick(self, now: float) -> Taken:
        """Do what is due by time: commit the head, keep alive, or find that
        the client has stopped reading (GONE)."""


class Delivery(Protocol):
    """The engine's end of one attempt, as its source calls it.

    Each call names its assignment; what comes from a revoked one changes
    nothing (F4).
    """

    def accepted(self, assignment: AssignmentId) -> None:
        """The worker answered with a 200 head (A1)."""

    def deltas(self, assignment: AssignmentId, deltas: Sequence[Delta]) -> None:
        """Deltas read together, in order."""

    def finished(self, finished: Finished) -> None:
        """The explicit end (F7). The source is done and lets go by itself."""

    def failed(self, assignment: AssignmentId, fault: Fault) -> None:
        """The attempt is over without its end. The source has closed itself."""

    def progress(self, assignment: AssignmentId) -> None:
        """A phase of the source ended (connected, sent, finish reason seen):
        deadlines must be looked at anew."""


class SourcePhase(Enum):
    """Where one attempt's upstream stands; each has its own clock (W)."""

    #: No byte can go yet.
    CONNECTING = "connecting"
    #: The request is on its way.
    SENDING = "sending"
    #: All of it is with an agent, which has not said whether it takes the job.
    OFFERED = "offered"
    #: The request is the worker's, and nothing of an answer has come.
    AWAITING_HEAD = "awaiting_head"
    #: The head is here; a body follows.
    STREAMING = "streaming"
    #: Every choice has its finish reason; usage or the end may follow (M3).
    FINISHING = "finishing"
    #: It is over, one way or the other.
    CLOSED = "closed"


class Source(Protocol):
    """One attempt's upstream, as the engine holds it."""

    phase: SourcePhase
    since: float
    """When the phase began, on Trio's clock."""
    last_byte_at: float
    """When the worker last moved a byte of this attempt, either way; set to
    the time of ``resume`` after a pause (W6)."""
    partial_head: bool
    """Bytes of a head have come, the head is not whole (W2)."""
    paused: bool

    @property
    def said(self) -> WaitState | None:
        """What an agent beside the engine says of the silence before the head;
        None: there is none, ask the worker (P2)."""

    @property
    def reason(self) -> FinishReason | None:
        """Why the answer ends, in FINISHING."""

    def pause(self) -> None:
        """Stop reading: TCP pushes back to the engine (section 5)."""

    def resume(self) -> None:
        """Read on."""

    def catch_up(self) -> None:
        """Read what has arrived, before a clock that runs out is believed (P4)."""

    def finish_now(self) -> None:
        """Wait no longer for usage: report Finished now. Only in FINISHING."""

    def close(self) -> None:
        """Abandon the attempt: the connection is closed at once, which is the
        abort. Idempotent; reports nothing."""


@runtime_checkable
class EndsReasoning(Protocol):
    """A source whose engine can be made to reason no longer (J6)."""

    def end_reasoning(self) -> int:
        """Ask the engine to go on to the answer; not a checkpoint.

        Returns: how many more deltas of reasoning to bear with; 0: it can't be
            asked, or was asked before.
        """


@runtime_checkable
class KnowsParams(Protocol):
    """A worker that knows which sampling parameters its engine has (J3)."""

    def unsupported(self, job: Job) -> tuple[str, ...]:
        """Name those of *job* that it lacks."""


class Worker(Protocol):
    """One worker, as the engine and its keeper use it."""

    id: WorkerId
    settle_s: float
    """Seconds its engine needs to notice a closed request (S3)."""
    settles_by_probe: bool
    """Can ``slot_view`` show that a slot is free again?"""
    works: bool | None
    """Have its processes used CPU time of late? None: it can't be told. Looked
    at when ``slot_view`` or ``alive`` has returned (W10)."""

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> Source:
        """Start one attempt, pinned to the engine's *slot* where one is given.

        Raises:
            WorkerFailed: it could not even start (CONNECT).
        """

    async def run(self) -> NoReturn:
        """Read all of this worker's sources. Returns only when cancelled, and
        closes every socket it still holds when it is."""

    async def probe(self) -> Probe:
        """Ask whether the worker is ready, and what it is. A checkpoint.
        Never raises for what the worker does. The caller bounds its time."""

    async def slot_view(self) -> SlotView | None:
        """Ask the engine about its slots; None: it did not say. A checkpoint.
        The caller bounds its time."""

    async def alive(self) -> bool:
        """Ask the cheapest question that proves a process answers (W8)."""

    async def count_tokens(self, job: Job) -> int | None:
        """Count the prompt tokens of a chat job, images left out, with the
        engine's own tokenizer; None: it did not say. A checkpoint that needs
        no slot. The caller bounds its time (M8)."""


@runtime_checkable
class BehindAgent(Protocol):
    """A worker that is an agent on some host (P)."""

    def agent_status(self) -> Mapping[str, object]:
        """Show its connection and what it hosts. Fit for JSON."""


class Process(Protocol):
    """The process of a worker that the router runs itself (L6-L8)."""

    def status(self) -> Mapping[str, object]:
        """Show it: pid, restarts, last line, cause. Fit for JSON."""

    def retry(self) -> None:
        """An operator has looked into it: wait no longer, forget past crashes."""

    def hurry(self) -> None:
        """Give it no more time to end by itself, now and later."""
