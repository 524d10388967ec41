"""Routers and agents on a lossy simulated network, in logical time, from a seed.

The real ends of the wire (`RouterEnd`, `AgentEnd`) and real fences; frames are
messages that may be lost, late, doubled or out of order, connections break, and
both kinds of process crash. A generation's n-th delta is ``request/attempt:n``,
so that what a client has shows where each piece came from.
"""

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs

from router.errors import Fault, FaultKind
from router.fence import Fence, Verdict
from router.fence import State as FenceState
from router.ids import AssignmentId, RequestId
from router.messages import Delta, Finished, FinishReason, Job, Kind
from router.ports import SourcePhase
from tests.kit.delivery import JOB
from tests.kit.wire import drain, open_reader
from workers.wire.attempt import RemoteSource
from workers.wire.faults import Decline
from workers.wire.frames import (
    AGENT_SENDS,
    ROUTER_SENDS,
    Cancel,
    Message,
    Observation,
)
from workers.wire.hosting import AgentEnd, Memory, Refusal
from workers.wire.inbound import Inbound, State
from workers.wire.routing import RouterEnd

LOST = Fault(FaultKind.STREAM_CLOSED_EARLY, "the connection is gone")
#: Ticks: of an offer without an answer, of a silent stream, until an end notices
#: that its connection is gone.
OFFER_TICKS = 30
SILENT_TICKS = 120
NOTICE_TICKS = 40
ATTEMPTS = 4


@attrs.frozen
class Faults:
    """How bad the network and the machines are, as chances."""

    lose: float = 0.0
    double: float = 0.0
    swap: float = 0.0
    """A message takes its own time, and may overtake."""
    delay: int = 1
    """Longest way of a message, in ticks."""
    cut: float = 0.0
    """Of one connection, each tick."""
    crash_agent: float = 0.0
    crash_router: float = 0.0
    leave: float = 0.0
    """A client, each tick."""
    stall: float = 0.0
    """A client stops reading, or goes on, each tick."""


NONE = Faults()
WILD = Faults(
    lose=0.05,
    double=0.08,
    swap=0.2,
    delay=6,
    cut=0.004,
    crash_agent=0.001,
    crash_router=0.001,
    leave=0.002,
    stall=0.02,
)


class Session:
    """One connection, while either end believes in it."""

    def __init__(self, world: "World", router: "Router", agent: "Agent") -> None:
        self.world = world
        self.router: Router | None = router
        self.agent: Agent | None = agent
        self.cut_at: int | None = None
        self.last_out = {"to_agent": 0, "to_router": 0}
        #: It lost a message, which no connection does and then lives on.
        self.unsound = False
        self.router_end = RouterEnd(
            Port(self), open_reader(AGENT_SENDS), agent.epoch, frozenset(), lambda: None
        )
        self.agent_end = AgentEnd(
            agent,
            agent.memory,
            open_reader(ROUTER_SENDS),
            agent.epoch,
            lambda: None,
            body_max=10**6,
            bodies_max=10**7,
        )

    def flush(self) -> None:
        """Give what both ends have written to the network."""
        if self.router is not None:
            for message in drain(self.router_end.outbox, ROUTER_SENDS):
                self.world.post(self, "to_agent", message)
        if self.agent is not None:
            for message in drain(self.agent_end.outbox, AGENT_SENDS):
                self.world.post(self, "to_router", message)

    def cut(self) -> None:
        """Nothing passes any more; each end notices by itself."""
        if self.cut_at is None:
            self.cut_at = self.world.now

    def end_router(self) -> None:
        """The router's end is over: noticed, or crashed."""
        if self.router is not None:
            router, self.router = self.router, None
            router.sessions.discard(self)
            self.router_end.end(LOST)
        self.cut()

    def end_agent(self) -> None:
        """The agent's end is over: noticed, or crashed."""
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.sessions.discard(self)
            self.agent_end.end()
        self.cut()


