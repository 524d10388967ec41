import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import spoken
from workers.spoken import LINE_MAX, LINES_MAX, Pipe, Spoken


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield Pipe(read), write
    for end in (read, write):
        try:
            os.close(end)
        except OSError:
            continue


def test_b104_lines_come_whole_and_the_last_is_known(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None)
    os.write(write, b"one\ntwo\nthr")

    assert said.take(pipe, stderr=True) is None
    assert list(said.lines) == ["one", "two"]
    assert said.last == "two"
    said.finish(pipe, stderr=True)
    assert said.last == "thr"


def test_l8_the_last_line_of_stderr_outweighs_stdout(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None)
    os.write(write, b"out\n")
    said.take(pipe, stderr=False)
    assert said.last == "out"

    os.write(write, b"err\n")
    said.take(pipe, stderr=True)
    os.write(write, b"out again\n")
    said.take(pipe, stderr=False)

    assert said.last == "err"
    said.begin()
    assert said.last == ""


def test_b104_the_end_of_the_pipe_ends_the_last_line(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None)
    os.write(write, b"no end")
    os.close(write)

    assert said.take(pipe, stderr=True) is False
    assert list(said.lines) == ["no end"]


def test_b104_long_lines_and_odd_bytes_survive(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None)
    for octets in (b"x" * 60_000, b"y\n", b"\xff\xc3\x28\n", b"\x1b[31mred\x1b[0m\0\n"):
        os.write(write, octets)
        said.take(pipe, stderr=True)

    assert list(said.lines) == ["x" * LINE_MAX, "\ufffd\ufffd(", "red"]


def test_b104_progress_is_told_by_its_last_state(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None)
    os.write(write, b"load 10%\rload 99%\rload 100%\r\n\n")
    said.take(pipe, stderr=True)

    assert said.last == "load 100%"


def test_b104_memory_is_bounded(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None)
    for number in range(1_000):
        os.write(write, b"%d\n" % number)
        said.take(pipe, stderr=True)

    assert list(said.lines) == [str(n) for n in range(1_000 - LINES_MAX, 1_000)]


def test_b104_one_call_takes_so_much_and_no_more(
    ends: tuple[Pipe, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoken, "READ_SIZE", 4)
    pipe, write = ends
    said = Spoken(None)
    os.write(write, b"a\n" * 20)

    assert said.take(pipe, stderr=True) is True
    assert len(said.lines) == 8


def test_l8_the_log_is_private_and_of_two_sizes(
    ends: tuple[Pipe, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoken, "LOG_MAX", 100)
    pipe, write = ends
    path = tmp_path / "w.log"
    said = Spoken(path)
    said.begin()
    for number in range(30):
        os.write(write, b"%09d\n" % number)
        said.take(pipe, stderr=False)
    said.end()

    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.log", "w.log.1"]
    assert all(p.stat().st_size <= 100 for p in tmp_path.iterdir())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().endswith(b"000000029\n")


def test_l8_the_log_goes_on_in_the_next_life(
    ends: tuple[Pipe, int], tmp_path: Path
) -> None:
    pipe, write = ends
    for life in (b"one\n", b"two\n"):
        said = Spoken(tmp_path / "w.log")
        said.begin()
        os.write(write, life)
        said.take(pipe, stderr=False)
        said.end()

    assert (tmp_path / "w.log").read_bytes() == b"one\ntwo\n"


def test_a_log_that_cannot_be_written_costs_nothing(
    ends: tuple[Pipe, int], tmp_path: Path
) -> None:
    pipe, write = ends
    said = Spoken(tmp_path / "no" / "w.log")
    said.begin()
    os.write(write, b"one\n")
    said.take(pipe, stderr=False)
    said.end()

    assert said.last == "one"


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_b104_lines_do_not_depend_on_where_reads_are_cut(pieces: list[bytes]) -> None:
    whole, cut = Pipe(-1), Pipe(-1)

    together = whole.lines(b"".join(pieces)) + whole.rest()
    apart = [line for piece in pieces for line in cut.lines(piece)] + cut.rest()

    assert together == apart


def test_h8_no_key_is_shown_in_the_last_line(ends: tuple[Pipe, int]) -> None:
    pipe, write = ends
    said = Spoken(None, {"hf_verysecret"})
    os.write(write, b"token=hf_verysecret key=sk-0123456789abc at http://h:1\n")
    said.take(pipe, stderr=True)

    assert said.last == "token=[key] key=[key] at http://h:1"
