"""What a model may be called.

Names come from clients and are only ever looked up (O6): no path, header or
file name is made of one. Pure.
"""

from collections.abc import Mapping
from typing import Final

from router.settings import ModelSettings

CATCH_ALL: Final = "*"


class Catalog:
    """Aliases and fallbacks, by name. Never changes once made."""

    def __init__(self, models: Mapping[str, ModelSettings]) -> None:
        """Index *models*, whose keys are the names workers are asked for."""
        self._aliases: dict[str, str] = {}
        self._fallbacks: dict[str, str] = {}
        self._default: str | None = None
        for name, model in models.items():
            for alias in model.aliases:
                if alias == CATCH_ALL:
                    self._default = name
                else:
                    self._aliases[alias] = name
            if model.fallback is not None:
                self._fallbacks[name] = model.fallback

    def target(self, name: str, known: Mapping[str, object]) -> str | None:
        """Find what *name* means: a model of *known*, an alias, or the default."""
        if name in known:
            return name
        return self._aliases.get(name, self._default)

    def aliases(self) -> Mapping[str, str]:
        """Each alias and what it means, ``*`` left out."""
        return self._aliases

    def fallback(self, name: str) -> str | None:
        """Name the model to use while none of *name* is ready."""
        return self._fallbacks.get(name)
