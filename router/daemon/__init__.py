"""The daemon: settings, router, listeners and signals put together (D3, H6)."""

from router.daemon.faults import Crashed, StartFailed
from router.daemon.serving import run_daemon

__all__ = ["Crashed", "StartFailed", "run_daemon"]
