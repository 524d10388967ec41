"""The chunk scanner: how far a body is well formed, and where it ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http1.chunks import EXTENSIONS_MAX, LINE_MAX, ChunkScanner
from router.http1.gate import Malformed

BODY = b"5\r\nhello\r\n6;a=b\r\n world\r\n0\r\n"


def scan_bytewise(body: bytes) -> None:
    scanner = ChunkScanner(100)
    held = b""
    for byte in body:
        held += bytes([byte])
        held = held[scanner.scan(held, 0) :]


def test_it_stops_behind_the_last_size_line() -> None:
    scanner = ChunkScanner(100)

    assert scanner.scan(BODY + b"\r\nGET", 0) == len(BODY)
    assert (scanner.last, scanner.body) == (True, 11)


def test_it_starts_where_it_is_told() -> None:
    scanner = ChunkScanner(100)

    assert scanner.scan(b"zzz" + BODY, 3) == 3 + len(BODY)


@pytest.mark.parametrize("cut", range(len(BODY)))
def test_it_goes_on_where_it_stopped(cut: int) -> None:
    scanner = ChunkScanner(100)

    passed = scanner.scan(BODY[:cut], 0)

    assert not scanner.last
    assert passed <= cut
    assert passed + scanner.scan(BODY[passed:], 0) == len(BODY)
    assert (scanner.last, scanner.body) == (True, 11)


def test_content_is_passed_as_it_comes_and_lines_when_they_are_whole() -> None:
    scanner = ChunkScanner(100)

    assert scanner.scan(b"5\r", 0) == 0
    assert scanner.scan(b"5\r\nhel", 0) == 6
    assert scanner.body == 3
    assert scanner.scan(b"lo\r", 0) == 2
    assert scanner.scan(b"\r\n0", 0) == 2
    assert scanner.scan(b"0\r\n", 0) == 3
    assert scanner.last


@pytest.mark.parametrize(
    "body",
    [
        b"+1\r\n",
        b"-1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b"g\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1\n",
        b"1\rx",
        b"\r\n",
        b"\n",
        b";a\r\n",
        b"1;a\nb\r\n",
        b"1;\x00\r\n",
        b"1" * 17,
        b"1\r\nxx\r\n",
        b"1\r\nx\n",
        b"1\r\nx\rx",
        b"1\r\nx0\r\n",
    ],
)
def test_b117_any_other_spelling_is_refused_whole_and_byte_by_byte(
    body: bytes,
) -> None:
    with pytest.raises(Malformed) as whole:
        ChunkScanner(100).scan(body, 0)

    with pytest.raises(Malformed) as bytewise:
        scan_bytewise(body)

    assert whole.value.status == bytewise.value.status == 400


def test_a_size_is_too_large_before_its_content_comes() -> None:
    scanner = ChunkScanner(10)
    scanner.scan(b"5\r\nhello\r\n", 0)

    with pytest.raises(Malformed) as caught:
        scanner.scan(b"6\r\n", 0)

    assert caught.value.status == 413


def test_a_body_at_the_limit_passes() -> None:
    scanner = ChunkScanner(11)

    scanner.scan(BODY, 0)

    assert scanner.last


def test_a_size_line_is_bounded_whether_or_not_it_ends() -> None:
    fits = b"1;" + b"a" * (LINE_MAX - 4) + b"\r\n"
    assert ChunkScanner(10).scan(fits, 0) == LINE_MAX
    assert ChunkScanner(10).scan(fits[:-1], 0) == 0

    for line in (b"1;a" + fits[2:], b"1;" + b"a" * (LINE_MAX - 2)):
        with pytest.raises(Malformed) as caught:
            ChunkScanner(10).scan(line, 0)
        assert caught.value.status == 400


def test_extensions_are_bounded_together() -> None:
    chunk = b"1;" + b"a" * 199 + b"\r\nx\r\n"
    scanner = ChunkScanner(10**6)
    for _ in range(EXTENSIONS_MAX // 200):
        scanner.scan(chunk, 0)

    with pytest.raises(Malformed, match="too many chunk extensions"):
        scanner.scan(chunk, 0)


@given(
    st.lists(st.binary(min_size=1, max_size=40)),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_any_content_is_counted_at_any_cut(
    contents: list[bytes], steps: list[int]
) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in contents) + b"0\r\n"
    scanner = ChunkScanner(10**6)

    passed = at = 0
    while at < len(body):
        at = min(len(body), at + steps[at % len(steps)])
        passed += scanner.scan(body[passed:at], 0)

    assert (scanner.last, passed) == (True, len(body))
    assert scanner.body == sum(len(content) for content in contents)
