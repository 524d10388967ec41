"""What differs between engines, and the questions that all of them share.

An `Engine` holds no connection: it asks through a `Control` and remembers
what its endpoints are. Whatever the server answers, nothing here raises but
`NoAnswer`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from router.messages import Discovery, Probe, ProbeResult, SlotView
from workers.control import Answer, Control

MODELS_PATH: Final = "/v1/models"


class Engine(Protocol):
    """One kind of server, as a direct worker needs it."""

    name: str
    settle_s: float
    """Seconds it needs to notice a closed request (S3)."""
    settles_by_probe: bool
    """Whether ``slot_view`` can tell that a slot is free again; known for
    certain after the first ``probe`` that answered."""
    max_tokens_field: str
    """What it calls the limit of completion tokens."""
    sampling_fields: Mapping[str, str]
    """What it calls those of ``upstream.VARYING`` that it knows (J3)."""
    early_head: bool
    """It answers 200 before it has looked at the request (W8)."""
    pins_slots: bool
    """A request can name the slot that is to serve it (W2)."""
    budget_field: str | None
    """What it calls the limit of reasoning tokens; None: it has none."""
    keeps_budget: bool
    """It is known to keep that limit by itself (J6)."""
    ends_reasoning: bool
    """It ends a reasoning when it is told to (J6)."""
    sees_images: bool
    """False: it is known to see none."""

    async def probe(self, control: Control, health_url: str | None) -> Probe:
        """Ask whether it is ready, and what it is (L2, L9). A checkpoint.

        Raises:
            NoAnswer: it did not say.
        """

    async def slot_view(self, control: Control) -> SlotView | None:
        """Ask about its slots; None: it does not say. A checkpoint.

        Raises:
            NoAnswer: it did not say.
        """

    async def alive(self, control: Control) -> bool:
        """Ask the cheapest question that proves a process answers. A checkpoint.

        Raises:
            NoAnswer: it did not say.
        """

    async def count_tokens(self, control: Control, body: bytes) -> int | None:
        """Have it count a prompt; *body*: ``build_count_body``'s. A checkpoint.

        None: it can't, or did not understand.

        Raises:
            NoAnswer: it did not say.
        """


class Cards(NamedTuple):
    """What ``/v1/models`` lists."""

    models: tuple[str, ...] = ()
    """Its own ids in order, then their aliases."""
    owners: frozenset[str] = frozenset()
    """``owned_by`` of all of them."""
    cards: Sequence[dict[str, Any]] = ()

    def smallest(self, *path: str) -> int | None:
        """Give the smallest whole number that the cards have at *path*."""
        found = [whole(dig(card, *path)) for card in self.cards]
        return min((n for n in found if n is not None and n > 0), default=None)


def unfit(answer: Answer, path: str) -> Probe | None:
    """Say why an answer's status means "not ready"; None: it does not."""
    if answer.status == 503:
        return Probe(ProbeResult.LOADING, f"{path} answers 503")
    if answer.status in {401, 403}:
        return Probe(ProbeResult.UNAUTHORIZED, f"{path} answers {answer.status}")
    return None


async def check_health(
    control: Control, path: str, health_url: str | None
) -> Probe | None:
    """Ask the health path; None: nothing is said against it (L2).

    The engine's own *path* is only to be not 503, since it may not exist or be
    another's; an operator's *health_url* has to answer well.
    """
    answer = await control.get(health_url or path)
    if health_url is None:
        loading = answer.status == 503
        return Probe(ProbeResult.LOADING, f"{path} answers 503") if loading else None
    said = "the health URL"
    probe = unfit(answer, said)
    if probe is None and not answer.ok:
        return Probe(ProbeResult.SILENT, f"{said} answers {answer.status}")
    return probe


async def list_models(control: Control) -> Cards | Probe:
    """Ask for the models; a probe where they can't be had (L2)."""
    answer = await control.get(MODELS_PATH)
    probe = unfit(answer, MODELS_PATH)
    if probe is not None:
        return probe
    if not answer.ok:
        return Probe(ProbeResult.SILENT, f"{MODELS_PATH} answers {answer.status}")
    if answer.json() is None:
        return Probe(ProbeResult.SILENT, f"{MODELS_PATH} answers without JSON")
    return read_cards(answer)


def read_cards(answer: Answer) -> Cards:
    """Read a list of models; what is not one is left out."""
    listed = answer.fields().get("data")
    cards = (
        [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    )
    names = [card.get("id") for card in cards]
    for card in cards:
        aliases = card.get("aliases")
        names += aliases if isinstance(aliases, list) else []
    models = dict.fromkeys(n for n in names if isinstance(n, str) and n)
    owners = {card.get("owned_by") for card in cards}
    return Cards(
        tuple(models), frozenset(o for o in owners if isinstance(o, str)), cards
    )


def answered(discovery: Discovery) -> Probe:
    """Give the probe of a worker that is ready."""
    return Probe(ProbeResult.ANSWERED, discovery=discovery)


def counted(answer: Answer, field: str) -> int | None:
    """Read a number of tokens, which is never 0; None: it is not there."""
    return (whole(answer.fields().get(field)) or None) if answer.ok else None


def dig(value: object, *path: str) -> object:
    """Follow *path* through JSON objects; None where it breaks off."""
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    return value


def whole(value: object) -> int | None:
    """Give a JSON whole number that is not negative; None for the rest."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value


def word(value: object) -> str | None:
    """Give a short string; None for the rest."""
    return value[:100] if isinstance(value, str) and value else None


def metric(text: str, name: str) -> float | None:
    """Add up a Prometheus metric over its labels; None: it is not there."""
    pattern = rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+([0-9.eE+-]{{1,40}})[ \t]*$"
    found = re.findall(pattern, text, re.MULTILINE)
    try:
        total = sum(map(float, found))
    except ValueError:
        return None
    return total if found and math.isfinite(total) else None
