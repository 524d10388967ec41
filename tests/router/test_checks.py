"""Bodies, as both dialects read them."""

import pytest

from router.checks import RequestInvalid, json_object


def words_of(body: bytes) -> str:
    with pytest.raises(RequestInvalid) as caught:
        json_object(body)
    return caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        rb'{"a":"\ud800"}',
        rb'{"a":"\uDBffx"}',
        rb'{"a":"\ud800\n"}',
        rb'{"a":"\\\ud800"}',
        rb'{"a":"' + b"x" * 100_000 + rb'\ud800"}',
    ],
)
def test_o5_half_of_a_surrogate_pair_is_not_called_a_body_cut_short(
    body: bytes,
) -> None:
    assert "half of a surrogate pair" in words_of(body)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"a":"x',
        rb'{"a":"\ud83d',
        rb'{"a":"\ud83d' + b"\\",
        rb'{"a":"\ud83d\u',
        rb'{"a":"\ud83d\ude',
        rb'{"a":"\ud83d\ude00',
        rb'{"a":"\\ud800x',
    ],
)
def test_o5_a_body_that_is_cut_short_is_called_so(body: bytes) -> None:
    assert "truncated" in words_of(body)
