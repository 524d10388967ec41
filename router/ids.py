"""Names of the things a router counts.

Two rules: an id says what it names by its type, and no id is ever parsed to
learn something that a field could have said.
"""

from typing import NamedTuple, NewType, TypeAlias

#: A worker's configured name; stable over its restarts.
WorkerId = NewType("WorkerId", str)

#: One client request. Sortable by birth, unique over restarts and replicas (F2).
RequestId = NewType("RequestId", str)

#: Position of a delta within one assignment, from 0 (F1). A plain alias: it is
#: made once per delta, and a NewType call would be the dearest part of that.
Index: TypeAlias = int


class AssignmentId(NamedTuple):
    """One attempt of one request on one worker: the fence's key (F2).

    ``attempt`` counts from 1 and only grows within a request.
    """

    request: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request}/{self.attempt}"
