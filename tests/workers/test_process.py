"""Servers that are kept: tiny real processes, real signals, real deaths."""

import faulthandler
import os
import random
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.kit.daemon import until
from tests.kit.deep import size
from tests.kit.keeping import (
    CHILD,
    PYTHON,
    Kept,
    free_port,
    gone_after,
    is_gone,
    kept,
    listening,
    numbers_in,
    plan,
)
from workers import proc, process
from workers.life import LAST_S
from workers.process import Stage

pytestmark = pytest.mark.slow

#: Signals 32 and 33: the C library's own, which no program may touch; some leave
#: them ignored to what they start (timeout does).
_LIBCS_OWN: Final = 0b11 << 31
_SHELLS: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1)
SLEEPS: Final = "import time; print('here', flush=True); time.sleep(600)"
STUBBORN: Final = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print('here', flush=True); time.sleep(600)"
)
FAMILY: Final = (
    "import subprocess, sys, time;"
    " child = subprocess.Popen([sys.executable, '-I', '-S', '-c',"
    " 'import os, signal, time; os.setsid();"
    " signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " print(os.getpid(), flush=True); time.sleep(600)']);"
)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---- L6: how it is started ----


async def test_l7_it_has_a_session_and_a_group_of_its_own_and_no_input() -> None:
    code = (
        "import os, sys, time; me = os.getpid();"
        " print(os.getsid(0) == me, os.getpgid(0) == me, repr(sys.stdin.read()),"
        " flush=True); time.sleep(600)"
    )
    async with kept(plan(code)) as one:
        await one.said("True True ''")


async def test_l6_it_gets_its_arguments_as_they_are(tmp_path: Path) -> None:
    code = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(600)"
    odd = ['{"a": {"b": 1}}', "two words", "", "$HOME; `id`", "ümläut"]
    async with kept(plan(code, command=(*PYTHON, "-c", code, *odd))) as one:
        await one.said(repr(odd))


async def test_l6_env_and_cwd_are_its_own(tmp_path: Path) -> None:
    code = (
        "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd(),"
        " flush=True); time.sleep(600)"
    )
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    async with kept(plan(code, environ=environ, cwd=str(tmp_path))) as one:
        await one.said(f"1 {tmp_path}")


async def test_l7_it_starts_with_no_signal_blocked_or_ignored() -> None:
    look = "grep -E 'Sig(Blk|Ign)' /proc/self/status; exec sleep 600"
    # As a shell does to what it runs in the background, and nohup to all.
    ours = {number: signal.signal(number, signal.SIG_IGN) for number in _SHELLS}
    try:
        async with kept(plan("", command=("/bin/sh", "-c", look))) as one:

            async def both() -> bool:
                return len(one.lines) >= 2

            await until(both)
            masks = dict(line.split(":\t") for line in list(one.lines)[:2])
            assert int(masks["SigBlk"], 16) == 0
            assert int(masks["SigIgn"], 16) & ~_LIBCS_OWN == 0
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        (
            {"command": ("/no/such/program",)},
            "it can't be executed: No such file or directory: /no/such/program",
        ),
        (
            {"command": ("/etc/passwd",)},
            "it can't be executed: Permission denied: /etc/passwd",
        ),
        (
            {"cwd": "/no/such/folder"},
            "it can't be started: No such file or directory: /no/such/folder",
        ),
        ({"command": ("a\0b",)}, "it can't be started: embedded null byte"),
    ],
)
async def test_b133_what_cannot_be_started_is_a_cause_and_no_exception(
    more: dict[str, object], cause: str
) -> None:
    async with kept(plan("", max_restarts=0, **more)) as one:
        await one.stage(Stage.FAILED)

        assert one.process.cause == (
            f"more than 0 restarts in 600 s, the last time {cause}"
        )


async def test_h6_a_machine_without_room_is_no_crash_of_the_servers() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with kept(plan(SLEEPS, max_restarts=0)) as one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files(), hard))
        try:
            await one.stage(Stage.RESTARTING)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in one.process.cause
        one.process.retry()

        await one.up()


# ---- L7: how it is ended ----


