"""The configuration: TOML in, checked Settings out, or all faults at once (D2).

Nothing is guessed and nothing converted: a key is known or it is a fault, a
value has its type and its range or it is a fault. A key that a later release
will know is refused with a sentence that says so.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from router.config.contradictions import contradictions
from router.config.reading import read_document
from router.config.rendering import render
from router.config.values import checks
from router.errors import LocalError, RouterError
from router.settings import Settings

__all__ = ["ConfigInvalid", "load", "parse", "render"]


class ConfigInvalid(RouterError):
    """A configuration that can't be used.

    ``faults`` holds one line for each thing that is wrong, at least one,
    mostly ``path: sentence``. No line repeats a secret.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        """Carry all the *faults*, at least one."""
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


def load(path: Path, *, environ: Mapping[str, str]) -> Settings:
    """Read the file at *path*; paths in it are relative to its folder.

    Raises:
        ConfigInvalid: the file can't be read, or what it says can't be used.
    """
    try:
        source = path.read_bytes().decode()
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ConfigInvalid([f"{path}: {reason}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigInvalid([f"{path}: byte {error.start} is not UTF-8"]) from None
    return parse(source, environ=environ, directory=path.parent.absolute())


def parse(source: str, *, environ: Mapping[str, str], directory: Path) -> Settings:
    """Read a TOML document; *directory* is where its relative paths start.

    Raises:
        ConfigInvalid: with every fault, each once.
    """
    try:
        document = tomllib.loads(source)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigInvalid([f"not TOML: {error}"]) from None
    settings, faults = read_document(document, checks(environ, directory))
    faults += contradictions(document)
    if faults:
        raise ConfigInvalid(faults)
    if settings is None:
        raise LocalError("a document without faults gave no settings")
    return settings
