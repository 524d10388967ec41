"""One connection, without a socket: what it does with bytes, ends and bugs."""

import pytest

from router.errors import LocalError
from tests.kit.paper import PaperPoll, PaperTransport
from workers.poll import READ, WRITE
from workers.upstream import Upstream

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


class Log:
    """Home and taker in one: every call, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bugs: list[Exception] = []
        self.crash_in = ""
        self.upstream: Upstream | None = None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.crash_in:
            raise ZeroDivisionError

    def parked(self, _upstream: Upstream, _now: float) -> None:
        self._note("parked")

    def lingers(self, _upstream: Upstream, _now: float) -> None:
        self._note("lingers")

    def gone(self, _upstream: Upstream) -> None:
        self._note("gone")

    def report_bug(self, _where: str, bug: Exception) -> None:
        self.bugs.append(bug)

    def connected(self, _now: float) -> None:
        self._note("connected")

    def refused(self, _now: float) -> None:
        self._note("refused")

    def moved(self, _now: float) -> None:
        self._note("moved")

    def sent(self, _now: float) -> None:
        self._note("sent")

    def received(self, octets: bytes, _now: float) -> None:
        assert self.upstream is not None
        self.upstream.parser.feed(octets)
        self._note("received")

    def ended(self, _now: float, *, clean: bool) -> None:
        self._note("fin" if clean else "rst")

    def close(self) -> None:
        self._note("close")

    def crashed(self, _bug: Exception, _now: float) -> None:
        self._note("crashed")


def make(
    *reads: bytes | Exception | None, room: int = 1000
) -> tuple[Upstream, PaperTransport, PaperPoll, Log]:
    transport = PaperTransport(*reads, room=room)
    poll = PaperPoll()
    log = Log()
    upstream = Upstream(transport, poll, log, secure=False)
    log.upstream = upstream
    assert upstream.connect(log)
    return upstream, transport, poll, log


def test_a_whole_answer_parks_the_connection() -> None:
    upstream, transport, _, log = make(OK + b"hi")
    assert upstream.begin((b"ask",))
    assert upstream.ready(READ, 1.0) == len(OK) + 2
    upstream.release(2.0)

    assert log.calls == ["received", "parked"]
    assert (upstream.used, upstream.idle_since) == (1, 2.0)
    assert transport.closed == 0


def test_an_answer_without_its_end_lingers_until_it_is_there() -> None:
    upstream, _, _, log = make(OK, b"hi")
    upstream.begin((b"ask",))
    upstream.ready(READ, 1.0)
    upstream.release(2.0)
    assert log.calls == ["received", "lingers"]

    upstream.ready(READ, 3.0)
    assert log.calls[-1] == "parked"


@pytest.mark.parametrize("then", [b"hi!", b"", ConnectionResetError()])
def test_a_doubtful_end_closes(then: bytes | Exception) -> None:
    upstream, transport, poll, log = make(OK, then)
    upstream.begin((b"ask",))
    upstream.ready(READ, 1.0)
    upstream.release(2.0)
    upstream.ready(READ, 3.0)

    assert log.calls[-1] == "gone"
    assert transport.closed == 1
    assert poll.wanted[-1] == 0


def test_an_endless_tail_closes() -> None:
    long = b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n"
    upstream, transport, _, _ = make(long, b"x" * 40_000, b"x" * 40_000)
    upstream.begin((b"ask",))
    upstream.ready(READ, 1.0)
    upstream.release(2.0)
    upstream.ready(READ, 3.0)
    assert transport.closed == 0

    upstream.ready(READ, 3.0)
    assert transport.closed == 1


def test_a_request_goes_out_as_there_is_room() -> None:
    upstream, transport, poll, log = make(room=2)
    assert not upstream.begin((b"abc", b"def"))
    assert poll.wanted[-1] == READ | WRITE
    transport.room = 2
    upstream.ready(WRITE, 1.0)
    transport.room = 9
    upstream.ready(WRITE, 2.0)

    assert transport.sent == b"abcdef"
    assert log.calls == ["moved", "moved", "sent"]
    assert poll.wanted[-1] == READ


def test_an_unsent_request_is_no_connection_to_keep() -> None:
    upstream, transport, _, _ = make(OK + b"hi", room=2)
    upstream.begin((b"abc",))
    upstream.ready(READ, 1.0)
    upstream.release(2.0)

    assert transport.closed == 1


def test_a_broken_pipe_leaves_the_answer_to_be_read() -> None:
    upstream, transport, _, log = make(OK + b"hi", room=1)
    upstream.begin((b"abc",))
    transport.room = -1
    upstream.ready(WRITE | READ, 1.0)

    assert upstream.broken
    assert log.calls == ["received"]


def test_nobody_hears_of_bytes_while_it_is_not_read() -> None:
    upstream, _, poll, log = make(b"x")
    upstream.begin((b"ask",))
    upstream.read(False)
    assert poll.wanted[-1] == 0
    upstream.ready(READ, 1.0)
    assert log.calls == []

    upstream.read(True)
    assert poll.wanted[-1] == READ


def test_a_failed_connect_closes_before_it_is_told() -> None:
    transport = PaperTransport()
    transport.connecting = [False, ConnectionRefusedError()]
    log = Log()
    upstream = Upstream(transport, PaperPoll(), log, secure=False)
    assert not upstream.connect(log)
    upstream.ready(WRITE, 1.0)

    assert log.calls == ["gone", "refused"]
    assert transport.closed == 1


def test_a_connect_that_takes_its_time_is_told_at_its_end() -> None:
    transport = PaperTransport()
    transport.connecting = [False, False, True]
    poll = PaperPoll()
    log = Log()
    upstream = Upstream(transport, poll, log, secure=False)
    upstream.connect(log)
    assert poll.wanted == [WRITE]
    upstream.ready(WRITE, 1.0)
    upstream.ready(WRITE, 2.0)

    assert log.calls == ["connected"]
    assert poll.wanted == [WRITE, READ]


def test_close_is_idempotent() -> None:
    upstream, transport, _, log = make()
    for _ in range(3):
        upstream.close()

    assert transport.closed == 1
    assert log.calls == ["gone"]


def test_abandon_closes_its_taker_too() -> None:
    upstream, transport, _, log = make()
    upstream.abandon()

    assert log.calls == ["close", "gone"]
    assert transport.closed == 1


def test_l1_a_bug_in_a_call_goes_to_the_taker() -> None:
    upstream, _, _, log = make(OK)
    upstream.begin((b"ask",))
    log.crash_in = "received"
    assert upstream.ready(READ, 1.0) == 0

    assert log.calls == ["received", "crashed"]
    assert len(log.bugs) == 1


def test_l1_a_bug_without_a_taker_closes_the_connection() -> None:
    upstream, transport, _, log = make(OK, b"hi")
    upstream.begin((b"ask",))
    upstream.ready(READ, 1.0)
    upstream.release(2.0)
    log.crash_in = "parked"
    upstream.ready(READ, 3.0)

    assert len(log.bugs) == 1
    assert transport.closed == 1


def test_l1_a_broken_invariant_passes_through() -> None:
    upstream, _, _, _ = make(LocalError("broken"))
    upstream.begin((b"ask",))
    with pytest.raises(LocalError):
        upstream.ready(READ, 1.0)
