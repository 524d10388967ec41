"""The agent's end of an open wire (P2, P3, P5, P6, F8)."""

import tracemalloc
from typing import SupportsIndex

import attrs
import pytest

from router.errors import Fault, FaultKind, LocalError
from router.messages import Delta, Finished, FinishReason, Kind, ToolPart, Usage
from tests.kit.delivery import JOB, assignment
from tests.kit.wire import EPOCH, Counter, offered
from workers.wire import frames, hosting
from workers.wire.faults import Decline
from workers.wire.frames import (
    DELTA_COST,
    PART_MAX,
    STEP_MAX,
    TEXT_MAX,
    Accepted,
    Bye,
    Cancel,
    Counted,
    Credit,
    Declined,
    Deltas,
    EndReasoning,
    Failed,
    Finishing,
    Hello,
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
)
from workers.wire.gathering import GATHER_S, GATHER_STEP
from workers.wire.hosting import ENDED_MAX, Memory, Refusal
from workers.wire.inbound import Inbound, State
from workers.wire.jobs import encode_job
from workers.wire.opening import ByeHeard
from workers.wire.outbox import HIGH

FULL = Refusal(Decline.NO_SLOT, "full")


def delta(index: int, text: str = "x", kind: Kind = Kind.TEXT) -> Delta:
    return Delta(assignment(), index, kind, text)


