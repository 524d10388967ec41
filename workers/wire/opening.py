"""How the two ends of a connection get to know each other (P1).

Both send a hello at once, then a proof that they know the token: a MAC over
both hellos, so that nothing recorded is of use on another connection, the
token itself never travels, and no version is talked down. Rule 1: every
change of state is a row of ``TRANSITIONS``. Rule 2: the nonce is the caller's;
nothing here knows a clock or a socket.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

import attrs

from router.words import Word
from workers.wire.frames import (
    AGENT_SENDS,
    FRAME_MAX,
    MAGIC,
    ROUTER_SENDS,
    VERSION_MAX,
    VERSION_MIN,
    Bye,
    Hello,
    Message,
    Proof,
    Reader,
    Reason,
    WireError,
    encode,
    pack,
)

_LABEL: Final = b"fencepost wire 1 "
#: Random bytes in a hello.
NONCE_BYTES: Final = 32


class State(Word):
    """How far an opening has come."""

    #: Our hello is out.
    GREETED = "greeted"
    #: The peer's hello is here, our proof is out.
    MET = "met"
    #: The peer's proof is here: it is whom it says.
    OPEN = "open"
    #: One of the ends has said why it goes.
    CLOSED = "closed"


class Event(Word):
    """What moves an opening."""

    HELLO = "hello"
    PROOF = "proof"
    END = "end"


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.GREETED: {Event.HELLO: State.MET, Event.END: State.CLOSED},
    State.MET: {Event.PROOF: State.OPEN, Event.END: State.CLOSED},
    State.OPEN: {Event.END: State.CLOSED},
    State.CLOSED: {Event.END: State.CLOSED},
}

_EVENTS: Final[Mapping[type[Message], Event]] = {
    Hello: Event.HELLO,
    Proof: Event.PROOF,
    Bye: Event.END,
}


class Role(Word):
    """Which end of the wire somebody is."""

    ROUTER = "router"
    AGENT = "agent"


@attrs.frozen
class Passport:
    """What one end says of itself, and what it demands of the other."""

    role: Role
    id: str
    epoch: int
    capabilities: tuple[str, ...] = ()
    token: bytes | None = attrs.field(default=None, repr=False)
    """None: no token is used; TLS or the net itself must do."""
    versions: tuple[int, int] = (VERSION_MIN, VERSION_MAX)
    """The oldest and the newest that it speaks."""


class ByeHeard(WireError):
    """The peer has closed, and said why."""


class Opening:
    """One connection's beginning, seen from one end.

    Invariant: ``peer`` is set from MET on, and may be believed from OPEN on.
    """

    def __init__(self, passport: Passport, nonce: bytes) -> None:
        """Greet; *nonce*: `NONCE_BYTES` random bytes, used for nothing else."""
        self._own = passport
        hello = Hello(
            MAGIC,
            *passport.versions,
            passport.role.value,
            passport.id,
            passport.epoch,
            nonce,
            list(passport.capabilities),
        )
        self._hello = encode(hello)
        self._wanted = b""
        self.reader = Reader(
            AGENT_SENDS if passport.role is Role.ROUTER else ROUTER_SENDS
        )
        self.state = State.GREETED
        self.version = 0
        self.peer: Hello | None = None
        #: Frames that wait to be sent.
        self.out: list[bytes] = [pack(hello)]

    @property
    def capabilities(self) -> frozenset[str]:
        """What both ends understand beyond the version's own messages."""
        if self.peer is None:
            return frozenset()
        return frozenset(self._own.capabilities) & frozenset(self.peer.capabilities)

    def receive(self, octets: bytes) -> bool:
        """Take bytes of the peer; True once it has proven itself.

        What came behind its proof is then left in ``reader``.

        Raises:
            WireError: the connection is of no use; a ``bye`` is due.
            ByeHeard: the peer said so first.
        """
        frame = self.reader.pop(octets)
        while frame is not None:
            self._take(self.reader.decode(frame), frame)
            if self.state is State.OPEN:
                self.reader.most = FRAME_MAX
                return True
            frame = self.reader.pop()
        return False

    def _take(self, message: Message, frame: bytes) -> None:
        event = _EVENTS.get(type(message))
        state = None if event is None else TRANSITIONS[self.state].get(event)
        if state is None:
            raise WireError(
                Reason.OUT_OF_ORDER,
                f"{type(message).__name__} while {self.state.value}",
            )
        if isinstance(message, Bye):
            self.state = state
            raise heard(message)
        if isinstance(message, Hello):
            self._meet(message, frame)
        elif isinstance(message, Proof):
            self._verify(message)
        self.state = state

    def _meet(self, hello: Hello, frame: bytes) -> None:
        if hello.magic != MAGIC:
            raise WireError(Reason.NOT_FENCEPOST, "the peer speaks something else")
        oldest, newest = self._own.versions
        self.version = min(newest, hello.version_max)
        if self.version < max(oldest, hello.version_min):
            raise WireError(
                Reason.VERSION,
                f"versions {oldest} to {newest} are spoken here, "
                f"{hello.version_min} to {hello.version_max} there",
            )
        other = Role.AGENT if self._own.role is Role.ROUTER else Role.ROUTER
        if hello.role != other.value:
            raise WireError(
                Reason.ROLE, f"this end speaks to no {_shown(hello.role, 20)}"
            )
        self.peer = hello
        self._wanted = self._mac(other, frame, self._hello)
        self.out.append(pack(Proof(self._mac(self._own.role, self._hello, frame))))

    def _mac(self, role: Role, own: bytes, peer: bytes) -> bytes:
        """Prove that *role*, who said *own* and heard *peer*, knows the token."""
        if self._own.token is None:
            return b""
        # Lengths first: nothing can be moved from one hello to the other.
        said = b"".join(
            len(part).to_bytes(4, "big") + part
            for part in (_LABEL + role.value.encode(), own, peer)
        )
        return hmac.digest(self._own.token, said, hashlib.sha256)

    def _verify(self, proof: Proof) -> None:
        if hmac.compare_digest(proof.mac, self._wanted):
            return
        if not self._wanted:
            words = "the other end uses a token, and this one has none"
        elif not proof.mac:
            words = "a token is needed"
        else:
            words = "the token is not the same at both ends"
        raise WireError(Reason.UNAUTHORIZED, words)


def heard(bye: Bye) -> ByeHeard:
    """Make the error of a peer's *bye*; a reason we don't know is LOST."""
    try:
        reason = Reason(bye.reason)
    except ValueError:
        reason = Reason.LOST
    words = _shown(bye.words, 200)
    return ByeHeard(reason, words or "the peer closed the connection")


def _shown(text: str, most: int) -> str:
    """Give *most* characters of a peer's *text*, fit for a log and a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])
