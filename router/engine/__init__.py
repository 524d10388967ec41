"""The library: open a router inside any Trio program (E1)."""

from router.engine.opening import open_router
from router.engine.queue import Completion, DeltaQueue, ToolCall
from router.engine.router import ModelCard, Router

__all__ = [
    "Completion",
    "DeltaQueue",
    "ModelCard",
    "Router",
    "ToolCall",
    "open_router",
]
