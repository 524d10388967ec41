"""Which jobs get a sieve, and the receiver that has one in front of it.

A job that asks for nothing of rules J4-J6 keeps its own receiver and costs one
look into a dict.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs

from router.errors import Fault, FaultKind, RequestFailed
from router.ids import AssignmentId, WorkerId
from router.messages import Delta, Endpoint, Finished, Job, Signal, SignalCode
from router.openai.prompting import (
    exit_tool,
    exits_of,
    names_of,
    offered,
    told,
    with_exits,
)
from router.openai.upstream import BUDGET
from router.ports import Receiver, Taken
from router.settings import Settings
from router.sieve import END_REASONING, FOR_MODELS, Sieve, SieveRules

#: The client's words for a limit of reasoning, by engine.
_BUDGETS: Final = frozenset(
    {BUDGET, "reasoning_budget_tokens", "thinking_token_budget"}
)


@attrs.frozen
class _Plan:
    """What a model's settings ask for."""

    bios: str | None = None
    invalid_signals: bool = False
    exits: tuple[SignalCode, ...] = ()
    thinking_max: int | None = None
    loop_repeats_max: int = 0


_NOTHING: Final = _Plan()


class Sieving:
    """Decides for each job, by its own wishes and the settings of its model."""

    def __init__(self, settings: Settings) -> None:
        """Read *settings* once."""
        self._signals_max = settings.router.signals_max
        self._tool_calls_max = settings.router.tool_calls_max
        plans = {
            name: _Plan(
                model.bios,
                model.tool_parse_error == "signal",
                tuple(SignalCode(code) for code in model.exit_tools),
                model.thinking_max_tokens,
                model.loop_repeats_max,
            )
            for name, model in settings.models.items()
        }
        self._plans: Mapping[str, _Plan] = {
            name: plan for name, plan in plans.items() if plan != _NOTHING
        }

    def prepare(self, job: Job, receiver: Receiver) -> tuple[Job, Receiver]:
        """Give the job as workers get it, and the receiver of its answer.

        Both are as they came where nothing is asked for.

        Raises:
            RequestFailed: the job asks for a signal that is not the model's.
        """
        plan = self._plans.get(job.target)
        if plan is None and not self._asks(job):
            return job, receiver
        job, rules = self._ruled(job, plan or _NOTHING)
        if rules == SieveRules(signals_max=self._signals_max):
            return job, receiver
        return job, SievedReceiver(receiver, Sieve(rules))

    def sent(self, job: Job) -> Job:
        """Give the job as workers get it, to be counted say (M8).

        Raises:
            RequestFailed: as ``prepare``.
        """
        return self._ruled(job, self._plans.get(job.target, _NOTHING))[0]

    def _ruled(self, job: Job, plan: _Plan) -> tuple[Job, SieveRules]:
        """Give the job as workers get it, and what its answer's sieve is to do."""
        rules = SieveRules(signals_max=self._signals_max)
        if job.endpoint is Endpoint.EMBEDDINGS:
            return job, rules
        repeats = job.loop_repeats_max
        if repeats is None:
            repeats = plan.loop_repeats_max
        rules = attrs.evolve(rules, loop_repeats_max=max(0, repeats))
        if job.endpoint is Endpoint.CHAT:
            job, rules = self._tools(job, plan, rules)
            job, rules = _thinking(job, plan, rules)
        return job, rules

    def _asks(self, job: Job) -> bool:
        if (
            job.exit_tools
            or job.loop_repeats_max
            or job.params.thinking_max_tokens is not None
        ):
            return True
        extras = job.extras
        # Most have none, and of a set and a dict's keys this asks once each.
        return bool(extras) and (
            not _BUDGETS.isdisjoint(extras)
            or (self._tool_calls_max > 0 and "tools" in extras)
        )

    def _tools(
        self, job: Job, plan: _Plan, rules: SieveRules
    ) -> tuple[Job, SieveRules]:
        codes = tuple(dict.fromkeys(plan.exits + _codes(job.exit_tools)))
        if not set(codes) <= set(FOR_MODELS):
            words = "A model can't give a signal that is the router's own."
            raise RequestFailed(Fault(FaultKind.REJECTED, words))
        if job.extras.get("tool_choice") == "none":
            codes = ()
        exits = exits_of(codes)
        tools = None
        if plan.bios is not None:
            offers = list(offered(job.extras))
            own = names_of(offers)
            offers += [exit_tool(c) for c in codes if c.value.lower() not in own]
            job = told(job, plan.bios, offers)
            if offers:
                tools = names_of(offers)
        elif codes:
            job = with_exits(job, codes)
        has_tools = tools is not None or bool(job.extras.get("tools"))
        return job, attrs.evolve(
            rules,
            tools=tools,
            invalid_signals=plan.invalid_signals and tools is not None,
            exits=exits,
            tool_calls_max=self._tool_calls_max if has_tools else 0,
        )