async def test_l7_it_is_asked_and_has_its_time_to_end() -> None:
    code = (
        "import signal, sys, time;"
        " signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5),"
        " print('bye', flush=True), sys.exit()));"
        " print('here', flush=True); time.sleep(600)"
    )
    async with kept(plan(code)) as one:
        pid = await one.up()
        await one.said("here")
        start = trio.current_time()

    assert 0.5 <= trio.current_time() - start < 2.5
    assert is_gone(pid)
    assert one.lines[-1] == "bye"


async def test_l7_who_ignores_it_is_killed_after_its_grace() -> None:
    async with kept(plan(STUBBORN, stop_grace_s=0.5)) as one:
        pid = await one.up()
        await one.said("here")
        start = trio.current_time()

    assert 0.5 <= trio.current_time() - start < 2.0
    assert is_gone(pid)


async def test_l7_without_a_grace_it_is_killed_at_once() -> None:
    async with kept(plan(STUBBORN, stop_grace_s=0.0)) as one:
        pid = await one.up()
        await one.said("here")
        start = trio.current_time()

    assert trio.current_time() - start < 1.0
    assert is_gone(pid)


async def test_l7_a_stopped_process_is_ended_in_its_grace_too() -> None:
    async with kept(plan(SLEEPS)) as one:
        pid = await one.up()
        await one.said("here")
        os.kill(pid, signal.SIGSTOP)
        start = trio.current_time()

    assert trio.current_time() - start < 2.0
    assert is_gone(pid)


async def test_d3_who_is_hurried_while_it_ends_has_no_more_time() -> None:
    async def hurry(one: Kept) -> None:
        await trio.sleep(0.3)
        one.process.hurry()

    async with trio.open_nursery() as nursery, kept(plan(STUBBORN)) as one:
        pid = await one.up()
        await one.said("here")
        nursery.start_soon(hurry, one)
        start = trio.current_time()

    assert 0.3 <= trio.current_time() - start < 1.5
    assert is_gone(pid)


async def test_b103_the_end_waits_for_no_pipe_that_a_grandchild_holds() -> None:
    code = FAMILY + " print('here', flush=True); time.sleep(600)"
    async with kept(plan(code)) as one:
        await one.up()
        await one.said("here")
        numbers: list[int] = []

        async def told() -> bool:
            numbers.extend(int(line) for line in one.lines if line.isdigit())
            return bool(numbers)

        await until(told)
        start = trio.current_time()

    assert trio.current_time() - start < 2.0
    assert is_gone(numbers[0])


async def test_s2_a_start_cancelled_at_any_time_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(20261129)
    code = FAMILY + " time.sleep(600)"
    async with kept(plan(code)) as one:
        await one.up()
    before = open_files()

    for _ in range(12):
        mark = f"FENCEPOST_TEST={rng.random()}"
        with trio.move_on_after(rng.uniform(0.0, 0.12)):
            async with kept(plan(code, environ=dict([mark.split("=")]))):
                await trio.sleep(600)
        left = [pid for pid in proc.numbers() if has(pid, mark)]
        assert [pid for pid in left if not is_gone(pid)] == []

    assert open_files() == before


def has(pid: int, mark: str) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_text()
    except OSError:
        return False


# ---- L7: the router dies ----

ROUTER: Final = """
import sys, trio
from router.engine import open_router
from router.settings import WorkerSettings

async def main():
    port, *command = sys.argv[1:]
    worker = WorkerSettings(name="w", command=tuple(command), port=int(port))
    async with open_router(workers=[worker]):
        await trio.sleep_forever()

trio.run(main)
"""


async def kill_router(numbers: Path, seen: list[float]) -> None:
    """Start a router with a stubborn family, kill -9 it, and see who is left."""
    port = free_port()
    words = (str(numbers), "family", "stubborn")
    router = await trio.lowlevel.open_process(
        [
            *(sys.executable, "-c", ROUTER, str(port)),
            *(*PYTHON, str(CHILD), "{port}", *words),
        ]
    )
    try:
        child, grandchild = await numbers_in(numbers)
        shim = int(
            Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]
        )
        assert not is_gone(grandchild)
    finally:
        killed_at = trio.current_time()
        router.kill()
        await router.wait()
    seen.append(await gone_after([child, grandchild, shim], killed_at))


async def test_l7_kill_9_of_the_router_leaves_nobody(tmp_path: Path) -> None:
    """20 times, five at once: grandchildren that left the session included."""
    seen: list[float] = []
    for batch in range(4):
        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(kill_router, tmp_path / f"{batch}-{n}", seen)

    assert len(seen) == 20
    assert max(seen) <= 2.0


