"""Whatever an engine sends, an attempt has one end, and only its own deltas."""

import random
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from router.errors import Fault, FaultKind
from router.messages import Finished
from router.ports import SourcePhase
from tests.kit.deep import size
from tests.kit.delivery import RecordingDelivery, assignment
from tests.kit.paper import PaperPoll, PaperTransport
from workers.poll import READ
from workers.source import DirectSource
from workers.transport import Address
from workers.upstream import Upstream

#: Replies a part; T8.10 wants 100 000 in all.
PARTS: Final = 20
REPLIES: Final = size(100_000 // PARTS, least=150)
#: Bytes an attempt may hold of an answer that brings nothing: one line, one head.
HELD_MAX: Final = 2 * 1024 * 1024

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
EVENTS = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"b"}}]}\n\n',
    b": ping\n\n",
    (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c",'
        b'"function":{"name":"f","arguments":"{"}}]}}]}\n\n'
    ),
    b'data: {"error":{"message":"no","code":503}}\n\n',
    b'error: {"code":500}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
)
TOKENS = (
    *EVENTS,
    HEAD,
    CHUNKED,
    b"\r\n",
    b"\n\n",
    b"\r",
    b"data:",
    b"0\r\n\r\n",
    b"\x00",
    b"\xff\xfe",
    b"null",
    b"[" * 3000,
    b"9" * 400,
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 503 X\r\nContent-Length: 2\r\n\r\n{}",
    b"Content-Length: 5\r\n",
)


class Paper:
    """Dials one connection that brings *reads*; is its home too."""

    def __init__(self, reads: Sequence[bytes | Exception]) -> None:
        self.transport = PaperTransport(*reads, room=10_000)
        self.bugs: list[Exception] = []
        self.kept = 0

    def address(self, tried: Sequence[Address]) -> Address | None:
        return None if tried else (2, ("127.0.0.1", 9))  # type: ignore[return-value]

    def dial(self, _address: Address) -> Upstream:
        return Upstream(self.transport, PaperPoll(), self, secure=False)

    def doubt(self, _address: Address) -> None:
        pass

    def failed(self, source: DirectSource, fault: Fault) -> None:
        source.report(fault)

    def parked(self, _upstream: Upstream, _now: float) -> None:
        self.kept += 1

    def lingers(self, _upstream: Upstream, _now: float) -> None:
        self.kept += 1

    def gone(self, _upstream: Upstream) -> None:
        pass

    def report_bug(self, _where: str, bug: Exception) -> None:
        self.bugs.append(bug)


def reply(rng: random.Random) -> bytes:
    """Make one well-formed reply of random events, in random framing."""
    events = [rng.choice(EVENTS) for _ in range(rng.randrange(8))]
    events += EVENTS[-3:] if rng.random() < 0.5 else ()
    if rng.random() < 0.3:
        body = b"".join(events)
        return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    if rng.random() < 0.2:
        return HEAD + b"\r\n" + b"".join(events)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return HEAD + CHUNKED + b"\r\n" + chunks + b"0\r\n\r\n"


def mutate(octets: bytes, rng: random.Random) -> bytes:
    """Change it in up to three places."""
    changed = bytearray(octets)
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[place:place] = rng.choice(TOKENS)
            case 1:
                del changed[place : place + rng.randrange(1, 40)]
            case 2 if place < len(changed):
                changed[place] = rng.randrange(256)
            case _:
                changed[place:place] = changed[: rng.randrange(200)]
    return bytes(changed)


def cut(octets: bytes, rng: random.Random) -> Iterator[bytes]:
    """Cut it into reads of random sizes."""
    while octets:
        length = rng.choice((1, 7, 100, 65536))
        yield octets[:length]
        octets = octets[length:]


def play(reads: Sequence[bytes], last: bytes | Exception) -> RecordingDelivery:
    """Let one attempt read it all."""
    paper = Paper([*reads, last])
    delivery = RecordingDelivery()
    source = DirectSource(
        paper, assignment(), delivery, (b"ask",), 0.0, early_head=False
    )
    assert source.launch(0.0) is None
    upstream = source._upstream
    assert upstream is not None
    for turn in range(len(reads) + 1):
        if source.phase is not SourcePhase.CLOSED:
            upstream.ready(READ, float(turn))

    assert paper.bugs == []
    assert source.phase is SourcePhase.CLOSED
    assert paper.transport.closed + paper.kept == 1
    return delivery


def check(delivery: RecordingDelivery) -> None:
    names = delivery.names
    assert names[-1] in {"finished", "failed"}
    assert sum(name in {"finished", "failed"} for name in names) == 1
    assert names.count("accepted") <= 1
    assert "deltas" not in names or names[0] == "accepted"
    assert [d.index for d in delivery.taken] == list(range(len(delivery.taken)))
    assert set(delivery.stamps) == {assignment()}
    assert isinstance(delivery.end, Finished | Fault)
    if isinstance(delivery.end, Fault):
        assert delivery.end.kind is not FaultKind.INTERNAL


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_t8_mutated_replies_have_one_valid_end_each(part: int) -> None:
    rng = random.Random(part)
    for _ in range(REPLIES):
        octets = mutate(reply(rng), rng)
        last = rng.choice((b"", ConnectionResetError()))

        check(play(list(cut(octets, rng)), last))


@pytest.mark.deep
def test_f9_the_same_bytes_give_the_same_deltas_at_every_cut() -> None:
    rng = random.Random(1)
    for _ in range(REPLIES):
        octets = mutate(reply(rng), rng)
        whole = play([octets], b"")
        pieces = play(list(cut(octets, rng)), b"")

        # A breach takes the events of its own read along, and no more.
        assert whole.text == pieces.text[: len(whole.text)]
        if isinstance(whole.end, Finished):
            # (Its usage too, where that came in the same read.)
            assert isinstance(pieces.end, Finished)
            assert pieces.end.reason is whole.end.reason
            assert pieces.text == whole.text


def test_w7_an_answer_without_end_or_meaning_holds_little() -> None:
    junk = [b"x" * 65536] * (HELD_MAX // 65536)
    delivery = play([HEAD + b"\r\n", *junk], b"")

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL
