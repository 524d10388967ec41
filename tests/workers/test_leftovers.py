"""What a dead router left: found by number, start and command line, and ended."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.kit.keeping import PYTHON, is_gone, no_descriptor
from workers import leftovers, proc
from workers.leftovers import Entry, Record, end_all, sweep

SLEEP = "import time; time.sleep(600)"
FAMILY = (
    "import os, subprocess, sys, time;"
    f" subprocess.Popen([sys.executable, '-I', '-S', '-c', {SLEEP!r}],"
    " start_new_session=True); print('up', flush=True); time.sleep(600)"
)


@contextmanager
def child(code: str = SLEEP) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([*PYTHON, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            if code is FAMILY:
                assert process.stdout is not None
                process.stdout.readline()
            # Its command line is its own once it is executed.
            while proc.command_of(process.pid)[-1:] != (code,):
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def entry(pid: int, **changes: Any) -> Entry:
    """What a router that is gone would have written of *pid*."""
    (me,) = proc.identify([os.getpid()])
    facts: dict[str, Any] = {
        "epoch": proc.epoch(),
        "router": attrs.evolve(me, start=1),
        "processes": tuple(proc.identify([pid])),
        **changes,
    }
    return Entry(**facts)


def write(folder: Path, one: Entry) -> Path:
    path = folder / "w.json"
    path.write_text(json.dumps(attrs.asdict(one)))
    return path


def test_l7_what_a_dead_router_left_is_ended_with_its_descendants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.1)
    with child(FAMILY) as process:
        family = [process.pid, *proc.tree(process.pid)]
        assert len(family) == 2
        path = write(tmp_path, entry(process.pid))

        assert sweep(tmp_path) == [f"w: pid {process.pid}"]

        assert all(map(is_gone, family))
        assert not path.exists()


def test_l7_a_keeper_that_is_at_it_has_its_time() -> None:
    with child("import time; time.sleep(0.5)") as process:
        start = time.perf_counter()
        end_all(proc.identify([process.pid]), patience_s=5.0)

        assert time.perf_counter() - start < 3.0
        assert process.wait() == 0


@pytest.mark.parametrize("change", ["start", "command", "epoch", "router"])
def test_l7_nobody_else_is_ever_ended(tmp_path: Path, change: str) -> None:
    with child() as process:
        one = entry(process.pid)
        (who,) = one.processes
        (me,) = proc.identify([os.getpid()])
        one = {
            "start": attrs.evolve(one, processes=(attrs.evolve(who, start=1),)),
            "command": attrs.evolve(one, processes=(attrs.evolve(who, command=()),)),
            "epoch": attrs.evolve(one, epoch="another boot"),
            # Whatever it calls itself by now.
            "router": attrs.evolve(one, router=attrs.evolve(me, command=("x",))),
        }[change]
        path = write(tmp_path, one)

        assert sweep(tmp_path) == []

        assert process.poll() is None
        # A living router's file is its own.
        assert path.exists() is (change == "router")


def test_l7_another_namespace_of_this_boot_is_left_alone(tmp_path: Path) -> None:
    boot = proc.epoch().partition(" ")[0]
    with child() as process:
        path = write(tmp_path, entry(process.pid, epoch=f"{boot} pid:[1]"))

        assert sweep(tmp_path) == []

        assert process.poll() is None
        assert path.exists()


def test_l7_a_file_that_is_no_record_goes(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(b'{"epoch": 1, \xff')

    assert sweep(tmp_path) == []
    assert not path.exists()


def test_l7_a_record_is_whole_private_and_erased(tmp_path: Path) -> None:
    record = Record(tmp_path, "w")
    (me,) = proc.identify([os.getpid()])
    record.write([me])

    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    read = json.loads(path.read_bytes())
    assert read["router"]["pid"] == os.getpid()
    assert read["processes"][0]["command"] == list(me.command)
    record.erase()
    record.erase()
    assert list(tmp_path.iterdir()) == []


def test_l7_a_record_that_another_has_written_over_is_not_erased(
    tmp_path: Path,
) -> None:
    """A worker that is changed has its next process before its last has gone."""
    old, new = Record(tmp_path, "w"), Record(tmp_path, "w")
    (me,) = proc.identify([os.getpid()])
    old.write([me])
    new.write([me, me])
    old.erase()

    assert [path.name for path in tmp_path.iterdir()] == ["w.json"]


def test_a_disk_that_takes_nothing_is_no_failure(tmp_path: Path) -> None:
    Record(tmp_path / "gone", "w").write(proc.identify([os.getpid()]))

    assert sweep(tmp_path / "gone") == []


def test_h6_without_a_descriptor_what_was_left_stays_for_the_next_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with child() as process:
        path = write(tmp_path, entry(process.pid))
        with no_descriptor():
            assert sweep(tmp_path) == []
        assert path.exists()
        assert process.poll() is None
        assert "can't be looked for: Too many open files" in caplog.text

        assert sweep(tmp_path) == [f"w: pid {process.pid}"]


def test_h6_who_sees_no_process_takes_nobody_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child() as process:
        path = write(tmp_path, entry(process.pid))
        monkeypatch.setattr(proc, "identify", lambda _: [])

        assert sweep(tmp_path) == []
        assert path.exists()


def test_h6_without_a_descriptor_there_is_no_record_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    known = proc.identify([os.getpid()])
    record = Record(tmp_path, "a")
    with monkeypatch.context() as short:
        short.setattr(os, "open", exhausted)
        record.write(known)
    assert not record.path.exists()

    record.write(known)
    assert record.path.exists()


def test_nobody_is_ended_for_nobody() -> None:
    end_all([])
    assert sys.executable