async def test_l7_a_fork_that_holds_the_routers_pipes_changes_nothing(
    tmp_path: Path,
) -> None:
    """A program that embeds the router may have forked without an exec."""
    numbers = tmp_path / "numbers"
    forks = ROUTER.replace(
        "    async with open_router(workers=[worker]):\n",
        "    async with open_router(workers=[worker]):\n"
        "        import os, time\n"
        "        await trio.sleep(1)\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(20)\n"
        "            os._exit(0)\n",
    )
    router = await trio.lowlevel.open_process(
        [
            *(sys.executable, "-W", "ignore", "-c", forks, str(free_port())),
            *(*PYTHON, str(CHILD), "{port}", str(numbers), "family"),
        ],
        start_new_session=True,
    )
    try:
        family = await numbers_in(numbers)
        await trio.sleep(1.5)
        killed_at = trio.current_time()
        router.kill()
        await router.wait()

        assert await gone_after(family, killed_at) <= 2.0
    finally:
        os.killpg(router.pid, signal.SIGKILL)


@pytest.mark.deep
async def test_l7_an_idle_healthy_server_outlives_every_thread() -> None:
    """Trio's idle threads end after 10 s: so would a child that one of them is the
    parent of, by the parent-death signal."""
    async with kept(plan(SLEEPS)) as one:
        pid = await one.up()
        # Any share of a release takes the whole minute, which is what a test may
        # take before it counts as hung.
        faulthandler.cancel_dump_traceback_later()
        await trio.sleep(60.0 if size(10**6, least=0) else 12.5)

        assert one.process.pid == pid
        assert not is_gone(pid)
        assert one.stages == [Stage.UP]


async def test_l7_a_shim_that_is_killed_takes_its_tree_along_and_is_replaced() -> None:
    code = FAMILY + " time.sleep(600)"
    async with kept(plan(code)) as one:
        pid = await one.up()
        life = one.process.life
        assert life is not None
        assert life.root is not None

        async def known() -> bool:
            return len(life._known) == 3

        await until(known)
        family = [who.pid for who in life._known]
        start = trio.current_time()
        os.kill(life.root, signal.SIGKILL)

        assert await gone_after(family, start) < 2.0
        await one.stage(Stage.RESTARTING)
        assert one.process.cause.startswith("its keeper was killed")
        assert await one.up() != pid


# ---- L8: it ends by itself ----


async def test_b102_a_server_that_fails_at_once_is_known_at_once() -> None:
    code = (
        "import sys, time; time.sleep(0.1);"
        " print('error: unknown flag --gqa', file=sys.stderr); sys.exit(1)"
    )
    async with kept(plan(code)) as one:
        await one.up()
        start = trio.current_time()
        await one.stage(Stage.RESTARTING)

        assert trio.current_time() - start < 1.0
        assert one.process.cause == "it ended with status 1: error: unknown flag --gqa"


async def test_l8_a_last_line_without_an_end_counts() -> None:
    code = "import os; os.write(2, b'one\\ntwo'); os.kill(os.getpid(), 11)"
    async with kept(plan(code)) as one:
        await one.stage(Stage.RESTARTING)

        assert one.process.cause == "it was killed by SIGSEGV: two"


async def test_l8_restarts_back_off_and_too_many_are_a_failure() -> None:
    code = "import sys; sys.exit('no model file')"
    async with kept(plan(code, max_restarts=2)) as one:
        start = trio.current_time()
        await one.stage(Stage.FAILED)

        # 0.5 s before the first restart, 1 s before the second.
        assert 1.5 <= trio.current_time() - start < 6.0
        assert one.stages.count(Stage.UP) == 3
        shown = one.process.status()
        assert shown["restarts"] == 2
        assert shown["pid"] is None
        assert shown["last_line"] == "no model file"
        assert shown["cause"] == (
            "more than 2 restarts in 600 s, the last time "
            "it ended with status 1: no model file"
        )


