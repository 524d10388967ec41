"""The library: open a router inside any Trio program (E1)."""

from router.engine.opening import open_router
from router.engine.queue import Completion, DeltaQueue, ToolCall
from router.engine.results import JobResult, JobState, JobStatus, JobUnknown
from router.engine.router import ModelCard, Router
from router.engine.threads import RouterClosed, SyncRouter, SyncStream

__all__ = [
    "Completion",
    "DeltaQueue",
    "JobResult",
    "JobState",
    "JobStatus",
    "JobUnknown",
    "ModelCard",
    "Router",
    "RouterClosed",
    "SyncRouter",
    "SyncStream",
    "ToolCall",
    "open_router",
]
