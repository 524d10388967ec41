"""How two ends get to know each other, and whom they turn away (P1, H8)."""

from collections.abc import Mapping

import attrs
import pytest

from workers.wire.frames import (
    MAGIC,
    Accepted,
    Bye,
    Deltas,
    Hello,
    Offer,
    Proof,
    Reader,
    Reason,
    WireError,
    pack,
)
from workers.wire.opening import (
    NONCE_BYTES,
    TRANSITIONS,
    ByeHeard,
    Event,
    Opening,
    Passport,
    Role,
    State,
)

TOKEN = b"a token that is long enough"
ROUTER = Passport(Role.ROUTER, "r1", 5, ("count",), TOKEN)
AGENT = Passport(Role.AGENT, "a1", 6, ("count", "more"), TOKEN)
NONCES = {ROUTER: b"r" * NONCE_BYTES, AGENT: b"a" * NONCE_BYTES}


def begin(passport: Passport, nonce: bytes = b"") -> Opening:
    fallback = b"r" if passport.role is Role.ROUTER else b"a"
    return Opening(passport, nonce or fallback * NONCE_BYTES)


def said(one: Opening) -> bytes:
    octets = b"".join(one.out)
    one.out.clear()
    return octets


def meet(one: Opening, other: Opening) -> None:
    """Carry bytes between both until both are open.

    Raises:
        WireError: one of them has enough.
    """
    for _ in range(3):
        one.receive(said(other))
        other.receive(said(one))


def refusal(one: Passport, other: Passport) -> WireError:
    with pytest.raises(WireError) as raised:
        meet(begin(one), begin(other))
    return raised.value


def test_p1_two_ends_with_one_token_open_to_each_other() -> None:
    router, agent = begin(ROUTER), begin(AGENT)
    meet(router, agent)

    assert (router.state, agent.state) == (State.OPEN, State.OPEN)
    assert router.peer is not None
    assert (router.peer.id, router.peer.epoch) == ("a1", 6)
    assert router.version == agent.version == 1
    assert router.capabilities == agent.capabilities == {"count"}


def test_p1_no_token_at_either_end_is_agreement_too() -> None:
    meet(
        begin(attrs.evolve(ROUTER, token=None)), begin(attrs.evolve(AGENT, token=None))
    )


def test_p1_a_wrong_token_is_refused_with_a_reason() -> None:
    error = refusal(attrs.evolve(ROUTER, token=b"another token, long enough"), AGENT)

    assert error.reason is Reason.UNAUTHORIZED
    assert error.words == "the token is not the same at both ends"


def test_p1_who_has_no_token_says_so_of_a_peer_that_has_one() -> None:
    router, agent = begin(attrs.evolve(ROUTER, token=None)), begin(AGENT)
    agent.receive(said(router))

    with pytest.raises(WireError) as raised:
        router.receive(said(agent))
    assert raised.value.reason is Reason.UNAUTHORIZED
    assert raised.value.words == "the other end uses a token, and this one has none"


def test_p1_a_peer_without_a_proof_is_told_that_one_is_needed() -> None:
    agent = begin(AGENT)
    router = begin(attrs.evolve(ROUTER, token=None))

    agent.receive(said(router))
    with pytest.raises(WireError) as raised:
        agent.receive(pack(Proof(b"")))
    assert raised.value.reason is Reason.UNAUTHORIZED
    assert raised.value.words == "a token is needed"


def test_p1_an_old_version_is_refused_with_both_numbers() -> None:
    old = begin(ROUTER)
    new = begin(attrs.evolve(AGENT, versions=(3, 4)))

    with pytest.raises(WireError) as raised:
        new.receive(said(old))
    assert raised.value.reason is Reason.VERSION
    assert raised.value.words == "versions 3 to 4 are spoken here, 1 to 1 there"


def test_p1_a_strangers_role_is_shown_without_its_control_characters() -> None:
    hello = Hello("fencepost", 1, 1, "\x1b[2J\nroot", "x", 1, b"n" * 16, [])
    with pytest.raises(WireError) as raised:
        begin(ROUTER).receive(pack(hello))
    assert raised.value.words == "this end speaks to no ?[2J?root"


def test_p1_the_newest_version_of_both_is_used() -> None:
    old = begin(attrs.evolve(ROUTER, versions=(1, 2)))
    new = begin(attrs.evolve(AGENT, versions=(1, 4)))
    meet(old, new)

    assert (old.version, new.version) == (2, 2)