async def test_l8_an_operator_may_have_it_tried_again(tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    code = (
        f"import os, sys, time; os.path.exists({str(mended)!r}) or sys.exit('broken');"
        " time.sleep(600)"
    )
    async with kept(plan(code, max_restarts=0)) as one:
        await one.stage(Stage.FAILED)
        mended.touch()

        one.process.retry()

        await one.up()


async def test_l8_an_operator_shortens_the_wait_before_a_restart() -> None:
    async with kept(plan("import sys; sys.exit(1)")) as one:
        while one.stages.count(Stage.UP) < 4:
            await one.stage(Stage.RESTARTING)
            one.process.retry()
            await one.stage(Stage.UP)

        assert one.process.status()["restarts"] == 3


async def test_l8_a_retry_of_a_server_that_is_up_is_not_saved_for_later() -> None:
    async with kept(plan(SLEEPS, max_restarts=0)) as one:
        pid = await one.up()
        await one.said("here")
        one.process.retry()

        os.kill(pid, signal.SIGKILL)
        await one.stage(Stage.FAILED)

        await trio.sleep(0.5)
        assert one.process.stage is Stage.FAILED


async def test_b105_a_killed_server_is_reaped_and_started_again() -> None:
    async with kept(plan(SLEEPS)) as one:
        pid = await one.up()
        await one.said("here")

        os.kill(pid, signal.SIGKILL)
        await one.stage(Stage.RESTARTING)

        assert one.process.cause == "it was killed by SIGKILL: here"
        assert not Path(f"/proc/{pid}").exists()
        assert await one.up() != pid


async def test_l8_what_a_server_leaves_behind_is_gone_before_the_next_start() -> None:
    code = FAMILY + " time.sleep(0.3); sys.exit(1)"
    async with kept(plan(code)) as one:
        await one.up()
        await one.stage(Stage.RESTARTING)
        await one.stage(Stage.UP)

        (grandchild,) = [int(line) for line in one.lines if line.isdigit()][:1]
        assert is_gone(grandchild)


async def test_b104_chatter_never_makes_it_wait(tmp_path: Path) -> None:
    code = (
        "import os, time;"
        " os.write(2, b'x' * (1 << 20) + b'\\n');"
        " os.write(2, b'\\xff\\xfe \\xc3\\x28\\n');"
        " [os.write(1, b'%d\\n' % n) for n in range(20000)];"
        " print('through', flush=True); time.sleep(600)"
    )
    async with kept(plan(code), tmp_path) as one:
        await one.said("through")

        assert len(one.lines) <= 200
        assert max(map(len, one.lines)) <= 2_000
    logged = (tmp_path / "w.log").read_bytes()
    assert logged.count(b"x") == 1 << 20
    assert b"\xff\xfe \xc3\x28\n" in logged
    assert b"19999\n" in logged


# ---- L6: its port ----


async def test_l6_a_port_that_is_taken_is_told_with_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "PORT_GRACE_S", 0.3)
    with listening() as port:
        async with kept(plan(SLEEPS, port=port)) as one:
            await one.stage(Stage.PORT_TAKEN)

            assert one.process.cause.startswith(
                f"port {port} is taken by pid {os.getpid()} ("
            )
            assert one.process.pid is None


async def test_l6_it_starts_as_soon_as_its_port_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "PORT_GRACE_S", 0.3)
    with listening() as port:
        one_plan = plan(SLEEPS, port=port)
        taken = kept(one_plan)
        one = await taken.__aenter__()
        await one.stage(Stage.PORT_TAKEN)
    try:
        await one.up()
        assert one.process.cause == ""
    finally:
        await taken.__aexit__(None, None, None)


async def test_l6_a_port_that_comes_free_in_time_is_no_failure() -> None:
    with listening() as port:
        taken = kept(plan(SLEEPS, port=port))
        one = await taken.__aenter__()
        await one.stage(Stage.STARTING)
        await trio.sleep(0.3)
    try:
        await one.up()
        assert Stage.PORT_TAKEN not in one.stages
    finally:
        await taken.__aexit__(None, None, None)


async def test_l6_time_wait_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        caller = socket.create_connection(("127.0.0.1", port))
        met, _ = server.accept()
        # Whoever closes first keeps the port in TIME_WAIT.
        met.close()
        caller.close()
    table = Path("/proc/net/tcp").read_text()
    assert any(
        fields[1].endswith(f":{port:04X}") and fields[3] == "06"
        for fields in (line.split() for line in table.splitlines())
    )
    async with kept(plan(SLEEPS, port=port)) as one:
        await one.up()

        assert one.stages == [Stage.UP]


def test_the_shim_has_time_for_its_own_killing() -> None:
    assert LAST_S > 1.0
