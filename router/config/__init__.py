"""The configuration: TOML in, checked Settings out, or all faults at once (D2).

Nothing is guessed and nothing converted: a key is known or it is a fault, a
value has its type and its range or it is a fault.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from router.config.contradictions import contradictions
from router.config.reading import read_document
from router.config.rendering import render
from router.config.values import checks
from router.errors import LocalError, RouterError
from router.settings import Settings

__all__ = ["ConfigInvalid", "load", "of_urls", "parse", "render"]


class ConfigInvalid(RouterError):
    """A configuration that can't be used.

    ``faults`` holds one line for each thing that is wrong, at least one,
    mostly ``path: sentence``. No line repeats a secret.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        """Carry all the *faults*, at least one."""
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


def load(
    path: Path,
    *,
    environ: Mapping[str, str] | None,
    listen: Sequence[str] = (),
    admin: str | None = None,
) -> Settings:
    """Read the file at *path*; paths in it are relative to its folder.

    Args:
        path: a TOML file in UTF-8.
        environ: what ``api_key_env`` looks at; None: don't look, which is for
            those who serve nothing.
        listen: addresses in place of the file's own, if there are any.
        admin: address in place of the file's own.

    Raises:
        ConfigInvalid: the file can't be read, or what it says can't be used.
    """
    try:
        source = path.read_bytes().decode()
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise ConfigInvalid([reason]) from None
    except UnicodeDecodeError as error:
        raise ConfigInvalid([f"byte {error.start} is not UTF-8"]) from None
    return parse(
        source,
        environ=environ,
        directory=path.parent.absolute(),
        listen=listen,
        admin=admin,
    )


def parse(
    source: str,
    *,
    environ: Mapping[str, str] | None,
    directory: Path,
    listen: Sequence[str] = (),
    admin: str | None = None,
) -> Settings:
    """Read a TOML document; *directory* is where its relative paths start.

    The other arguments and what is raised: as ``load``.
    """
    try:
        document = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid([f"not TOML: {error}"]) from None
    except RecursionError:
        raise ConfigInvalid(["not TOML: it is nested too deeply"]) from None
    except ValueError:
        # What else tomllib passes on: Python's limit on the digits of a number.
        raise ConfigInvalid(["a number in it has thousands of digits"]) from None
    return _settings(_overlaid(document, listen, admin), environ, directory)


def of_urls(
    urls: Sequence[str], *, listen: Sequence[str] = (), admin: str | None = None
) -> Settings:
    """Give the settings of a router that has no file, over workers at *urls*.

    Raises:
        ConfigInvalid: as ``load``; ``worker[0]`` is the first of *urls*.
    """
    workers = [{"name": f"w{place}", "url": url} for place, url in enumerate(urls)]
    document = _overlaid({"worker": workers}, listen, admin)
    return _settings(document, {}, Path.cwd())


def _overlaid(
    document: dict[str, Any], listen: Sequence[str], admin: str | None
) -> dict[str, Any]:
    """Put addresses from a command line over those of a document."""
    for section, value in (("server", list(listen)), ("admin", admin)):
        table = document.setdefault(section, {}) if value else None
        if isinstance(table, dict):
            table["listen"] = value
    return document


def _settings(
    document: Mapping[str, Any], environ: Mapping[str, str] | None, directory: Path
) -> Settings:
    settings, faults = read_document(document, checks(environ, directory))
    faults += contradictions(document, environ, directory)
    if faults:
        raise ConfigInvalid(faults)
    if settings is None:
        raise LocalError("a document without faults gave no settings")
    return settings