def end(reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(assignment(), reason)


def test_p3_an_offer_is_accepted_when_its_job_is_here_and_begun() -> None:
    desk = Counter()
    offer, part = offered(3)
    desk.hear(offer)
    assert (len(desk.looks), desk.begun, desk.sent()) == (1, [], [])
    desk.hear(part)

    ((inbound, job),) = desk.begun
    assert job == JOB
    assert inbound.state is State.RUNNING
    assert desk.sent() == [Accepted(3)]


def test_p1_a_job_comes_in_parts() -> None:
    desk = Counter()
    job = attrs.evolve(JOB, messages=("x" * (2 * PART_MAX),))
    octets = encode_job(job)
    desk.hear(Offer(1, "r", 1, EPOCH, "m", len(octets), 1))
    for at in range(0, len(octets), PART_MAX):
        assert desk.begun == []
        desk.hear(Part(1, at, octets[at : at + PART_MAX]))

    assert desk.begun[0][1] == job


def test_p3_a_decline_says_why_and_when_to_come_back() -> None:
    desk = Counter()
    desk.against = Refusal(Decline.LOADING, "soon", 2.5)
    desk.hear(*offered(1))

    assert desk.sent() == [Declined(1, "loading", "soon", 2500)]
    assert desk.end.inbounds == {}


def test_p3_the_slot_is_asked_for_again_when_the_job_is_here() -> None:
    desk = Counter()
    offer, part = offered(1)
    desk.hear(offer)
    desk.against = FULL
    desk.hear(part)

    assert desk.begun == []
    assert desk.sent() == [Declined(1, "no_slot", "full")]


def test_p3_an_offer_for_an_earlier_life_is_declined() -> None:
    desk = Counter()
    desk.hear(*offered(1, epoch=EPOCH - 1))

    (declined,) = desk.sent()
    assert declined.reason == "wrong_epoch"
    assert desk.looks == []


@pytest.mark.parametrize("size", [0, 1_000_001])
def test_p3_a_job_of_no_size_or_too_large_is_declined(size: int) -> None:
    desk = Counter()
    desk.hear(Offer(1, "r", 1, EPOCH, "m", size, 1))

    (declined,) = desk.sent()
    assert declined.reason == "too_large"


def promise(number: int, size: int = 1_000_000) -> Offer:
    """An offer of a job that need not come; there is room for 2 MB."""
    return Offer(number, f"r{number}", 1, EPOCH, "m", size, 1)


def declined(desk: Counter) -> list[int]:
    """Numbers of the offers for which there was no room since the last look."""
    sent = desk.sent()
    assert {m.reason for m in sent} <= {"too_large"}
    return [m.stream for m in sent]


def test_p3_jobs_on_their_way_are_bounded_together() -> None:
    desk = Counter()
    desk.hear(*(promise(number, 500_000) for number in (1, 2, 3)))
    assert declined(desk) == [3]
    desk.hear(Cancel(1), promise(4, 500_000))

    assert declined(desk) == []


def test_p3_jobs_on_their_way_are_bounded_over_all_connections() -> None:
    memory = Memory()
    first, second, third = Counter(memory), Counter(memory), Counter(memory)
    for number, desk in enumerate((first, second, third), 1):
        desk.hear(promise(number))
    assert [declined(d) for d in (first, second, third)] == [[], [], [3]]
    first.end.end()
    third.hear(promise(4))

    assert declined(third) == []


def test_p3_a_router_that_sends_no_job_shuts_no_other_out() -> None:
    memory = Memory()
    for router in range(5):
        greedy = Counter(memory)
        greedy.hear(*(promise(router * 1000 + n, 10_000) for n in range(1, 201)))
        assert declined(greedy)
    other = Counter(memory)
    other.hear(*offered(9001), promise(9002, 10_000))

    assert other.sent() == [Accepted(9001)]


def test_p3_a_job_that_does_not_come_is_declined_in_time() -> None:
    memory = Memory()
    desk = Counter(memory)
    desk.hear(promise(1))
    for now in (100.0, 100.0 + GATHER_S):
        desk.end.tick(now)
        assert desk.sent() == []
    desk.end.tick(100.1 + GATHER_S)
    assert declined(desk) == [1]
    assert desk.end.inbounds == {}
    assert memory.room.taken == 0

    # Its parts come too late; its offer, once more, begins nothing.
    desk.hear(Part(1, 0, b"x"), promise(1))
    assert declined(desk) == [1]
    assert desk.refusals == [Decline.TOO_LARGE]


@pytest.mark.parametrize(
    ("octets", "left"), [(GATHER_STEP, [1, 2]), (GATHER_STEP - 1, [2])]
)
def test_p3_a_job_comes_if_its_next_kibibyte_does(octets: int, left: list[int]) -> None:
    desk = Counter()
    desk.hear(promise(1, 100_000), *offered(2))
    for step in range(3):
        desk.end.tick(100.0 + step * GATHER_S)
        desk.hear(Part(1, step * octets, b"x" * octets))
    desk.end.tick(100.1 + 3 * GATHER_S)

    assert list(desk.end.inbounds) == left


def test_p1_a_job_takes_the_room_of_its_bytes_however_it_is_cut() -> None:
    desk = Counter()
    size = 100_000
    tracemalloc.start()
    desk.end.take(Offer(1, "r", 1, EPOCH, "m", size, 1))
    before, _ = tracemalloc.get_traced_memory()
    for at in range(0, size - 2, 2):
        desk.end.take(Part(1, at, b"%02d" % (at % 97)))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert after - before < 2 * size


def test_p6_a_router_that_grants_nothing_gets_no_more_when_much_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "LINGERING_MAX", 3)
    desk = Counter()
    for number in (1, 2, 3):
        inbound = desk.take_on(number, credit=0)
        inbound.deltas([delta(0)])
        inbound.finish(end())
    desk.hear(*offered(4))
    assert [d.reason for d in desk.sent()] == ["too_large"]
    assert len(desk.end.inbounds) == 3

    # One that is taken, or not wanted any more, makes room for another.
    desk.hear(Credit(1, 1), *offered(5), Cancel(2), *offered(6))
    assert [m for m in desk.sent() if not isinstance(m, Finished)][-2:] == [
        Accepted(5),
        Accepted(6),
    ]
    assert set(desk.end.inbounds) == {3, 5, 6}


def test_p3_what_is_no_job_is_declined_and_the_connection_lives() -> None:
    desk = Counter()
    desk.hear(Offer(1, "r", 1, EPOCH, "m", 3, 1), Part(1, 0, b"\xc1\xc1\xc1"))

    (declined,) = desk.sent()
    assert declined.reason == "bad_job"


