"""Every case of the corpus, whole and byte by byte: one verdict (H2)."""

import attrs
import pytest

from router.http1 import (
    BadRequest,
    End,
    Head,
    ProtocolError,
    RequestEvent,
    RequestParser,
    ResponseParser,
)
from tests.kit.corpus import (
    RequestCase,
    ResponseCase,
    request_cases,
    response_cases,
)

requests = pytest.mark.parametrize("case", request_cases(), ids=lambda c: c.name)
responses = pytest.mark.parametrize("case", response_cases(), ids=lambda c: c.name)


def messages(events: list[RequestEvent]) -> tuple[bytes, ...]:
    """Whole messages, written as the corpus writes them."""
    whole, head, body = [], b"", b""
    for event in events:
        if isinstance(event, Head):
            head, body = f"{event.method} {event.path} ".encode(), b""
        elif isinstance(event, End):
            whole.append(head + body)
        else:
            body += event
    return tuple(whole)


def verdict(case: RequestCase, chunks: list[bytes]) -> RequestCase:
    """Feed *chunks*; write down what came of them, as a case."""
    parser = RequestParser(head_max=case.head_max, body_max=case.body_max)
    events: list[RequestEvent] = []
    status = None
    try:
        for chunk in chunks:
            events += parser.feed(chunk)
    except BadRequest as refusal:
        events += refusal.events
        status = refusal.status
    heads = [event for event in events if isinstance(event, Head)]
    return attrs.evolve(
        case,
        messages=messages(events),
        status=status,
        partial=status is None and parser.has_partial,
        continues=status is None and bool(heads) and heads[-1].expect_continue,
    )


def answer(case: ResponseCase, chunks: list[bytes]) -> ResponseCase:
    """Feed *chunks*; write down what came of them, as a case."""
    parser = ResponseParser()
    body = b""
    try:
        for chunk in chunks:
            parser.feed(chunk)
            body += b"".join(parser.body)
            parser.body.clear()
        if case.eof:
            parser.eof()
    except ProtocolError as error:
        fault = "truncated" if error.truncated else "malformed"
        return ResponseCase(case.name, case.rfc, case.raw, eof=case.eof, fault=fault)
    assert parser.head is not None
    return attrs.evolve(
        case,
        status=parser.head.status,
        body=body,
        complete=parser.complete,
        keep_alive=parser.keep_alive,
        excess=parser.excess,
        fault=None,
    )


def bytewise(raw: bytes) -> list[bytes]:
    return [raw[i : i + 1] for i in range(len(raw))]


@requests
def test_h2_a_request_gets_the_verdict_of_the_corpus(case: RequestCase) -> None:
    assert verdict(case, [case.raw]) == case


@requests
def test_h2_a_request_gets_the_same_verdict_byte_by_byte(case: RequestCase) -> None:
    assert verdict(case, bytewise(case.raw)) == case


@responses
def test_b117_an_answer_gets_the_verdict_of_the_corpus(case: ResponseCase) -> None:
    assert answer(case, [case.raw]) == case


@responses
def test_b117_an_answer_gets_the_same_verdict_byte_by_byte(case: ResponseCase) -> None:
    assert answer(case, bytewise(case.raw)) == case
