"""A job as bytes, and what can be told of it without an engine."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.messages import Endpoint, GenerationParams, Job, SignalCode, Trace
from tests.kit.delivery import JOB
from workers.wire.jobs import JobUnreadable, decode_job, encode_job, known_tokens

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(values, max_size=4), st.dictionaries(st.text(), values, max_size=4))
def test_a_job_survives_its_bytes(
    messages: list[object], extras: dict[str, object]
) -> None:
    job = Job(
        "alias",
        tuple(messages),
        "m",
        GenerationParams(max_tokens=5, temperature=0.5, stop=("a", "é")),
        extras,
        ("dropped",),
        (SignalCode.POLICY_RISK,),
        3,
        Endpoint.COMPLETIONS,
        may_drop_images=True,
        trace=Trace("00-a-b-01", "k=v"),
    )

    assert decode_job(encode_job(job)) == job


@pytest.mark.parametrize(
    "octets", [b"", b"\x80", b"\xc1", b"\x81\xa5model\x01", b"\x91" * 5000, b"\x90"]
)
def test_what_is_no_job_is_said_so(octets: bytes) -> None:
    with pytest.raises(JobUnreadable):
        decode_job(octets)


@pytest.mark.parametrize(
    "value",
    [
        msgspec.msgpack.Ext(5, b"x"),
        datetime(2020, 1, 1, tzinfo=UTC),
        b"bytes",
        {1: "a"},
        {None: "a"},
        {(1, 2): "a"},
    ],
)
@pytest.mark.parametrize("depth", range(4))
def test_what_json_has_no_word_for_is_in_no_job(value: Any, depth: int) -> None:
    for number in range(depth):
        value = [value] if number % 2 else {"inner": value}
    for job in (
        attrs.evolve(JOB, messages=("a", value)),
        attrs.evolve(JOB, extras={"field": value}),
    ):
        with pytest.raises(JobUnreadable):
            decode_job(encode_job(job))


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader_of_jobs(octets: bytes) -> None:
    with suppress(JobUnreadable):
        decode_job(octets)


def test_a_field_that_one_end_does_not_know_is_left_out() -> None:
    octets = encode_job(JOB)
    # A map of one field more: its size is in its first byte.
    more = bytes([octets[0] + 1]) + octets[1:] + b"\xa5later\x01"

    assert decode_job(more) == JOB


def test_tokens_are_known_of_a_prompt_of_tokens() -> None:
    job = attrs.evolve(
        JOB,
        endpoint=Endpoint.COMPLETIONS,
        messages=([1, 2, 3],),
        params=GenerationParams(max_tokens=10),
    )

    assert known_tokens(job) == 13
    assert known_tokens(attrs.evolve(job, messages=("text",))) is None
    assert known_tokens(attrs.evolve(job, messages=([1, "a"],))) is None
    assert known_tokens(JOB) is None
