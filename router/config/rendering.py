"""Settings back to TOML: what `fencepost check` shows.

Every key is there, defaults included; one that has no value is a comment.
Reading the result gives the same settings.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from router.config.keys import key, quoted
from router.settings import Settings


def render(settings: Settings) -> str:
    """Show *settings* as a whole TOML document."""
    lines: list[str] = []
    for section in ("server", "admin", "router", "waits", "agents", "agent"):
        table = getattr(settings, section)
        if table is not None:
            lines += [f"[{section}]", *_table(table), ""]
    for worker in settings.workers:
        lines += ["[[worker]]", *_table(worker), ""]
    for name, model in settings.models.items():
        lines += [f"[models.{key(name)}]", *_table(model), ""]
    return "\n".join(lines)


def _table(values: attrs.AttrsInstance) -> Iterator[str]:
    row: Mapping[str, Any] = attrs.asdict(values, recurse=False)
    for name, value in row.items():
        yield f"# {name} is not set" if value is None else f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        pairs = (f"{key(name)} = {_value(entry)}" for name, entry in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return str(value)