def test_f8_a_duplicate_offer_is_acknowledged_again_and_begins_nothing() -> None:
    desk = Counter()
    messages = offered(1)
    desk.hear(*messages)
    desk.hear(*messages)

    assert len(desk.begun) == 1
    assert desk.sent() == [Accepted(1), Accepted(1)]


def test_f8_a_duplicate_of_an_offer_whose_job_is_on_the_way_is_nothing() -> None:
    desk = Counter()
    offer, part = offered(1)
    desk.hear(offer, offer)
    assert desk.sent() == []
    desk.hear(part)

    assert len(desk.begun) == 1


def test_f8_a_duplicate_of_an_offer_that_is_over_gets_its_last_word_again() -> None:
    desk = Counter()
    messages = offered(1)
    inbound = desk.take_on(1)
    inbound.finish(end())
    last = desk.sent()
    desk.hear(*messages)

    assert len(desk.begun) == 1
    assert desk.sent() == last == [frames.Finished(1, 0, "stop")]


def test_f8_an_attempt_that_is_not_newer_is_declined() -> None:
    desk = Counter()
    desk.take_on(1, request="r", attempt=2)
    desk.hear(*offered(2, request="r", attempt=2))
    desk.hear(*offered(3, request="r", attempt=1))
    assert [d.reason for d in desk.sent()] == ["stale", "stale"]
    desk.hear(*offered(4, request="r", attempt=3))

    assert len(desk.begun) == 2


def test_m8_a_question_is_never_stale_and_is_not_remembered() -> None:
    memory = Memory()
    first, second = Counter(memory), Counter(memory)
    for desk in (first, second):
        desk.hear(*offered(1, request="count-1", purpose=1, credit=0))
        desk.asked[0].counted(3)
        assert desk.sent() == [Counted(1, 3)]
    second.hear(*offered(2, request="count-1"))

    assert len(second.begun) == 1


def test_f8_an_offer_with_the_number_of_one_that_is_over_begins_nothing() -> None:
    desk = Counter()
    desk.take_on(1).finish(end())
    last = desk.sent()
    desk.hear(*offered(1, request="another"))

    assert desk.sent() == last
    assert len(desk.begun) == 1


def test_f8_nor_does_one_with_a_number_that_is_over_for_long() -> None:
    desk = Counter()
    for number in range(1, ENDED_MAX + 2):
        desk.take_on(number).finish(end())
    desk.sent()
    late = desk.end.late
    desk.hear(*offered(1, request="another"))

    assert desk.sent() == []
    assert len(desk.begun) == ENDED_MAX + 1
    # Its offer and its part.
    assert desk.end.late == late + 2


def test_f8_attempts_are_remembered_over_connections() -> None:
    memory = Memory()
    first, second = Counter(memory), Counter(memory)
    first.take_on(1, request="r")
    first.end.end()
    second.hear(*offered(1, request="r"))

    assert second.begun == []
    assert second.sent()[0].reason == "stale"


def test_the_memory_of_attempts_is_bounded() -> None:
    memory = Memory(most=2)
    assert all(memory.admit(name, 1) for name in ("a", "b", "c"))

    assert memory.admit("a", 1)
    assert not memory.admit("c", 1)


def test_one_number_for_two_assignments_closes_the_connection() -> None:
    desk = Counter()
    desk.take_on(1)
    with pytest.raises(WireError) as raised:
        desk.hear(*offered(1, request="another"))
    assert raised.value.reason is Reason.OUT_OF_ORDER


def test_f8_parts_that_repeat_or_skip_change_nothing() -> None:
    desk = Counter()
    octets = encode_job(JOB)
    half = len(octets) // 2
    desk.hear(Offer(1, "r", 1, EPOCH, "m", len(octets), 1))
    desk.hear(Part(1, half, octets[half:]), Part(1, 0, octets[:half]))
    desk.hear(Part(1, 0, octets[:half]))
    assert desk.begun == []
    desk.hear(Part(1, half, octets[half:]))

    assert desk.begun[0][1] == JOB


