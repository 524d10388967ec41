"""The router's end of an open wire (P2, P6, P7, F8)."""

import gc
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

import attrs
import msgspec.structs
import pytest

from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.messages import (
    Delta,
    Endpoint,
    Finished,
    FinishReason,
    Job,
    Kind,
    ToolPart,
    Usage,
)
from router.openai.document import DOCUMENT_MAX
from router.openai.worker_errors import RETRY_AFTER_MAX
from router.ports import SourcePhase
from router.waiting import WaitState
from tests.kit.delivery import JOB, RecordingDelivery, assignment
from tests.kit.wire import EPOCH, Desk
from workers.wire import frames
from workers.wire.attempt import (
    OVERDRAFT_MAX,
    PIECES_MAX,
    RemoteSource,
)
from workers.wire.frames import (
    DELTA_COST,
    HOSTS_MAX,
    LACKS_MAX,
    MODELS_MAX,
    PART_MAX,
    WINDOW,
    Accepted,
    Bye,
    Cancel,
    Counted,
    Credit,
    Declined,
    Deltas,
    Draining,
    EndReasoning,
    Failed,
    Finishing,
    Hello,
    Host,
    Message,
    Observation,
    Offer,
    Part,
    Piece,
    Reason,
    RichDelta,
    Seen,
    Tokens,
    Tool,
    Waiting,
    WireError,
    pack,
)
from workers.wire.holding import RESUME_BATCH
from workers.wire.jobs import decode_job
from workers.wire.opening import ByeHeard

LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "lost")


def text(number: int, index: int, piece: str) -> Deltas:
    return Deltas([(number, index, 0, piece)])


def finished(number: int, count: int, reason: str = "stop") -> frames.Finished:
    return frames.Finished(number, count, reason)


def streaming(desk: Desk, number: int = 1) -> tuple[RemoteSource, RecordingDelivery]:
    """Have an attempt accepted, and one delta of it."""
    source, delivery = desk.offer(number)
    desk.sent()
    desk.hear(Accepted(source.number), text(source.number, 0, "a"))
    return source, delivery


def test_p2_an_offer_names_the_assignment_and_its_job_follows() -> None:
    desk = Desk()
    source, _ = desk.offer(3, waiting=4)
    offer, part = desk.sent()

    assert offer == Offer(
        source.number, "r3", 1, EPOCH, "m", len(part.octets), WINDOW, 4
    )
    assert decode_job(part.octets) == JOB
    assert source.phase is SourcePhase.OFFERED


def test_p1_a_long_job_goes_in_parts_that_delay_no_other_frame() -> None:
    desk = Desk()
    long = attrs.evolve(JOB, messages=("x" * (3 * PART_MAX),))
    source, _ = desk.offer(1, long)
    other, _ = desk.offer(2)

    seen = []
    while chunk := desk.end.outbox.pull():
        seen.append(chunk)
        desk.end.outbox.wrote()
        if len(seen) == 2:
            assert source.phase is SourcePhase.SENDING
            other.close()
    sizes = [len(chunk) for chunk in seen]
    assert max(sizes) <= PART_MAX + 64
    # Both offers first, a part, then the cancel of the other before more parts.
    assert sizes[0] < PART_MAX
    assert sizes[2] < 64
    assert source.phase is SourcePhase.OFFERED


def test_a2_the_offer_is_made_when_its_last_part_is_written() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.end.outbox.pull()
    desk.end.outbox.wrote()
    desk.end.outbox.pull()
    desk.time = 250.0
    assert source.phase is SourcePhase.SENDING

    desk.end.outbox.wrote()
    assert (source.phase, source.since) == (SourcePhase.OFFERED, 250.0)
    assert delivery.calls == [("progress", None)]


def test_p2_a_whole_answer_is_delivered_once_and_in_order() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.sent()
    desk.hear(Accepted(1), Deltas([(1, 0, 0, "a"), (1, 1, 1, "b"), (1, 2, 2, "c")]))
    desk.hear(
        RichDelta(1, 3, "tool_call", "{}", Tool(0, "id", "f"), b"[]"),
        Finishing(1, 4, "stop"),
        frames.Finished(1, 4, "stop", Tokens(3, 2, 1, None), "END"),
    )

    assert delivery.names == ["accepted", "deltas", "deltas", "finished"]
    assert [(d.index, d.kind, d.text) for d in delivery.taken] == [
        (0, Kind.TEXT, "a"),
        (1, Kind.REASONING, "b"),
        (2, Kind.REFUSAL, "c"),
        (3, Kind.TOOL_CALL, "{}"),
    ]
    assert delivery.taken[3].tool == ToolPart(0, "id", "f")
    assert delivery.taken[3].logprobs == b"[]"
    assert delivery.end == Finished(
        assignment(), FinishReason.STOP, Usage(3, 2, 1, None), "END"
    )
    assert source.phase is SourcePhase.CLOSED
    assert desk.end.sources == {}


