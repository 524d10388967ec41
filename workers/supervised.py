"""A worker whose server is a process of ours: a direct worker, and that process.

Two rules: what is known of the process outweighs what a port answers; and who was
served by a process that has ended hears so at once, with the server's last words.
Rules L6-L9, W10.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NoReturn

import attrs
import trio

from router.cork import Cork
from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.ids import AssignmentId
from router.messages import Job, Probe, ProbeResult, SlotView
from router.openai.worker_errors import scrubbed
from router.ports import Delivery
from router.settings import WaitSettings, WorkerSettings
from workers import portcheck, proc
from workers.command import fill
from workers.direct import DirectWorker
from workers.life import Life, Plan
from workers.process import ServerProcess, Stage
from workers.pulse import Pulse
from workers.source import DirectSource

#: Seconds that a broken connection waits for the news that its server has died.
DOUBT_S: Final = 0.15
#: What a dying server looks like from its connections.
_DEATHLIKE: Final = frozenset({FaultKind.STREAM_CLOSED_EARLY, FaultKind.CONNECT})
#: Variables whose values are never shown (H8), and what is too short to be one.
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SECRET_MIN: Final = 8
#: The state's own reason, for what has a state with reasons of its own (L2).
_NOT_READY: Final = "WORKER_NOT_READY"


def make_plan(settings: WorkerSettings, environ: Mapping[str, str]) -> Plan:
    """Say what is to be run for *settings*, on top of *environ*.

    Raises:
        ValueError: the command or its port is missing, or a word stands for nothing.
    """
    if not settings.command or settings.port is None:
        raise ValueError("a supervised worker needs command and port")
    variables = {**environ, **settings.env}
    return Plan(
        settings.name,
        fill(
            settings.command,
            port=settings.port,
            slots=settings.slots,
            model=settings.model,
        ),
        settings.port,
        variables,
        settings.cwd,
        settings.stop_grace_ms / 1000,
        settings.max_restarts,
        settings.restart_window_ms / 1000,
        frozenset(
            value
            for name, value in variables.items()
            if _SECRET.search(name) and len(value) >= _SECRET_MIN
        ),
    )


class SupervisedWorker(DirectWorker):
    """Implements ``ports.Worker`` for a server that it runs itself."""

    def __init__(
        self,
        settings: WorkerSettings,
        waits: WaitSettings,
        *,
        environ: Mapping[str, str] = os.environ,
        report_bug: Callable[[str, Exception], None],
        cork: Cork | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            settings: this worker's, with ``command`` and ``port``.
            waits: as for a direct worker.
            environ: the server's, below ``env``; and where the key is found.
            report_bug: as for a direct worker.
            cork: as for a direct worker.
            folder: where the server's log and record go; None: nowhere.

        Raises:
            ValueError: a setting is of no use; the message holds no secret.
        """
        plan = make_plan(settings, environ)
        super().__init__(
            attrs.evolve(settings, url=f"http://{portcheck.HOST}:{plan.port}"),
            waits,
            environ=environ,
            report_bug=report_bug,
            cork=cork,
            explain=self._doubt,
        )
        self.process = ServerProcess(plan, folder, self._changed)
        #: Told of what this worker knows before any probe does.
        self.told: Callable[[Probe], None] = lambda _: None
        self._pulse = Pulse()
        #: Its present life has been ready.
        self._answered = False
        self._started_at: float | None = None
        #: It is our process that listens, as far as the kernel tells.
        self._proven = False
        #: (when to give up, whom, with what), earliest first.
        self._doubts: deque[tuple[float, DirectSource, Fault]] = deque()
        self._doubted = trio.Event()

    # ---- ports.Worker ----

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> DirectSource:
        """Start one attempt. Not a checkpoint; *delivery* is not called.

        Raises:
            WorkerFailed: it could not even start.
        """
        if self.process.pid is None:
            raise WorkerFailed(self._death())
        return super().open(assignment, job, delivery, slot=slot)

    async def run(self) -> NoReturn:
        """Run the server, and read all of this worker's sources.

        Returns only when cancelled; the server and all it has started is gone then.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(super().run)
            nursery.start_soon(self._settle_doubts)
            await self.process.run()
        raise AssertionError

    async def probe(self) -> Probe:
        """Ask whether it is ready, and whether it is ours that answers (L6).

        A checkpoint. Never raises for what the server does.
        """
        life = self.process.life
        if life is None or self.process.stage is not Stage.UP:
            await trio.lowlevel.checkpoint()
            return self._known()
        probe = await super().probe()
        if probe.result in {ProbeResult.REFUSED, ProbeResult.SILENT}:
            self._proven = False
        elif self._alive(life) and not self._proven:
            ours = await trio.to_thread.run_sync(self._listens, life)
            if ours is False and self._alive(life):
                who = await trio.to_thread.run_sync(
                    portcheck.owner, self.process.plan.port
                )
                return self._foreign(life, who)
            self._proven = True
        if not self._alive(life):
            return self._known()
        if probe.discovery is None:
            coming = self._answered or self._proven
            return probe if coming else self._known()
        if not self._answered and life.pid is not None:
            self._answered = True
            self._started_at = proc.started_at(life.pid)
        # Ours, whatever the engine says: its own end is what we see, and a clock
        # that is set or a metric that is missing once must look like no restart.
        found = attrs.evolve(probe.discovery, started_at=self._started_at)
        return attrs.evolve(probe, discovery=found)

    async def slot_view(self) -> SlotView | None:
        """Ask the engine about its slots; see what its processes do. A checkpoint."""
        await self._feel(asked=False)
        view = await super().slot_view()
        await self._feel(asked=True)
        return view

    async def alive(self) -> bool:
        """Ask whether it answers; see what its processes do. A checkpoint."""
        await self._feel(asked=False)
        answers = await super().alive()
        await self._feel(asked=True)
        return answers

    async def _feel(self, *, asked: bool) -> None:
        """Count the CPU time of its processes; what a question took is left out."""
        now = trio.current_time()
        ticks = await trio.to_thread.run_sync(self.process.ticks, now)
        if asked:
            self._pulse.leave_out(now, ticks)
        else:
            self._pulse.look(now, ticks)
            self.works = self._pulse.works

    # ---- what is known of the process ----

    def _alive(self, life: Life) -> bool:
        return life is self.process.life and not life.ended

    def _listens(self, life: Life) -> bool | None:
        return portcheck.listens(self.process.plan.port, life.tree())

    def _known(self) -> Probe:
        """Say what is known without asking."""
        process = self.process
        again = "restarting" if process.starts > 1 else None
        cause = process.cause
        match process.stage:
            case Stage.FAILED:
                return Probe(
                    ProbeResult.UNFIT, cause, reason="crash_loop", died=self._words()
                )
            case Stage.PORT_TAKEN:
                return Probe(ProbeResult.UNFIT, cause, reason=_NOT_READY)
            case Stage.UP:
                detail = f"pid {process.pid} runs and is not ready yet"
                if cause:
                    detail = f"{detail}; before that, {cause}"
                return Probe(ProbeResult.STARTING, detail, reason=again)
            case Stage.STARTING:
                return Probe(ProbeResult.STARTING, cause or "it is being started")
            case Stage.RESTARTING:
                return Probe(
                    ProbeResult.STARTING,
                    cause,
                    reason="restarting",
                    died=self._words(),
                )

    def _foreign(self, life: Life, who: str) -> Probe:
        port = self.process.plan.port
        detail = f"port {port} is answered{who}, not by our process {life.pid}"
        return Probe(ProbeResult.STARTING, detail, reason=_NOT_READY)

    def _words(self) -> str:
        return f"The worker's process died: {scrubbed(self.process.cause)}"

    def _death(self) -> Fault:
        return Fault(FaultKind.SERVER_DIED, self._words())

    def _changed(self) -> None:
        """The process is in another stage: whoever is concerned hears so now."""
        if self.process.stopping:
            return
        self._pulse = Pulse()
        self.works = None
        self._answered = self._proven = False
        # The engine first: it lets go of all attempts, and grants no more.
        self.told(self._known())
        if self.process.pid is None:
            doubts, self._doubts = self._doubts, deque()
            for _, source, _ in doubts:
                self._report(source, self._death())
            self.lose(self._death())

    # ---- connections that broke ----

    def _doubt(self, source: DirectSource, fault: Fault) -> bool:
        """Hold a failure back that may be the first sign of a death."""
        if fault.kind not in _DEATHLIKE:
            return False
        if self.process.pid is None:
            source.report(self._death())
            return True
        self._doubts.append((trio.current_time() + DOUBT_S, source, fault))
        self._doubted.set()
        return True

    async def _settle_doubts(self) -> NoReturn:
        """Report what turned out to be no death."""
        while True:
            await self._doubted.wait()
            self._doubted = trio.Event()
            while self._doubts:
                due, source, fault = first = self._doubts[0]
                await trio.sleep_until(due)
                if self._doubts and self._doubts[0] is first:
                    self._doubts.popleft()
                    self._report(source, fault)

    def _report(self, source: DirectSource, fault: Fault) -> None:
        try:
            source.report(fault)
        except LocalError:
            raise
        except Exception as bug:  # noqa: BLE001 - L1: it ends this request only
            self.report_bug("report", bug)
