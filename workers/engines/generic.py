"""Anything that speaks OpenAI's dialect and of which we know no more (W8)."""

from collections.abc import Sequence
from typing import Final

import msgspec

from router.messages import Discovery, Probe, ProbeResult, SlotView
from router.openai.upstream import OPENAI_FIELDS
from workers.control import Answer, Control
from workers.engines.engine import (
    MODELS_PATH,
    answered,
    check_health,
    read_cards,
    unfit,
)

_ABSENT: Final = frozenset({404, 405, 501})


class Generic:
    """Its silence is judged by ``/v1/models`` alone: an answer means alive."""

    name = "generic"
    settle_s = 1.0
    settles_by_probe = False
    max_tokens_field = "max_tokens"
    sampling_fields = OPENAI_FIELDS
    early_head = False
    pins_slots = False
    budget_field: str | None = "thinking_budget_tokens"
    keeps_budget = False
    ends_reasoning = False
    sees_images = True

    def __init__(self, models: Sequence[str] = ()) -> None:
        """*models*: configured names, for a server that lists none."""
        self._models = tuple(models)
        self._warm = False

    async def probe(self, control: Control, health_url: str | None) -> Probe:
        """Ask whether it is ready, and what it is (L2, L9). A checkpoint."""
        probe = await check_health(control, "/health", health_url)
        if probe is not None:
            return probe
        answer = await control.get(MODELS_PATH)
        probe = unfit(answer, MODELS_PATH)
        if probe is not None:
            return probe
        if answer.ok and answer.json() is not None:
            return answered(Discovery(models=read_cards(answer).models))
        if health_url is not None:
            return answered(Discovery(models=self._models))
        if answer.status in _ABSENT and self._models:
            return await self._warm_up(control)
        return Probe(ProbeResult.SILENT, f"{MODELS_PATH} answers {_shape(answer)}")

    async def _warm_up(self, control: Control) -> Probe:
        """Ask for one token, once: nothing else is there to be asked (L2)."""
        if not self._warm:
            body = msgspec.json.encode(
                {
                    "model": self._models[0],
                    "messages": [{"role": "user", "content": "Hi"}],
                    self.max_tokens_field: 1,
                }
            )
            answer = await control.post("/v1/chat/completions", body)
            probe = unfit(answer, "a one-token request")
            if probe is not None:
                return probe
            if not answer.ok:
                said = f"a one-token request is answered with {answer.status}"
                return Probe(ProbeResult.SILENT, said)
            self._warm = True
        return answered(Discovery(models=self._models))

    async def slot_view(self, control: Control) -> SlotView | None:
        """It says nothing of its slots. Not a checkpoint."""
        del control
        return None

    async def alive(self, control: Control) -> bool:
        """Ask for the models. A checkpoint."""
        return (await control.get(MODELS_PATH)).status < 500

    async def count_tokens(self, control: Control, body: bytes) -> int | None:
        """It has no endpoint that all of its kind have. Not a checkpoint."""
        del control, body
        return None


def _shape(answer: Answer) -> str:
    return "without JSON" if answer.ok else str(answer.status)
