"""Finds the model that says the same over and over.

A loop is a piece of text that follows on itself again and again without a gap:
one character, a phrase, a line, or several lines. Pure.
"""

from typing import Final

#: Longest piece that is looked for, in characters.
PERIOD_MAX: Final = 2_048
#: A loop is at least so long, in characters: rules, tables and rows of zeros
#: are no loops.
LOOP_MIN: Final = 512
#: So many characters are looked for in what came before.
_PROBE: Final = 24


class LoopWatch:
    """Watches one text grow; holds the last few thousand characters of it."""

    __slots__ = ("_period", "_repeats_max", "_run", "_tail")

    def __init__(self, repeats_max: int) -> None:
        """*repeats_max*: a piece may follow on itself so often."""
        self._repeats_max = repeats_max
        self.reset()

    def reset(self) -> None:
        """Begin with another text."""
        self._tail = ""
        self._period = 0
        """Length of the piece that the text now repeats; 0: none is known."""
        self._run = 0
        """Characters, up to the end, that repeat with this period."""

    def feed(self, text: str) -> bool:
        """Take the next piece; say whether it is a loop by now."""
        size = len(text)
        if not size:
            return False
        whole = self._tail + text
        self._tail = whole[-2 * PERIOD_MAX :]
        period = self._period
        if period:
            # A text repeats itself where it equals itself moved by the period.
            if whole[-size:] == whole[-size - period : -period]:
                self._run += size
            else:
                period = 0
        if not period:
            period = self._find(whole)
        self._period = period
        return (
            period > 0
            and self._run >= LOOP_MIN
            and self._run // period > self._repeats_max + 1
        )

    def _find(self, whole: str) -> int:
        """Find how far back the last characters stood before; set the run."""
        probe = whole[-_PROBE:]
        if len(probe) < _PROBE:
            return 0
        end = len(whole)
        at = whole.rfind(probe, max(0, end - PERIOD_MAX - _PROBE), end - 1)
        if at < 0:
            return 0
        period = end - _PROBE - at
        run = period + _PROBE
        while run + period <= end and (
            whole[end - run - period : end - run]
            == whole[end - run : end - run + period]
        ):
            run += period
        self._run = run
        return period
