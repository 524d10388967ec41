"""Whatever an engine says, what an end sends is a frame that its peer takes (P2)."""

import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import Fault, FaultKind, WorkerFailed
from router.messages import Delta, Finished, FinishReason, Kind, ToolPart, Usage
from tests.kit.delivery import JOB, RecordingDelivery, assignment
from tests.kit.wire import EPOCH, Counter, Desk, offered
from workers.wire.faults import Decline
from workers.wire.frames import (
    FRAME_MAX,
    HOSTS_MAX,
    LENGTH,
    MODELS_MAX,
    NAME_MAX,
    NUMBER_MAX,
    Host,
    Observation,
    pack,
)
from workers.wire.hosting import Refusal
from workers.wire.inbound import Inbound
from workers.wire.shapes import fit, fits, milliseconds

#: Numbers that an engine may say, far beyond those of the wire.
NUMBERS = st.integers() | st.sampled_from([-1, 0, NUMBER_MAX, NUMBER_MAX + 1, 2**64])
MAYBE = st.none() | NUMBERS
TIMES = st.none() | st.floats()
TEXTS = st.text(max_size=20) | st.integers(0, 9000).map("é".__mul__)
SAID = st.none() | TEXTS

USAGES = st.none() | st.builds(Usage, NUMBERS, NUMBERS, MAYBE, MAYBE)
FAULTS = st.builds(
    Fault,
    st.sampled_from(FaultKind),
    TEXTS,
    MAYBE,
    st.binary(max_size=100),
    SAID,
    TIMES,
    SAID,
    SAID,
)
DELTAS = st.builds(
    Delta,
    st.just(assignment()),
    st.just(0),
    st.sampled_from(Kind),
    TEXTS,
    st.none() | st.builds(ToolPart, st.integers(0, 100), SAID, SAID),
    st.none() | st.binary(max_size=20),
)
HOSTS = st.builds(
    Host, TEXTS, TEXTS, TEXTS, SAID, SAID, NUMBERS, NUMBERS, st.lists(TEXTS, max_size=3)
)
OBSERVATIONS = st.builds(
    Observation,
    st.just(EPOCH),
    st.integers(1, 1000),
    NUMBERS,
    NUMBERS,
    st.dictionaries(TEXTS, st.tuples(NUMBERS, st.integers(0, 2)), max_size=4),
    MAYBE,
    st.just(["min_p"]),
    st.none() | st.lists(HOSTS, max_size=3),
)


def begun(desk: Counter) -> Inbound:
    """Have an assignment accepted."""
    return desk.take_on(1, credit=NUMBER_MAX)


@given(st.lists(DELTAS, max_size=3), st.none() | FAULTS, USAGES, SAID)
def test_p2_whatever_an_answer_holds_its_frames_are_taken(
    deltas: list[Delta], fault: Fault | None, usage: Usage | None, stop: str | None
) -> None:
    desk = Counter()
    inbound = begun(desk)
    inbound.wait("busy")
    for index, delta in enumerate(deltas):
        delta.index = index
    inbound.deltas(deltas)
    inbound.finishing(FinishReason.STOP)
    if fault is None:
        inbound.finish(Finished(assignment(), FinishReason.STOP, usage, stop))
    else:
        inbound.fail(fault)

    assert desk.sent()[-1].stream == 1


@given(st.sampled_from(Decline), TEXTS, TIMES)
def test_p2_whatever_a_decline_says_it_is_taken(
    reason: Decline, words: str, after: float | None
) -> None:
    desk = Counter()
    desk.against = Refusal(reason, words, after)
    desk.hear(*offered(1))

    assert desk.sent()[-1].reason == reason.value


@given(MAYBE)
def test_p2_a_count_that_is_no_number_is_none(tokens: int | None) -> None:
    desk = Counter()
    desk.hear(*offered(1, purpose=1))
    desk.asked[0].counted(tokens)

    told = tokens if tokens is not None and 0 <= tokens <= NUMBER_MAX else None
    assert desk.sent()[-1].tokens == told


@given(OBSERVATIONS)
def test_p2_whatever_engines_say_an_observation_is_taken(seen: Observation) -> None:
    desk = Counter()
    desk.end.observe(seen)

    (told,) = desk.sent()
    assert told == fit(told)
    assert set(told.models) == {n for n in seen.models if 0 < len(n) <= NAME_MAX}


def test_p2_an_odd_part_of_usage_is_left_out_and_without_a_whole_there_is_none() -> (
    None
):
    for usage, told in (
        (Usage(10, 5, -1, NUMBER_MAX + 1), [10, 5, None, None]),
        (Usage(-1, 5), None),
        (Usage(10, 2**64), None),
    ):
        desk = Counter()
        begun(desk).finish(Finished(assignment(), FinishReason.STOP, usage))
        tokens = desk.sent()[-1].usage
        assert (tokens and attrs_of(tokens)) == told


def attrs_of(struct: Any) -> list[Any]:
    return [getattr(struct, name) for name in struct.__struct_fields__]


def test_p4_an_observation_is_of_bounded_length() -> None:
    models = {f"m{n}": (1, 2) for n in range(MODELS_MAX + 5)}
    told = fit(Observation(EPOCH, 1, 1, 0, models, None, []))

    assert len(told.models) == MODELS_MAX


@pytest.mark.parametrize("letter", ["m", "é", "\N{CJK UNIFIED IDEOGRAPH-6A21}", "😀"])
def test_p2_however_long_the_names_of_models_are_an_observation_is_a_frame(
    letter: str,
) -> None:
    names = [f"{n:06}".rjust(NAME_MAX, letter) for n in range(MODELS_MAX)]
    host = Host("e", "ready", "", letter * 9000, letter * 9000, 1, 0, names[:64])
    seen = Observation(
        EPOCH,
        NUMBER_MAX,
        NUMBER_MAX,
        NUMBER_MAX,
        dict.fromkeys(names, (NUMBER_MAX, 2)),
        NUMBER_MAX,
        ["min_p"],
        [host] * (HOSTS_MAX + 1),
    )
    told = fit(seen)

    assert len(pack(told)) <= LENGTH + FRAME_MAX
    # The first of them, so that they are the same ones each time.
    assert list(told.models) == names[: len(told.models)]
    assert len(told.models) == MODELS_MAX if letter == "m" else len(told.models) > 1000
    assert told.hosts
    assert told == fit(told)
    assert fits(told)
    assert not fits(seen)


@given(st.text(max_size=5) | st.integers(0, 600).map("m".__mul__), st.booleans())
def test_p2_whatever_model_is_asked_for_an_offer_is_taken(
    target: str, counts: bool
) -> None:
    desk = Desk()
    job = attrs.evolve(JOB, target=target)
    told: list[int | None] = []
    named = 0 < len(target) <= NAME_MAX
    if counts:
        desk.end.count(job, told.append)
        assert told == ([] if named else [None])
    elif named:
        desk.end.offer(assignment(), job, RecordingDelivery(), 0)
    else:
        with pytest.raises(WorkerFailed) as raised:
            desk.end.offer(assignment(), job, RecordingDelivery(), 0)
        assert raised.value.fault.kind is FaultKind.MODEL_GONE

    assert [m.target for m in desk.sent() if hasattr(m, "target")] == [target][:named]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, None), (math.nan, None), (-1.0, 0), (2.5, 2500), (math.inf, NUMBER_MAX)],
)
def test_a_time_is_told_as_near_as_it_can_be(
    seconds: float | None, told: int | None
) -> None:
    assert milliseconds(seconds) == told