def test_a_job_longer_than_its_offer_closes_the_connection() -> None:
    desk = Counter()
    with pytest.raises(WireError):
        desk.hear(Offer(1, "r", 1, EPOCH, "m", 3, 1), Part(1, 0, b"four"))


def test_p7_the_deltas_of_one_step_go_in_one_frame() -> None:
    desk = Counter()
    one, two = desk.take_on(1), desk.take_on(2)
    one.deltas([delta(0, "a"), delta(1, "b", Kind.REASONING)])
    two.deltas([delta(0, "é", Kind.REFUSAL)])

    assert desk.sent() == [Deltas([(1, 0, 0, "a"), (1, 1, 1, "b"), (2, 0, 2, "é")])]


def test_p7_what_follows_a_delta_comes_behind_it() -> None:
    desk = Counter()
    one, two = desk.take_on(1), desk.take_on(2)
    one.deltas([delta(0)])
    one.finish(end())
    two.deltas([delta(0)])

    assert desk.sent() == [
        Deltas([(1, 0, 0, "x")]),
        frames.Finished(1, 1, "stop"),
        Deltas([(2, 0, 0, "x")]),
    ]


def test_p1_a_step_is_cut_before_it_delays_others() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=10**9)
    inbound.deltas([delta(n, "x" * 1000) for n in range(2 * STEP_MAX // 1000)])

    assert [type(m) for m in desk.sent()] == [Deltas, Deltas, Deltas]


def test_p6_a_tool_call_costs_its_id_and_its_name() -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    call = delta(0, "{}", Kind.TOOL_CALL)
    call.tool = ToolPart(0, "é" * 10, "f")
    inbound.deltas([call])

    assert inbound.spent == DELTA_COST + 2 + 20 + 1


def test_f8_only_the_next_index_is_emitted() -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    inbound.deltas([delta(0)])
    for index in (0, 2):
        with pytest.raises(LocalError):
            inbound.deltas([delta(index)])


@pytest.mark.parametrize("step", ["deltas", "finish", "fail", "accept"])
def test_f8_nothing_is_emitted_after_the_end(step: str) -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    desk.hear(Cancel(1))
    with pytest.raises(LocalError):
        {
            "deltas": lambda: inbound.deltas([delta(0)]),
            "finish": lambda: inbound.finish(end()),
            "fail": lambda: inbound.fail(Fault(FaultKind.STALLED, "x")),
            "accept": inbound.accept,
        }[step]()
    assert desk.sent() == []


def test_p6_what_is_beyond_the_credit_waits_in_order() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=2 * (DELTA_COST + 1))
    inbound.deltas([delta(n) for n in range(4)])
    assert inbound.full
    inbound.finish(end())
    assert desk.sent() == [Deltas([(1, 0, 0, "x"), (1, 1, 0, "x")])]
    assert 1 in desk.end.inbounds
    desk.hear(Credit(1, 10_000))

    assert [type(m).__name__ for m in desk.sent()] == [
        "RichDelta",
        "RichDelta",
        "Finished",
    ]
    assert desk.end.inbounds == {}


def test_p6_the_gate_hears_when_there_is_credit_again() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=1)
    inbound.deltas([delta(0), delta(1), delta(2)])
    desk.hear(Credit(1, DELTA_COST + 2))
    assert inbound.full
    assert desk.roomy == []
    desk.hear(Credit(1, 100 * DELTA_COST))

    assert desk.roomy == [inbound]
    assert not inbound.full


def test_p6_credit_that_comes_out_of_turn_is_no_less() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=5)
    desk.hear(Credit(1, 900), Credit(1, 100))

    assert inbound.credit == 900


