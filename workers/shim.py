"""The keeper of one supervised server: a tiny process between it and the router.

``python -I -S shim.py ROUTER REPORT COMMAND …`` runs COMMAND in a session of its
own, and ends when nothing of it is left. Standard library alone, and started as a
file: it is up in milliseconds and has nothing to break. Rules L7, L8.

* It is the reaper of the whole tree (PR_SET_CHILD_SUBREAPER): grandchildren that
  have called setsid, too, stay its descendants whatever they do.
* stdin is a pipe that only the router holds. ``stop MS`` asks the server to end
  and kills what is left after that time, ``kill`` does so at once. End of file is
  the router's death, however it died.
* REPORT is a pipe to the router: ``up PID``, ``error ERRNO``, ``exit STATUS`` or
  ``signal NUMBER``, a line each. Its end without the last two is our own death.
* The server's parent-death signal is set from this process, whose one thread lives
  as long as it does; it serves only where somebody kills us.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

#: Seconds between SIGTERM and SIGKILL where the router has died: all must be gone
#: within two.
ORPHAN_GRACE = 1.0
#: The same for what a server that has ended by itself leaves behind.
REST_GRACE = 0.5
#: Seconds between two looks at what is to end; longest pause between two rounds of
#: SIGKILL: what survives one is stuck in the kernel.
LOOK = 0.02
LOOK_MAX = 1.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: By Python, by us, or by who started us: a server starts as if from a shell.
_RESTORED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
_FOREVER = float("inf")

_libc = ctypes.CDLL(None)


def descendants() -> list[int]:
    """Name every process below this one, parents first, zombies included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs more than all else
        if name.isdigit():
            with suppress(OSError):
                stat = Path(f"/proc/{name}/stat").read_bytes()
                parent = int(stat.rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    left = [os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process, or to a group by its negative number."""
    with suppress(OSError):
        os.kill(pid, number)


class Keeper:
    """The one server, and until when it may live."""

    def __init__(self, report: int, command: list[str]) -> None:
        """Start *command*; *report* is the pipe to the router."""
        self._report = report
        self._kill_at = _FOREVER
        self._pause = LOOK
        self.ending = False
        self.server = self._spawn(command)
        self._say("up", self.server)

    def _spawn(self, command: list[str]) -> int:
        shim = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != shim:
                os._exit(1)
            for number in _RESTORED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)  # noqa: S606 - a list, and no shell (L6)
        except OSError as error:
            self._say("error", error.errno or 0)
        finally:
            os._exit(127)

    def _say(self, word: str, number: int) -> None:
        with suppress(OSError):
            os.write(self._report, f"{word} {number}\n".encode())

    def reap(self, now: float) -> None:
        """Take the exit of everybody who has ended (B105)."""
        pid = -1
        while pid:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self.server:
                self.server = 0
                code = os.waitstatus_to_exitcode(status)
                self._say("signal" if code < 0 else "exit", abs(code))
                self.end(now + REST_GRACE)

    def end(self, kill_at: float, *, everybody: bool = False) -> None:
        """Ask the server to end, or all that is there; kill at the earliest time."""
        self.ending = True
        self._kill_at = min(self._kill_at, kill_at)
        asked = [-self.server] if self.server and not everybody else descendants()
        for pid in asked:
            send(pid, signal.SIGTERM)
            # What is stopped takes no signal but SIGKILL.
            send(pid, signal.SIGCONT)

    def look(self, now: float) -> float:
        """Kill what is due; give the seconds until the next look."""
        if not self.ending:
            return _FOREVER
        if now < self._kill_at:
            return min(self._kill_at - now, LOOK)
        for pid in descendants():
            send(pid, signal.SIGKILL)
        self._pause = min(LOOK_MAX, self._pause * 1.5)
        return self._pause

    def over(self) -> bool:
        """Say whether nothing is left."""
        return self.ending and not self.server and not descendants()


def main(router: int, report: int, command: list[str]) -> None:
    """Keep *command* for the process *router* until nothing of it is left."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(report, False)
    bell, ringer = os.pipe()
    os.set_blocking(bell, False)
    os.set_blocking(ringer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ringer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(bell, select.POLLIN)
    poll.register(0, select.POLLIN)
    with suppress(OSError):
        # Sees the router's death too where a child of its own, forked and never
        # executed, still holds our pipe open.
        poll.register(os.pidfd_open(router), select.POLLIN)
    # Not ignored before: a server that is not executed yet would ignore them too,
    # and lose the one that asks it to end. Till then they wait, at both.
    signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    keeper = Keeper(report, command)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    if os.getppid() != router:
        keeper.end(0.0)
    half = b""
    while True:
        now = time.monotonic()  # noqa: TID251 - there is no Trio in here
        keeper.reap(now)
        if keeper.over():
            return
        pause = keeper.look(now)
        for fd, _ in poll.poll(None if pause == _FOREVER else pause * 1000):
            now = time.monotonic()  # noqa: TID251
            if fd == bell:
                os.read(bell, 4096)
            elif fd == 0 and (piece := os.read(0, 4096)):
                *orders, half = (half + piece).split(b"\n")
                for order in orders:
                    word, _, ms = order.partition(b" ")
                    keeper.end(now + int(ms) / 1000 if word == b"stop" else now)
            else:
                poll.unregister(fd)
                keeper.end(now + ORPHAN_GRACE, everybody=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
