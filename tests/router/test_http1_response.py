"""What the response parser tells of an answer, beside its verdict."""

import httptools
import pytest

from router.errors import LocalError
from router.http1 import ProtocolError, ResponseHead, ResponseParser
from router.http1.response import judge

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = HEAD + b"Content-Length: 4\r\n\r\n"


def test_a_head_carries_all_that_it_says() -> None:
    parser = ResponseParser()

    parser.feed(LENGTH)

    assert parser.head == ResponseHead(
        status=200,
        headers=(
            (b"content-type", b"text/event-stream"),
            (b"content-length", b"4"),
        ),
        minor=1,
        content_length=4,
        chunked=False,
    )
    assert parser.head.get(b"content-type") == b"text/event-stream"
    assert parser.head.get(b"server") is None


def test_w2_a_partial_head_shows_from_its_first_byte_to_its_last() -> None:
    parser = ResponseParser()
    seen = [parser.partial_head]
    for byte in CHUNKED:
        parser.feed(bytes([byte]))
        seen.append(parser.partial_head)

    assert seen == [False, *[True] * (len(CHUNKED) - 1), False]


def test_w2_an_interim_head_that_is_whole_is_no_partial_head() -> None:
    parser = ResponseParser()

    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n")

    assert not parser.partial_head
    assert parser.head is None


def test_body_pieces_gather_until_the_caller_clears_them() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED + b"1\r\na\r\n1\r\nb\r\n")
    parser.feed(b"1\r\nc\r\n")
    assert parser.body == [b"a", b"b", b"c"]

    parser.body.clear()
    parser.feed(b"1\r\nd\r\n")

    assert parser.body == [b"d"]


def test_a_head_and_a_body_that_are_read_together_are_both_there() -> None:
    parser = ResponseParser()

    parser.feed(LENGTH + b"abcd")

    assert (parser.body, parser.complete) == ([b"abcd"], True)
    assert parser.keep_alive
    assert not parser.excess


def test_complete_comes_with_the_last_byte_of_the_last_chunk() -> None:
    parser = ResponseParser()
    stream = CHUNKED + b"4\r\nabcd\r\n0\r\n\r\n"

    for byte in stream[:-1]:
        parser.feed(bytes([byte]))
        assert not parser.complete
        assert not parser.keep_alive
    parser.feed(stream[-1:])

    assert parser.complete
    assert parser.keep_alive


def test_the_next_exchange_starts_from_nothing() -> None:
    parser = ResponseParser()
    parser.feed(LENGTH + b"abcd")
    body = parser.body

    parser.reset()

    assert parser.body is body
    assert (parser.head, parser.body, parser.complete) == (None, [], False)
    assert (parser.keep_alive, parser.excess) == (False, False)
    parser.feed(CHUNKED + b"1\r\nx\r\n0\r\n\r\n")
    assert (parser.body, parser.complete) == ([b"x"], True)


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b"HTTP/1.1 2",
        LENGTH + b"ab",
        LENGTH + b"abcde",
        LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0") + b"abcd",
        HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"\r\nabcd",
    ],
)
def test_a_connection_without_a_next_exchange_is_not_reset(stream: bytes) -> None:
    parser = ResponseParser()
    parser.feed(stream)
    body = list(parser.body)

    with pytest.raises(LocalError):
        parser.reset()

    assert parser.body == body


@pytest.mark.parametrize(
    ("raw", "may_stay"),
    [
        (LENGTH, True),
        (CHUNKED, True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (HEAD + b"\r\n", False),
        (LENGTH.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (LENGTH.replace(b"Content-T", b"Connection: close\r\nContent-T"), False),
    ],
)
def test_only_a_body_that_ends_by_itself_lets_the_connection_stay(
    raw: bytes, may_stay: bool
) -> None:
    assert judge(raw)[1] is may_stay


def test_excess_bytes_show_at_once_and_later_and_are_not_kept() -> None:
    for behind in ([b"x"], [b"", b"x"], [b"\r\n"], [LENGTH + b"abcd"]):
        for whole in (LENGTH + b"abcd", CHUNKED + b"4\r\nabcd\r\n0\r\n\r\n"):
            together, apart = ResponseParser(), ResponseParser()
            together.feed(whole + b"".join(behind))
            for chunk in [whole, *behind]:
                apart.feed(chunk)

            assert (together.body, together.excess) == ([b"abcd"], True)
            assert (apart.body, apart.excess) == ([b"abcd"], True)


def test_an_empty_feed_behind_the_end_is_no_excess() -> None:
    parser = ResponseParser()
    parser.feed(LENGTH + b"abcd")

    parser.feed(b"")

    assert not parser.excess


def test_closing_behind_a_whole_answer_ends_keep_alive() -> None:
    parser = ResponseParser()
    parser.feed(LENGTH + b"abcd")

    parser.eof()

    assert parser.complete
    assert not parser.keep_alive


@pytest.mark.parametrize(
    "stream",
    [b"", b"HTTP/1.1 2", LENGTH, LENGTH + b"abc", CHUNKED, CHUNKED + b"4\r\nabcd\r\n"],
)
def test_w7_a_close_before_the_end_is_truncation(stream: bytes) -> None:
    parser = ResponseParser()
    parser.feed(stream)

    with pytest.raises(ProtocolError) as caught:
        parser.eof()

    assert caught.value.truncated
    assert not parser.complete


def test_w7_a_malformed_answer_is_not_truncation() -> None:
    with pytest.raises(ProtocolError) as caught:
        ResponseParser().feed(b"\x00")

    assert not caught.value.truncated


def test_what_came_before_a_broken_chunk_stays() -> None:
    parser = ResponseParser()

    with pytest.raises(ProtocolError):
        parser.feed(CHUNKED + b"1\r\na\r\nzz\r\n")

    assert parser.body == [b"a"]
    assert not parser.complete


def test_a_body_up_to_the_close_is_handed_out_as_it_comes() -> None:
    parser = ResponseParser()
    parser.feed(HEAD + b"\r\ndata: a\n\n")
    assert (parser.body, parser.complete) == ([b"data: a\n\n"], False)
    parser.body.clear()

    parser.feed(b"data: b\n\n")
    parser.eof()

    assert (parser.body, parser.complete) == ([b"data: b\n\n"], True)
    assert not parser.keep_alive


def test_the_head_limit_is_the_callers() -> None:
    with pytest.raises(ProtocolError, match="larger than 30 bytes"):
        ResponseParser(head_max=30).feed(CHUNKED)


def test_bytes_that_bring_no_body_are_bounded_only_in_a_row() -> None:
    parser = ResponseParser(head_max=100)
    parser.feed(CHUNKED)
    for _ in range(50):
        parser.feed(b"1;" + b"a" * 80 + b"\r\n")
        parser.feed(b"x\r\n")

    parser.feed(b"1;" + b"a" * 98)
    with pytest.raises(ProtocolError, match="without a body"):
        parser.feed(b"a")


class Deaf:
    """An httptools that finds no end anywhere."""

    def __init__(self, seen: object) -> None:
        pass

    def feed_data(self, data: bytes) -> None:
        pass


@pytest.mark.parametrize(
    "stream", [HEAD + b"Content-Length: 0\r\n\r\n", LENGTH + b"abcd"]
)
def test_b118_an_answer_that_httptools_reads_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, stream: bytes
) -> None:
    monkeypatch.setattr(httptools, "HttpResponseParser", Deaf)

    with pytest.raises(ProtocolError, match="in two ways"):
        ResponseParser().feed(stream)