def test_p6_an_outbox_that_is_full_stops_every_assignment_and_says_when_not() -> None:
    desk = Counter()
    one, two = desk.take_on(1, credit=10**9), desk.take_on(2)
    freed: list[None] = []
    desk.end.outbox.on_room = lambda: freed.append(None)
    one.deltas([delta(n, "x" * 100_000) for n in range(1 + HIGH // 100_000)])
    assert (one.full, two.full) == (True, True)
    desk.sent()

    assert (one.full, two.full) == (False, False)
    assert freed == [None]


def test_a_rich_delta_keeps_all_that_it_has() -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    inbound.deltas(
        [
            Delta(
                assignment(), 0, Kind.TOOL_CALL, "{}", ToolPart(1, "id", "f"), b"[1]"
            ),
            delta(1, "x"),
        ]
    )

    assert desk.sent() == [
        RichDelta(1, 0, "tool_call", "{}", Tool(1, "id", "f"), b"[1]"),
        Deltas([(1, 1, 0, "x")]),
    ]


def test_a_document_goes_in_pieces_as_credit_allows() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=1)
    document = "[" + "1," * TEXT_MAX + "1]"
    inbound.deltas([delta(0, document, Kind.DOCUMENT)])
    inbound.finish(end())
    found = []
    total = 1
    while desk.end.inbounds:
        total += TEXT_MAX
        desk.hear(Credit(1, total))
        found += desk.sent()

    assert [type(m) for m in found] == [Piece, Piece, RichDelta, frames.Finished]
    assert "".join(m.text for m in found[:3]) == document
    assert [m.place for m in found[:2]] == [0, 1]
    assert found[2].pieces == 2


class Counting(str):  # noqa: SLOT000 - a text that has an attribute
    """A text that counts the characters that are copied out of it."""

    copied = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        self.copied += len(part)
        return part


def test_p6_a_document_is_cut_as_its_credit_allows_and_copied_once() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=1)
    document = Counting("x" * (64 * TEXT_MAX))
    inbound.deltas([delta(0, document, Kind.DOCUMENT)])
    assert document.copied == TEXT_MAX
    desk.hear(Credit(1, 4 * TEXT_MAX))
    assert document.copied == 4 * TEXT_MAX
    desk.hear(Credit(1, 10**9))
    assert document.copied == len(document)

    *pieces, last = desk.sent()
    assert "".join(m.text for m in (*pieces, last)) == document
    assert [m.place for m in pieces] == list(range(63))
    assert last.pieces == 63


def test_a_finish_reason_is_told_once_with_the_count() -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    inbound.deltas([delta(0)])
    inbound.finishing(FinishReason.LENGTH)
    inbound.finishing(FinishReason.LENGTH)
    inbound.finish(
        Finished(assignment(), FinishReason.LENGTH, Usage(1, 2, 3, 4), "END")
    )

    assert desk.sent() == [
        Deltas([(1, 0, 0, "x")]),
        Finishing(1, 1, "length"),
        frames.Finished(1, 1, "length", Tokens(1, 2, 3, 4), "END"),
    ]


def test_a_failure_drops_what_waits_for_credit() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=1)
    inbound.deltas([delta(0), delta(1)])
    inbound.fail(Fault(FaultKind.STREAM_CLOSED_EARLY, "broke", 502, b"x" * 100_000))

    step, failed = desk.sent()
    assert step == Deltas([(1, 0, 0, "x")])
    assert (failed.kind, failed.status) == ("stream_closed_early", 502)
    assert len(failed.body) == 64 * 1024


def test_a_failure_in_the_middle_of_a_document_is_told() -> None:
    desk = Counter()
    inbound = desk.take_on(1, credit=1)
    inbound.deltas([delta(0, "x" * (3 * TEXT_MAX), Kind.DOCUMENT)])
    inbound.fail(Fault(FaultKind.STREAM_CLOSED_EARLY, "broke"))

    assert [type(m) for m in desk.sent()] == [Piece, Failed]
    assert desk.end.inbounds == {}


