"""What stands between a worker's deltas and their receiver, where a job asks for it.

A sieve holds back what may be a tool call, takes signals out of the answer, and
ends an answer that runs away. Pure: deltas in, deltas out. A job that asks for
none of it has no sieve. Rules J4-J6 of the contract.
"""

from router.sieve.sieve import END_REASONING, Sieve, SieveRules
from router.sieve.signals import EXIT_TOOLS, FOR_MODELS

__all__ = ["END_REASONING", "EXIT_TOOLS", "FOR_MODELS", "Sieve", "SieveRules"]
