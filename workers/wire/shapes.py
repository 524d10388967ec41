"""What an agent puts into a frame, made to fit it.

Rule: numbers and names of an engine are the engine's, and whatever they are,
they end no connection: what no frame can carry is left out. The limits are those
of ``frames``. Pure.
"""

from collections.abc import Mapping
from itertools import islice
from math import isnan
from typing import Final

from msgspec.structs import replace

from router.messages import Usage
from workers.wire.frames import NAME_MAX, NUMBER_MAX, Host, Observation, Tokens

#: Models in one observation.
MODELS_MAX: Final = 4096


def number_of(value: int | None) -> int | None:
    """Give *value* where it is a number of the wire."""
    return value if value is not None and 0 <= value <= NUMBER_MAX else None


def milliseconds(seconds: float | None) -> int | None:
    """Write a time of *seconds*, as near as the wire has it."""
    if seconds is None or isnan(seconds):
        return None
    return int(min(max(seconds, 0.0) * 1000, NUMBER_MAX))


def is_name(text: str) -> bool:
    """Say whether the wire has such a name."""
    return 0 < len(text) <= NAME_MAX


def tokens_of(usage: Usage | None) -> Tokens | None:
    """Write *usage*; None where a count that it must have is none."""
    if usage is None:
        return None
    prompt, completion = (
        number_of(usage.prompt_tokens),
        number_of(usage.completion_tokens),
    )
    if prompt is None or completion is None:
        return None
    return Tokens(
        prompt,
        completion,
        number_of(usage.cached_tokens),
        number_of(usage.reasoning_tokens),
    )


def fit(seen: Observation) -> Observation:
    """Give *seen* without what no frame can carry."""
    hosts = seen.hosts
    return replace(
        seen,
        slots=_clamped(seen.slots),
        load=_clamped(seen.load),
        models=_models(seen.models),
        context=number_of(seen.context),
        hosts=None if hosts is None else [_host(host) for host in hosts],
    )


def _models(models: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    named = ((name, at) for name, at in models.items() if is_name(name))
    return {
        name: (_clamped(slots), state)
        for name, (slots, state) in islice(named, MODELS_MAX)
    }


def _host(host: Host) -> Host:
    return replace(
        host,
        slots=_clamped(host.slots),
        busy=_clamped(host.busy),
        models=[name[:NAME_MAX] for name in host.models],
    )


def _clamped(value: int) -> int:
    return min(max(value, 0), NUMBER_MAX)
