"""How names stand in TOML: bare where they can, else as a quoted string."""

import json
import re
from typing import Final

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def quoted(value: str) -> str:
    """Write *value* as a TOML string, fit for reading back."""
    # A JSON string is a TOML basic string, but for DEL, which TOML escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def key(name: str) -> str:
    """Write *name* as a key."""
    return name if _BARE.fullmatch(name) else quoted(name)


def join(path: str, part: str | int) -> str:
    """Extend *path* by a key, or by a 0-based place in a list."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{key(part)}" if path else key(part)
