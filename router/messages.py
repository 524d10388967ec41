"""The nouns that cross the rooms: what a job is, what an answer is made of.

Nothing here knows HTTP. ``messages`` and ``extras`` of a job are opaque JSON
values that the core carries and never reads (O8).
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs
import msgspec

from router.ids import AssignmentId, Index
from router.words import Word


class SignalCode(Word):
    """What a job may say out of band: closed and stable (J5).

    The first five are the model's, said by calling an exit tool; the others
    are the router's own.
    """

    LOW_CONFIDENCE = "LOW_CONFIDENCE"
    NEEDS_EXTERNAL_INFO = "NEEDS_EXTERNAL_INFO"
    #: Stops the job.
    NEEDS_HIGHER_REASONER = "NEEDS_HIGHER_REASONER"
    #: Stops the job.
    NEEDS_MANAGER_DECISION = "NEEDS_MANAGER_DECISION"
    POLICY_RISK = "POLICY_RISK"
    #: ``tool_calls_max`` calls were made, and one more was begun.
    TOOL_LIMIT_REACHED = "TOOL_LIMIT_REACHED"
    #: The answer ended at a limit of tokens: finish reason length.
    MAX_TOKENS_REACHED = "MAX_TOKENS_REACHED"
    #: The same words over and over; the job fails with ``loop_detected``.
    LOOP_DETECTED = "LOOP_DETECTED"


@attrs.frozen
class Signal:
    """One control signal of one request: never in the conversation (J5)."""

    code: SignalCode
    message: str
    """The model's or the router's words, for people; may hold content."""
    index: int
    """Place among the request's signals, from 0."""


@attrs.frozen
class GenerationParams:
    """What the client asked of the sampler; None is the engine's default.

    Each engine gets those that it knows, under its own names; the others are
    named in the job's result, and are no error (J3).
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    """A factor: 1 is none."""
    repeat_last_n: int | None = None
    """Tokens that ``repeat_penalty`` looks back on."""
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    thinking_max_tokens: int | None = None
    """Tokens of reasoning, 0 for none. Where the engine has no such limit the
    router counts deltas, each of which holds at least one (J6)."""


class Endpoint(Enum):
    """Which of an engine's endpoints a job is for."""

    CHAT = "chat"
    #: Text from bare text.
    COMPLETIONS = "completions"
    #: Its answer is one document, and no stream.
    EMBEDDINGS = "embeddings"


@attrs.frozen
class Trace:
    """The trace context that a request came with, to be handed on (X4)."""

    parent: str
    """Of ``traceparent``, whole: version, trace, parent and flags, in hex."""
    state: str | None = None
    """Of ``tracestate``."""

    @property
    def id(self) -> str:
        """The trace's own number."""
        return self.parent[3:35]


@attrs.frozen
class Job:
    """A request with the wire taken off.

    Each attempt builds its body anew from the same job (A3), so a job is
    never changed.
    """

    model: str
    """The name the client sent: what the reply is signed with (O3)."""
    messages: tuple[Any, ...]
    """What the engine works on, as JSON values that the core never reads: chat
    messages, or the one prompt or input of the other endpoints."""
    target: str = ""
    """The name in our table, aliases resolved: what a worker is asked for.
    Empty: not resolved yet."""
    params: GenerationParams = GenerationParams()
    extras: Mapping[str, Any] = attrs.field(factory=dict)
    """Fields that pass through to the engine untouched (O1)."""
    ignored: tuple[str, ...] = ()
    """Names of fields that were dropped, for the counter (O1)."""
    exit_tools: tuple[SignalCode, ...] = ()
    """Signals that the model may give, in addition to those of its settings
    (J5): it is offered one tool for each."""
    loop_repeats_max: int | None = None
    """How often the same words may follow on themselves; 0 for no limit, None
    for the model's own setting."""
    endpoint: Endpoint = Endpoint.CHAT
    may_drop_images: bool = False
    """A worker that sees no images gets a note in their place (B69)."""
    trace: Trace | None = None
    """Each attempt's request carries it (X4)."""


