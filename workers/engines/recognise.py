"""Which engine is behind a URL (L9)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from router.messages import Probe, ProbeResult
from workers.control import Control
from workers.engines.engine import Engine, list_models
from workers.engines.generic import Generic
from workers.engines.llama_server import LlamaServer
from workers.engines.sglang import Sglang
from workers.engines.vllm import Vllm

_KINDS: Final[Mapping[str, Callable[[], Engine]]] = {
    "llama-server": LlamaServer,
    "vllm": Vllm,
    "sglang": Sglang,
}
#: ``owned_by`` of the engines' model cards.
_OWNERS: Final[Mapping[str, str]] = {
    "llamacpp": "llama-server",
    "vllm": "vllm",
    "sglang": "sglang",
}
#: An endpoint that only this engine has, with a field of its answer.
_MARKS: Final = (
    ("llama-server", "/props", "total_slots"),
    ("vllm", "/version", "version"),
    ("sglang", "/model_info", "model_path"),
)


def make_engine(name: str, models: Sequence[str]) -> Engine:
    """Make the engine called *name*; "auto" gives a generic one for now.

    Args:
        name: as in ``WorkerSettings.engine``.
        models: the worker's configured models.

    Raises:
        ValueError: there is no such engine.
    """
    if name in {"auto", "generic"}:
        return Generic(models)
    if name not in _KINDS:
        raise ValueError(f"unknown engine: {name}")
    return _KINDS[name]()


async def recognise(control: Control, models: Sequence[str]) -> Engine | Probe:
    """Tell the engine by its model cards, else by an endpoint of its own.

    A checkpoint. A probe where the server is not ready to be told apart.

    Raises:
        NoAnswer: it did not say.
    """
    cards = await list_models(control)
    if isinstance(cards, Probe):
        if cards.result is not ProbeResult.SILENT:
            return cards
    else:
        for owner in sorted(cards.owners & _OWNERS.keys()):
            return _KINDS[_OWNERS[owner]]()
    for name, path, field in _MARKS:
        answer = await control.get(path)
        if answer.ok and field in answer.fields():
            return _KINDS[name]()
    return Generic(models)
