"""A server process that the router runs: started, watched, and started again.

One task holds it from its first start to its last end; what the server does, and
what keeps it from running, becomes a stage and a cause. Rules L6-L8.
"""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import quote

import trio

from router.words import Word
from workers.leftovers import Record
from workers.life import Life, Plan
from workers.portcheck import why_taken
from workers.restarts import Restarts
from workers.spoken import Spoken

log: Final = logging.getLogger("fencepost.workers")

#: Seconds for which a port may be taken before that is a failure: the servers of
#: a router that has just died have two to go.
PORT_GRACE_S: Final = 2.5
#: Seconds between two looks at a port that is taken: at first, and at most.
PORT_LOOK_S: Final = (0.25, 5.0)


class Stage(Word):
    """Where a server stands."""

    #: Its first start is ahead, or under way.
    STARTING = "starting"
    #: Its process runs.
    UP = "up"
    #: It has ended, and will be started again.
    RESTARTING = "restarting"
    #: Somebody else has its port.
    PORT_TAKEN = "port_taken"
    #: It has ended too often.
    FAILED = "failed"


class ServerProcess:
    """Implements ``ports.Process``. Its public attributes are for reading."""

    def __init__(
        self, plan: Plan, folder: Path | None, on_change: Callable[[], None]
    ) -> None:
        """Start nothing yet.

        Args:
            plan: what to run.
            folder: for its log and its record; None: it gets neither.
            on_change: called after each change of stage or cause.
        """
        self.plan = plan
        self.stage = Stage.STARTING
        #: Why it is not up, or was started again; for people.
        self.cause = ""
        #: The present life, or the last one; None before the first.
        self.life: Life | None = None
        self.starts = 0
        self._restarts = Restarts(plan.max_restarts, plan.restart_window_s)
        name = quote(plan.name, safe="")
        self._spoken = Spoken(
            None if folder is None else folder / f"{name}.log", plan.secrets
        )
        self._record = None if folder is None else Record(folder, name)
        self._on_change = on_change
        #: Called for each restart that is counted.
        self.on_restart: Callable[[], None] = lambda: None
        self._again_at = math.inf
        self._retry = trio.Event()
        self._hurried = False

    # ---- ports.Process ----

    def status(self) -> Mapping[str, object]:
        """Show it. Not a checkpoint."""
        now = trio.current_time()
        life = self.life
        up_s = again_s = None
        if self.stage is Stage.UP and life is not None:
            up_s = round(now - life.started_at, 3)
        if self._again_at != math.inf:
            again_s = round(max(0.0, self._again_at - now), 3)
        return {
            "stage": self.stage.value,
            "pid": self.pid,
            "port": self.plan.port,
            "up_s": up_s,
            "restarts": self._restarts.total,
            "again_s": again_s,
            "last_line": self._spoken.last,
            "cause": self.cause,
        }

    def retry(self) -> None:
        """Wait no longer, and forget past crashes. Not a checkpoint."""
        self._restarts.forgive()
        # Whoever waits now; what comes later has its own wait.
        self._retry.set()
        self._retry = trio.Event()

    def hurry(self) -> None:
        """Give it no more time to end by itself. Not a checkpoint."""
        self._hurried = True
        if self.life is not None:
            self.life.hurry()

    # ---- for its worker ----

    @property
    def pid(self) -> int | None:
        """Number of the server itself while it runs."""
        return None if self.life is None else self.life.pid

    @property
    def stopping(self) -> bool:
        """It was asked to end, for good."""
        return self.life is not None and self.life.stopping

    def ticks(self, now: float) -> dict[int, int]:
        """Give the CPU time of each of its processes. Blocking: for a thread."""
        life = self.life
        return {} if life is None else life.ticks(now)

    # ---- its task ----

    async def run(self) -> NoReturn:
        """Keep it running. Returns only when cancelled, and it is gone then."""
        while True:
            await self._await_port()
            self.starts += 1
            self.life = life = Life(
                self.plan,
                self._spoken,
                self._record,
                on_up=lambda: self._change(Stage.UP, self.cause),
                on_end=self._ended,
            )
            if self._hurried:
                life.hurry()
            try:
                await life.run()
            finally:
                if not life.gone:
                    log.error(
                        "worker %s: its processes do not end, not even by SIGKILL",
                        self.plan.name,
                    )
            if life.innocent:
                # Ours to mend, and no crash of the server's.
                log.error("worker %s: %s", self.plan.name, self.cause)
                await self._pause(PORT_LOOK_S[1])
            else:
                await self._await_restart()

    async def _await_port(self) -> None:
        """Wait until nobody has its port."""
        stage, cause = self.stage, self.cause
        since = trio.current_time()
        gap, longest = PORT_LOOK_S
        while (
            why := await trio.to_thread.run_sync(why_taken, self.plan.port)
        ) is not None:
            late = trio.current_time() - since >= PORT_GRACE_S
            if late and self.stage is not Stage.PORT_TAKEN:
                log.error("worker %s: %s", self.plan.name, why)
            self._change(Stage.PORT_TAKEN if late else stage, why)
            await self._pause(gap)
            gap = min(longest, gap * 2)
        if self.cause != cause:
            self._change(stage, cause)

    async def _await_restart(self) -> None:
        """Wait before the next start; for ever, if there were too many."""
        pause = self._restarts.ended(trio.current_time())
        name, cause = self.plan.name, self.cause
        if pause is not None:
            log.warning("worker %s: %s; starts again in %g s", name, cause, pause)
            self._again_at = trio.current_time() + pause
            self.on_restart()
            self._change(Stage.RESTARTING, cause)
            await self._pause(pause)
            self._again_at = math.inf
            return
        most, window_s = self.plan.max_restarts, self.plan.restart_window_s
        why = f"more than {most} restarts in {window_s:g} s, the last time {cause}"
        log.error("worker %s: %s", name, why)
        self._change(Stage.FAILED, why)
        await self._retry.wait()
        self._change(Stage.RESTARTING, cause)

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._retry.wait()

    def _ended(self, cause: str) -> None:
        self._change(Stage.RESTARTING, cause)

    def _change(self, stage: Stage, cause: str) -> None:
        self.stage, self.cause = stage, cause
        self._on_change()
