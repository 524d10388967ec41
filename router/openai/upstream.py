"""The worker's side of the dialect: a job's body, and an answer's deltas.

``build_body`` writes what a worker is sent; ``AnswerReader`` reads its events
and stamps each delta where its bytes were read (F9); ``fault_of_reply`` and
``fault_of_frame`` read its errors. An engine's oddities end here (PROTOCOLS B.4);
whatever it sends, nothing here raises.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec

from router.errors import Fault, FaultKind
from router.ids import AssignmentId
from router.messages import (
    Delta,
    Endpoint,
    Finished,
    FinishReason,
    Job,
    Kind,
    Usage,
)
from router.openai.calls import Calls
from router.openai.chunk import (
    Choice,
    Chunk,
    Counted,
    Details,
    Fields,
    decode_chunk,
    oddly_counted,
)
from router.openai.fields import OWNED
from router.openai.images import without_images
from router.openai.worker_errors import (
    fault_of_frame,
    fault_of_reply,
    is_error,
    scrubbed,
)
from router.sse import Event

__all__ = [
    "AnswerReader",
    "build_body",
    "build_count_body",
    "fault_of_frame",
    "fault_of_reply",
]

# Attributes of an enum are slow to reach, for what is done once per token.
_TEXT: Final = Kind.TEXT
_REASONING: Final = Kind.REASONING

#: How engines say each finish reason; PROTOCOLS B.2 and the servers that we call
#: generic. ``repetition`` (vLLM) is a limit: the text was cut, not ended.
_REASONS: Final = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "repetition": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}
#: The engine's own failures (A6).
_ABORTS: Final = frozenset({"abort", "error"})

_NO_FIELDS: Final = Fields()
_NO_DETAILS: Final = Details()
#: Log probabilities of nothing.
_NOTHING: Final = frozenset({b"null", b"[]"})

#: The limit of reasoning, as a job's extras name it: llama-server's word.
BUDGET: Final = "thinking_budget_tokens"

#: Sampling parameters that engines name in their own ways, or do not know (J3).
#: Those that are not here have one name everywhere.
VARYING: Final = (
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "min_tokens",
    "ignore_eos",
)
_varying_of: Final = attrgetter(*VARYING)
_NONE_VARYING: Final = (None,) * len(VARYING)
#: The names of a server of which no more is known than its dialect.
OPENAI_FIELDS: Final[Mapping[str, str]] = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}

_encode: Final = msgspec.json.Encoder().encode


def unsupported(job: Job, sampling_fields: Mapping[str, str]) -> tuple[str, ...]:
    """Name what *job* asks of the sampler and an engine does not know (J3).

    Args:
        job: as it is sent.
        sampling_fields: the engine's names, as for ``build_body``.
    """
    return tuple(
        name
        for name, value in zip(VARYING, _varying_of(job.params), strict=True)
        if value is not None and name not in sampling_fields
    )


def build_body(
    job: Job,
    max_tokens_field: str = "max_tokens",
    *,
    budget_field: str | None = BUDGET,
    reasoning_control: bool = False,
    images: bool = True,
    sampling_fields: Mapping[str, str] = OPENAI_FIELDS,
    slot: int | None = None,
) -> bytes:
    """Write the request that a worker is sent for *job*.

    Always a stream with usage where its endpoint streams, whatever the client
    asked (PROTOCOLS B.4). No field of ``OWNED`` is taken from the job's extras.

    Args:
        job: is not changed; each attempt writes its own body (A3).
        max_tokens_field: the name that this engine knows for a chat's limit.
        budget_field: its name for the limit of reasoning; None: it has none.
        reasoning_control: it must be told ahead that a limited reasoning may be
            ended from outside (J6).
        images: False: this worker sees none, so a job that may lose them gets
            a note in the place of each (B69).
        sampling_fields: its names for those of ``VARYING`` that it knows; the
            others are left out (J3).
        slot: llama-server's slot that the request is pinned to; None: any (W2).
    """
    body: dict[str, Any] = {
        name: value for name, value in job.extras.items() if name not in OWNED
    }
    if reasoning_control and BUDGET in body:
        body["reasoning_control"] = True
    if budget_field != BUDGET and BUDGET in body:
        budget = body.pop(BUDGET)
        if budget_field is not None:
            body.setdefault(budget_field, budget)
    body["model"] = job.target
    if job.endpoint is Endpoint.EMBEDDINGS:
        body["input"] = job.messages[0]
        return _encode(body)
    if job.endpoint is Endpoint.COMPLETIONS:
        max_tokens_field = "max_tokens"
        body["prompt"] = job.messages[0]
    elif images or not job.may_drop_images:
        body["messages"] = job.messages
    else:
        body["messages"] = without_images(job.messages)
    params = job.params
    asked = {
        max_tokens_field: params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "stop": params.stop or None,
        "seed": params.seed,
    }
    body |= {name: value for name, value in asked.items() if value is not None}
    varying = _varying_of(params)
    if varying != _NONE_VARYING:
        for name, value in zip(VARYING, varying, strict=True):
            if value is not None and name in sampling_fields:
                body[sampling_fields[name]] = value
    if slot is not None:
        body["id_slot"] = slot
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    return _encode(body)


#: What a chat template makes a prompt of.
_TEMPLATED: Final = (
    "tools",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)


def build_count_body(job: Job) -> bytes:
    """Write the request by which an engine counts a chat's prompt (M8).

    Without its images: where engines count them at all, they count the
    placeholder.
    """
    body = {name: job.extras[name] for name in _TEMPLATED if name in job.extras}
    body |= {"model": job.target, "messages": without_images(job.messages)}
    return _encode(body)


class AnswerReader:
    """Reads one assignment's answer, event by event.

    Deltas that came before a fault are good: hand them over first. What comes
    after the finish reason is dropped, usage excepted (B18, M3).
    """

    __slots__ = (
        "_assignment",
        "_calls",
        "_index",
        "_stop_sequence",
        "deltas",
        "done",
        "finish",
        "usage",
    )

    def __init__(self, assignment: AssignmentId) -> None:
        """Start at index 0 of *assignment*."""
        self.deltas: list[Delta] = []
        """Read and not yet handed over, in order. The caller takes the list and
        leaves an empty one."""
        self.finish: FinishReason | None = None
        """The finish reason of the answer's only choice."""
        self.usage: Usage | None = None
        """As last told; may still change until ``done`` or the body's end."""
        self.done = False
        """``[DONE]`` was read, with a finish reason before it."""
        self._assignment = assignment
        self._index = 0
        self._stop_sequence: str | None = None
        self._calls = Calls(assignment)

    def read(self, event: Event) -> Fault | None:
        """Take one event; give the fault that it is. Not called after a fault."""
        body = event.data
        try:
            chunk = decode_chunk(body)
        except (msgspec.MsgspecError, RecursionError):
            odd = oddly_counted(body)
            if odd is None:
                return self._read_other(event)
            chunk = odd
        choices = chunk.choices
        if (
            choices is None
            or chunk.error
            or chunk.object == "error"
            or event.name == b"error"
            or event.legacy_error
        ):
            return self._read_bare(event, chunk)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        for choice in choices:
            fault = self._read_choice(choice)
            if fault is not None:
                return fault
        return None

    def _read_choice(self, choice: Choice) -> Fault | None:
        if self.finish is not None:
            return None
        if choice.index:
            return _protocol("The engine sent a choice that nobody asked for.")
        fields = choice.delta
        if fields is None:
            fields = Fields(content=choice.text) if choice.text else _NO_FIELDS
        text = fields.content
        reasoning = fields.reasoning_content or fields.reasoning
        if (
            choice.logprobs is not None
            or fields.tool_calls
            or fields.refusal
            or (text and reasoning)
        ):
            self._take(fields, choice.logprobs)
        elif text:
            self.deltas.append(Delta(self._assignment, self._index, _TEXT, text))
            self._index += 1
        elif reasoning:
            self.deltas.append(
                Delta(self._assignment, self._index, _REASONING, reasoning)
            )
            self._index += 1
        return self._take_finish(choice) if choice.finish_reason else None

    def finished(self) -> Finished:
        """Compose the explicit end (F7). Only once ``finish`` is set."""
        assert self.finish is not None
        return Finished(self._assignment, self.finish, self.usage, self._stop_sequence)

    def _read_bare(self, event: Event, chunk: Chunk) -> Fault | None:
        """Take a chunk without choices, or an error in any of its shapes (B47)."""
        if self.done:
            return None
        if (
            chunk.error
            or chunk.object == "error"
            or chunk.detail is not None
            or event.name == b"error"
            or event.legacy_error
        ):
            return fault_of_frame(event.data)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        return None

    def _read_other(self, event: Event) -> Fault | None:
        """Take an event that is no chunk."""
        word = event.data.strip()
        if self.done or not word:
            return None
        if event.legacy_error or event.name == b"error" or is_error(word):
            return fault_of_frame(word)
        if word == b"[DONE]":
            if self.finish is None:
                return Fault(
                    FaultKind.STREAM_CLOSED_EARLY,
                    "The engine ended its answer without a finish reason.",
                )
            self.done = True
            return None
        if event.name not in (b"", b"message"):
            # Engines name events of their own, as SGLang does ``sglext_ids``.
            return None
        return _protocol("The engine sent an event that is not a chunk.")

    def _take(self, fields: Fields, logprobs: dict[str, msgspec.Raw] | None) -> None:
        """Make deltas of all that one chunk holds."""
        found: list[Delta] = []
        reasoning = fields.reasoning_content or fields.reasoning
        if reasoning:
            found.append(self._delta(_REASONING, reasoning))
        if fields.content:
            found.append(self._delta(_TEXT, fields.content))
        if fields.refusal:
            found.append(self._delta(Kind.REFUSAL, fields.refusal))
        calls = fields.tool_calls or ()
        for call, part in zip(calls, self._calls.parts(calls), strict=True):
            arguments = (call.function and call.function.arguments) or ""
            if arguments or part.id is not None or part.name is not None:
                delta = self._delta(Kind.TOOL_CALL, arguments)
                delta.tool = part
                found.append(delta)
        if logprobs is not None and not _NOTHING.issuperset(
            bytes(entries) for entries in logprobs.values()
        ):
            # Asked for by the client, so output like any other, also where the
            # text is still held back by the engine or is the end token's.
            if not found:
                found.append(self._delta(Kind.TEXT, ""))
            texts = [delta for delta in found if delta.kind is _TEXT]
            (texts or found)[0].logprobs = _encode(logprobs)
        self.deltas += found

    def _delta(self, kind: Kind, text: str) -> Delta:
        """Stamp the next delta (F9)."""
        delta = Delta(self._assignment, self._index, kind, text)
        self._index += 1
        return delta

    def _take_usage(self, counted: Counted) -> None:
        if counted.prompt_tokens is None or counted.completion_tokens is None:
            return
        prompt = counted.prompt_tokens_details or _NO_DETAILS
        completion = counted.completion_tokens_details or _NO_DETAILS
        reasoning = completion.reasoning_tokens
        self.usage = Usage(
            prompt_tokens=counted.prompt_tokens,
            completion_tokens=counted.completion_tokens,
            cached_tokens=prompt.cached_tokens,
            reasoning_tokens=counted.reasoning_tokens
            if reasoning is None
            else reasoning,
        )

    def _take_finish(self, choice: Choice) -> Fault | None:
        """Note the finish reason, or say why it is none (A6)."""
        assert choice.finish_reason is not None
        word = choice.finish_reason.lower()
        self.finish = _REASONS.get(word)
        if self.finish is None:
            # Unknown words fail as well: nobody can tell whether the text is whole.
            message = f"The engine ended its answer with '{scrubbed(word[:40])}'."
            if word in _ABORTS:
                return Fault(FaultKind.ENGINE_ABORT, message)
            return _protocol(message)
        for matched in (choice.stop_reason, choice.matched_stop):
            if isinstance(matched, str):
                self._stop_sequence = matched
        return None


def _protocol(message: str) -> Fault:
    return Fault(FaultKind.PROTOCOL, message)