def test_p7_deltas_of_one_stream_in_one_read_go_in_one_call() -> None:
    desk = Desk()
    _, first = streaming(desk, 1)
    _, second = streaming(desk, 2)
    desk.hear(
        Deltas([(1, 1, 0, "b"), (2, 1, 0, "B")]),
        Deltas([(1, 2, 0, "c"), (2, 2, 0, "C")]),
    )

    assert first.calls[-1] == ("deltas", ["b", "c"])
    assert second.calls[-1] == ("deltas", ["B", "C"])


def test_p7_an_end_in_the_same_read_comes_behind_its_deltas() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(text(1, 1, "b"), finished(1, 2))

    assert delivery.text == "ab"
    assert delivery.names[-2:] == ["deltas", "finished"]


def test_a_decline_ends_the_attempt_without_an_acceptance() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.sent()
    desk.hear(Declined(1, "no_slot", "full", 1500))

    assert delivery.end == Fault(FaultKind.NO_SLOT, "full", retry_after=1.5)
    assert delivery.names == ["failed"]
    assert source.phase is SourcePhase.CLOSED


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("draining", FaultKind.DRAINED),
        ("wrong_epoch", FaultKind.WORKER_RESTARTED),
        ("unknown_model", FaultKind.MODEL_GONE),
        ("context_too_long", FaultKind.CONTEXT_LENGTH),
        ("no_slot", FaultKind.NO_SLOT),
        ("loading", FaultKind.NO_SLOT),
        ("of a later version", FaultKind.DECLINED),
    ],
)
def test_p3_each_reason_of_a_decline_has_its_fault(
    reason: str, kind: FaultKind
) -> None:
    desk = Desk()
    _, delivery = desk.offer()
    desk.hear(Declined(1, reason))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is kind
    assert delivery.end.row.moves


def test_a4_a_failure_carries_status_and_body_and_is_told_as_it_is() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(Failed(1, "rejected", "bad", 400, b'{"error":1}', "t", 2500, "stop", "c"))

    assert delivery.end == Fault(
        FaultKind.REJECTED, "bad", 400, b'{"error":1}', "t", 2.5, "stop", "c"
    )


@pytest.mark.parametrize(
    ("kind", "said", "told"),
    [
        ("rejected", 204, None),
        ("rejected", 422, 422),
        ("rejected", 401, 400),
        ("rejected", 599, 400),
        ("rejected", None, None),
        ("server_error", 399, None),
        ("server_error", 599, 599),
        ("server_error", 600, None),
        ("server_error", 2**53, None),
    ],
)
def test_a4_an_agent_may_say_no_other_status_than_an_engine(
    kind: str, said: int | None, told: int | None
) -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(Failed(1, kind, "x", said, b"{}"))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.status == told


@pytest.mark.parametrize("accepted", [False, True])
def test_a4_an_agent_sends_no_client_away_for_longer_than_an_engine_may(
    accepted: bool,
) -> None:
    desk = Desk()
    _, delivery = desk.offer()
    if accepted:
        desk.hear(Accepted(1), Failed(1, "declined", "x", retry_after_ms=2**53))
    else:
        desk.hear(Declined(1, "no_slot", "x", 2**53))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.retry_after == RETRY_AFTER_MAX


@pytest.mark.parametrize("kind", ["client_stalled", "queue_full", "no such kind"])
def test_what_no_worker_may_say_is_a_protocol_fault(kind: str) -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(Failed(1, kind, "?"))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL


def test_f5_an_end_that_counts_more_than_came_is_a_gap() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(finished(1, 2))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL
    assert desk.sent() == [Cancel(1)]


def test_f4_what_comes_for_an_attempt_that_is_over_is_counted_and_dropped() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    desk.sent()
    source.close()
    source.close()
    assert desk.sent() == [Cancel(1)]
    said = list(delivery.calls)
    desk.hear(text(1, 1, "b"), Waiting(1, "busy"), finished(1, 2), Accepted(99))

    assert delivery.calls == said
    assert desk.end.late == 4
    # What was accepted for nobody is sent away.
    assert desk.sent() == [Cancel(99)]


@pytest.mark.parametrize(
    "awry",
    [
        text(1, 0, "before it was accepted"),
        finished(1, 0),
        Finishing(1, 0, "stop"),
        Failed(1, "stalled", "x"),
    ],
)
def test_p2_a_message_out_of_its_place_ends_that_assignment_alone(
    awry: frames.Message,
) -> None:
    desk = Desk()
    _, delivery = desk.offer(1)
    _, other = streaming(desk, 2)
    desk.sent()
    desk.hear(awry)

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL
    assert desk.sent() == [Cancel(1)]
    desk.hear(text(2, 1, "b"), finished(2, 2))
    assert isinstance(other.end, Finished)


