from workers.pulse import TICKS, WINDOW_S, Pulse


def test_w10_nothing_is_known_before_a_whole_window() -> None:
    pulse = Pulse()
    assert pulse.works is None
    for tick in range(10):
        pulse.look(tick * 0.5, {7: 100})

    assert pulse.works is None


def test_w10_no_tick_in_a_whole_window_is_no_work() -> None:
    pulse = Pulse()
    for tick in range(11):
        pulse.look(tick * 0.5, {7: 100})

    assert pulse.works is False


def test_w10_a_few_ticks_are_work_at_once_and_for_a_window() -> None:
    pulse = Pulse()
    pulse.look(0.0, {7: 100})
    pulse.look(0.5, {7: 100 + TICKS})
    seen = {0.5: pulse.works}
    for tick in range(2, 13):
        pulse.look(tick * 0.5, {7: 100 + TICKS})
        seen[tick * 0.5] = pulse.works

    assert {at for at, works in seen.items() if works} == {
        tick * 0.5 for tick in range(1, 11)
    }
    assert seen[0.5 + WINDOW_S] is False


def test_w10_what_our_own_question_took_is_left_out() -> None:
    pulse = Pulse()
    ticks = 0
    for tick in range(20):
        pulse.look(tick * 0.5, {7: ticks})
        ticks += 5
        pulse.leave_out(tick * 0.5 + 0.1, {7: ticks})

    assert pulse.works is False


def test_w10_one_tick_is_rounding() -> None:
    pulse = Pulse()
    for tick in range(12):
        pulse.look(tick * 0.5, {7: tick // 10})

    assert pulse.works is False


def test_w10_the_whole_tree_counts_and_who_has_left_takes_nothing_back() -> None:
    pulse = Pulse()
    pulse.look(0.0, {7: 100, 8: 5_000})
    pulse.look(0.5, {7: 100, 9: TICKS})

    assert pulse.works is True


def test_w10_a_gap_without_looking_begins_anew() -> None:
    pulse = Pulse()
    for tick in range(11):
        pulse.look(tick * 0.5, {7: 100})
    pulse.look(100.0, {7: 100})

    assert pulse.works is None
