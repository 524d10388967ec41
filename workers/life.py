"""One life of a supervised server: from the start of its shim to the last of its
processes. Rules L7, L8.

Whatever happens to the server is told by two calls, ``on_up`` and ``on_end``; the
second comes at once, and once. `Life.run` returns later: when nothing is left of
the tree. No failure of the server's, nor of this machine's, is an exception (B133).
"""

import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import attrs
import trio

from router.errors import EXHAUSTED
from workers import proc
from workers.leftovers import Record, end_all
from workers.proc import Identity
from workers.spoken import Pipe, Spoken

SHIM: Final = Path(__file__).with_name("shim.py")
#: Seconds beyond its grace that the shim has to see the end of it all.
LAST_S: Final = 3.0
#: Seconds between two looks at who belongs to the tree: at first, and at most;
#: and while its CPU time is counted.
RECORD_S: Final = (0.25, 30.0)
TREE_S: Final = 2.0
#: Characters of its last line that a cause repeats.
WORDS_MAX: Final = 300
_NO_ROOM: Final = EXHAUSTED | {errno.EAGAIN}
#: Reads of what it said before its end; more comes from whoever is left of it.
_LAST_READS: Final = 16


@attrs.frozen
class Plan:
    """What to run, and how patiently."""

    name: str
    """The worker's."""
    command: Sequence[str]
    """Complete: no word in braces is left that is ours."""
    port: int
    environ: Mapping[str, str]
    cwd: str | None
    stop_grace_s: float
    max_restarts: int
    restart_window_s: float
    secrets: frozenset[str] = frozenset()
    """What is never shown of what it says (H8)."""


@attrs.frozen
class _Ends:
    """Our ends of the pipes to one shim."""

    lifeline: int
    report: int
    out: Pipe
    err: Pipe