def test_a_second_acceptance_is_nothing_new() -> None:
    desk = Desk()
    _, delivery = desk.offer()
    desk.sent()
    desk.hear(Accepted(1), Accepted(1), text(1, 0, "a"), Accepted(1))

    assert delivery.names == ["accepted", "deltas"]


def test_an_agent_may_accept_before_the_kernel_has_said_that_the_job_is_gone() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.hear(Accepted(1))
    desk.sent()

    assert delivery.names == ["accepted"]
    assert source.phase is SourcePhase.AWAITING_HEAD


def test_w2_what_the_agent_says_of_the_silence_is_kept() -> None:
    desk = Desk()
    source, _ = desk.offer()
    desk.sent()
    desk.hear(Accepted(1))
    said = [source.said]
    desk.hear(Waiting(1, "busy"))
    said.append(source.said)
    at = source.last_byte_at
    desk.hear(Waiting(1, "unavailable"))
    said.append(source.said)

    assert said == [None, WaitState.BUSY, WaitState.UNAVAILABLE]
    # The silence goes on: a word of it is no sign of life.
    assert source.last_byte_at == at


def test_w2_a_word_of_the_silence_that_comes_too_late_or_early_is_left_aside() -> None:
    desk = Desk()
    source, _ = desk.offer()
    desk.hear(Waiting(1, "busy"), Accepted(1), text(1, 0, "a"), Waiting(1, "busy"))
    desk.hear(Counted(1, 3))

    assert source.said is None
    assert source.phase is SourcePhase.STREAMING


def test_w6_the_head_and_bytes_without_a_delta_are_progress() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.sent()
    desk.hear(Accepted(1), Waiting(1, "head"))
    assert source.phase is SourcePhase.STREAMING
    at = source.last_byte_at
    desk.hear(Waiting(1, "moves"))

    assert source.last_byte_at == at + 1
    assert delivery.names == ["accepted"]
    desk.hear(Waiting(1, "a word of a later version"))
    assert source.phase is SourcePhase.STREAMING


def test_m3_finish_now_reports_the_reason_that_is_known() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.finish_now()
    assert delivery.names == ["accepted", "deltas"]
    desk.hear(Finishing(1, 1, "length"))
    assert source.phase is SourcePhase.FINISHING
    desk.sent()
    source.finish_now()

    assert delivery.end == Finished(assignment(), FinishReason.LENGTH)
    assert desk.sent() == [Cancel(1)]


def test_m3_finish_now_waits_for_the_client_to_take_what_came() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    desk.hear(Finishing(1, 1, "stop"), text(1, 1, "b"))
    source.pause()
    desk.hear(text(1, 2, "c"))
    source.finish_now()
    # Nothing is due while the client is behind: nobody asks again and again.
    assert (delivery.end, source.since) == (None, inf)
    desk.time += 5.0
    source.resume()
    assert (delivery.text, source.since) == ("abc", desk.time)
    source.finish_now()

    assert delivery.end == Finished(assignment(), FinishReason.STOP)


def test_f4_a_repeat_takes_no_delta_back() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(text(1, 1, "b"), Accepted(1), text(1, 0, "a"), finished(1, 2))

    assert isinstance(delivery.end, Finished)


@pytest.mark.parametrize("paused", [False, True])
def test_f4_a_repeat_in_one_batch_or_with_more_than_a_text_takes_none_back(
    paused: bool,
) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    if paused:
        source.pause()
    desk.hear(Deltas([(1, 1, 0, "b"), (1, 0, 0, "a")]), RichDelta(1, 0, "text", "a"))
    desk.hear(finished(1, 2))
    source.resume()

    assert isinstance(delivery.end, Finished)


def test_a_word_behind_the_finish_reason_still_counts() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(Finishing(1, 1, "stop"), text(1, 1, "b"), finished(1, 2))

    assert delivery.text == "ab"
    assert isinstance(delivery.end, Finished)


