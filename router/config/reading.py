"""From a parsed TOML document to Settings, or to the list of all its faults.

cattrs does the walking: every key is looked at, whatever else is wrong, and
each fault comes out with its path, as the operator wrote it (D2).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import attrs
import cattrs
from cattrs.errors import (
    BaseValidationError,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
)
from cattrs.gen import make_dict_structure_fn, override

from router.config.keys import join
from router.config.values import Check, EntriesInvalid, kind_of, near
from router.settings import (
    AdminSettings,
    AgentSettings,
    AgentsSettings,
    ModelSettings,
    RouterSettings,
    ServerSettings,
    Settings,
    WaitSettings,
    WorkerSettings,
)

#: Section to class, as the document names them.
SECTIONS: Final[Mapping[str, type]] = {
    "server": ServerSettings,
    "admin": AdminSettings,
    "router": RouterSettings,
    "waits": WaitSettings,
    "worker": WorkerSettings,
    "models": ModelSettings,
    "agents": AgentsSettings,
    "agent": AgentSettings,
}

_T = TypeVar("_T")


def read_document(
    document: Mapping[str, Any], rules: Mapping[str, Mapping[str, Check]]
) -> tuple[Settings | None, list[str]]:
    """Structure a whole document.

    Returns: the settings, None if there is a fault; and all the faults, in
        the order of the sections, each ``path: sentence``.
    """
    converter = _converter(rules)
    try:
        return converter.structure(dict(document), Settings), []
    except BaseValidationError as group:
        return None, [f"{path}: {says}" for path, says in _faults(group, "")]


def _converter(rules: Mapping[str, Mapping[str, Check]]) -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True, forbid_extra_keys=True)
    for section, cls in SECTIONS.items():
        hooks = {
            key: override(struct_hook=_hook(check))
            for key, check in rules[section].items()
        }
        _register(converter, cls, hooks)
    worker = override(rename="worker", struct_hook=_tables(converter))
    models = override(struct_hook=_named_tables(converter))
    _register(converter, Settings, {"workers": worker, "models": models})
    return converter


def _register(
    converter: cattrs.Converter, cls: type[_T], hooks: Mapping[str, Any]
) -> None:
    fill = make_dict_structure_fn(
        cls,
        converter,
        _cattrs_forbid_extra_keys=True,
        _cattrs_detailed_validation=True,
        **hooks,
    )

    def structure(value: Any, cls: type[_T]) -> _T:
        if type(value) is not dict:
            raise ValueError(f"needs a table, got {kind_of(value)}")
        return fill(value, cls)

    converter.register_structure_hook(cls, structure)


def _hook(check: Check) -> Callable[[Any, Any], Any]:
    return lambda value, _: check(value)


def _tables(converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Take ``[[worker]]``: a list of tables."""

    def structure(value: Any, _: Any) -> tuple[WorkerSettings, ...]:
        if type(value) is not list:
            raise ValueError("each worker is a table of a list: write [[worker]]")
        return converter.structure(value, tuple[WorkerSettings, ...])

    return structure


def _named_tables(converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Take ``[models.NAME]``: tables by name."""

    def structure(value: Any, _: Any) -> Mapping[str, ModelSettings]:
        if type(value) is not dict:
            raise ValueError("each model is a table with a name: write [models.NAME]")
        return converter.structure(value, dict[str, ModelSettings])

    return structure


# ---- from cattrs' tree of exceptions to lines ----


def _faults(error: BaseException, path: str) -> Iterator[tuple[str, str]]:
    """Give (path, sentence) for every leaf under *error*, met at *path*."""
    if isinstance(error, ClassValidationError):
        fields, others = error.group_exceptions()
        for part, note in fields:
            key = "worker" if note.name == "workers" else note.name
            yield from _faults(part, join(path, key))
        for other in others:
            yield from _faults(other, path)
    elif isinstance(error, IterableValidationError):
        for part, place in error.group_exceptions()[0]:
            yield from _faults(part, join(path, place.index))
    else:
        yield from _leaf(error, path)


def _leaf(error: BaseException, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(error, ForbiddenExtraKeysError):
        for key in sorted(error.extra_fields):
            yield join(path, key), _unknown_key(key, error.cl)
    elif isinstance(error, EntriesInvalid):
        for index, sentence in error.entries:
            yield path if index is None else join(path, index), sentence
    elif isinstance(error, KeyError):
        yield path, "is missing"
    else:
        yield path, str(error)


def _unknown_key(key: str, cls: type) -> str:
    section = next((name for name, other in SECTIONS.items() if other is cls), "")
    if not section:
        sections = tuple(SECTIONS)
        otherwise = f": {', '.join(sections)}"
        return f"unknown section{near(key, sections, otherwise=otherwise)}"
    known = _keys(cls)
    meant = near(key, known)
    if not meant:
        homes = [name for name, other in SECTIONS.items() if key in _keys(other)]
        meant = f", it belongs to [{homes[0]}]" if homes else ""
    return f"unknown key{meant or ': ' + ', '.join(known)}"


def _keys(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(cls))
