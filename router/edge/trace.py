"""The trace context that a client's request carries (X4).

The router is no part of the trace: it hands on what is whole, and leaves aside what
is not, as https://www.w3.org/TR/trace-context/ has it. Pure.
"""

import re
from typing import Final

from router.http1 import Head
from router.messages import Trace

#: Version, trace, parent and flags. A later version may have more behind them, which
#: is not ours to read; ff is none.
_PARENT: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
    rb"(-[!-~]{0,200})?"
)
#: Bytes of a state: as much as everybody hands on.
STATE_MAX: Final = 512
_STATE: Final = re.compile(rb"[ -~]{1,%d}" % STATE_MAX)


def trace_of(head: Head) -> Trace | None:
    """Give the trace context of a request; None: it has none that is whole.

    A state that is not whole is left out, and its trace goes on without it.
    """
    parents = [value for name, value in head.headers if name == b"traceparent"]
    if len(parents) != 1:
        return None
    found = _PARENT.fullmatch(parents[0])
    if found is None or (found[1] == b"00" and found[2] is not None):
        return None
    states = [value for name, value in head.headers if name == b"tracestate" and value]
    state = b",".join(states)
    return Trace(
        parents[0].decode(), state.decode() if _STATE.fullmatch(state) else None
    )
