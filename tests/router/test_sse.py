"""What a worker's event stream becomes, wherever it is cut."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.sse import Event, Parser, SseError

CHUNK = '{"choices":[{"delta":{"content":"北京🙂é"}}]}'.encode()


def data(*values: bytes) -> list[Event]:
    return [Event(b"", value, False) for value in values]


def read(*chunks: bytes, line_max: int = 1024 * 1024) -> list[Event]:
    parser = Parser(line_max)
    return [event for chunk in chunks for event in parser.feed(chunk)]


def bytewise(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


def naive(stream: bytes) -> list[Event]:
    """WHATWG HTML 9.2.6 word by word, on a whole stream."""
    text = stream.removeprefix(b"\xef\xbb\xbf")
    lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]
    events, fields = [], []
    for line in lines:
        if line:
            name, _, value = line.partition(b":")
            fields.append((name, value.removeprefix(b" ")))
            continue
        names = [value for name, value in fields if name == b"event"]
        errors = [value for name, value in fields if name == b"error"]
        values = errors or [value for name, value in fields if name == b"data"]
        if values:
            name = names[-1] if names else b""
            events.append(Event(name, b"\n".join(values), bool(errors)))
        fields = []
    return events


def test_one_frame_is_one_event() -> None:
    assert read(b"data: " + CHUNK + b"\n\n") == data(CHUNK)


def test_frames_that_are_read_together_come_out_in_order() -> None:
    assert read(b"data: a\n\ndata: b\n\ndata: [DONE]\n\n") == data(
        b"a", b"b", b"[DONE]"
    )


def test_b34_a_stream_of_single_bytes_gives_the_same_text() -> None:
    stream = b"data: " + CHUNK + b"\n\n"

    assert read(*bytewise(stream)) == data(CHUNK)


@pytest.mark.parametrize(
    "stream",
    [
        b"data: a\n\ndata: b\n\n",
        b"data: a\r\n\r\ndata: b\r\n\r\n",
        b"data: a\r\rdata: b\r\r",
        b"data: a\r\n\ndata: b\r\r\n",
        b"data: a\n\r\ndata: b\n\r",
    ],
)
def test_b35_every_line_end_gives_the_same_events_at_every_cut(stream: bytes) -> None:
    for cut in range(len(stream) + 1):
        assert read(stream[:cut], stream[cut:]) == data(b"a", b"b")
    assert read(*bytewise(stream)) == data(b"a", b"b")


def test_b35_a_cut_between_cr_and_lf_makes_no_empty_line() -> None:
    parser = Parser()

    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"") == []
    assert parser.feed(b"\ndata: b\r") == []
    assert parser.feed(b"\n\r") == data(b"a\nb")
    assert parser.feed(b"\n") == []


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'data:{"a":1}', b'{"a":1}'),
        (b"data:[DONE]", b"[DONE]"),
        (b"data: x", b"x"),
        (b"data:  x", b" x"),
        (b"data:\tx", b"\tx"),
        (b"data: x ", b"x "),
        (b"data: a: b", b"a: b"),
        (b"data:", b""),
        (b"data: ", b""),
        (b"data", b""),
    ],
)
def test_b36_exactly_one_leading_space_is_removed(line: bytes, value: bytes) -> None:
    assert read(line + b"\n\n") == data(value)


def test_b37_data_lines_of_one_event_are_joined_with_lf() -> None:
    assert read(b'data: {"id":"a",\ndata: "x":1}\n\n') == data(b'{"id":"a",\n"x":1}')


def test_b37_a_bare_data_line_is_an_empty_line_of_data() -> None:
    assert read(b"data: a\ndata\ndata: b\n\n") == data(b"a\n\nb")


@pytest.mark.parametrize("raw", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_b39_what_only_python_calls_a_line_end_is_content(raw: str) -> None:
    content = f'{{"content":"a{raw}b"}}'.encode()

    assert read(b"data: " + content + b"\n\n") == data(content)
    assert read(*bytewise(b"data: " + content + b"\r\n\r\n")) == data(content)


@pytest.mark.parametrize(
    "stream",
    [
        b":\n\n",
        b": keepalive\n\n",
        b": ka\n",
        b"\n\n\n",
        b"event: ping\n\n",
        b"id: 1\nretry: 5\n\n",
        b"nonsense\n\n",
        b"dat: x\n\n",
        b"DATA: x\n\n",
        b" data: x\n\n",
        b"data : x\n\n",
    ],
)
def test_what_holds_no_data_is_no_event(stream: bytes) -> None:
    assert read(stream) == []
    assert read(*bytewise(stream)) == []


def test_b40_a_comment_inside_an_event_leaves_it_whole() -> None:
    assert read(b"data: a\n: ka\ndata: b\n\n") == data(b"a\nb")


def test_comments_before_a_frame_are_dropped() -> None:
    assert read(b": ka\n\ndata: a\n\n: ka\ndata: b\n\n") == data(b"a", b"b")


def test_an_event_carries_its_last_name_and_the_next_one_does_not() -> None:
    stream = b"event: a\nevent: error\ndata: x\n\ndata: y\n\n"

    assert read(stream) == [Event(b"error", b"x", False), Event(b"", b"y", False)]


def test_a_name_without_data_does_not_leak_into_the_next_event() -> None:
    assert read(b"event: ping\n\n", b"data: x\n\n") == data(b"x")


def test_a_name_waits_for_data_that_is_read_later() -> None:
    assert read(b"event: ping\n", b"data: x\n\n") == [Event(b"ping", b"x", False)]


def test_an_old_llama_server_error_line_is_seen() -> None:
    assert read(b'error: {"code":500}\n\ndata: [DONE]\n\n') == [
        Event(b"", b'{"code":500}', True),
        Event(b"", b"[DONE]", False),
    ]


def test_an_error_line_outweighs_the_data_of_its_event() -> None:
    assert read(b"data: x\nerror: {}\n\ndata: y\n\n") == [
        Event(b"", b"{}", True),
        Event(b"", b"y", False),
    ]


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    stream = b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbf\n\n\xef\xbb\xbfdata: b\n\n"

    assert read(stream) == data(b"a", b"\xef\xbb\xbf")
    assert read(*bytewise(stream)) == data(b"a", b"\xef\xbb\xbf")


def test_half_a_byte_order_mark_is_an_ordinary_byte() -> None:
    assert read(b"\xef", b"\xbb", b"data: a\n\ndata: b\n\n") == data(b"b")


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r"])
def test_an_event_without_its_blank_line_is_not_an_event(ending: bytes) -> None:
    assert read(b"data: a" + ending) == []


def test_b42_a_line_of_900_kib_passes_in_pieces() -> None:
    value = b"x" * (900 * 1024)
    stream = b"data: " + value + b"\n\n"

    pieces = [stream[i : i + 65536] for i in range(0, len(stream), 65536)]

    assert read(*pieces) == data(value)


def test_b42_a_line_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    assert read(b"data: 1234\n\n", line_max=10) == data(b"1234")
    with pytest.raises(SseError):
        read(b"data: 12345\n\n", line_max=10)
    assert read(*bytewise(b"data: 1234\n\n"), line_max=10) == data(b"1234")
    with pytest.raises(SseError):
        read(*bytewise(b"data: 12345\n\n"), line_max=10)


def test_b42_a_line_without_end_is_refused_once_it_is_too_long() -> None:
    parser = Parser(line_max=1000)
    parser.feed(b"x" * 1000)

    with pytest.raises(SseError, match="a line of more than 1000 bytes"):
        parser.feed(b"x")


def test_b42_a_long_comment_is_bounded_like_any_line() -> None:
    with pytest.raises(SseError):
        read(b":" + b"x" * 10, line_max=10)


@pytest.mark.parametrize("line", [b"data: x\n", b"data\n", b"error: x\n"])
def test_w7_an_event_of_many_lines_is_bounded(line: bytes) -> None:
    with pytest.raises(SseError, match="an event of more than 100 bytes"):
        read(*[line] * 100, line_max=100)


def test_lines_that_are_not_held_count_for_nothing() -> None:
    lines = [b": ka\n", b"event: ping\n", b"id: 7\n"] * 1000

    assert read(*lines, b"data: x\n\n", line_max=100) == [Event(b"ping", b"x", False)]


def test_many_frames_in_one_read_may_pass_the_line_limit() -> None:
    assert read(b"data: x\n\n" * 50, line_max=10) == data(*[b"x"] * 50)


PIECES = st.sampled_from(
    [
        b"data: ",
        b"data:",
        b"data",
        b"error: ",
        b"event: e",
        b": ka",
        b"id: 1",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b"x",
        b" ",
        b":",
        b"data: a\n\n",
        b"\xef\xbb\xbf",
        b"\xe2\x80\xa8",
        b"\xc2\x85\x0b\x0c",
    ]
)


@given(pieces=st.lists(PIECES, max_size=30), cuts=st.lists(st.integers(0, 200)))
@example(pieces=[b"data: a\n\n", b"data: ", b"x", b"\n", b"data: ", b"\n\n"], cuts=[])
def test_any_cut_of_any_stream_gives_what_the_standard_says(
    pieces: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(pieces)
    # A CR at the very end has ended its line; the standard's cut comes later.
    want = naive(stream)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})

    chunks = [stream[a:b] for a, b in itertools.pairwise(edges)]

    assert read(stream) == want
    assert read(*chunks) == want
    assert read(*bytewise(stream)) == want


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_are_events_or_an_sse_error(stream: bytes, line_max: int) -> None:
    def verdict(chunks: list[bytes]) -> list[Event] | None:
        try:
            return read(*chunks, line_max=line_max)
        except SseError:
            return None

    assert verdict([stream]) == verdict(bytewise(stream))