class Port:
    """The router's side of a session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def now(self) -> float:
        return float(self.session.world.now)

    def observed(self, observation: Observation) -> None:
        pass

    def draining(self) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def report_bug(self, where: str, bug: Exception) -> None:
        raise AssertionError(where) from bug


class Flight:
    """One request at its router: a fence, a client, and its attempts."""

    def __init__(self, router: "Router", request: RequestId) -> None:
        self.router = router
        self.request = request
        self.fence = Fence()
        self.source: RemoteSource | None = None
        self.attempt = 0
        self.client: list[str] = []
        self.outcome = ""
        self.reading = True
        self.due = 0
        self.verdicts: Counter[Verdict] = Counter()

    @property
    def over(self) -> bool:
        return self.outcome != ""

    # ---- ports.Delivery ----

    def accepted(self, assignment: AssignmentId) -> None:
        if assignment == self.fence.owner:
            self.due = self.router.world.now + SILENT_TICKS

    def progress(self, assignment: AssignmentId) -> None:
        pass

    def deltas(self, assignment: AssignmentId, deltas: Sequence[Delta]) -> None:
        count = 0
        for delta in deltas:
            verdict = self.fence.judge(delta.assignment, delta.index, count)
            if verdict is Verdict.GAP:
                self._hand_over(deltas, count)
                self.give_up()
                return
            if verdict is Verdict.NEXT:
                count += 1
            else:
                self.verdicts[verdict] += 1
                self._hand_over(deltas, count)
                # What follows is looked at by itself.
                self.deltas(assignment, deltas[count + 1 :])
                return
        self._hand_over(deltas, count)

    def _hand_over(self, deltas: Sequence[Delta], count: int) -> None:
        if count:
            self.client += [d.text for d in deltas[:count]]
            self.fence.sent(count)
            self.due = self.router.world.now + SILENT_TICKS
            if not self.reading and self.source is not None:
                self.source.pause()

    def finished(self, finished: Finished) -> None:
        if finished.assignment != self.fence.owner:
            return
        self.source = None
        self.outcome = "completed"
        self.fence.close()

    def failed(self, assignment: AssignmentId, fault: Fault) -> None:
        assert fault.message != "No job can be read.", "a job that is none"
        if assignment != self.fence.owner:
            return
        self.source = None
        if self.fence.state is FenceState.COMMITTED:
            self.outcome = "failed"
            self.fence.close()
        else:
            self.fence.revoke()

    # ---- its own doings ----

    def give_up(self) -> None:
        owner = self.fence.owner
        source, self.source = self.source, None
        if owner is not None:
            self.failed(owner, LOST)
        if source is not None:
            source.close()

    def leave(self) -> None:
        """The client is gone."""
        if not self.outcome:
            self.outcome = "left"
            self.fence.close()
            source, self.source = self.source, None
            if source is not None:
                source.close()

    def step(self, rng: random.Random, faults: Faults) -> None:
        world = self.router.world
        if self.outcome:
            return
        if rng.random() < faults.leave:
            self.leave()
            return
        if rng.random() < faults.stall:
            self.reading = not self.reading
            if self.reading and self.source is not None:
                self.source.resume()
                self.due = world.now + SILENT_TICKS
        source = self.source
        if self.over:
            return  # what it had held was the end
        if source is None:
            self.offer(rng)
        elif source.phase is SourcePhase.SENDING:
            self.due = world.now + OFFER_TICKS
        elif world.now >= self.due and not source.paused:
            self.give_up()

    def offer(self, rng: random.Random) -> None:
        if self.attempt >= ATTEMPTS and not self.router.world.calm:
            self.outcome = "failed"
            self.fence.close()
            return
        sessions = sorted(self.router.sessions, key=id_of)
        if not sessions:
            return
        session = rng.choice(sessions)
        self.attempt += 1
        assignment = AssignmentId(self.request, self.attempt)
        self.fence.assign(assignment)
        self.due = self.router.world.now + OFFER_TICKS
        self.source = session.router_end.offer(assignment, JOB, self, 0)


def id_of(session: Session) -> int:
    return session.world.sessions.index(session)


class Router:
    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.sessions: set[Session] = set()
        self.flights: dict[RequestId, Flight] = {}
        self.born = 0

    def submit(self) -> None:
        self.born += 1
        request = RequestId(f"{self.name}.{self.born}")
        self.flights[request] = Flight(self, request)

    def crash(self) -> None:
        """Its clients are gone with it; its connections are found dead."""
        for flight in self.flights.values():
            if not flight.outcome:
                flight.outcome = "crashed"
                flight.source = None
        for session in list(self.sessions):
            session.router = None
            self.sessions.discard(session)
            session.cut()


class Agent:
    """Implements ``hosting.Gate`` over so many slots."""

    def __init__(self, world: "World", name: str, slots: int) -> None:
        self.world = world
        self.name = name
        self.slots = slots
        self.epoch = 1
        self.memory = Memory()
        self.sessions: set[Session] = set()
        self.running: dict[Inbound, int] = {}
        """How many deltas are still to come."""
        self.stopped: set[Inbound] = set()
        self.most = 0

    # ---- hosting.Gate ----

    def look(self, inbound: Inbound) -> Refusal | None:
        del inbound
        return None

    def begin(self, inbound: Inbound, job: Job) -> Refusal | None:
        assert job == JOB, "a job that is none"
        if len(self.running) >= self.slots:
            return Refusal(Decline.NO_SLOT)
        offer = inbound.offer
        self.world.begun[self.name, self.epoch, offer.request, offer.attempt] += 1
        self.running[inbound] = self.world.length
        self.most = max(self.most, len(self.running))
        return None

    def count(self, inbound: Inbound, job: Job) -> None:
        raise AssertionError(inbound, job)

    def refused(self, reason: Decline) -> None:
        """What is not begun is nothing to this one."""

    def cancelled(self, inbound: Inbound) -> None:
        self.running.pop(inbound, None)
        self.stopped.discard(inbound)

    def has_room(self, inbound: Inbound) -> None:
        self.stopped.discard(inbound)

    def end_reasoning(self, inbound: Inbound) -> None:
        raise AssertionError(inbound)

    # ---- its own doings ----

    def step(self, rng: random.Random) -> None:
        """One engine step: some of the streams get some deltas."""
        for inbound, left in list(self.running.items()):
            if inbound in self.stopped or inbound.state is State.GATHERING:
                continue
            if rng.random() < 0.4:
                continue
            count = min(left, rng.randint(1, 3))
            first = inbound.next_index
            offer = inbound.offer
            assignment = AssignmentId(RequestId(offer.request), offer.attempt)
            inbound.deltas(
                [
                    Delta(assignment, n, Kind.TEXT, f"{assignment}:{n}")
                    for n in range(first, first + count)
                ]
            )
            self.running[inbound] = left - count
            if inbound.full:
                self.stopped.add(inbound)
            elif left == count:
                inbound.finish(Finished(assignment, FinishReason.STOP))
                del self.running[inbound]

    def crash(self) -> None:
        """All is gone; the next life has another epoch and no memory."""
        for session in list(self.sessions):
            session.agent = None
            self.sessions.discard(session)
            session.cut()
        self.running.clear()
        self.stopped.clear()
        self.memory = Memory()
        self.epoch += 1


class World:
    """All of it. ``run`` ends when every request has ended, or raises."""

    def __init__(
        self,
        seed: int,
        faults: Faults,
        *,
        routers: int = 2,
        agents: int = 2,
        requests: int = 6,
        slots: int = 3,
        length: int = 9,
    ) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.length = length
        self.now = 0
        self.calm = faults == NONE
        self.begun: Counter[tuple[str, int, str, int]] = Counter()
        self.sessions: list[Session] = []
        self.trace: list[str] = []
        self._posts: list[tuple[int, int, Session, str, Message]] = []
        self._numbers = 0
        self.agents = [Agent(self, f"a{n}", slots) for n in range(agents)]
        self.routers = [Router(self, f"r{n}") for n in range(routers)]
        for router in self.routers:
            for _ in range(requests):
                router.submit()

    # ---- the network ----

    def post(self, session: Session, way: str, message: Message) -> None:
        rng, faults = self.rng, self.faults
        if session.cut_at is not None:
            return
        if not self.calm and rng.random() < faults.lose:
            session.unsound = True
            return
        copies = 2 if not self.calm and rng.random() < faults.double else 1
        for _ in range(copies):
            at = self.now + rng.randint(1, faults.delay)
            if self.calm or rng.random() >= faults.swap:
                at = max(at, session.last_out[way])
                session.last_out[way] = at
            self._numbers += 1
            heapq.heappush(self._posts, (at, self._numbers, session, way, message))

    def _deliver(self) -> None:
        while self._posts and self._posts[0][0] <= self.now:
            _, _, session, way, message = heapq.heappop(self._posts)
            self.trace.append(f"{self.now} {way} {type(message).__name__}")
            if way == "to_agent" and session.agent is not None:
                session.agent_end.take(message)
                if isinstance(message, Cancel):
                    left = session.agent_end.inbounds
                    assert message.stream not in left, "it works for nobody"
            elif way == "to_router" and session.router is not None:
                _take(session.router_end, message, float(self.now))

    # ---- time ----

    def run(self, ticks: int = 4_000) -> None:
        """Be bad for a while, then calm, until all has ended.

        Raises:
            AssertionError: a rule was broken.
        """
        while not self.over():
            self.now += 1
            if self.now > ticks // 2:
                self.calm = True
            assert self.now < ticks, "it never ends"
            self._chaos()
            self._connect()
            self._deliver()
            for router in self.routers:
                for flight in list(router.flights.values()):
                    flight.step(self.rng, NONE if self.calm else self.faults)
                    if self.calm and not flight.reading:
                        flight.reading = True
                        if flight.source is not None:
                            flight.source.resume()
            for agent in self.agents:
                agent.step(self.rng)
            for session in list(self.sessions):
                session.flush()
            self.check()
        for session in self.sessions:
            if session.unsound:
                session.cut()
        for _ in range(NOTICE_TICKS + 2 * self.faults.delay + 5):
            self.now += 1
            self.calm = True
            self._deliver()
            self._notice()
            for agent in self.agents:
                agent.step(self.rng)
            for session in list(self.sessions):
                session.flush()
            self.check()
        self.check_rest()

    def over(self) -> bool:
        return all(
            flight.outcome
            for router in self.routers
            for flight in router.flights.values()
        )

    def _chaos(self) -> None:
        rng, faults = self.rng, self.faults
        if not self.calm:
            for session in self.sessions:
                if session.cut_at is None and rng.random() < faults.cut:
                    session.cut()
            for agent in self.agents:
                if rng.random() < faults.crash_agent:
                    agent.crash()
            for router in self.routers:
                if rng.random() < faults.crash_router:
                    router.crash()
                    router.submit()
        self._notice()

    def _notice(self) -> None:
        """An end finds out that its connection is gone, sooner or later."""
        for session in list(self.sessions):
            if session.cut_at is None:
                continue
            late = self.now - session.cut_at >= NOTICE_TICKS
            if late or self.rng.random() < 0.05:
                session.end_router()
            if late or self.rng.random() < 0.05:
                session.end_agent()
            if session.router is None and session.agent is None:
                self.sessions.remove(session)

    def _connect(self) -> None:
        """A router that has no connection to an agent makes one."""
        for router in self.routers:
            for agent in self.agents:
                if any(s.agent is agent for s in router.sessions):
                    continue
                session = Session(self, router, agent)
                router.sessions.add(session)
                agent.sessions.add(session)
                self.sessions.append(session)

    # ---- the rules ----

    def check(self) -> None:
        """Hold at every tick: F1, F8, S1, and no success without its end."""
        for agent in self.agents:
            assert agent.most <= agent.slots, "S1: a slot too many"
            at_wire = {
                inbound
                for session in agent.sessions
                for inbound in session.agent_end.inbounds.values()
            }
            assert set(agent.running) <= at_wire, "it works for nobody"
        for key, times in self.begun.items():
            assert times == 1, f"F8: {key} was begun {times} times"
        for router in self.routers:
            for flight in router.flights.values():
                check_client(flight, self.length)

    def check_rest(self) -> None:
        """Hold when all is over: nothing works for nobody (P5, S2)."""
        for agent in self.agents:
            assert not agent.running, "an orphan"
        for session in self.sessions:
            assert not session.router_end.sources
            # An offer that came behind its cancel waits for parts that came before
            # it: it holds no slot, and goes with the connection.
            left = session.agent_end.inbounds.values()
            assert all(i.state is State.GATHERING for i in left), "an orphan"


def check_client(flight: Flight, length: int) -> None:
    """F1: a gapless prefix of one assignment's output, each piece once."""
    if not flight.client:
        assert flight.outcome != "completed" or length == 0
        return
    source = flight.client[0].partition(":")[0]
    expected = [f"{source}:{n}" for n in range(len(flight.client))]
    assert flight.client == expected, f"F1: {flight.client}"
    assert len(flight.client) <= length
    if flight.outcome == "completed":
        assert len(flight.client) == length, "F7: a short answer as a whole one"


def _take(end: RouterEnd, message: Any, now: float) -> None:
    """Take one message as ``received`` would."""
    if hasattr(message, "entries"):
        end._fan_out([message], now)
    else:
        end.take(message)
