"""Mutated messages: no crash, one verdict at every cut, no second reading.

The seeds are the corpus; h11 is the third opinion. How many are tried follows
FENCEPOST_DEEP, up to a million; in parts, for a test has a minute at most.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Final

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http1 import (
    BadRequest,
    End,
    Head,
    ProtocolError,
    RequestEvent,
    RequestParser,
    ResponseParser,
)
from tests.kit.corpus import request_cases, response_cases
from tests.kit.deep import size

SEED_MAX: Final = 2000
BODY_MAX: Final = 100_000
#: What smugglers insert, beside single bytes.
TOKENS: Final = (
    b"\r\n",
    b"\r",
    b"\n",
    b" ",
    b"\t",
    b"\x00",
    b":",
    b",",
    b";",
    b"0\r\n\r\n",
    b"0",
    b"2",
    b"+",
    b"-",
    b"0x",
    b"_",
    b"\xff",
    b"\x0b",
    b"chunked",
    b"HTTP/1.0",
    b"Content-Length: 2\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: x\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Expect: 100-continue\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n2\r\n{}\r\n0\r\n\r\n",
)

#: What is refused already has less to teach: three of it to ten of the rest.
REQUESTS: Final = [c.raw for c in request_cases() if len(c.raw) < SEED_MAX]
REQUESTS.extend(
    [c.raw for c in request_cases() if c.status is None and len(c.raw) < SEED_MAX] * 8
)
RESPONSES: Final = [c.raw for c in response_cases() if len(c.raw) < SEED_MAX]


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Give one seed with up to four faults."""
    raw = rng.choice(seeds)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(raw))
        to = min(len(raw), at + rng.choice((1, 1, 2, 8, 30)))
        match rng.randint(0, 6):
            case 0:
                raw = raw[:at] + bytes([rng.randint(0, 255)]) + raw[at + 1 :]
            case 1:
                raw = raw[:at] + raw[to:]
            case 2:
                raw = raw[:to] + raw[at:]
            case 3:
                raw += rng.choice(seeds)
            case 4:
                raw = raw[:at]
            case _:
                raw = raw[:at] + rng.choice(TOKENS) + raw[at:]
    return raw


def cut(rng: random.Random, raw: bytes) -> list[bytes]:
    """Cut *raw* at random, sometimes into single bytes."""
    widest = rng.choice((1, 2, 5, 50))
    chunks = []
    at = 0
    while at < len(raw):
        to = at + rng.randint(1, widest)
        chunks.append(raw[at:to])
        at = to
    return chunks


def messages(events: list[RequestEvent]) -> list[tuple[bytes, bytes]]:
    """Method and body of each whole request."""
    whole, method, body = [], b"", b""
    for event in events:
        if isinstance(event, Head):
            method, body = event.method.encode(), b""
        elif isinstance(event, End):
            whole.append((method, body))
        else:
            body += event
    return whole


def verdict(
    chunks: list[bytes],
) -> tuple[list[tuple[bytes, bytes]], int | None, bool]:
    """Whole messages, the status of the refusal, and whether one is unfinished."""
    parser = RequestParser(body_max=BODY_MAX)
    events: list[RequestEvent] = []
    try:
        for chunk in chunks:
            events += parser.feed(chunk)
    except BadRequest as refusal:
        events += refusal.events
        return messages(events), refusal.status, False
    return messages(events), None, parser.has_partial


def h11_messages(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """What h11 reads in *raw*, up to what it refuses."""
    while raw:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=10**6)
        # RFC 9112 2.2 wants it skipped; h11 does not.
        connection.receive_data(raw.removeprefix(b"\r\n"))
        method, body = b"", b""
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError:
                return
            if isinstance(event, h11.Request):
                method = event.method
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                yield method, body
                raw = connection.trailing_data[0]
                break
            else:
                return


def answer(chunks: list[bytes], *, eof: bool) -> tuple[object, ...]:
    """All that the attributes say after *chunks*, or the fault."""
    parser = ResponseParser()
    body = b""
    try:
        for chunk in chunks:
            parser.feed(chunk)
            body += b"".join(parser.body)
            parser.body.clear()
        if eof:
            parser.eof()
    except ProtocolError as error:
        return ("fault", error.truncated)
    return (
        parser.head,
        body,
        parser.complete,
        parser.keep_alive,
        parser.excess,
        parser.partial_head,
    )


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(20))
def test_h2_mutated_requests_have_one_reading_or_none(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(size(50_000, least=150)):
        raw = mutate(rng, REQUESTS)

        whole = verdict([raw])

        assert verdict(cut(rng, raw)) == whole, raw
        if whole[0]:
            third = list(itertools.islice(h11_messages(raw), len(whole[0])))
            assert third == whole[0], raw


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_b117_mutated_answers_have_one_reading_or_none(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(size(50_000, least=250)):
        raw = mutate(rng, RESPONSES)
        eof = rng.random() < 0.5

        assert answer(cut(rng, raw), eof=eof) == answer([raw], eof=eof), raw


@given(st.lists(st.sampled_from([*TOKENS, *REQUESTS]), max_size=8), st.randoms())
def test_h2_any_row_of_fragments_has_one_verdict(
    fragments: list[bytes], rng: random.Random
) -> None:
    raw = b"".join(fragments)

    assert verdict(cut(rng, raw)) == verdict([raw])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_requests_or_a_bad_request(chunks: list[bytes]) -> None:
    assert verdict(chunks) == verdict([b"".join(chunks)])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_are_an_answer_or_a_protocol_error(chunks: list[bytes]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert answer(chunks, eof=True) == answer([b"".join(chunks)], eof=True)
    assert answer([head, *chunks], eof=True) == answer(
        [head + b"".join(chunks)], eof=True
    )
