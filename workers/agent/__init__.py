"""The daemon beside the engines of one host: the same engine behind the wire.

A front like ``router.edge``, of its rank, though it lives with the workers: it
is what stands beside them. Rules P1-P7, L5, F8.
"""

from workers.agent.agent import Agent

__all__ = ["Agent"]
