"""Both ends as one state machine, driven message by message (T1).

Every message may be delivered in any order, doubled or lost, and every call
may come at any time. What no order of events may break: F1, F3, F8, S1, P5, P6.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from router.errors import FaultKind
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Kind
from router.ports import SourcePhase
from tests.kit.delivery import JOB
from tests.kit.wire_world import (
    LOST,
    NONE,
    Agent,
    Flight,
    Session,
    World,
    _take,
    check_client,
)
from workers.wire.attempt import RemoteSource
from workers.wire.frames import DELTA_COST, WINDOW, Message, Waiting
from workers.wire.inbound import Inbound, State

#: Deltas of a whole answer, long ones among them.
LENGTH = 6
SLOTS = 2
#: What agents say of an engine's silence, and a word that none does.
WORDS = ("busy", "idle", "unavailable", "head", "moves", "?")


def how_far(source: RemoteSource) -> tuple[SourcePhase, int, int]:
    """Say how far an attempt has come at its router."""
    return source.phase, source.count, len(source.pieces or ())


class Net(World):
    """A world whose messages wait until somebody delivers them."""

    def __init__(self) -> None:
        self.to_agent: list[Message] = []
        self.to_router: list[Message] = []
        super().__init__(
            0, NONE, routers=1, agents=1, requests=0, slots=SLOTS, length=LENGTH
        )

    def post(self, session: Session, way: str, message: Message) -> None:
        if session.cut_at is None:
            (self.to_agent if way == "to_agent" else self.to_router).append(message)


class TheWire(RuleBasedStateMachine):
    """One router, one agent, one connection at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.router = self.net.routers[0]
        self.agent: Agent = self.net.agents[0]
        self.session: Session

    @initialize()
    def connect(self) -> None:
        self.net._connect()
        (self.session,) = self.net.sessions

    @property
    def flights(self) -> list[Flight]:
        return list(self.router.flights.values())

    def pick(self, data: st.DataObject, found: list[Any]) -> Any:
        return data.draw(st.sampled_from(found)) if found else None

    def after(self) -> None:
        self.net.now += 1
        self.session.flush()

    # ---- the router ----

    @precondition(lambda self: len(self.router.flights) < 5)
    @rule()
    def submit(self) -> None:
        self.router.submit()

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        idle = [f for f in self.flights if not f.over and f.source is None]
        flight = self.pick(data, idle)
        if flight is not None:
            self.try_with(flight)

    @precondition(lambda self: len(self.router.flights) < 5)
    @rule()
    def begin(self) -> None:
        """One more request, and nothing in the way of its job: most of what can
        happen begins behind that."""
        self.router.submit()
        self.try_with(self.flights[-1])
        self.hand_over_all()

    def try_with(self, flight: Flight) -> None:
        flight.attempt += 1
        assignment = AssignmentId(flight.request, flight.attempt)
        flight.fence.assign(assignment)
        flight.source = self.session.router_end.offer(assignment, JOB, flight, 0)
        self.after()

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        flight = self.pick(data, [f for f in self.flights if f.source is not None])
        if flight is not None:
            flight.give_up()
            self.after()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        flight = self.pick(data, [f for f in self.flights if not f.over])
        if flight is not None:
            flight.leave()
            self.after()

    @rule(data=st.data())
    def stall_or_go_on(self, data: st.DataObject) -> None:
        flight = self.pick(data, [f for f in self.flights if f.source is not None])
        if flight is not None:
            if flight.source.paused:
                flight.source.resume()
            else:
                flight.source.pause()
            self.after()

    @rule(data=st.data())
    def finish_now(self, data: st.DataObject) -> None:
        finishing = [
            f
            for f in self.flights
            if f.source is not None and f.source.phase is SourcePhase.FINISHING
        ]
        flight = self.pick(data, finishing)
        if flight is not None:
            flight.source.finish_now()
            self.after()

    # ---- the network ----

    @rule(data=st.data(), keep=st.booleans())
    def deliver_to_agent(self, data: st.DataObject, keep: bool) -> None:
        self.deliver(data, self.net.to_agent, keep=keep)

    @rule(data=st.data(), keep=st.booleans())
    def deliver_to_router(self, data: st.DataObject, keep: bool) -> None:
        self.deliver(data, self.net.to_router, keep=keep)

    @rule()
    def deliver_all_in_order(self) -> None:
        self.hand_over_all()

    def hand_over_all(self) -> None:
        for queue, way in (
            (self.net.to_agent, "to_agent"),
            (self.net.to_router, "to_router"),
        ):
            while queue:
                self.hand(queue.pop(0), way)

    @rule(data=st.data(), way=st.sampled_from(["to_agent", "to_router"]))
    def lose(self, data: st.DataObject, way: str) -> None:
        queue: list[Message] = getattr(self.net, way)
        if queue:
            queue.pop(data.draw(st.integers(0, len(queue) - 1)))

    def deliver(self, data: st.DataObject, queue: list[Message], *, keep: bool) -> None:
        if queue:
            place = data.draw(st.integers(0, len(queue) - 1))
            message = queue[place] if keep else queue.pop(place)
            self.hand(message, "to_agent" if queue is self.net.to_agent else "")

    def hand(self, message: Message, way: str) -> None:
        if way == "to_agent":
            self.session.agent_end.take(message)
        else:
            sources = list(self.session.router_end.sources.values())
            before = [(s, how_far(s), s.last_byte_at) for s in sources]
            _take(self.session.router_end, message, float(self.net.now))
            moves = isinstance(message, Waiting) and message.state == "moves"
            for source, far, at in before:
                if how_far(source) == far and not moves:
                    assert source.last_byte_at == at, f"W6: {message} is no progress"
        self.after()

    @rule()
    def cut(self) -> None:
        """The connection breaks; both ends notice, and there is another."""
        self.session.end_agent()
        self.session.end_router()
        assert not self.agent.running, "P5: it works for a router that is gone"
        assert not self.session.router_end.sources
        self.net.sessions.clear()
        self.net.to_agent.clear()
        self.net.to_router.clear()
        self.net._connect()
        (self.session,) = self.net.sessions

    # ---- the agent's engine ----

    @rule(data=st.data(), count=st.integers(1, 3), long=st.booleans())
    def generate(self, data: st.DataObject, count: int, long: bool) -> None:
        inbound = self.pick(data, self.able())
        if inbound is None:
            return
        count = min(count, self.agent.running[inbound])
        offer = inbound.offer
        assignment = AssignmentId(RequestId(offer.request), offer.attempt)
        first = inbound.next_index
        # A long one uses up its credit.
        pad = " " * (WINDOW // 2) if long else ""
        inbound.deltas(
            [
                Delta(assignment, n, Kind.TEXT, f"{assignment}:{n}{pad}")
                for n in range(first, first + count)
            ]
        )
        self.agent.running[inbound] -= count
        if inbound.full:
            self.agent.stopped.add(inbound)
        self.after()

    @rule(data=st.data(), word=st.sampled_from(WORDS))
    def tell_silence(self, data: st.DataObject, word: str) -> None:
        """Whatever an agent may say, true or not."""
        inbound = self.pick(data, list(self.agent.running))
        if inbound is not None:
            inbound.wait(word)
            self.after()

    @rule(data=st.data(), told=st.booleans())
    def end_generation(self, data: st.DataObject, told: bool) -> None:
        inbound = self.pick(data, [i for i in self.able(0) if i.next_index == LENGTH])
        if inbound is not None:
            if told:
                inbound.finishing(FinishReason.STOP)
            else:
                offer = inbound.offer
                assignment = AssignmentId(RequestId(offer.request), offer.attempt)
                inbound.finish(Finished(assignment, FinishReason.STOP))
                del self.agent.running[inbound]
            self.after()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        inbound = self.pick(data, list(self.agent.running))
        if inbound is not None:
            del self.agent.running[inbound]
            self.agent.stopped.discard(inbound)
            inbound.fail(LOST)
            self.after()

    def able(self, least: int = 1) -> list[Inbound]:
        return [
            inbound
            for inbound, left in self.agent.running.items()
            if left >= least
            and inbound not in self.agent.stopped
            and inbound.state in {State.RUNNING, State.FINISHING}
        ]

    # ---- what always holds ----

    @invariant()
    def f1_each_client_has_a_gapless_prefix_of_one_assignment(self) -> None:
        for flight in self.flights:
            flight.client = [piece.rstrip() for piece in flight.client]
            check_client(flight, LENGTH)

    @invariant()
    def s1_f8_slots_and_generations_are_counted(self) -> None:
        assert len(self.agent.running) <= SLOTS
        assert all(times == 1 for times in self.net.begun.values())

    @invariant()
    def p6_what_is_held_is_within_its_credit(self) -> None:
        for source in self.session.router_end.sources.values():
            if not source.paused:
                assert not source._held
            longest = DELTA_COST + WINDOW
            # Doubled messages may be held too, and only they.
            held = sum(len(d.text) for d in source._held if isinstance(d, Delta))
            assert held <= source._granted + 3 * longest

    @invariant()
    def f1_what_came_of_an_answer_is_never_taken_back(self) -> None:
        begun = {SourcePhase.STREAMING, SourcePhase.FINISHING}
        for source in self.session.router_end.sources.values():
            assert source.phase in begun or not (source.count or source.pieces)

    @invariant()
    def a_source_and_its_flight_agree(self) -> None:
        for flight in self.flights:
            source = flight.source
            if source is not None:
                assert source.assignment == flight.fence.owner
                assert source.phase is not SourcePhase.CLOSED
                assert not flight.over

    @invariant()
    def what_runs_is_at_the_wire(self) -> None:
        at_wire = set(self.session.agent_end.inbounds.values())
        assert set(self.agent.running) <= at_wire


TestTheWire = TheWire.TestCase
# Fewer runs seldom come to a delta that is late and a head that is taken back.
TestTheWire.settings = settings(
    settings.default,
    max_examples=max(200, settings().max_examples),
    stateful_step_count=40,
)


def test_a_lost_connection_is_a_fault_that_moves_a_job() -> None:
    assert LOST.kind is FaultKind.STREAM_CLOSED_EARLY
    assert LOST.row.moves
