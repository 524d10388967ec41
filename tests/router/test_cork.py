"""What a turn gathers, and that nothing of it is forgotten."""

import pytest

from router.cork import Cork
from router.errors import LocalError


class Keeper:
    """Somebody who kept something."""

    def __init__(self, cork: Cork, told: list[str], name: str = "k") -> None:
        self.cork = cork
        self.told = told
        self.name = name
        self.bug: Exception | None = None
        self.crash_bug: Exception | None = None

    def uncork(self) -> None:
        self.told.append(f"{self.name} uncorked")
        if self.bug is not None:
            raise self.bug

    def crash(self) -> None:
        self.told.append(f"{self.name} crashed")
        if self.crash_bug is not None:
            raise self.crash_bug


class Rig:
    def __init__(self) -> None:
        self.bugs: list[tuple[str, Exception]] = []
        self.told: list[str] = []
        self.cork = Cork(lambda place, bug: self.bugs.append((place, bug)))

    def keeper(self, name: str) -> Keeper:
        keeper = Keeper(self.cork, self.told, name)
        self.cork.keep(keeper)
        return keeper


def test_who_keeps_is_uncorked_once_when_the_turn_is_over() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    rig.keeper("a")
    rig.keeper("b")
    assert rig.told == []

    rig.cork.release()
    rig.cork.release()

    assert rig.told == ["a uncorked", "b uncorked"]
    assert not rig.cork.held


def test_what_is_sent_while_uncorking_is_not_kept_again() -> None:
    rig = Rig()
    held: list[bool] = []

    class Asks(Keeper):
        def uncork(self) -> None:
            held.append(self.cork.held)

    rig.cork.hold(0.0)
    rig.cork.keep(Asks(rig.cork, rig.told))
    rig.cork.release()

    assert held == [False]


def test_l1_a_bug_of_one_keeper_is_its_own() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    first = rig.keeper("a")
    rig.keeper("b")
    first.bug = ValueError("a bug")

    rig.cork.release()

    assert rig.told == ["a uncorked", "a crashed", "b uncorked"]
    assert rig.bugs == [("cork", first.bug)]


def test_l1_a_broken_invariant_ends_more_than_one_client() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    rig.keeper("a").bug = LocalError("broken")

    with pytest.raises(LocalError):
        rig.cork.release()
    assert rig.bugs == []
    assert not rig.cork.held


def test_a_turn_within_a_turn_sends_what_both_kept() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    rig.keeper("outer")
    rig.cork.hold(0.0)
    rig.keeper("inner")
    rig.cork.release()
    assert rig.told == ["outer uncorked", "inner uncorked"]

    rig.cork.release()
    assert len(rig.told) == 2


def test_l1_a_bug_in_ending_one_leaves_nobody_behind_it_waiting() -> None:
    rig = Rig()
    rig.cork.hold(0.0)
    bad = rig.keeper("a")
    bad.bug = ValueError("uncork")
    bad.crash_bug = ValueError("crash")
    rig.keeper("b")

    rig.cork.release()

    assert rig.told == ["a uncorked", "a crashed", "b uncorked"]
    assert [place for place, _ in rig.bugs] == ["cork", "cork.crash"]