class Kind(Enum):
    """What a delta is a piece of."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    REFUSAL = "refusal"
    #: A whole JSON document: the only delta of a job that has no stream.
    DOCUMENT = "document"


@attrs.frozen
class ToolPart:
    """Which tool call a fragment belongs to.

    ``index`` tells the calls of one answer apart; ``id`` and ``name`` come with
    the first fragment of a call and are None after it.
    """

    index: int
    id: str | None = None
    name: str | None = None


class Delta(msgspec.Struct, eq=False, gc=False):
    """One piece of visible output, stamped where its bytes were read (F9).

    A struct and not frozen: one is made per token, and made so it costs half
    of what it would otherwise. Nobody changes one all the same.
    """

    assignment: AssignmentId
    index: Index
    kind: Kind
    text: str
    """Text, reasoning, or a fragment of tool arguments. May be "" only for a
    tool call's first fragment, and for text of which only the ``logprobs`` came."""
    tool: ToolPart | None = None
    logprobs: bytes | None = None
    """The choice's ``logprobs`` as raw JSON, passed through (O1)."""


class FinishReason(Enum):
    """Why an answer that is whole ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@attrs.frozen
class Usage:
    """Tokens, as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Part of ``prompt_tokens`` that came from a cache; None: not said."""
    reasoning_tokens: int | None = None
    """Part of ``completion_tokens`` spent on reasoning; None: not said."""


@attrs.frozen
class Finished:
    """The explicit end of a whole answer (F7)."""

    assignment: AssignmentId
    reason: FinishReason
    usage: Usage | None = None
    stop_sequence: str | None = None
    """The client's stop string that matched, where the engine says so."""
    signals: tuple[Signal, ...] = ()
    """In the order of their indices, at most ``signals_max``; no part of the
    answer (J5)."""


@attrs.frozen
class SlotView:
    """What an engine says of its slots at one moment, foreign work included."""

    total: int | None
    """None where the engine does not say."""
    processing: int
    """Slots at work now."""
    busy: frozenset[int] | None = None
    """Numbers of the slots at work; None where the engine does not name them."""


@attrs.frozen
class Share:
    """What a router may have of a worker that other routers use too (P3)."""

    slots: int
    """Requests of its own that may be there at once, now; 0: others have all."""
    serves: bool = True
    """An engine of the model is up."""
    coming: bool = False
    """None is, and one is coming up."""


@attrs.frozen
class Discovery:
    """What a worker said of itself when it was found ready (L9)."""

    models: tuple[str, ...] = ()
    """Model names it answers to, its own id first."""
    slots: int | None = None
    """Its own parallelism; None where it does not say."""
    context: int | None = None
    """Tokens of context per slot; None where it does not say."""
    engine: str = "generic"
    version: str | None = None
    started_at: float | None = None
    """Process start, unix seconds: a change is a restart."""
    shares: Mapping[str, Share] | None = None
    """Model to our part of it, where the worker has the say over its slots."""


class ProbeResult(Enum):
    """The outcome of one readiness probe (L2)."""

    ANSWERED = "answered"
    LOADING = "loading"
    #: Nothing listens there, or the connection was reset: hard evidence.
    REFUSED = "refused"
    #: No answer in time, or a useless one: soft evidence (L3).
    SILENT = "silent"
    UNAUTHORIZED = "unauthorized"
    #: The process that we keep for it is coming up, again or for the first time.
    STARTING = "starting"
    #: Nothing can come of it until somebody mends it: see the reason.
    UNFIT = "unfit"
    #: It takes nothing new, by its own word; what runs may finish (L5).
    DRAINING = "draining"
    #: It could not be asked, for want of something here: no evidence at all (H6).
    UNASKED = "unasked"


@attrs.frozen
class Probe:
    """What one readiness probe found."""

    result: ProbeResult
    detail: str = ""
    """For people: why, without addresses or keys."""
    discovery: Discovery | None = None
    """Set when ANSWERED."""
    reason: str | None = None
    """A stable code, where the state's own is too coarse (L2)."""
    died: str = ""
    """For clients: how the process ended that all that was on it ended with."""
