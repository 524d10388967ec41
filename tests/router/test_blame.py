from router.blame import sort_out
from router.errors import LocalError


def test_b126_a_plain_bug_stays_and_nothing_goes_on() -> None:
    bug = ValueError()

    assert sort_out(bug) == (bug, None)


def test_b126_a_group_of_bugs_is_one_outcome() -> None:
    group = ExceptionGroup("", [ValueError(), ExceptionGroup("", [OSError()])])

    assert sort_out(group) == (group, None)


def test_b126_what_is_no_exception_goes_on_without_the_bugs() -> None:
    bug, stop = ValueError(), KeyboardInterrupt()

    stays, goes_on = sort_out(BaseExceptionGroup("", [bug, stop]))

    assert isinstance(stays, ExceptionGroup)
    assert stays.exceptions == (bug,)
    assert isinstance(goes_on, BaseExceptionGroup)
    assert goes_on.exceptions == (stop,)


def test_b126_a_group_of_cancellations_alone_is_no_bug() -> None:
    stop = KeyboardInterrupt()

    stays, goes_on = sort_out(BaseExceptionGroup("", [stop]))

    assert stays is None
    assert isinstance(goes_on, BaseExceptionGroup)
    assert goes_on.exceptions == (stop,)


def test_l1_a_broken_invariant_goes_on_wherever_it_hides() -> None:
    broken = LocalError()
    group = ExceptionGroup("", [ValueError(), ExceptionGroup("", [broken])])

    assert sort_out(broken) == (None, broken)
    assert sort_out(group) == (None, group)