def test_p1_a_recorded_connection_is_of_no_use_on_another() -> None:
    router, agent = begin(ROUTER), begin(AGENT)
    recorded = said(router)
    agent.receive(recorded)
    router.receive(said(agent))
    proof = said(router)
    agent.receive(proof)
    assert agent.state is State.OPEN

    later = begin(AGENT, b"b" * NONCE_BYTES)
    later.receive(recorded)
    with pytest.raises(WireError) as raised:
        later.receive(proof)
    assert raised.value.reason is Reason.UNAUTHORIZED


def test_p1_a_proof_that_is_sent_back_proves_nothing() -> None:
    """Who knows no token plays our own words back to us."""
    agent = begin(AGENT)
    hello = Hello(MAGIC, 1, 1, "router", "x", 1, b"a" * NONCE_BYTES, [])
    agent.receive(pack(hello))
    own = Reader([Hello, Proof, Bye])
    frames = own.split(said(agent))
    proof = own.decode(frames[-1])
    assert isinstance(proof, Proof)

    with pytest.raises(WireError) as raised:
        agent.receive(pack(proof))
    assert raised.value.reason is Reason.UNAUTHORIZED


def test_p1_a_changed_hello_spoils_the_proof() -> None:
    """Nobody between the two can talk a version or a name down."""
    router, agent = begin(ROUTER), begin(AGENT)
    agent.receive(said(router).replace(b"\xa2r1", b"\xa2r2"))

    with pytest.raises(WireError) as raised:
        router.receive(said(agent))
    assert raised.value.reason is Reason.UNAUTHORIZED


@pytest.mark.parametrize("passport", [ROUTER, AGENT])
def test_p1_two_of_a_kind_do_not_speak(passport: Passport) -> None:
    assert refusal(passport, passport).reason is Reason.ROLE


def test_p1_something_else_is_turned_away() -> None:
    with pytest.raises(WireError) as raised:
        begin(AGENT).receive(
            pack(Hello("elsewhere", 1, 1, "router", "x", 1, b"n" * 16, []))
        )
    assert raised.value.reason is Reason.NOT_FENCEPOST


def test_p1_nothing_is_taken_before_the_proof() -> None:
    agent = begin(AGENT)
    router = begin(ROUTER)
    agent.receive(said(router))

    with pytest.raises(WireError) as raised:
        agent.receive(pack(Offer(1, "r", 1, 6, "m", 1, 1)))
    assert raised.value.reason is Reason.OUT_OF_ORDER


def test_p1_a_second_hello_is_out_of_order() -> None:
    agent = begin(AGENT)
    hello = said(begin(ROUTER))
    agent.receive(hello)

    with pytest.raises(WireError) as raised:
        agent.receive(hello)
    assert raised.value.reason is Reason.OUT_OF_ORDER


def test_what_comes_behind_the_proof_is_left_to_the_open_wire() -> None:
    router, agent = begin(ROUTER), begin(AGENT)
    agent.receive(said(router))
    late = pack(Deltas([(1, 0, 0, "x" * 5000)]))

    assert router.receive(said(agent) + late + pack(Accepted(5))[:3])
    (frame,) = router.reader.split(b"")
    assert router.reader.decode(frame) == Deltas([(1, 0, 0, "x" * 5000)])
    assert router.reader.held == 3


def test_a_bye_is_heard_in_any_state_with_its_reason() -> None:
    for wait in (False, True):
        router, agent = begin(ROUTER), begin(AGENT)
        if wait:
            router.receive(said(agent))
        with pytest.raises(ByeHeard) as raised:
            router.receive(pack(Bye("unauthorized", "no\x1b[0m")))
        assert raised.value.reason is Reason.UNAUTHORIZED
        assert raised.value.words == "no?[0m"
        assert router.state is State.CLOSED


def test_a_reason_that_is_not_known_is_a_loss() -> None:
    with pytest.raises(ByeHeard) as raised:
        begin(ROUTER).receive(pack(Bye("tomorrow", "")))
    assert raised.value.reason is Reason.LOST


def test_h8_the_token_is_in_no_text_and_on_no_wire() -> None:
    router, agent = begin(ROUTER), begin(AGENT)
    hello = said(router)
    agent.receive(hello)
    answer = said(agent)
    router.receive(answer)

    for octets in (hello, answer, said(router)):
        assert TOKEN not in octets
    for text in (repr(ROUTER), str(ROUTER), repr(router.__dict__)):
        assert TOKEN.decode() not in text


def test_every_state_has_its_row() -> None:
    rows: Mapping[State, Mapping[Event, State]] = TRANSITIONS

    assert set(rows) == set(State)
    assert all(Event.END in row for row in rows.values())
