"""What the request parser tells of a request, beside its verdict."""

import contextlib
import gc

import httptools
import pytest

from router.http1 import END, BadRequest, Head, RequestEvent, RequestParser
from router.http1.gate import Seen
from router.http1.head import judge
from router.http1.request import BODY_MAX

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/chat HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def head_of(raw: bytes) -> Head:
    event = RequestParser().feed(raw)[0]
    assert isinstance(event, Head)
    return event


def refusal_of(parser: RequestParser, raw: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parser.feed(raw)
    return caught.value


def test_a_head_carries_all_that_it_says() -> None:
    raw = (
        b"POST /v1/chat/completions?a=b HTTP/1.1\r\n"
        b"Host: x\r\nX-Request-ID:  abc \r\nContent-Length: 2\r\n\r\n"
    )

    assert head_of(raw) == Head(
        method="POST",
        path="/v1/chat/completions",
        query=b"a=b",
        headers=(
            (b"host", b"x"),
            (b"x-request-id", b"abc"),
            (b"content-length", b"2"),
        ),
        minor=1,
        keep_alive=True,
        expect_continue=False,
        content_length=2,
        chunked=False,
    )


def test_h2_a_whole_url_is_taken_by_its_path_and_its_query() -> None:
    head = head_of(b"GET http://x:1/v1/models?a=b?c HTTP/1.1\r\nHost: x\r\n\r\n")

    assert (head.path, head.query) == ("/v1/models", b"a=b?c")


@pytest.mark.parametrize(
    ("line", "fields", "status"),
    [
        ("POST", "Expect: more", 417),
        ("BREW", "", 501),
        ("POST", f"Content-Length: {BODY_MAX + 1}", 413),
    ],
)
def test_m6_a_refusal_of_a_head_that_was_read_names_its_path(
    line: str, fields: str, status: int
) -> None:
    lines = [f"{line} /v1/messages?beta=true HTTP/1.1", "Host: x", fields]
    raw = "\r\n".join([*filter(None, lines), "", ""]).encode()

    refused = refusal_of(RequestParser(), raw)

    assert (refused.status, refused.path) == (status, "/v1/messages")


def test_a_head_without_a_body_has_no_length() -> None:
    head = head_of(GET)

    assert (head.content_length, head.chunked) == (None, False)


def test_a_chunked_head_has_no_length() -> None:
    head = head_of(CHUNKED)

    assert (head.content_length, head.chunked) == (None, True)


def test_get_gives_the_first_value_of_a_name_in_lower_case() -> None:
    head = head_of(b"GET / HTTP/1.1\r\nHost: x\r\nA: 1\r\na: 2\r\n\r\n")

    assert head.get(b"a") == b"1"
    assert head.get(b"b") is None


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"Connection: close\r\n", False),
        (b"1.1", b"Connection: Keep-Alive, Close\r\n", False),
        (b"1.1", b"Connection: te\r\n", True),
        (b"1.0", b"", False),
        (b"1.0", b"Connection: keep-alive\r\n", True),
        (b"1.0", b"Connection: te\r\nConnection: Keep-Alive\r\n", True),
        (b"1.0", b"Connection: keep-alive\r\nConnection: close\r\n", False),
    ],
)
def test_h1_keep_alive_follows_version_and_connection(
    version: bytes, connection: bytes, keep_alive: bool
) -> None:
    raw = b"GET / HTTP/" + version + b"\r\nHost: x\r\n" + connection + b"\r\n"

    assert head_of(raw).keep_alive is keep_alive


def test_a_body_comes_in_one_piece_a_feed() -> None:
    parser = RequestParser()

    assert parser.feed(POST)[1:] == []
    assert parser.feed(b"ab") == [b"ab"]
    assert parser.feed(b"cd") == [b"cd", END]


def test_chunks_that_are_read_together_come_in_one_piece() -> None:
    parser = RequestParser()
    parser.feed(CHUNKED)

    assert parser.feed(b"1\r\na\r\n2\r\nbc\r\n1\r\n") == [b"abc"]
    assert parser.feed(b"d\r\n0\r\n\r\n") == [b"d", END]


def test_an_empty_feed_gives_nothing() -> None:
    parser = RequestParser()

    assert parser.feed(b"") == []
    parser.feed(POST)
    assert parser.feed(b"") == []


def test_h1_pipelined_requests_come_out_in_order() -> None:
    events = RequestParser().feed(POST + b"abcd" + CHUNKED + b"0\r\n\r\n" + GET)

    kinds = [type(event) if isinstance(event, Head) else event for event in events]
    assert kinds == [Head, b"abcd", END, Head, END, Head, END]


def test_has_partial_is_true_from_the_first_byte_to_the_last() -> None:
    parser = RequestParser()
    seen = [parser.has_partial]
    for byte in POST + b"abcd":
        parser.feed(bytes([byte]))
        seen.append(parser.has_partial)

    assert seen == [False, *[True] * (len(POST) + 3), False]


def test_has_partial_is_true_inside_chunks_and_trailers() -> None:
    parser = RequestParser()
    for part in (CHUNKED, b"1\r\na\r\n", b"0\r\n", b"A: b\r\n"):
        parser.feed(part)
        assert parser.has_partial

    parser.feed(b"\r\n")

    assert not parser.has_partial


