"""The checks that every head passes, one by one."""

import pytest

from router.http1.gate import (
    FIELDS_MAX,
    Malformed,
    Seen,
    by_name,
    check_trailers,
    fields,
    first,
    framing,
    head_end,
    keeps_alive,
)

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_head_ends_behind_its_empty_line() -> None:
    assert head_end(HEAD + b"body", 0, 0, 1000) == len(HEAD)
    assert head_end(b"before" + HEAD, 6, 0, 1000) == 6 + len(HEAD)


def test_an_end_that_comes_in_pieces_is_found() -> None:
    for seen in range(len(HEAD)):
        assert head_end(HEAD[:seen], 0, max(0, seen - 1), 1000) == -1
        assert head_end(HEAD, 0, seen, 1000) == len(HEAD)


def test_an_end_before_the_start_is_not_its_own() -> None:
    assert head_end(b"\r\n\r\nGET", 4, 0, 1000) == -1


def test_the_limit_counts_the_whole_head() -> None:
    assert head_end(HEAD, 0, 0, len(HEAD)) == len(HEAD)
    with pytest.raises(Malformed) as caught:
        head_end(HEAD, 0, 0, len(HEAD) - 1)
    assert caught.value.status == 431


def test_a_head_at_the_limit_may_still_end() -> None:
    assert head_end(b"x" * 100, 0, 0, 100) == -1
    with pytest.raises(Malformed) as caught:
        head_end(b"x" * 101, 0, 100, 100)
    assert caught.value.status == 431


@pytest.mark.parametrize("stray", [b"\x00", b"\x0b", b"\x7f", b"\rx", b"x\n", b"\n"])
def test_a_stray_byte_is_refused_before_the_head_is_whole(stray: bytes) -> None:
    with pytest.raises(Malformed) as caught:
        head_end(b"GET" + stray, 0, 3, 1000)

    assert caught.value.status == 400


def test_a_stray_byte_across_two_reads_is_refused() -> None:
    assert head_end(b"GET\r", 0, 3, 1000) == -1
    with pytest.raises(Malformed):
        head_end(b"GET\rx", 0, 4, 1000)


def test_a_leading_lf_is_refused_though_a_cr_of_another_message_is_before_it() -> None:
    with pytest.raises(Malformed):
        head_end(b"\r\nGET", 1, 0, 1000)


def test_names_are_lowered_and_values_stripped() -> None:
    assert fields(b"\r\nA-B:  c d\t\r\nE:\r\n\r\n", 2) == (
        (b"a-b", b"c d"),
        (b"e", b""),
    )


def test_no_fields_are_no_fields() -> None:
    assert fields(b"\r\n\r\n", 2) == ()


@pytest.mark.parametrize(
    "line",
    [
        b"a",
        b": b",
        b"a : b",
        b" a: b",
        b"a: b\rc",
        b"a: b\nc: d",
        b"a: \x00",
        b"\xff: b",
    ],
)
def test_one_bad_line_among_good_ones_is_found(line: bytes) -> None:
    good = b"x: y\r\n"
    for block in (
        line + b"\r\n" + good,
        good + line + b"\r\n",
        good + line + b"\r\n" + good,
    ):
        with pytest.raises(Malformed) as caught:
            fields(b"\r\n" + block + b"\r\n", 2)
        assert caught.value.status == 400


def test_fields_are_counted() -> None:
    assert len(fields(b"\r\n" + b"a: b\r\n" * FIELDS_MAX + b"\r\n", 2)) == FIELDS_MAX
    with pytest.raises(Malformed) as caught:
        fields(b"\r\n" + b"a: b\r\n" * (FIELDS_MAX + 1) + b"\r\n", 2)
    assert caught.value.status == 431


@pytest.mark.parametrize("filling", [b" ", b"\t", b"a", b":", b"\xff"])
def test_what_almost_matches_is_not_tried_again_and_again(filling: bytes) -> None:
    # Quadratic in 32 KiB would be seconds for each of these.
    block = b"\r\na:" + filling * 32_000 + b"\x00\r\n\r\n"

    for _ in range(20):
        with pytest.raises(Malformed):
            fields(block, 2)


def test_repeated_names_are_joined_in_order() -> None:
    headers = ((b"a", b"1"), (b"b", b"2"), (b"a", b"3"))

    assert by_name(headers) == {b"a": b"1,3", b"b": b"2"}
    assert first(headers, b"a") == b"1"
    assert first(headers, b"c") is None


@pytest.mark.parametrize("name", [b"host", b"content-length", b"transfer-encoding"])
def test_h2_a_field_that_frames_or_addresses_comes_once(name: bytes) -> None:
    with pytest.raises(Malformed):
        by_name(((name, b"1"), (name, b"1")))


@pytest.mark.parametrize(
    ("index", "minor", "framed"),
    [
        ({}, 1, (None, False)),
        ({b"content-length": b"0"}, 1, (0, False)),
        ({b"content-length": b"007"}, 0, (7, False)),
        ({b"content-length": b"9" * 18}, 1, (10**18 - 1, False)),
        ({b"transfer-encoding": b"Chunked"}, 1, (None, True)),
    ],
)
def test_a_body_is_framed_in_one_way(
    index: dict[bytes, bytes], minor: int, framed: tuple[int | None, bool]
) -> None:
    assert framing(index, minor) == framed


@pytest.mark.parametrize(
    ("index", "minor"),
    [
        ({b"content-length": b"1", b"transfer-encoding": b"chunked"}, 1),
        ({b"content-length": b"+1"}, 1),
        ({b"content-length": b""}, 1),
        ({b"content-length": b"1" * 19}, 1),
        ({b"transfer-encoding": b"gzip"}, 1),
        ({b"transfer-encoding": b"chunked"}, 0),
    ],
)
def test_b118_ambiguous_framing_is_refused(
    index: dict[bytes, bytes], minor: int
) -> None:
    with pytest.raises(Malformed) as caught:
        framing(index, minor)

    assert caught.value.status == 400


def test_close_outweighs_keep_alive() -> None:
    assert keeps_alive({}, 1)
    assert not keeps_alive({}, 0)
    assert keeps_alive({b"connection": b"x, Keep-Alive"}, 0)
    assert not keeps_alive({b"connection": b"keep-alive ,\tCLOSE"}, 1)


def test_trailers_may_not_reframe_the_message() -> None:
    check_trailers(b"digest: x\r\n\r\n")
    with pytest.raises(Malformed):
        check_trailers(b"Content-Length: 5\r\n\r\n")


def test_only_the_first_end_is_noted() -> None:
    body = [b"a"]
    seen = Seen(body)

    seen.on_message_complete()
    seen.on_body(b"behind")
    seen.on_message_complete()

    assert (seen.complete, seen.pieces, body) == (True, 1, [b"a", b"behind"])
