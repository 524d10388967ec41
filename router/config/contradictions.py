"""Faults that lie between keys: each is well formed, together they can't be.

These look at the raw document, so that they are told together with all the
other faults; what has the wrong type is passed over here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from router.config.agents import agent_faults
from router.config.commands import command_faults
from router.config.keys import join, quoted
from router.config.places import place_faults, plain_address, plain_url
from router.config.values import model_name
from router.settings import ServerSettings, WaitSettings

_BITS: Final = 64


def contradictions(
    document: Mapping[str, Any], environ: Mapping[str, str] | None, directory: Path
) -> list[str]:
    """Give all of them, each ``path: sentence``; arguments as ``config.load``."""
    workers = [w for w in _list(document.get("worker")) if isinstance(w, dict)]
    models = {
        name: model
        for name, model in _dict(document.get("models")).items()
        if isinstance(model, dict)
    }
    return [
        *_workers(document, workers),
        *command_faults(workers, environ, directory),
        *agent_faults(document, workers, environ),
        *_models(workers, models, announced=_announced(document)),
        *place_faults(document, workers),
        *_sizes(_dict(document.get("server"))),
        *_budgets(_dict(document.get("waits"))),
    ]


def _workers(
    document: Mapping[str, Any], workers: list[dict[str, Any]]
) -> Iterator[str]:
    if document.get("worker", []) == [] and not _announced(document):
        yield "worker: there is none: add a [[worker]] with name and url"
    for key, plain, why in (
        ("name", str, "each worker needs a name of its own"),
        ("url", plain_url, "one worker entry holds all its slots"),
        ("agent", plain_address, "one worker entry is all that its agent hosts"),
    ):
        first: dict[str, int] = {}
        for index, worker in enumerate(workers):
            value = worker.get(key)
            if not isinstance(value, str):
                continue
            twin = first.setdefault(plain(value), index)
            if twin != index:
                yield f"worker[{index}].{key}: the same as worker[{twin}]: {why}"


def _announced(document: Mapping[str, Any]) -> bool:
    """Say whether agents may come by themselves, with models of their own."""
    return bool(_dict(document.get("agents")).get("listen"))


def _models(
    workers: list[dict[str, Any]],
    models: Mapping[str, dict[str, Any]],
    *,
    announced: bool,
) -> Iterator[str]:
    served = {m for w in workers for m in _strings(w.get("models"))}
    # A worker that does not list its models tells them only when it is met.
    listed = bool(workers) and all(_strings(w.get("models")) for w in workers)
    closed = listed and not announced
    owners: dict[str, str] = {}
    for name, model in models.items():
        for alias in _strings(model.get("aliases")):
            owners.setdefault(alias, name)
    for name, model in models.items():
        path = join("models", name)
        try:
            model_name(name)
        except ValueError as error:
            yield f"{path}: {error}"
        else:
            if closed and name not in served:
                yield f"{path}: no worker lists this model"
        for alias in _strings(model.get("aliases")):
            if alias in models or alias in served:
                yield f"{path}.aliases: {quoted(alias)} is the name of a model"
            elif owners[alias] != name:
                owner = quoted(owners[alias])
                yield f"{path}.aliases: {quoted(alias)} is an alias of {owner} already"
        if model.get("tool_parse_error") == "signal" and "bios" not in model:
            yield f"{path}.tool_parse_error: without a bios no call is parsed"
        fallback = model.get("fallback")
        if isinstance(fallback, str):
            yield from _fallback(path, name, fallback, owners)
            if closed and fallback not in {name, *owners, *served}:
                yield f"{path}.fallback: no worker lists the model {quoted(fallback)}"


def _fallback(
    path: str, name: str, fallback: str, owners: Mapping[str, str]
) -> Iterator[str]:
    if fallback == name:
        yield f"{path}.fallback: a model is no fallback for itself"
    elif fallback in owners:
        owner = quoted(owners[fallback])
        yield f"{path}.fallback: {quoted(fallback)} is an alias: name {owner} itself"


def _sizes(server: Mapping[str, Any]) -> Iterator[str]:
    defaults = ServerSettings()
    one = server.get("body_max_bytes", defaults.body_max_bytes)
    all_together = server.get("bodies_max_bytes", defaults.bodies_max_bytes)
    if _is_count(one) and _is_count(all_together) and one > all_together:
        yield (
            f"server.body_max_bytes: {one} is more than bodies_max_bytes "
            f"({all_together}), which holds all bodies together"
        )


def _budgets(waits: Mapping[str, Any]) -> Iterator[str]:
    defaults = WaitSettings()
    poll = waits.get("poll_ms", defaults.poll_ms)
    for key in ("busy_wait_ms", "load_wait_ms", "idle_grace_ms"):
        budget = waits.get(key, getattr(defaults, key))
        if _is_count(poll) and _is_count(budget) and 0 < budget < poll:
            yield (
                f"waits.{key}: {budget} is less than poll_ms ({poll}), "
                "the step in which it is counted"
            )


def _is_count(value: object) -> bool:
    # A number that is out of every range may be too long to be written.
    return type(value) is int and value.bit_length() < _BITS


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: object) -> list[str]:
    return [entry for entry in _list(value) if isinstance(entry, str)]
