"""vLLM (PROTOCOLS B.2)."""

from collections.abc import Mapping
from typing import Final

from router.messages import Discovery, Probe, SlotView
from workers.control import Control
from workers.engines.engine import (
    answered,
    check_health,
    counted,
    list_models,
    metric,
    word,
)

_SAMPLING: Final[Mapping[str, str]] = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}


class Vllm:
    """Answers 200 at once and aborts at once when its client leaves."""

    name = "vllm"
    settle_s = 0.0
    settles_by_probe = True
    max_tokens_field = "max_completion_tokens"
    sampling_fields = _SAMPLING
    early_head = True
    pins_slots = False
    budget_field: str | None = "thinking_token_budget"
    keeps_budget = True
    ends_reasoning = False
    sees_images = True

    async def probe(self, control: Control, health_url: str | None) -> Probe:
        """Ask whether it is ready, and what it is (L2, L9). A checkpoint."""
        probe = await check_health(control, "/health", health_url)
        if probe is not None:
            return probe
        cards = await list_models(control)
        if isinstance(cards, Probe):
            return cards
        version = await control.get("/version")
        metrics = await control.get("/metrics")
        return answered(
            Discovery(
                models=cards.models,
                context=cards.smallest("max_model_len"),
                engine=self.name,
                version=word(version.fields().get("version")),
                started_at=metric(metrics.text(), "process_start_time_seconds"),
            )
        )

    async def slot_view(self, control: Control) -> SlotView | None:
        """Count what it runs and what waits in it. A checkpoint."""
        answer = await control.get("/metrics")
        if not answer.ok:
            return None
        text = answer.text()
        running = metric(text, "vllm:num_requests_running")
        waiting = metric(text, "vllm:num_requests_waiting")
        if running is None:
            return None
        return SlotView(None, int(running + (waiting or 0.0)))

    async def alive(self, control: Control) -> bool:
        """Ask its health path. A checkpoint."""
        return (await control.get("/health")).ok

    async def count_tokens(self, control: Control, body: bytes) -> int | None:
        """Have it tokenize the messages. A checkpoint."""
        return counted(await control.post("/tokenize", body), "count")