def test_p6_credit_is_granted_when_half_of_it_is_used() -> None:
    desk = Desk()
    source, _ = streaming(desk)
    desk.sent()
    spent = source.spent
    desk.hear(text(1, 1, "x" * (WINDOW // 2 - spent - DELTA_COST - 1)))
    assert desk.sent() == []
    desk.hear(text(1, 2, ""))

    assert desk.sent() == [Credit(1, source.spent + WINDOW)]


def test_p6_a_delta_costs_the_bytes_of_its_text() -> None:
    desk = Desk()
    source, _ = streaming(desk)
    before = source.spent
    desk.hear(text(1, 1, "é" * 10))
    assert source.spent == before + DELTA_COST + 20
    desk.hear(RichDelta(1, 2, "tool_call", "é", Tool(0, None, None), b"123"))
    assert source.spent == before + 2 * DELTA_COST + 20 + 2 + 3
    desk.hear(RichDelta(1, 3, "tool_call", "", Tool(0, "é" * 10, "f")))
    assert source.spent == before + 3 * DELTA_COST + 20 + 2 + 3 + 21


def test_p6_a_paused_attempt_holds_all_and_grants_nothing() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    desk.sent()
    source.pause()
    desk.hear(text(1, 1, "x" * WINDOW), text(1, 2, "c"), finished(1, 3))

    assert delivery.names == ["accepted", "deltas"]
    assert desk.sent() == []
    source.resume()
    assert delivery.text == "a" + "x" * WINDOW + "c"
    assert isinstance(delivery.end, Finished)


def test_p6_going_on_stops_where_the_client_is_full_again() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.hear(*(text(1, n, "b") for n in range(1, 3 * RESUME_BATCH)))
    delivery.hook = lambda name: source.pause() if name == "deltas" else None
    source.resume()
    assert len(delivery.taken) == 1 + RESUME_BATCH
    assert source.paused

    source.resume()
    assert len(delivery.taken) == 1 + 2 * RESUME_BATCH
    delivery.hook = None
    source.resume()
    assert [d.index for d in delivery.taken] == list(range(3 * RESUME_BATCH))


def test_p6_credit_owed_from_a_pause_is_granted_behind_it() -> None:
    desk = Desk()
    source, _ = streaming(desk)
    desk.sent()
    source.pause()
    desk.hear(text(1, 1, "x" * WINDOW))
    source.resume()

    assert desk.sent() == [Credit(1, source.spent + WINDOW)]


def test_p6_an_agent_that_overruns_its_credit_is_cut() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.sent()
    piece = "x" * (512 * 1024)
    desk.hear(*(text(1, n, piece) for n in range(1, 4 + OVERDRAFT_MAX // len(piece))))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL
    assert desk.sent() == [Cancel(1)]


@pytest.mark.parametrize(
    "free",
    [
        Accepted(1),
        Finishing(1, 2, "stop"),
        Finishing(1, 1, "stop"),
        Failed(1, "stalled", "x", body=b"x" * 2_000_000),
        finished(1, 1),
    ],
    ids=["accepted", "finishing", "early", "failed", "finished"],
)
def test_p6_a_paused_attempt_holds_one_of_each_message_that_costs_nothing(
    free: frames.Message,
) -> None:
    desk = Desk()
    source, _ = streaming(desk)
    source.pause()
    desk.hear(text(1, 1, "b"))
    for _ in range(100):
        desk.hear(free)

    assert len(source._held) == 2
    assert sum(len(pack(m)) for m in source._held if isinstance(m, Failed)) < 66_000
    assert desk.end.late == 99


def test_f4_behind_a_last_word_that_is_held_nothing_counts() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.hear(finished(1, 1), text(1, 1, "b"), Failed(1, "stalled", "x"), Accepted(1))
    assert desk.end.late == 3
    source.resume()

    assert delivery.text == "a"
    assert isinstance(delivery.end, Finished)


def test_a4_a_failure_that_was_held_is_told_as_it_is() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.hear(Failed(1, "rejected", "bad", 400, b"{}", "t", 2500, "stop", "c"))
    source.resume()

    assert delivery.end == Fault(
        FaultKind.REJECTED, "bad", 400, b"{}", "t", 2.5, "stop", "c"
    )


@pytest.mark.parametrize("piece", ["", "x" * 1000])
def test_p6_the_pieces_of_one_delta_are_bounded(piece: str) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    times = PIECES_MAX // (DELTA_COST + len(piece))
    for place in range(times):
        desk.hear(Piece(1, 1, place, piece))
    kept = source.pieces
    assert kept is not None
    assert (delivery.end, kept.before("")) == (None, piece * times)
    desk.hear(Piece(1, 1, times, piece))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL
    assert source.pieces is None


def test_p6_pieces_that_were_handed_over_count_no_more() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    half = "x" * (PIECES_MAX // 2)
    for index in range(1, 6):
        desk.hear(Piece(1, index, 0, half), RichDelta(1, index, "text", "", pieces=1))
    desk.hear(finished(1, 6))

    assert isinstance(delivery.end, Finished)


def test_p6_the_document_of_an_embedding_may_be_longer() -> None:
    desk = Desk()
    source, delivery = desk.offer(1, attrs.evolve(JOB, endpoint=Endpoint.EMBEDDINGS))
    desk.hear(Accepted(1))
    for place in range(10):
        desk.hear(Piece(1, 0, place, "x" * (PIECES_MAX // 2)))

    assert delivery.end is None
    assert source.pieces_max > DOCUMENT_MAX


def test_a_document_in_pieces_comes_as_one_delta() -> None:
    desk = Desk()
    job = attrs.evolve(JOB, endpoint=Endpoint.EMBEDDINGS)
    _, delivery = desk.offer(1, job)
    (offer, _) = desk.sent()
    assert offer.credit > WINDOW
    desk.hear(
        Accepted(1),
        Piece(1, 0, 0, "[1,"),
        Piece(1, 0, 1, "2,"),
        RichDelta(1, 0, "document", "3]", pieces=2),
        finished(1, 1),
    )

    assert [(d.kind, d.text) for d in delivery.taken] == [(Kind.DOCUMENT, "[1,2,3]")]


def test_f1_pieces_that_were_held_go_before_their_own_delta() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.hear(Piece(1, 1, 0, "B"), RichDelta(1, 1, "text", "C", pieces=1))
    desk.hear(RichDelta(1, 2, "text", "E"), text(1, 3, "F"))
    desk.hear(Piece(1, 4, 0, "G"), RichDelta(1, 4, "text", "H", pieces=1))
    desk.hear(finished(1, 5))
    source.resume()

    assert delivery.text == "aBCEFGH"
    assert isinstance(delivery.end, Finished)


def test_f1_a_pause_behind_a_piece_leaves_it_before_its_own_delta() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    desk.hear(Piece(1, 1, 0, "B"))
    source.pause()
    desk.hear(RichDelta(1, 1, "text", "C", pieces=1), text(1, 2, "D"), finished(1, 3))
    source.resume()

    assert delivery.text == "aBCD"


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("repeat", [text(1, 0, "a"), RichDelta(1, 0, "text", "a")])
def test_f1_a_repeat_takes_no_piece_along(repeat: Message, paused: bool) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    if paused:
        source.pause()
    last = RichDelta(1, 1, "text", "C", pieces=1)
    desk.hear(Piece(1, 1, 0, "B"), repeat, last, finished(1, 2))
    source.resume()

    assert [(d.index, d.text) for d in delivery.taken if d.index] == [(1, "BC")]


@pytest.mark.parametrize("paused", [False, True])
def test_f3_a_piece_that_repeats_is_counted_and_left_aside(paused: bool) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    if paused:
        source.pause()
    b, c, d = Piece(1, 1, 0, "B"), Piece(1, 1, 1, "C"), Piece(1, 0, 0, "a")
    last = RichDelta(1, 1, "text", "D", pieces=2)
    desk.hear(d, b, b, c, b, c, last, b, d, finished(1, 2))
    source.resume()

    assert delivery.text == "aBCD"
    assert isinstance(delivery.end, Finished)
    assert desk.end.late == 6


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(
    "gap",
    [
        [Piece(1, 2, 0, "x")],
        [Piece(1, 1, 1, "x")],
        [Piece(1, 1, 0, "x"), Piece(1, 1, 2, "x")],
        [Piece(1, 1, 0, "x"), RichDelta(1, 1, "text", "x", pieces=2)],
        [Piece(1, 1, 0, "x"), RichDelta(1, 1, "text", "x")],
        [RichDelta(1, 1, "text", "x", pieces=1)],
        [Piece(1, 1, 0, "x"), text(1, 1, "x")],
        [Piece(1, 1, 0, "x"), Deltas([(1, 0, 0, "a"), (1, 1, 0, "x")])],
        [Piece(1, 1, 0, "x"), finished(1, 1)],
    ],
)
def test_f5_a_piece_that_was_left_out_ends_the_attempt(
    gap: list[Message], paused: bool
) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    if paused:
        source.pause()
    desk.hear(*gap, text(1, 2, "x"))
    source.resume()

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL
    assert delivery.text == "a"
    assert desk.sent()[-1] == Cancel(1)


@pytest.mark.parametrize(
    "half",
    [
        RichDelta(1, 1, "tool_call", "{}"),
        RichDelta(1, 1, "text", "x", Tool(0, None, None)),
        RichDelta(1, 1, "no such kind", "x"),
    ],
)
def test_half_a_delta_is_a_protocol_fault(half: RichDelta) -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    desk.hear(half)

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.PROTOCOL


def test_p5_the_end_of_the_connection_ends_all_that_is_not_whole() -> None:
    desk = Desk()
    _, one = streaming(desk, 1)
    _, two = desk.offer(2)
    desk.end.end(LOST)

    assert (one.end, two.end) == (LOST, LOST)
    assert desk.end.sources == {}


def test_p5_an_answer_that_came_whole_is_whole_though_the_connection_is_gone() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.hear(text(1, 1, "b"), finished(1, 2))
    desk.end.end(LOST)
    assert delivery.names == ["accepted", "deltas"]
    source.resume()

    assert delivery.text == "ab"
    assert isinstance(delivery.end, Finished)


def test_a_closed_connection_sends_nothing() -> None:
    desk = Desk()
    source, _ = streaming(desk)
    desk.sent()
    desk.end.closed = True
    source.close()

    assert desk.sent() == []


@pytest.mark.parametrize("bad", [b"\0\0\0\0", b"\0\0\0\1\xc1", pack(Cancel(1))])
@pytest.mark.parametrize("whole", [False, True])
def test_f7_what_came_whole_before_a_bad_frame_is_delivered(
    bad: bytes, whole: bool
) -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    octets = pack(text(1, 1, "b")) + (pack(finished(1, 2)) if whole else b"") + bad
    with pytest.raises(WireError):
        desk.end.received(octets + pack(text(1, 2, "c")), 1.0)

    assert delivery.text == "ab"
    assert isinstance(delivery.end, Finished) is whole


def test_p4_an_observation_is_answered_and_handed_on() -> None:
    desk = Desk()
    seen = Observation(EPOCH, 5, 4, 1, {"m": (3, 2)}, None, [])
    desk.hear(seen)

    assert desk.observations == [seen]
    assert desk.sent() == [Seen(5)]


def test_p4_an_observation_of_another_life_closes_the_connection() -> None:
    desk = Desk()
    with pytest.raises(WireError) as raised:
        desk.hear(Observation(EPOCH + 1, 1, 4, 1, {}, None, []))
    assert raised.value.reason is Reason.OUT_OF_ORDER


@pytest.mark.parametrize(
    ("field", "of", "most"),
    [
        ("models", lambda n: {f"m{i}": (1, 2) for i in range(n)}, MODELS_MAX),
        ("hosts", lambda n: [Host("e", "", "", None, None, 1, 0, [])] * n, HOSTS_MAX),
        ("lacks", lambda n: ["min_p"] * n, LACKS_MAX),
    ],
)
def test_p4_an_observation_of_more_than_there_may_be_closes_the_connection(
    field: str, of: Callable[[int], Any], most: int
) -> None:
    desk = Desk()
    none = Observation(EPOCH, 1, 4, 1, {}, None, [])
    desk.hear(msgspec.structs.replace(none, **{field: of(most)}))
    assert len(desk.observations) == 1

    with pytest.raises(WireError) as raised:
        desk.hear(msgspec.structs.replace(none, **{field: of(most + 1)}))
    assert raised.value.reason is Reason.BAD_SHAPE
    assert len(desk.observations) == 1


def test_l5_draining_is_handed_on() -> None:
    desk = Desk()
    desk.hear(Draining())

    assert desk.drains == 1


def test_a_bye_carries_its_reason() -> None:
    desk = Desk()
    with pytest.raises(ByeHeard) as raised:
        desk.hear(Bye("stopping", "the agent stops"))
    assert raised.value.reason is Reason.STOPPING


def test_p2_a_hello_on_an_open_wire_is_out_of_order() -> None:
    desk = Desk()
    with pytest.raises(WireError) as raised:
        desk.hear(Hello("fencepost", 1, 1, "agent", "a", 1, b"n" * 16, []))
    assert raised.value.reason is Reason.OUT_OF_ORDER


def test_m8_a_count_is_an_offer_without_a_slot() -> None:
    desk = Desk()
    told: list[int | None] = []
    number = desk.end.count(JOB, told.append)
    offer, part = desk.sent()
    assert offer.purpose == 1
    assert decode_job(part.octets) == JOB
    desk.hear(Counted(number, 17))
    desk.hear(Counted(number, 18))

    assert told == [17]


@pytest.mark.parametrize("how", ["declined", "lost"])
def test_m8_a_count_that_comes_to_nothing_is_none(how: str) -> None:
    desk = Desk()
    told: list[int | None] = []
    number = desk.end.count(JOB, told.append)
    if how == "declined":
        desk.hear(Declined(number, "too_large"))
    else:
        desk.end.end(LOST)

    assert told == [None]


def test_m8_a_count_that_nobody_wants_is_cancelled() -> None:
    desk = Desk()
    number = desk.end.count(JOB, lambda _: None)
    desk.sent()
    desk.end.drop_count(number)
    desk.end.drop_count(number)

    assert desk.sent() == [Cancel(number)]


@pytest.mark.parametrize("how", ["dropped", "declined", "counted"])
def test_m8_of_a_count_that_is_over_no_more_is_sent(how: str) -> None:
    desk = Desk()
    long = attrs.evolve(JOB, messages=("x" * (5 * PART_MAX),))
    number = desk.end.count(long, lambda _: None)
    desk.end.outbox.pull()
    desk.end.outbox.pull()
    if how == "dropped":
        desk.end.drop_count(number)
    else:
        desk.hear(
            Declined(number, "too_large") if how == "declined" else Counted(number, 3)
        )

    assert not any(isinstance(m, Part) for m in desk.sent())


def test_p1_an_attempt_that_is_over_is_kept_by_nobody() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    gone = weakref.ref(delivery)
    source.close()
    del source, delivery

    gc.collect()
    assert gone() is None


def test_j6_reasoning_is_ended_where_the_agent_can() -> None:
    desk = Desk()
    source, _ = streaming(desk)
    desk.sent()
    assert source.end_reasoning() > 0
    assert desk.sent() == [EndReasoning(1)]
    desk.end.capabilities = frozenset()

    assert source.end_reasoning() == 0
    assert desk.sent() == []


def test_l1_a_bug_in_one_delivery_ends_that_attempt_alone() -> None:
    desk = Desk()
    _, one = streaming(desk, 1)
    _, two = streaming(desk, 2)
    desk.sent()
    one.hook = crash_once()
    desk.hear(Deltas([(1, 1, 0, "b"), (2, 1, 0, "B")]))

    assert isinstance(one.end, Fault)
    assert one.end.kind is FaultKind.INTERNAL
    assert two.text == "aB"
    assert len(desk.bugs) == 1
    assert desk.sent() == [Cancel(1)]


def test_l1_a_bug_while_what_was_held_is_handed_over_ends_that_attempt() -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    source.pause()
    desk.hear(text(1, 1, "b"), RichDelta(1, 2, "text", "c", None, b"{}"))
    desk.sent()
    delivery.hook = crash_once()
    source.resume()
    desk.hear(text(1, 3, "d"))

    assert isinstance(delivery.end, Fault)
    assert delivery.end.kind is FaultKind.INTERNAL
    assert delivery.text == "ab"
    assert len(desk.bugs) == 1
    assert desk.sent() == [Cancel(1)]


def test_l1_a_bug_while_a_connection_ends_keeps_no_other_from_being_told() -> None:
    desk = Desk()
    _, one = streaming(desk, 1)
    _, two = streaming(desk, 2)
    told: list[int | None] = []
    desk.end.count(JOB, told.append)
    one.hook = crash_once(on="failed")
    desk.end.end(LOST)

    assert (two.end, told) == (LOST, [None])
    assert len(desk.bugs) == 1


def test_l1_a_broken_invariant_goes_through() -> None:
    desk = Desk()
    _, delivery = streaming(desk)
    delivery.hook = crash_once(LocalError("broken"))

    with pytest.raises(LocalError):
        desk.hear(text(1, 1, "b"))


def crash_once(
    bug: Exception | None = None, on: str = "deltas"
) -> Callable[[str], None]:
    bugs = [bug or ValueError("a bug")]

    def hook(name: str) -> None:
        if name == on and bugs:
            raise bugs.pop()

    return hook


def test_a_source_that_is_closed_inside_a_call_gets_nothing_more() -> None:
    desk = Desk()
    source, delivery = streaming(desk, 1)
    _, other = streaming(desk, 2)
    delivery.hook = lambda _: source.close()
    desk.hear(Deltas([(1, 1, 0, "b"), (1, 2, 0, "c"), (2, 1, 0, "B")]), text(1, 3, "d"))

    assert delivery.text == "abcd"[: len(delivery.text)]
    assert other.text == "aB"
    assert source.phase is SourcePhase.CLOSED
    assert delivery.end is None


def test_catching_up_is_its_connections_business() -> None:
    desk = Desk()
    source, _ = desk.offer()
    source.catch_up()

    assert desk.catches == 1


def test_what_was_heard_is_no_sign_of_life_once_the_connection_is_gone() -> None:
    desk = Desk()
    source, _ = streaming(desk)
    desk.end.silence()

    assert source.last_byte_at == -float("inf")


def test_deltas_are_stamped_with_their_assignment() -> None:
    desk = Desk()
    _, delivery = streaming(desk, 8)

    assert delivery.taken[0].assignment == assignment(8)
    assert isinstance(delivery.taken[0], Delta)


def test_jobs_may_be_of_any_size() -> None:
    desk = Desk()
    big = Job("m", tuple({"role": "user", "content": "x" * 1000} for _ in range(500)))
    desk.offer(1, attrs.evolve(big, target="m"))
    offer, *parts = desk.sent()

    octets = b"".join(p.octets for p in parts if isinstance(p, Part))
    assert len(octets) == offer.size
    assert [p.offset for p in parts] == list(range(0, offer.size, PART_MAX))
    assert decode_job(octets).messages == big.messages


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_l1_a_job_that_msgpack_cannot_say_is_its_clients_and_begins_nothing(
    number: int,
) -> None:
    desk = Desk()
    job = attrs.evolve(JOB, extras={"response_format": {"maximum": number}})

    with pytest.raises(WorkerFailed) as failed:
        desk.offer(1, job)
    counts: list[int | None] = []
    desk.end.count(job, counts.append)

    assert failed.value.fault.kind is FaultKind.REJECTED
    assert failed.value.fault.status == 400
    assert counts == [None]
    assert desk.sent() == []
    assert not desk.end.sources


@pytest.mark.parametrize("state", list(WaitState))
def test_w2_an_agent_whose_engine_was_lost_before_a_delta_waits_for_a_head_again(
    state: WaitState,
) -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.sent()
    desk.hear(Accepted(1), Waiting(1, "busy"), Waiting(1, "head"))
    desk.hear(Waiting(1, "moves"))
    calls = delivery.calls.count(("progress", None))
    desk.hear(Waiting(1, state.value))

    assert (source.phase, source.said) == (SourcePhase.AWAITING_HEAD, state)
    # The silence begins here, and no other word of it begins it anew.
    assert source.since == source.last_byte_at == desk.time
    assert delivery.calls.count(("progress", None)) == calls + 1
    began = desk.time
    desk.hear(Waiting(1, "idle"), Waiting(1, "busy"), Waiting(1, "moves"))
    assert source.last_byte_at == began

    desk.hear(Waiting(1, "head"))
    assert source.phase is SourcePhase.STREAMING
    desk.hear(text(1, 0, "a"), finished(1, 1))
    assert delivery.names == ["accepted", "deltas", "finished"]
    assert desk.end.late == 0


def test_w2_a_delta_may_follow_a_head_that_was_taken_back() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.hear(Accepted(1), Waiting(1, "head"), Waiting(1, "idle"), text(1, 0, "a"))

    assert source.phase is SourcePhase.STREAMING
    assert delivery.text == "a"


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(
    ("came", "phase"),
    [
        (text(1, 0, "a"), SourcePhase.STREAMING),
        (RichDelta(1, 0, "text", "a"), SourcePhase.STREAMING),
        (Piece(1, 0, 0, "a"), SourcePhase.STREAMING),
        (Finishing(1, 0, "stop"), SourcePhase.FINISHING),
    ],
    ids=["delta", "rich", "piece", "finishing"],
)
def test_f1_no_word_takes_a_head_back_behind_which_something_came(
    came: Message, phase: SourcePhase, paused: bool
) -> None:
    desk = Desk()
    source, _ = desk.offer()
    desk.hear(Accepted(1), Waiting(1, "head"))
    if paused:
        source.pause()
    desk.hear(came)
    at = source.last_byte_at
    desk.hear(*(Waiting(1, state.value) for state in WaitState))
    assert (source.said, source.last_byte_at) == (None, at)
    assert source.phase is (SourcePhase.STREAMING if paused else phase)
    source.resume()

    assert source.phase is phase


def test_w2_deltas_that_were_held_end_the_wait_for_the_head() -> None:
    desk = Desk()
    source, delivery = desk.offer()
    desk.hear(Accepted(1))
    source.pause()
    desk.hear(text(1, 0, "a"))
    source.resume()

    assert source.phase is SourcePhase.STREAMING
    assert delivery.text == "a"


@pytest.mark.parametrize(
    "nothing",
    [
        Waiting(1, "busy"),
        Waiting(1, "head"),
        Waiting(1, "a word of a later version"),
        Accepted(1),
        Counted(1, 3),
        text(1, 0, "a"),
        Deltas([(1, 0, 0, "a"), (1, 0, 0, "a")]),
        RichDelta(1, 0, "text", "a"),
        Piece(1, 0, 0, "a"),
        Piece(1, 1, 0, "b"),
    ],
    ids=repr,
)
def test_w6_what_says_nothing_new_is_no_sign_of_life(nothing: Message) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    desk.hear(Piece(1, 1, 0, "b"))
    at = source.last_byte_at
    desk.hear(nothing)

    assert source.last_byte_at == at
    assert source.phase is SourcePhase.STREAMING
    assert delivery.end is None


@pytest.mark.parametrize(
    "life",
    [
        Waiting(1, "moves"),
        text(1, 1, "b"),
        Deltas([(1, 0, 0, "a"), (1, 1, 0, "b")]),
        Deltas([(1, 1, 0, "b"), (1, 0, 0, "a")]),
        RichDelta(1, 1, "text", "b"),
        Piece(1, 1, 0, "b"),
        Finishing(1, 1, "stop"),
    ],
    ids=repr,
)
def test_w6_what_moves_an_answer_is_a_sign_of_life(life: Message) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    desk.hear(life)

    assert source.last_byte_at == desk.time
    assert delivery.end is None


@pytest.mark.parametrize(
    "delta", [text(1, 1, "b"), RichDelta(1, 1, "text", "b")], ids=["plain", "rich"]
)
def test_w6_the_time_of_a_delta_is_known_to_whom_it_is_handed(delta: Message) -> None:
    desk = Desk()
    source, delivery = streaming(desk)
    times: list[float] = []
    delivery.hook = lambda _: times.append(source.last_byte_at)
    desk.hear(delta)

    assert times == [desk.time]
