"""Keep one worker for as long as the router runs.

A keeper is one nursery: it reads the worker's sources, probes it, watches the
silence of requests that wait for a head, and times permits that settle. What
it learns goes to the fleet as events. A fault of the worker never leaves it; a
bug does, and ends the router on purpose (L1). Rules L1-L4, L9, S3, W2, W5.
"""

import logging
import random
from collections.abc import Collection, Sequence
from math import inf
from typing import Final, Protocol

import trio

from router.commands import Command
from router.crew.crew import SAME_START_S
from router.fleet import Fleet
from router.ids import AssignmentId, WorkerId
from router.lifecycle import COMING, SERVING, Event, State
from router.messages import Discovery, Probe, ProbeResult, SlotView
from router.ports import Worker
from router.settings import WaitSettings
from router.tally import Tally
from router.waiting import Grid, WaitState, classify

log: Final = logging.getLogger("fencepost.workers")

#: Seconds between two probes of a worker that serves, and of one that is
#: coming up: an operator who starts a worker looks at the screen.
WATCH_S: Final = 2.0
KNOCK_S: Final = 0.5
#: Reason of a worker that drains by its own word, not by an operator's here.
AGENT_DRAINS: Final = "agent_drains"
#: A probe's own limit: an engine in the middle of a long batch answers late.
PROBE_WITHIN_S: Final = 5.0
#: Soft misses in a row before a silent worker counts as lost (L3).
SOFT_MISSES: Final = 3
#: Backoff of probes to a lost worker, in seconds (L3).
BACKOFF_S: Final = (0.5, 30.0)
#: First and longest gap between two looks at a settling slot (S3). The longest
#: is well over a second: llama-server looks for a client that has left only
#: after one second in which it answered nothing, ``/slots`` included.
SETTLE_GAP_S: Final = (0.05, 2.0)


class Silent(Protocol):
    """A request that waits for its head, as the keeper sees it."""

    @property
    def silent_since(self) -> float:
        """When its silence began, on Trio's clock."""

    @property
    def partial_head(self) -> bool:
        """Part of a head has come."""

    @property
    def said(self) -> WaitState | None:
        """What an agent beside the engine says of this silence (P2)."""

    @property
    def assignment(self) -> AssignmentId:
        """Its attempt on this worker."""

    def polled(self, state: WaitState, polls: int) -> None:
        """Take what *polls* ticks showed, mostly one (W3-W5)."""


class Shell(Protocol):
    """What a keeper needs of the router around it."""

    fleet: Fleet
    tally: Tally

    def apply(self, commands: Sequence[Command]) -> None:
        """Carry out what the fleet asks for."""

    def silent(self, worker: WorkerId) -> Sequence[Silent]:
        """List the requests on *worker* that wait for a head."""

    def at_work(self, worker: WorkerId) -> set[AssignmentId]:
        """Name the attempts that *worker*'s engine must be working on.

        None that is on its way there or at its end, and none whose client does
        not read: its engine may have finished long ago.
        """

    def changed(self) -> None:
        """Learn that a worker's state is another one now."""

    def cut(self, worker: str) -> bool:
        """End what still runs on *worker*."""

    def heard_at(self, worker: WorkerId) -> float:
        """Say when a byte of any live answer last came from *worker*."""


class Keeper:
    """The supervision of one worker. Its public calls are synchronous."""

    def __init__(
        self, worker: Worker, shell: Shell, waits: WaitSettings, rng: random.Random
    ) -> None:
        """*rng* spreads the probes of many workers and routers."""
        self.worker = worker
        self._shell = shell
        self._fleet = shell.fleet
        self._rng = rng
        self._poll_s = waits.poll_ms / 1000
        self._ghost_s = waits.ghost_ms / 1000
        self._scope = trio.CancelScope()
        self._check = trio.Event()
        self._settle = trio.Event()
        self._alarm = trio.Event()
        self._rest_until = inf
        self._cut_at = inf
        self._missed = 0
        #: The engine has shown its slots at least once: this one, of this build.
        self._told_slots = False
        self._build: tuple[str, str | None] | None = None
        self.last_probe: Probe | None = None
        #: The state that the log has last.
        self._logged = State.STARTING

    async def run(self) -> None:
        """Keep the worker until ``dismiss``, or until cancelled."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.worker.run)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._poll)
                nursery.start_soon(self._settle_permits)
                nursery.start_soon(self._mind_the_clock)

    def dismiss(self) -> None:
        """End ``run``: the worker was removed. Not a checkpoint."""
        self._scope.cancel()

    def check(self) -> None:
        """Probe at once. Not a checkpoint."""
        self._check.set()

    def told(self, probe: Probe) -> None:
        """Take what the worker itself knows first: its process ended, or starts.

        Not a checkpoint: when it returns, all that ran there has ended.
        """
        if self.worker.id in self._fleet.members and self._state() is not State.GONE:
            self._learn(probe, trio.current_time())
            self.last_probe = probe
            self._check.set()

    def settle(self) -> None:
        """A permit has begun to settle. Not a checkpoint."""
        self._settle.set()

    def rest(self, until: float) -> None:
        """Call the fleet's ``dispatch`` at *until*. Not a checkpoint."""
        self._rest_until = min(self._rest_until, until)
        self._alarm.set()

    def cut_at(self, at: float) -> None:
        """Cut what runs here at *at*; inf: do not. Not a checkpoint."""
        self._cut_at = at
        self._alarm.set()

    # --- readiness ---------------------------------------------------------

    async def _watch(self) -> None:
        """Probe for ever; what is found goes to the fleet."""
        backoff = BACKOFF_S[0]
        while True:
            self._check = trio.Event()
            self._log_change()
            asked_at = trio.current_time()
            probe = await self._probe()
            if self._removed():
                return
            if probe.result is not ProbeResult.UNASKED:
                self._learn(probe, asked_at)
            self.last_probe = probe
            state = self._state()
            if state in SERVING or state is State.DRAINING:
                backoff, pause = BACKOFF_S[0], WATCH_S
            elif state in COMING:
                backoff, pause = BACKOFF_S[0], KNOCK_S
            else:
                pause = backoff
                backoff = min(BACKOFF_S[1], backoff * 2)
            with trio.move_on_after(pause * self._rng.uniform(0.75, 1.0)):
                await self._check.wait()

    async def _probe(self) -> Probe:
        with trio.move_on_after(PROBE_WITHIN_S):
            return await self.worker.probe()
        return Probe(ProbeResult.SILENT, "no answer in time")

    def _learn(self, probe: Probe, asked_at: float) -> None:
        """Turn one probe into an event of the fleet."""
        self._log_change()
        now = trio.current_time()
        before = self._state()
        worker, learned = self.worker.id, self._fleet.learned
        # Known only once the engine is recognised (S3).
        self._fleet.members[worker].settle_s = self.worker.settle_s
        if probe.result is not ProbeResult.SILENT:
            self._missed = 0
        self._undrained(probe, now)
        match probe.result:
            case ProbeResult.ANSWERED if probe.discovery is not None:
                self._recognised(probe.discovery)
                started = self._fleet.members[worker].started_at
                commands = self._fleet.answered(worker, probe.discovery, now)
                if _another_start(started, probe.discovery.started_at):
                    self._shell.tally.restarts[worker] += 1
            case ProbeResult.LOADING:
                commands = learned(worker, Event.LOADS, now, detail=probe.detail)
            case ProbeResult.UNAUTHORIZED:
                commands = learned(
                    worker,
                    Event.UNFIT,
                    now,
                    reason="unauthorized",
                    detail=probe.detail,
                )
            case ProbeResult.STARTING:
                commands = self._fleet.down(worker, probe, Event.RESTARTS, now)
            case ProbeResult.UNFIT:
                commands = self._fleet.down(worker, probe, Event.UNFIT, now)
            case ProbeResult.DRAINING:
                commands = self._drained(probe, now)
            case ProbeResult.REFUSED if not self._flows(asked_at):
                commands = learned(worker, Event.MISSED, now, detail=probe.detail)
            case _:
                if not self._believes_a_miss(asked_at):
                    return
                commands = learned(worker, Event.MISSED, now, detail=probe.detail)
        self._shell.apply(commands)
        after = self._state()
        if after is State.GONE:
            return
        if (
            after is before
            and before is State.STARTING
            and self.last_probe is None
            and probe.result is not ProbeResult.STARTING
        ):
            log.warning(
                "worker %s does not answer yet (%s): start it, or check its address;"
                " it is taken in when it answers",
                worker,
                probe.detail or probe.result.value,
            )
        self._log_change()

    def _log_change(self) -> None:
        """Log what the worker's state has become, by whichever way (L2)."""
        state, before = self._state(), self._logged
        if state is before or state is State.GONE:
            return
        self._logged = state
        self._shell.changed()
        life = self._fleet.members[self.worker.id].life
        log.info(
            "worker %s: %s -> %s (%s) %s",
            self.worker.id,
            before.value,
            state.value,
            life.reason,
            life.detail,
        )

    def _recognised(self, found: Discovery) -> None:
        """Another engine behind the same address has yet to show its slots (S3)."""
        build = (found.engine, found.version)
        if build != self._build:
            self._build = build
            self._told_slots = False

    def _drained(self, probe: Probe, now: float) -> list[Command]:
        """The worker takes nothing new, by its own word (L5)."""
        worker = self.worker.id
        if self._state() is State.DRAINING:
            return []
        return self._fleet.learned(
            worker, Event.DRAIN, now, reason=AGENT_DRAINS, detail=probe.detail
        )

    def _undrained(self, probe: Probe, now: float) -> None:
        """What drained by its own word is something else now: find out what."""
        life = self._fleet.members[self.worker.id].life
        if (
            life.state is State.DRAINING
            and life.reason == AGENT_DRAINS
            and probe.result is not ProbeResult.DRAINING
        ):
            self._shell.apply(self._fleet.learned(self.worker.id, Event.UNDRAIN, now))

    def _believes_a_miss(self, asked_at: float) -> bool:
        """Weigh soft evidence: silence of the health path alone (L3, B115)."""
        member = self._fleet.members[self.worker.id]
        loading = member.life.state is State.LOADING
        if not member.serving and not loading:
            return True
        if self._flows(asked_at):
            self._missed = 0
            return False
        self._missed += 1
        # A worker that loads serves nobody yet, but is waited for (L2).
        return self._missed >= SOFT_MISSES and (loading or self._replaceable())

    def _replaceable(self) -> bool:
        """Say whether each model of the worker has another that serves it."""
        member = self._fleet.members[self.worker.id]
        return all(
            any(
                other.serves(model)
                for other in self._fleet.models.get(model, ())
                if other is not member
            )
            for model in member.models
        )

    def _flows(self, asked_at: float) -> bool:
        """Say whether live answers have brought bytes since the last round.

        They outweigh a probe, a refused one too (L3): a process that is gone
        has no live answers left.
        """
        return self._shell.heard_at(self.worker.id) >= asked_at - WATCH_S

    def _state(self) -> State:
        member = self._fleet.members.get(self.worker.id)
        return State.GONE if member is None else member.life.state

    def _removed(self) -> bool:
        """Say whether the worker was removed in the turn in which we woke, or
        before we began: then we are cancelled, and find nothing in the fleet."""
        return self.worker.id not in self._fleet.members

    # --- silence before the head -------------------------------------------

    async def _poll(self) -> None:
        """Classify every silent request of this worker on a fixed grid (W2)."""
        grid = Grid(trio.current_time(), self._poll_s)
        while True:
            await trio.sleep_until(grid.next(trio.current_time()))
            # An engine is left in quiet while nobody owes a verdict.
            since = trio.current_time() - self._poll_s / 2
            silent = self._shell.silent(self.worker.id)
            waiting = [s for s in silent if s.silent_since <= since]
            if not waiting:
                continue
            slots: SlotView | None = None
            alive: bool | None = None
            worked = self._shell.at_work(self.worker.id)
            if any(not s.partial_head for s in waiting):
                with trio.move_on_after(self._poll_s):
                    if self.worker.settles_by_probe:
                        slots = await self.worker.slot_view()
                    else:
                        alive = await self.worker.alive()
            if not self.worker.settles_by_probe:
                alive = bool(alive)
            if self._removed():
                return
            member = self._fleet.members[self.worker.id]
            # By now a head may have come, a client may have gone, and who began
            # while nothing was answered has seen that silence too.
            now = trio.current_time()
            still = {s.assignment: s for s in self._shell.silent(self.worker.id)}
            ours = len(worked & self._shell.at_work(self.worker.id))
            for assignment, polls in grid.owed(
                {a: s.silent_since for a, s in still.items()}, now
            ).items():
                one = still[assignment]
                state = one.said or classify(
                    one.partial_head,
                    slots,
                    alive,
                    ours,
                    member.slots,
                    pinned=member.pins.get(assignment),
                    works=self.worker.works,
                )
                one.polled(state, polls)

    # --- permits that settle -----------------------------------------------

    async def _settle_permits(self) -> None:
        """Give permits back when their slots are free again (S3)."""
        if self._removed():
            return
        member = self._fleet.members[self.worker.id]
        gap = SETTLE_GAP_S[0]
        while True:
            if not member.settling:
                await self._settle.wait()
            if self._settle.is_set():
                # Somebody new: most slots are free in milliseconds.
                self._settle = trio.Event()
                gap = SETTLE_GAP_S[0]
                await trio.sleep(gap)
            else:
                with trio.move_on_after(self._settle_pause(gap)):
                    await self._settle.wait()
                    continue
            gap = min(SETTLE_GAP_S[1], gap * 2)
            asked_at = trio.current_time()
            worked = self._shell.at_work(self.worker.id)
            view: SlotView | None = None
            if self.worker.settles_by_probe:
                with trio.move_on_after(max(self._poll_s, gap)):
                    view = await self.worker.slot_view()
            if self._removed():
                return
            self._told_slots = self._told_slots or view is not None
            worked &= self._shell.at_work(self.worker.id)
            self._judge_settling(view, asked_at, worked)

    def _settle_pause(self, gap: float) -> float:
        """Say how long to wait for the next look; *gap* is a probe's."""
        if self.worker.settles_by_probe:
            return gap
        member = self._fleet.members[self.worker.id]
        oldest = min(member.settling.values(), default=0.0)
        return max(SETTLE_GAP_S[0], oldest + member.settle_s - trio.current_time())

    def _judge_settling(
        self, view: SlotView | None, asked_at: float, worked: Collection[AssignmentId]
    ) -> None:
        """Free what *view* shows to be free, and what has waited for too long.

        Args:
            view: what the engine said; None: nothing.
            asked_at: when it was asked: it knows of nothing that came later.
            worked: our live attempts that it worked on from then until now.
        """
        member = self._fleet.members[self.worker.id]
        now = trio.current_time()
        waiting = [a for a, since in member.settling.items() if since <= asked_at]
        if view is not None and view.busy is not None and member.pin_slots:
            free = [a for a in waiting if member.pins.get(a) not in view.busy]
        elif view is not None:
            # Work beyond our live assignments may be what we let go, or may be
            # a foreign client's: believe the worse (B04). A live one that may
            # not have been at work accounts for none of it.
            still = max(0, view.processing - len(worked))
            free = waiting[: max(0, len(waiting) - still)]
        elif self._told_slots and self.worker.settles_by_probe:
            # A probe can tell, and did not this time: that frees nothing.
            free = []
        else:
            free = [a for a in waiting if now - member.settling[a] >= member.settle_s]
        late = [a for a in waiting if now - member.settling[a] >= self._ghost_s]
        for assignment in dict.fromkeys((*free, *late)):
            self._shell.tally.settle.observe(now - member.settling[assignment])
            self._shell.apply(self._fleet.settled(self.worker.id, assignment, now))
        for assignment, since in member.settling.items():
            if now - since >= member.settle_s and assignment not in member.ghosts:
                member.ghosts.add(assignment)
                self._shell.tally.ghosts[self.worker.id] += 1
                log.warning(
                    "worker %s: a slot still works for a request that has left",
                    self.worker.id,
                )

    # --- what is due by the clock ------------------------------------------

    async def _mind_the_clock(self) -> None:
        """Let waiters have the worker as soon as its rest is over (A8), and cut
        what runs when its drain has lasted long enough (L5)."""
        while True:
            self._alarm = trio.Event()
            with trio.CancelScope(deadline=min(self._rest_until, self._cut_at)):
                await self._alarm.wait()
            now = trio.current_time()
            if now >= self._rest_until:
                self._rest_until = inf
                self._shell.apply(self._fleet.dispatch(self.worker.id, now))
                # It may rest from one model longer than from another.
                self.rest(self._fleet.rests_until(self.worker.id, now))
            if now >= self._cut_at:
                self._cut_at = inf
                self._shell.cut(self.worker.id)


def _another_start(known: float | None, found: float | None) -> bool:
    """Say whether these are the starts of two processes, as the fleet does (L9)."""
    return known is not None and found is not None and abs(found - known) > SAME_START_S
