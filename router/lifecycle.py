"""One worker's life, as the router sees it.

Rule 1: every change of state is a row of ``TRANSITIONS``. Rule 2: this file
knows no HTTP, no JSON, no clock and no Trio. Rules L2-L5 of the contract.
"""

from collections.abc import Mapping
from typing import Final

import attrs

from router.errors import LocalError
from router.words import Word


class State(Word):
    """What may be asked of a worker."""

    #: Never seen ready yet, or its process is coming up again.
    STARTING = "starting"
    #: It answers, and is loading its model: waited for, not punished (L2).
    LOADING = "loading"
    #: It answers its probes and is offered work.
    READY = "ready"
    #: It answers its probes but fails requests: one at a time (S6, L4).
    SUSPECT = "suspect"
    #: No new work; what runs may finish (L5).
    DRAINING = "draining"
    #: It was ready and does not answer.
    LOST = "lost"
    #: It answers, and is unusable until somebody mends it: see the reason.
    FAILED = "failed"
    #: Removed.
    GONE = "gone"


class Event(Word):
    """What is learned of a worker."""

    #: A probe found it ready.
    ANSWERED = "answered"
    #: A probe or a request was told that the model is loading.
    LOADS = "loads"
    #: The process that we keep for it is down, and comes up by itself (L8).
    RESTARTS = "restarts"
    #: A probe was missed, for good reason to believe it (L3).
    MISSED = "missed"
    #: It refuses our key, or its slots do not fit our configuration.
    UNFIT = "unfit"
    #: Too many faults in a row (S6).
    FAULTED = "faulted"
    #: A request succeeded.
    SUCCEEDED = "succeeded"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    REMOVE = "remove"


_LEAVING: Final = {Event.DRAIN: State.DRAINING, Event.REMOVE: State.GONE}

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.STARTING: {
        **_LEAVING,
        Event.ANSWERED: State.READY,
        Event.LOADS: State.LOADING,
        Event.RESTARTS: State.STARTING,
        Event.MISSED: State.STARTING,
        Event.UNFIT: State.FAILED,
        # What it ran before it was drained and undrained may still end.
        Event.SUCCEEDED: State.STARTING,
        Event.FAULTED: State.STARTING,
    },
    State.LOADING: {
        **_LEAVING,
        Event.ANSWERED: State.READY,
        Event.LOADS: State.LOADING,
        Event.RESTARTS: State.STARTING,
        Event.MISSED: State.LOST,
        Event.UNFIT: State.FAILED,
        # What was sent before it began to load may still end either way.
        Event.SUCCEEDED: State.LOADING,
        Event.FAULTED: State.LOADING,
    },
    State.READY: {
        **_LEAVING,
        Event.ANSWERED: State.READY,
        Event.LOADS: State.LOADING,
        Event.RESTARTS: State.STARTING,
        Event.MISSED: State.LOST,
        Event.UNFIT: State.FAILED,
        Event.FAULTED: State.SUSPECT,
        Event.SUCCEEDED: State.READY,
    },
    State.SUSPECT: {
        **_LEAVING,
        # Its probes were fine all along: only a request clears it (L4).
        Event.ANSWERED: State.SUSPECT,
        Event.LOADS: State.LOADING,
        Event.RESTARTS: State.STARTING,
        Event.MISSED: State.LOST,
        Event.UNFIT: State.FAILED,
        Event.FAULTED: State.SUSPECT,
        Event.SUCCEEDED: State.READY,
    },
    State.DRAINING: {
        Event.ANSWERED: State.DRAINING,
        Event.LOADS: State.DRAINING,
        Event.RESTARTS: State.DRAINING,
        Event.MISSED: State.DRAINING,
        Event.UNFIT: State.DRAINING,
        Event.FAULTED: State.DRAINING,
        Event.SUCCEEDED: State.DRAINING,
        Event.DRAIN: State.DRAINING,
        # What it is now must be found out anew.
        Event.UNDRAIN: State.STARTING,
        Event.REMOVE: State.GONE,
    },
    State.LOST: {
        **_LEAVING,
        Event.ANSWERED: State.READY,
        Event.LOADS: State.LOADING,
        Event.RESTARTS: State.STARTING,
        Event.MISSED: State.LOST,
        Event.UNFIT: State.FAILED,
        Event.FAULTED: State.LOST,
        Event.SUCCEEDED: State.LOST,
    },
    State.FAILED: {
        **_LEAVING,
        Event.ANSWERED: State.READY,
        Event.LOADS: State.LOADING,
        Event.RESTARTS: State.STARTING,
        Event.MISSED: State.LOST,
        Event.UNFIT: State.FAILED,
        Event.FAULTED: State.FAILED,
        Event.SUCCEEDED: State.FAILED,
    },
    State.GONE: {},
}

#: States in which a worker is offered work.
SERVING: Final = frozenset({State.READY, State.SUSPECT})
#: States out of which it may soon serve: a job waits for it (S4).
COMING: Final = frozenset({State.STARTING, State.LOADING})

_REASONS: Final[Mapping[State, str]] = {
    State.STARTING: "WORKER_NOT_READY",
    State.LOADING: "model_loading",
    State.READY: "ready",
    State.SUSPECT: "faults_in_a_row",
    State.DRAINING: "draining",
    State.LOST: "unreachable",
    State.FAILED: "unfit",
    State.GONE: "removed",
}


@attrs.define(eq=False)
class Lifecycle:
    """A worker's state, why it is in it, and since when."""

    since: float
    """Seconds on the caller's clock."""
    state: State = attrs.field(default=State.STARTING, init=False)
    reason: str = attrs.field(default=_REASONS[State.STARTING], init=False)
    """Stable code (L2)."""
    detail: str = attrs.field(default="", init=False)
    """For people."""

    def fire(
        self, event: Event, now: float, *, reason: str | None = None, detail: str = ""
    ) -> bool:
        """Apply *event*; say whether the state changed.

        Args:
            event: what was learned.
            now: seconds; becomes ``since`` if the state or its reason changes.
            reason: a stable code, where the state's own is too coarse.
            detail: one sentence for people; kept until the next event.

        Raises:
            LocalError: the event cannot happen in this state.
        """
        try:
            state = TRANSITIONS[self.state][event]
        except KeyError:
            raise LocalError(f"worker: {event.name} while {self.state.name}") from None
        changed = state is not self.state
        if state is State.DRAINING and event is not Event.DRAIN:
            # Why it takes nothing new is the drain, whatever else is learned (L2).
            return changed
        if event is Event.DRAIN and reason is None:
            # An operator's drain outlasts one by the worker's own word (L5).
            reason = _REASONS[State.DRAINING]
        if changed or (reason is not None and reason != self.reason):
            self.since = now
            self.reason = reason or _REASONS[state]
        self.state = state
        if detail or changed:
            self.detail = detail
        return changed
