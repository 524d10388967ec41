"""What an agent puts into a frame, made to fit it.

Rule: numbers and names of an engine are the engine's, and whatever they are,
they end no connection: what no frame can carry is left out. The limits are those
of ``frames``. Pure.
"""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Final

from msgspec.structs import replace

from router.messages import Usage
from workers.wire.frames import (
    HOSTS_MAX,
    MODELS_MAX,
    NAME_MAX,
    NUMBER_MAX,
    Host,
    Observation,
    Tokens,
    encode,
)

#: Bytes of an observation for its models, and for its hosts: together less than a
#: frame has. As many models as it may have fit, if their names are ASCII.
MODELS_BYTES: Final = 1280 * 1024
HOSTS_BYTES: Final = 512 * 1024
#: Bytes of a model besides those of its name, at most: heads, slots and state.
_MODEL_COST: Final = 16


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
    """Give *seen* without what no frame can carry.

    Of more models or hosts than it has room for, the first are told of: which
    they are depends on nothing but their order.
    """
    hosts = seen.hosts
    return replace(
        seen,
        slots=_clamped(seen.slots),
        load=_clamped(seen.load),
        models=_models(seen.models),
        context=number_of(seen.context),
        hosts=None if hosts is None else _hosts(hosts),
    )


def fits(seen: Observation) -> bool:
    """Say whether ``fit`` leaves no model and no host of *seen* out."""
    told = fit(seen)
    return len(told.models) == len(seen.models) and (
        len(told.hosts or ()) == len(seen.hosts or ())
    )


def _models(models: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    kept: dict[str, tuple[int, int]] = {}
    room = MODELS_BYTES
    for name, (slots, state) in models.items():
        if not is_name(name):
            continue
        room -= _MODEL_COST + len(name.encode())
        if room < 0 or len(kept) == MODELS_MAX:
            break
        kept[name] = (_clamped(slots), state)
    return kept


def _hosts(hosts: Sequence[Host]) -> list[Host]:
    kept: list[Host] = []
    room = HOSTS_BYTES
    for host in map(_host, hosts[:HOSTS_MAX]):
        room -= len(encode(host))
        if room < 0:
            break
        kept.append(host)
    return kept


def _host(host: Host) -> Host:
    return replace(
        host,
        slots=_clamped(host.slots),
        busy=_clamped(host.busy),
        engine=_cut(host.engine),
        version=_cut(host.version),
        models=[name[:NAME_MAX] for name in host.models],
    )


def _cut(text: str | None) -> str | None:
    return None if text is None else text[:NAME_MAX]


def _clamped(value: int) -> int:
    return min(max(value, 0), NUMBER_MAX)
