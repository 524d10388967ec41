import os
import subprocess
import time

import pytest

from tests.kit.keeping import PYTHON
from workers import proc
from workers.proc import Identity, Stat, below, parse_stat


def line(name: str = "a", state: str = "S") -> bytes:
    rest = " ".join(str(n) for n in range(7, 30))
    return f"42 ({name}) {state} 1 5 6 {rest}\n".encode()


@pytest.mark.parametrize("name", ["a", "a b", ") R 9 (", "a)", "", ")))"])
def test_w10_a_name_may_hold_anything(name: str) -> None:
    plain = parse_stat(line())

    assert parse_stat(line(name)) == plain
    # utime 14 and stime 15, starttime 22, counted from 1 (proc(5)).
    assert plain == Stat(parent=1, zombie=False, ticks=14 + 15, start=22)


def test_a_zombie_is_told() -> None:
    assert parse_stat(line(state="Z")).zombie


@pytest.mark.parametrize("octets", [b"", b"1 (a) S", b"1 (a) S x"])
def test_what_is_no_status_is_refused(octets: bytes) -> None:
    with pytest.raises(ValueError, match="no process status"):
        parse_stat(octets)


def test_below_gives_descendants_only_parents_first() -> None:
    def stat(parent: int) -> Stat:
        return Stat(parent, zombie=False, ticks=0, start=0)

    processes = {1: stat(0), 2: stat(1), 3: stat(2), 4: stat(1), 9: stat(8), 8: stat(9)}

    assert list(below(1, processes)) in ([2, 4, 3], [4, 2, 3], [2, 3, 4])
    assert list(below(3, processes)) == []


def test_w10_ticks_count_the_cpu_time_of_a_process() -> None:
    me = os.getpid()
    before = proc.everybody()[me].ticks
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass

    assert proc.everybody()[me].ticks - before >= 8


def test_a_process_is_known_by_number_start_and_command() -> None:
    command = [*PYTHON, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as child:
        while proc.command_of(child.pid) != tuple(command):
            time.sleep(0.01)
        (who,) = proc.identify([child.pid, 2**30])

        assert who.pid == child.pid
        assert proc.lives(who)
        assert not proc.lives(Identity(who.pid, who.start + 1, who.command))
        assert not proc.lives(Identity(who.pid, who.start, ("other",)))
        assert child.pid in proc.tree(os.getpid())
        started = proc.started_at(child.pid)
        assert started is not None
        assert abs(started - time.time_ns() / 1e9) < 60
        child.kill()
        child.wait()
        assert not proc.lives(who)
        assert proc.started_at(child.pid) is None


def test_the_epoch_names_boot_and_namespace() -> None:
    boot, namespace = proc.epoch().split()

    assert len(boot) == 36
    assert namespace.startswith("pid:[")