@pytest.mark.parametrize(
    ("kind", "abroad"),
    [
        (FaultKind.INTERNAL, "server_error"),
        (FaultKind.SHUTTING_DOWN, "drained"),
        (FaultKind.NO_WORKER, "declined"),
        (FaultKind.UNAUTHORIZED, "declined"),
        (FaultKind.STALLED, "stalled"),
    ],
)
def test_a_fault_of_the_agents_own_is_something_that_workers_say(
    kind: FaultKind, abroad: str
) -> None:
    desk = Counter()
    desk.take_on(1).fail(Fault(kind, "x"))

    (failed,) = desk.sent()
    assert isinstance(failed, Failed)
    assert failed.kind == abroad


def test_p5_a_cancel_ends_an_assignment_whatever_its_state() -> None:
    desk = Counter()
    running = desk.take_on(1)
    desk.hear(offered(2)[0])
    waiting = desk.take_on(3, credit=1)
    waiting.deltas([delta(0), delta(1)])
    waiting.finish(end())
    desk.sent()
    desk.hear(Cancel(1), Cancel(2), Cancel(3), Cancel(1))

    assert desk.end.inbounds == {}
    assert running in desk.left
    assert desk.sent() == []
    assert desk.end.late == 1


def test_p5_the_end_of_the_connection_ends_all_that_it_had_begun() -> None:
    desk = Counter()
    running = desk.take_on(1)
    desk.hear(offered(2)[0])
    desk.end.end()

    assert running.state is State.ENDED
    assert running in desk.left
    assert desk.end.inbounds == {}


def test_the_wait_of_an_engine_is_told_while_it_runs() -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    inbound.wait("busy")
    inbound.finishing(FinishReason.STOP)
    inbound.wait("idle")

    assert desk.sent() == [Waiting(1, "busy"), Finishing(1, 0, "stop")]


def test_p4_what_the_router_has_seen_only_grows() -> None:
    desk = Counter()
    desk.hear(Seen(5), Seen(3))
    desk.end.observe(Observation(EPOCH, 1, 1, 1, {}, None, []))

    assert desk.end.seen == 5
    assert len(desk.sent()) == 1


def test_m8_a_count_takes_no_slot_and_is_answered_once() -> None:
    desk = Counter()
    offer, part = offered(1, purpose=1)
    desk.hear(offer)
    desk.against = FULL
    desk.hear(part)
    (inbound,) = desk.asked
    assert desk.begun == []
    inbound.counted(17)
    inbound.counted(18)

    assert desk.sent() == [Counted(1, 17)]


def test_m8_a_count_that_is_cancelled_is_not_answered() -> None:
    desk = Counter()
    desk.hear(*offered(1, purpose=1))
    desk.hear(Cancel(1))
    desk.asked[0].counted(17)

    assert desk.sent() == []


def test_j6_reasoning_is_ended_of_whom_it_is_asked() -> None:
    desk = Counter()
    inbound = desk.take_on(1)
    desk.hear(EndReasoning(1), EndReasoning(9))

    assert desk.ended_reasoning == [inbound]


def test_f4_messages_for_nobody_are_counted_and_dropped() -> None:
    desk = Counter()
    desk.hear(Cancel(7), Credit(8, 1), Part(9, 0, b"x"))

    assert desk.end.late == 3
    assert desk.sent() == []


def test_a_bye_carries_its_reason() -> None:
    with pytest.raises(ByeHeard):
        Counter().hear(Bye("stopping"))


def test_p2_a_hello_on_an_open_wire_is_out_of_order() -> None:
    with pytest.raises(WireError) as raised:
        Counter().hear(Hello("fencepost", 1, 1, "router", "r", 1, b"n" * 16, []))
    assert raised.value.reason is Reason.OUT_OF_ORDER


def test_what_is_kept_of_ended_assignments_is_bounded() -> None:
    desk = Counter()
    for number in range(1, ENDED_MAX + 10):
        desk.take_on(number).finish(end())
    desk.sent()

    assert len(desk.end._ended) == ENDED_MAX


def test_an_inbound_is_named_by_its_offer() -> None:
    inbound = Counter().take_on(5, waiting=3)

    assert isinstance(inbound, Inbound)
    assert (inbound.number, inbound.offer.waiting, inbound.counts) == (5, 3, False)