def _codes(exit_tools: object) -> tuple[SignalCode, ...]:
    """Read a program's list of signals, spelled as in a file or not (J5)."""
    try:
        if isinstance(exit_tools, tuple | list):
            return tuple(map(SignalCode, exit_tools))
    except ValueError:
        pass
    known = ", ".join(code.value for code in FOR_MODELS)
    words = f"Job.exit_tools is a tuple of signals, any of {known}."
    raise RequestFailed(Fault(FaultKind.REJECTED, words))


def _thinking(job: Job, plan: _Plan, rules: SieveRules) -> tuple[Job, SieveRules]:
    """Find the least limit of reasoning, and ask the engine for it (J6)."""
    extras = job.extras
    asked = [plan.thinking_max, job.params.thinking_max_tokens]
    asked += [extras.get(name) for name in _BUDGETS]
    # A negative budget is an engine's word for none.
    limits = [n for n in asked if type(n) is int and n >= 0]
    if not limits:
        return job, rules
    least = min(limits)
    others = {k: v for k, v in extras.items() if k not in _BUDGETS}
    job = attrs.evolve(job, extras={**others, BUDGET: least})
    return job, attrs.evolve(rules, thinking_max=least)


class SievedReceiver:
    """A receiver behind a sieve. Implements ``ports.Receiver``.

    Nothing is committed while all that came is held: a loss until then starts
    over elsewhere, with an empty sieve (A2, A5).
    """

    def __init__(self, receiver: Receiver, sieve: Sieve) -> None:
        """Hand over to *receiver* what *sieve* lets through."""
        self._receiver = receiver
        self._sieve = sieve
        self._on_gone: Callable[[], None] = _nobody
        self._any_out = False
        #: The inner receiver's last word: FULL must not be lost.
        self.full = False

    @property
    def buffered(self) -> bool:
        """See ``ports.Receiver``: the client has seen nothing yet."""
        return self._receiver.buffered or not self._any_out

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The signals of the present attempt."""
        return self._sieve.signals

    def attach(self, on_room: Callable[[], None], on_gone: Callable[[], None]) -> None:
        """See ``ports.Receiver``."""
        self._on_gone = on_gone
        self._receiver.attach(on_room, on_gone)

    def take(self, deltas: Sequence[Delta]) -> Taken | Fault:
        """See ``ports.Receiver``. STEER: look at ``ending``."""
        self.full = False
        taken = self._hand_over(self._sieve.take(deltas))
        if taken is Taken.GONE or isinstance(taken, Fault):
            return taken
        return taken if self._sieve.wish is None else Taken.STEER

    def _hand_over(self, out: Sequence[Delta]) -> Taken | Fault:
        if not out:
            return Taken.MORE
        taken = self._receiver.take(out)
        if taken is not Taken.GONE and not isinstance(taken, Fault):
            self._any_out = True
            self.full = self.full or taken is Taken.FULL
        return taken

    def ending(
        self, assignment: AssignmentId, end_reasoning: Callable[[], int]
    ) -> Finished | Fault | None:
        """Say how the answer is to end now; None: it goes on, or its client left.

        What came with the delta at which the reasoning was to end is handed over
        here, where it is to be borne with.

        Args:
            assignment: the one whose deltas were taken.
            end_reasoning: asks the engine to end its reasoning; gives how many
                more deltas of it are to be borne with, 0 if it can't be asked.
        """
        sieve = self._sieve
        while sieve.wish is END_REASONING:
            more = end_reasoning()
            if not more:
                sieve.cut(assignment)
                break
            taken = self._hand_over(sieve.bear(more))
            if isinstance(taken, Fault):
                return taken
            if taken is Taken.GONE:
                self._on_gone()
                return None
        wish = sieve.wish
        if wish is None or wish is END_REASONING:
            return None
        return wish

    def finish(self, finished: Finished) -> Taken | Fault:
        """See ``ports.Receiver``."""
        out, end = self._sieve.finish(finished)
        if out:
            taken = self._receiver.take(out)
            if taken is Taken.GONE or isinstance(taken, Fault):
                return taken
        return end if isinstance(end, Fault) else self._receiver.finish(end)

    def conclude(self, finished: Finished) -> Taken | Fault:
        """End the answer by the sieve's own word; nothing is held any more."""
        return self._receiver.finish(finished)

    def routed(self, worker: WorkerId, attempts: int) -> None:
        """See ``ports.Receiver``."""
        self._receiver.routed(worker, attempts)

    def fail(self, fault: Fault) -> None:
        """See ``ports.Receiver``.

        One who shows nothing before the end gets what was held, so that it
        has all there was (J1).
        """
        if self._receiver.buffered:
            left = self._sieve.leftover()
            if left:
                self._receiver.take(left)
        self._receiver.fail(fault)

    def restart(self) -> None:
        """See ``ports.Receiver``."""
        self._sieve.restart()
        self._any_out = False
        self._receiver.restart()

    def due(self, now: float) -> float:
        """See ``ports.Receiver``."""
        return self._receiver.due(now)

    def tick(self, now: float) -> Taken:
        """See ``ports.Receiver``."""
        return self._receiver.tick(now)


def _nobody() -> None:
    """Stand in for a flight before there is one."""
