"""The shim alone, over its pipes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

from tests.kit.keeping import PYTHON, is_gone
from workers.life import SHIM

pytestmark = pytest.mark.slow

HERE = "print('here', flush=True);"
SLEEPS = f"import time; {HERE} time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    f" {HERE} time.sleep(600)"
)


@attrs.frozen
class Shim:
    process: "subprocess.Popen[bytes]"
    report: int

    def say(self, order: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order)
        self.process.stdin.flush()

    def hear(self) -> bytes:
        """Its next line."""
        line = b""
        while not line.endswith(b"\n"):
            piece = os.read(self.report, 1)
            if not piece:
                break
            line += piece
        return line

    def here(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"here\n"


@contextmanager
def shim(*command: str, router: int | None = None) -> Iterator[Shim]:
    report, theirs = os.pipe()
    process = subprocess.Popen(
        [
            *(*PYTHON, str(SHIM), str(router or os.getpid()), str(theirs)),
            *command,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(theirs,),
    )
    os.close(theirs)
    try:
        yield Shim(process, report)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        process.wait(10)
        os.close(report)


def python(code: str) -> tuple[str, ...]:
    return (*PYTHON, "-c", code)


def test_l8_it_reports_the_start_and_the_exit() -> None:
    with shim(*python("import sys; sys.exit(7)")) as one:
        assert one.hear().startswith(b"up ")
        assert one.hear() == b"exit 7\n"
        assert one.hear() == b""
        assert one.process.wait(5) == 0


def test_l8_it_reports_the_signal() -> None:
    with shim(*python(SLEEPS)) as one:
        pid = int(one.hear().split()[1])
        one.here()
        os.kill(pid, signal.SIGKILL)

        assert one.hear() == b"signal 9\n"


def test_l6_it_reports_why_nothing_can_be_executed() -> None:
    with shim("/no/such/program") as one:
        said = {one.hear().split()[0] for _ in range(2)}

        assert said == {b"up", b"error"}
        assert one.hear() == b"exit 127\n"


def test_l7_stop_asks_and_kills_after_its_time() -> None:
    with shim(*python(STUBBORN)) as one:
        one.hear()
        one.here()
        start = time.perf_counter()
        one.say(b"stop 300\n")

        assert one.hear() == b"signal 9\n"
        assert 0.3 <= time.perf_counter() - start < 1.5


def test_l7_kill_in_the_middle_of_a_stop_counts() -> None:
    with shim(*python(STUBBORN)) as one:
        one.hear()
        one.here()
        start = time.perf_counter()
        one.say(b"stop 60000\nki")
        one.say(b"ll\n")

        assert one.hear() == b"signal 9\n"
        assert time.perf_counter() - start < 1.5


def test_l7_the_end_of_its_input_is_the_end_of_all() -> None:
    with shim(*python(STUBBORN)) as one:
        pid = int(one.hear().split()[1])
        one.here()
        assert one.process.stdin is not None
        start = time.perf_counter()
        one.process.stdin.close()
        one.process.wait(5)

        assert time.perf_counter() - start < 2.0
        assert is_gone(pid)


def test_l7_the_end_of_its_router_is_noticed_though_the_pipe_is_open() -> None:
    with subprocess.Popen(python("import time; time.sleep(600)")) as router:
        # It is another's child, which it takes for a router that has died already.
        with shim(*python(STUBBORN), router=router.pid) as one:
            pid = int(one.hear().split()[1])
            one.process.wait(5)

            assert is_gone(pid)
        router.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_l7_it_takes_orders_from_its_router_only(number: signal.Signals) -> None:
    with shim(*python(SLEEPS)) as one:
        pid = int(one.hear().split()[1])
        one.here()
        one.process.send_signal(number)
        one.process.send_signal(number)

        with pytest.raises(subprocess.TimeoutExpired):
            one.process.wait(0.3)
        assert not is_gone(pid)


@pytest.mark.slow
def test_l7_a_signal_in_the_moment_of_its_start_ends_nothing() -> None:
    for _ in range(20):
        with shim(*python(SLEEPS)) as one:
            pid = int(one.hear().split()[1])
            one.process.send_signal(signal.SIGINT)
            one.here()

            assert one.process.poll() is None
            assert not is_gone(pid)


def test_l7_its_server_dies_with_it() -> None:
    with shim(*python(STUBBORN)) as one:
        pid = int(one.hear().split()[1])
        one.here()
        one.process.kill()
        one.process.wait(5)
        end = time.perf_counter() + 5
        while not is_gone(pid):
            assert time.perf_counter() < end
            time.sleep(0.01)


def test_b105_it_reaps_whoever_is_left_to_it() -> None:
    code = (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        os.fork()\n"
        "        os._exit(0)\n"
        f"{HERE} time.sleep(600)"
    )
    with shim(*python(code)) as one:
        pid = int(one.hear().split()[1])
        one.here()
        end = time.perf_counter() + 5
        while True:
            table = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(one.process.pid)],
                capture_output=True,
                check=False,
            ).stdout.split()
            if [int(n) for n in table] == [pid]:
                break
            assert time.perf_counter() < end
            time.sleep(0.02)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = f"import runpy, sys; runpy.run_path({str(SHIM)!r}); print(len(sys.modules))"
    done = subprocess.run(
        [*PYTHON, "-c", code], capture_output=True, check=True, text=True
    )

    assert int(done.stdout) < 120
    assert sys.version_info >= (3, 11)
