"""llama.cpp's server (PROTOCOLS B.1)."""

from collections.abc import Mapping
from typing import Final

import msgspec

from router.messages import Discovery, Probe, SlotView
from workers.control import Answer, Control
from workers.engines.engine import (
    answered,
    check_health,
    counted,
    dig,
    list_models,
    metric,
    unfit,
    whole,
    word,
)

_SAMPLING: Final[Mapping[str, str]] = {
    name: name
    for name in (
        "presence_penalty",
        "frequency_penalty",
        "top_k",
        "min_p",
        "typical_p",
        "repeat_penalty",
        "repeat_last_n",
        "ignore_eos",
    )
}
_STARTED: Final = "process-start-time-unix"


class LlamaServer:
    """Shows its slots; queues without a word, so never more than they are."""

    name = "llama-server"
    settle_s = 1.0
    max_tokens_field = "max_tokens"
    sampling_fields = _SAMPLING
    early_head = False
    pins_slots = True
    budget_field: str | None = "thinking_budget_tokens"
    keeps_budget = True
    ends_reasoning = True

    def __init__(self) -> None:
        """Know nothing of its build yet."""
        self.sees_images = True
        self.settles_by_probe = True
        self._slots_path = "/slots"
        #: This build can fall asleep, and ``/slots`` would wake it (B.0).
        self._may_sleep = False
        self._has_metrics = False
        self._total: int | None = None

    async def probe(self, control: Control, health_url: str | None) -> Probe:
        """Ask whether it is ready, and what it is (L2, L9). A checkpoint."""
        probe = await check_health(control, "/health", health_url)
        if probe is not None:
            return probe
        cards = await list_models(control)
        if isinstance(cards, Probe):
            return cards
        props = await control.get("/props")
        probe = unfit(props, "/props")
        if probe is not None:
            return probe
        self._learn(props)
        fields = props.fields()
        context = cards.smallest("meta", "n_ctx")
        if context is None:
            context = whole(dig(fields, "default_generation_settings", "n_ctx"))
        return answered(
            Discovery(
                models=cards.models,
                slots=self._total,
                context=context,
                engine=self.name,
                version=word(fields.get("build_info")),
                started_at=await self._started_at(control),
            )
        )

    def _learn(self, props: Answer) -> None:
        fields = props.fields()
        self._total = whole(fields.get("total_slots")) or None
        self._may_sleep = "is_sleeping" in fields
        self.sees_images = dig(fields, "modalities", "vision") is not False
        self._has_metrics = fields.get("endpoint_metrics") is True
        # Older builds don't say; they are asked, and may answer 501.
        has_slots = fields.get("endpoint_slots") is not False
        self.settles_by_probe = has_slots or self._has_metrics
        self._slots_path = "/slots" if has_slots else "/metrics"

    async def _started_at(self, control: Control) -> float | None:
        if not self._has_metrics:
            return None
        value = (await control.get("/metrics")).headers.get(_STARTED, "")
        return float(value) if value.isascii() and value.isdecimal() else None

    async def slot_view(self, control: Control) -> SlotView | None:
        """Ask about its slots, without waking it up. A checkpoint."""
        if self._may_sleep and self._slots_path == "/slots":
            props = (await control.get("/props")).fields()
            if props.get("is_sleeping") is True:
                return SlotView(self._total, 0, frozenset())
        answer = await control.get(self._slots_path)
        if not answer.ok:
            return None
        if self._slots_path == "/metrics":
            processing = metric(answer.text(), "llamacpp:requests_processing")
            return (
                None if processing is None else SlotView(self._total, int(processing))
            )
        slots = answer.json()
        if not isinstance(slots, list) or not slots:
            return None
        busy = [slot for slot in slots if dig(slot, "is_processing") is True]
        numbers = frozenset(whole(dig(slot, "id")) for slot in busy)
        named = frozenset(number for number in numbers if number is not None)
        # Numbers only if each has its own: else nobody knows which is which.
        return SlotView(
            len(slots), len(busy), named if len(named) == len(busy) else None
        )

    async def alive(self, control: Control) -> bool:
        """Ask its health path, which needs no slot. A checkpoint."""
        return (await control.get("/health")).ok

    async def count_tokens(self, control: Control, body: bytes) -> int | None:
        """Have it count; older builds write the prompt out first. A checkpoint."""
        answer = await control.post("/v1/chat/completions/input_tokens", body)
        if answer.ok:
            return counted(answer, "input_tokens")
        prompt = (await control.post("/apply-template", body)).fields().get("prompt")
        if not isinstance(prompt, str):
            return None
        asked = {"content": prompt, "add_special": True, "parse_special": True}
        answer = await control.post("/tokenize", msgspec.json.encode(asked))
        tokens = answer.fields().get("tokens")
        return (len(tokens) or None) if isinstance(tokens, list) else None