class Life:
    """One start of a server. Its public attributes are for reading."""

    def __init__(
        self,
        plan: Plan,
        spoken: Spoken,
        record: Record | None,
        *,
        on_up: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Start nothing yet.

        Args:
            plan: what to run.
            spoken: takes what it says.
            record: is told of its processes, and erased when they are gone.
            on_up: the server has its number now.
            on_end: the server is no more, and why, in words for people.
        """
        #: Number of the server itself while it runs.
        self.pid: int | None = None
        #: Number of its shim while that runs: the root of the tree.
        self.root: int | None = None
        #: On Trio's clock.
        self.started_at = trio.current_time()
        self.ended = False
        #: It never was: this machine had no room for it.
        self.innocent = False
        #: False: it could not be ended, not even by SIGKILL.
        self.gone = True
        self._plan = plan
        self._spoken = spoken
        self._record = record
        self._on_up = on_up
        self._on_end = on_end
        self._ends: _Ends | None = None
        self._known: tuple[Identity, ...] = ()
        self._numbers: list[int] = []
        self._looked_at = -math.inf
        self._grace_s = plan.stop_grace_s
        # Without a deadline until it is to end: `_stop` sets one.
        self._shielded = trio.CancelScope(shield=True)
        #: It was asked to end, by us.
        self.stopping = False

    async def run(self) -> None:
        """See it to its end, which comes to the whole tree.

        Cancelled: it is asked to end; after its grace, and a little, it is gone.
        """
        over = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, over)
            try:
                await over.wait()
            finally:
                if not over.is_set():
                    self.stopping = True
                    self._stop()

    def hurry(self) -> None:
        """Give it no more time to end by itself, now or then. Not a checkpoint."""
        self._grace_s = 0.0
        if self.stopping:
            self._stop()

    def tree(self) -> list[int]:
        """Number its processes now, the shim left out. Blocking: for a thread."""
        root = self.root
        return [] if root is None else list(proc.tree(root))

    def ticks(self, now: float) -> dict[int, int]:
        """Give the CPU time that each of its processes has used (W10).

        Blocking: for a thread. Who belongs to it is looked up now and then only:
        that takes a look at every process of the machine.
        """
        if now - self._looked_at > TREE_S:
            self._looked_at = now
            self._numbers = self.tree()
        stats = ((pid, proc.stat_of(pid)) for pid in self._numbers)
        return {pid: stat.ticks for pid, stat in stats if stat is not None}

    def _stop(self) -> None:
        """Have the shim end it all; at once where there is no grace."""
        self._shielded.deadline = trio.current_time() + self._grace_s + LAST_S
        if self._ends is not None:
            order = f"stop {self._grace_s * 1000:.0f}\n" if self._grace_s else "kill\n"
            try:
                os.write(self._ends.lifeline, order.encode())
            except OSError:
                return  # the shim is gone, and has left nothing to end

    async def _serve(self, over: trio.Event) -> None:
        if self.stopping:
            over.set()
            return
        with self._shielded, ExitStack() as ours:
            self._spoken.begin()
            ours.callback(self._spoken.end)
            try:
                shim = await self._start(ours)
            except (OSError, ValueError) as error:
                self.innocent = getattr(error, "errno", None) in _NO_ROOM
                self._end(f"it can't be started: {_why(error)}")
            else:
                await self._keep(shim)
        self.gone = not self._shielded.cancelled_caught
        self.root = self._ends = None
        if self._record is not None and self.gone:
            self._record.erase()
        over.set()

    async def _start(self, ours: ExitStack) -> trio.Process:
        """Start the shim.

        Raises:
            OSError: this machine has no room for it, or its folder is not there.
            ValueError: a part of the command is no argument.
        """
        with ExitStack() as theirs:
            lifeline_end, lifeline = _pipe(theirs, ours)
            report, report_end = _pipe(ours, theirs)
            out, out_end = _pipe(ours, theirs)
            err, err_end = _pipe(ours, theirs)
            for descriptor in (lifeline, report, out, err):
                os.set_blocking(descriptor, False)
            shim = await trio.lowlevel.open_process(
                [
                    *(sys.executable, "-I", "-S", str(SHIM)),
                    *(str(os.getpid()), str(report_end)),
                    *self._plan.command,
                ],
                stdin=lifeline_end,
                stdout=out_end,
                stderr=err_end,
                pass_fds=(report_end,),
                env=dict(self._plan.environ),
                cwd=self._plan.cwd,
                # Ctrl-C is for us; we end it in order.
                start_new_session=True,
            )
        self._ends = _Ends(lifeline, report, Pipe(out), Pipe(err))
        self.root = shim.pid
        self.started_at = trio.current_time()
        return shim

    async def _keep(self, shim: trio.Process) -> None:
        ends = self._ends
        if ends is None:
            return
        if self.stopping:
            self._stop()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drain, ends.out)
            nursery.start_soon(self._drain, ends.err)
            nursery.start_soon(self._know, shim.pid)
            await self._hear(ends)
            # Not at the end of its pipes, which anybody may hold (B103).
            nursery.cancel_scope.cancel()
        await shim.wait()

    # ---- what the shim reports ----

    async def _hear(self, ends: _Ends) -> None:
        """Read the report to its end, which is the end of the shim."""
        said = b""
        whole = False
        while True:
            await trio.lowlevel.wait_readable(ends.report)
            try:
                piece = os.read(ends.report, 4096)
            except BlockingIOError:
                continue
            if not piece:
                break
            *lines, said = (said + piece).split(b"\n")
            for line in lines:
                word, _, number = line.decode().partition(" ")
                whole = whole or word in {"exit", "signal"}
                self._report(ends, word, int(number))
        if not whole:
            # Somebody has killed the shim. Its server goes with it; the others
            # have nobody left but us.
            self._say_last(ends)
            self._end(f"its keeper was killed{self._words()}")
            await trio.to_thread.run_sync(end_all, self._known)

    def _report(self, ends: _Ends, word: str, number: int) -> None:
        if self.ended:
            return
        if word == "up":
            self.pid = number
            self._on_up()
        elif word == "error":
            name = self._plan.command[0]
            self._end(f"it can't be executed: {os.strerror(number)}: {name}")
        else:
            self._say_last(ends)
            how = f"ended with status {number}"
            if word == "signal":
                how = f"was killed by {_signal_name(number)}"
            self._end(f"it {how}{self._words()}")

    def _end(self, cause: str) -> None:
        if not self.ended:
            self.ended = True
            self.pid = None
            self._on_end(cause)

    # ---- what the server says ----

    async def _drain(self, pipe: Pipe) -> None:
        stderr = self._is_stderr(pipe)
        while True:
            more = self._spoken.take(pipe, stderr=stderr)
            if more is None:
                await trio.lowlevel.wait_readable(pipe.descriptor)
            elif more:
                await trio.lowlevel.checkpoint()
            else:
                return

    def _say_last(self, ends: _Ends) -> None:
        """Take what its pipes still hold: it was written before the end."""
        for pipe in (ends.out, ends.err):
            stderr = self._is_stderr(pipe)
            for _ in range(_LAST_READS):
                if not self._spoken.take(pipe, stderr=stderr):
                    break
            self._spoken.finish(pipe, stderr=stderr)

    def _is_stderr(self, pipe: Pipe) -> bool:
        return self._ends is not None and pipe is self._ends.err

    def _words(self) -> str:
        last = self._spoken.last[:WORDS_MAX]
        return f": {last}" if last else ""

    # ---- who belongs to it ----

    async def _know(self, shim: int) -> None:
        """Know, and write down, who is in the tree."""
        gap, longest = RECORD_S
        while True:
            known = await trio.to_thread.run_sync(_tree_of, shim)
            if known and known != self._known:
                self._known = known
                if self._record is not None:
                    await trio.to_thread.run_sync(self._record.write, known)
            await trio.sleep(gap)
            gap = min(longest, gap * 2)


def _tree_of(shim: int) -> tuple[Identity, ...]:
    return tuple(proc.identify([shim, *proc.tree(shim)]))


def _pipe(reader: ExitStack, writer: ExitStack) -> tuple[int, int]:
    """Make a pipe; each end is closed by its stack."""
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{os.strerror(error.errno or 0)}{where}"
    return str(error)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