def test_a_crlf_between_requests_is_no_partial_request() -> None:
    parser = RequestParser()

    assert parser.feed(b"\r\n") == []
    assert not parser.has_partial
    assert parser.feed(GET)[1:] == [END]


def test_nothing_is_read_behind_a_request_that_closes() -> None:
    parser = RequestParser()
    closing = GET.replace(b"Host", b"Connection: close\r\nHost")

    assert parser.feed(closing + GET)[1:] == [END]
    assert parser.feed(b"\x00 anything") == []
    assert not parser.has_partial


def test_a_refusal_carries_what_came_before_it() -> None:
    refusal = refusal_of(RequestParser(), GET + b"BAD\r\n\r\n")

    assert refusal.status == 400
    assert [type(event) for event in refusal.events] == [Head, type(END)]


def test_a_refused_body_leaves_its_head_without_an_end() -> None:
    refusal = refusal_of(RequestParser(), CHUNKED + b"x\r\n")

    assert [type(event) for event in refusal.events] == [Head]


def test_a_refused_connection_stays_refused() -> None:
    parser = RequestParser()
    first = refusal_of(parser, GET + b"BAD\r\n\r\n")

    again = refusal_of(parser, GET)

    assert (again.status, again.message) == (first.status, first.message)
    assert again.events == ()
    assert not parser.has_partial


def test_nothing_is_left_to_the_garbage_collector() -> None:
    def connection() -> None:
        parser = RequestParser()
        parser.feed(GET + POST + b"abcd" + CHUNKED)
        with contextlib.suppress(BadRequest):
            parser.feed(b"zz")

    connection()
    gc.collect()

    connection()

    assert gc.collect() == 0


class Deaf:
    """An httptools that finds no end anywhere."""

    def __init__(self, seen: object) -> None:
        pass

    def feed_data(self, data: bytes) -> None:
        pass


class Hasty:
    """An httptools that finds an end at once."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def feed_data(self, _: bytes) -> None:
        self._seen.on_message_complete()


@pytest.mark.parametrize(
    ("other", "raw"),
    [(Deaf, GET), (Deaf, POST + b"abcd"), (Hasty, POST), (Hasty, CHUNKED)],
)
def test_h2_a_request_that_httptools_reads_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, other: type, raw: bytes
) -> None:
    parser = RequestParser()
    monkeypatch.setattr(httptools, "HttpRequestParser", other)

    refusal = refusal_of(parser, raw)

    assert (refusal.status, refusal.message) == (
        400,
        "a request that can be read in two ways",
    )


def test_h1_a_declared_body_is_refused_before_it_is_read() -> None:
    parser = RequestParser(body_max=3)

    refusal = refusal_of(parser, POST)

    assert (refusal.status, refusal.events) == (413, ())


def test_h1_32_mib_may_be_declared_and_not_a_byte_more() -> None:
    at_limit = b"%d" % BODY_MAX

    assert head_of(POST.replace(b"4", at_limit)).content_length == 32 * 1024 * 1024
    with pytest.raises(BadRequest):
        head_of(POST.replace(b"4", b"%d" % (BODY_MAX + 1)))


def test_h1_a_chunk_is_refused_by_its_declared_size() -> None:
    parser = RequestParser(body_max=3)
    events: list[RequestEvent] = list(parser.feed(CHUNKED + b"2\r\nab\r\n"))

    refusal = refusal_of(parser, b"2\r\n")

    assert refusal.status == 413
    assert events[1:] == [b"ab"]


def test_h1_expect_is_told_only_where_a_body_waits() -> None:
    expect = POST.replace(b"Host", b"Expect: 100-continue\r\nHost")

    assert head_of(expect).expect_continue
    assert not head_of(expect.replace(b" 4", b" 0")).expect_continue
    assert not head_of(expect.replace(b"1.1", b"1.0")).expect_continue


def test_h1_an_upgrade_stays_in_the_headers_and_its_body_is_read() -> None:
    raw = POST.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")
    parser = RequestParser()

    head, body, end = parser.feed(raw + b"abcd")

    assert isinstance(head, Head)
    assert head.get(b"upgrade") == b"h2c"
    assert (body, end) == (b"abcd", END)
    assert parser.feed(GET)[1:] == [END]


def test_a_large_body_in_small_reads_is_not_gathered() -> None:
    parser = RequestParser()
    parser.feed(POST.replace(b" 4", b" 1000000"))
    piece = b"x" * 1000

    for _ in range(999):
        assert parser.feed(piece) == [piece]

    assert parser.feed(piece) == [piece, END]


def test_judge_says_whether_an_upgrade_is_asked_for() -> None:
    assert judge(GET, 0)[1] is False
    assert judge(GET.replace(b"Host", b"Upgrade: a\r\nHost"), 0)[1] is True


def test_a_message_says_what_is_wrong_and_nothing_that_was_sent() -> None:
    refusal = refusal_of(RequestParser(), b"GET /secret HTTP/9.9\r\n\r\n")

    assert str(refusal) == refusal.message == "a malformed request line"
