"""SGLang (PROTOCOLS B.3)."""

from collections.abc import Mapping
from typing import Any, Final

from router.messages import Discovery, Probe, SlotView
from workers.control import Answer, Control
from workers.engines.engine import (
    answered,
    check_health,
    counted,
    dig,
    list_models,
    whole,
    word,
)

_LOADS = "/v1/loads?include=core"
_SAMPLING: Final[Mapping[str, str]] = {
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}


class Sglang:
    """Notices a client that left after 2 to 6 s.

    Its ``/health`` runs a generation of one token, so ``/ready`` is asked where
    it exists, and the process alone otherwise.
    """

    name = "sglang"
    settle_s = 6.0
    max_tokens_field = "max_completion_tokens"
    sampling_fields = _SAMPLING
    early_head = False
    pins_slots = False
    budget_field: str | None = None
    keeps_budget = False
    ends_reasoning = False
    sees_images = True

    def __init__(self) -> None:
        """Know nothing of its build yet."""
        self.settles_by_probe = False

    async def probe(self, control: Control, health_url: str | None) -> Probe:
        """Ask whether it is ready, and what it is (L2, L9). A checkpoint."""
        probe = await check_health(control, "/ready", health_url)
        if probe is not None:
            return probe
        cards = await list_models(control)
        if isinstance(cards, Probe):
            return cards
        about = (await control.get("/server_info")).fields()
        loads = _loads(await control.get(_LOADS))
        self.settles_by_probe = bool(loads)
        return answered(
            Discovery(
                models=cards.models,
                slots=_total(loads),
                context=cards.smallest("max_model_len"),
                engine=self.name,
                version=word(about.get("version")),
            )
        )

    async def slot_view(self, control: Control) -> SlotView | None:
        """Count what it runs and what waits in it. A checkpoint."""
        loads = _loads(await control.get(_LOADS))
        if not loads:
            return None
        counts = [
            whole(load.get(field))
            for load in loads
            for field in ("num_running_reqs", "num_waiting_reqs")
        ]
        return SlotView(_total(loads), sum(filter(None, counts)))

    async def alive(self, control: Control) -> bool:
        """Ask which model it has. A checkpoint."""
        return (await control.get("/model_info")).ok

    async def count_tokens(self, control: Control, body: bytes) -> int | None:
        """Have it tokenize the messages. A checkpoint."""
        return counted(await control.post("/v1/tokenize", body), "count")


def _loads(answer: Answer) -> list[dict[str, Any]]:
    """Read the loads, one a data-parallel rank; empty where there are none."""
    found = answer.json() if answer.ok else None
    listed = found if isinstance(found, list) else dig(found, "loads")
    return (
        [x for x in listed if isinstance(x, dict)] if isinstance(listed, list) else []
    )


def _total(loads: list[dict[str, Any]]) -> int | None:
    totals = [whole(load.get("max_running_requests")) for load in loads]
    return sum(filter(None, totals)) or None
