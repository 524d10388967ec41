"""The command line of a supervised server: a list, in which three words stand for
what the router knows (L6). No shell, and no formatting: JSON keeps its braces.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

#: ``{word}``; a doubled brace before it (Jinja) makes it no word of ours.
_WORD: Final = re.compile(r"(?<!\{)\{([A-Za-z_][A-Za-z0-9_-]*)\}")

WORDS: Final = ("port", "slots", "model")


def words_in(argument: str) -> tuple[str, ...]:
    """Name what stands in braces in *argument*, in order; known words or not."""
    return tuple(_WORD.findall(argument))


def fill(
    command: Sequence[str], *, port: int, slots: int | None, model: str | None
) -> list[str]:
    """Put the known values into *command*; what they hold is not read again.

    Raises:
        ValueError: a word that is not one of ``WORDS``, or has no value here.
    """
    values = {"port": port, "slots": slots, "model": model}

    def value(match: re.Match[str]) -> str:
        word = match[1]
        if word not in values:
            known = ", ".join(f"{{{name}}}" for name in WORDS)
            raise ValueError(f"{{{word}}} stands for nothing: there are {known}")
        found = values[word]
        if found is None:
            raise ValueError(f"{{{word}}} needs the setting {word}")
        return str(found)

    return [_WORD.sub(value, argument) for argument in command]


def find_program(
    name: str, *, environ: Mapping[str, str], cwd: str | None
) -> str | None:
    """Say why *name* can't be executed; None: it can, as far as can be told.

    Args:
        name: as the shim will execute it: with a slash a path, else looked for.
        environ: the server's own, for its PATH.
        cwd: where a relative path starts.
    """
    if "/" in name:
        path = Path(cwd or ".", name)
        try:
            found = path.is_file()
        except OSError as error:  # too long, or in a folder that is not ours
            return f"cannot be looked at: {error.strerror}"
        if not found:
            return f"there is no program {name}: correct the path"
        if not os.access(path, os.X_OK):
            return f"{name} is not executable: chmod +x it, or name another"
        return None
    if shutil.which(name, path=environ.get("PATH", os.defpath)) is None:
        return f"no program {name} in PATH: install it, or give its whole path"
    return None
