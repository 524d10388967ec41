"""The daemon: settings, router, listeners and signals put together (D3, H6)."""

from router.daemon.faults import Crashed, StartFailed
from router.daemon.hosting import run_agent
from router.daemon.serving import run_daemon

__all__ = ["Crashed", "StartFailed", "run_agent", "run_daemon"]
