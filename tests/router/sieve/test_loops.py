"""Loops, and what only looks like one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.sieve.loops import LOOP_MIN, PERIOD_MAX, LoopWatch

REPEATS = 20


def fed(watch: LoopWatch, text: str, size: int) -> int | None:
    """Feed *text* in pieces of *size*; give the characters until the loop."""
    for at in range(0, len(text), size):
        if watch.feed(text[at : at + size]):
            return at + size
    return None


def prose(length: int) -> str:
    rng = random.Random(7)
    words = ["river", "the", "of", "a", "stone", "and", "is", "\n", "long", ". "]
    text = " ".join(rng.choice(words) for _ in range(length // 4 + 1))
    return text[:length]


@pytest.mark.parametrize("size", [1, 3, 7, 64, 1_000])
@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "ha ",
        "I am sorry, I can't do that.\n",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\nb c\n",
        "- one thing\n- another thing\n- a third thing\n\n",
        "\n",
        prose(PERIOD_MAX - 100),
    ],
    ids=["letter", "word", "line", "with a run", "lines", "newline", "page"],
)
def test_j5_a_piece_that_follows_on_itself_is_found_soon(piece: str, size: int) -> None:
    before = prose(300)
    loop = piece * (REPEATS + 4) + piece * (2 * LOOP_MIN // len(piece))
    must = max(LOOP_MIN, (REPEATS + 2) * len(piece))

    at = fed(LoopWatch(REPEATS), before + loop, size)

    assert at is not None
    found = at - len(before)
    assert must - len(piece) < found <= must + 2 * len(piece) + size + 128


@pytest.mark.parametrize("size", [1, 5, 64])
def test_j5_as_many_repeats_as_are_allowed_are_no_loop(size: int) -> None:
    line = "The same line, for the same reason, and with the same end.\n"
    text = "Before.\n" + line * (REPEATS + 1) + "After it something else comes."

    assert fed(LoopWatch(REPEATS), text, size) is None


@pytest.mark.parametrize(
    "text",
    [
        prose(40_000),
        "-" * (LOOP_MIN - 1) + "\n" + prose(100),
        "".join(f"{n}. Item number {n} of the list.\n" for n in range(500)),
        "".join(f"| {n:4} | {n * n:8} |\n" for n in range(500)),
        ("    " * 6 + "x = 1\n") + prose(5_000),
    ],
    ids=["prose", "rule", "list", "table", "code"],
)
@pytest.mark.parametrize("size", [1, 4, 200])
def test_j5_text_that_goes_on_is_no_loop(text: str, size: int) -> None:
    assert fed(LoopWatch(REPEATS), text, size) is None


@given(st.lists(st.text("ab\n", max_size=9), max_size=60))
def test_a_watch_takes_any_text_in_any_pieces(texts: list[str]) -> None:
    watch = LoopWatch(1_000_000)

    assert not any(watch.feed(text) for text in texts)


@given(
    st.text("abc \n", min_size=1, max_size=40),
    st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_j5_a_loop_is_found_however_it_is_cut(piece: str, sizes: list[int]) -> None:
    watch = LoopWatch(REPEATS)
    text = piece * (4 * LOOP_MIN // len(piece) + 3 * REPEATS)
    at = turn = 0
    found = False
    while at < len(text) and not found:
        size = sizes[turn % len(sizes)]
        found = watch.feed(text[at : at + size])
        at += size
        turn += 1

    assert found


def test_a_reset_begins_with_another_text() -> None:
    watch = LoopWatch(REPEATS)
    half = "ha " * (LOOP_MIN // 4)

    assert not watch.feed(half)
    watch.reset()
    assert not watch.feed(half)
    assert watch.feed(half)
