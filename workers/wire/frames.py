"""The words of the wire, and their bytes: length, then one msgpack array.

Rule 1: a frame is one array whose first element is its number; who may send
which is `ROUTER_SENDS` and `AGENT_SENDS`, and nothing else is ever decoded
(P2). Rule 2: pure; every limit of the wire stands here. ``docs/wire.md``.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from router.errors import RouterError
from router.words import Word

MAGIC: Final = "fencepost"
#: Versions that this build speaks, both ends included.
VERSION_MIN: Final = 1
VERSION_MAX: Final = 1

#: Bytes of a frame's length, unsigned and big-endian.
LENGTH: Final = 4
#: Longest frame behind its length: an engine's line of 1 MiB fits (P1).
FRAME_MAX: Final = 2 * 1024 * 1024
#: The same from a peer that has not proven itself.
FRAME_MAX_UNPROVEN: Final = 4096
#: Bytes of a job in one frame.
PART_MAX: Final = 64 * 1024
#: Bytes of deltas that are gathered into one frame.
STEP_MAX: Final = 64 * 1024
#: Characters of one delta's text; a longer document goes in pieces.
TEXT_MAX: Final = 256 * 1024
#: Bytes of one assignment's deltas that may be under way (P6).
WINDOW: Final = 64 * 1024
#: What a delta costs of its credit besides the bytes of its text: about what an
#: end that must hold it pays for it.
DELTA_COST: Final = 64
#: Greatest number, and characters of a name and of words for people.
NUMBER_MAX: Final = 2**53
NAME_MAX: Final = 256
SENTENCE_MAX: Final = 4096
#: Models, engines and missing parameters in one observation.
MODELS_MAX: Final = 4096
HOSTS_MAX: Final = 1024
LACKS_MAX: Final = 64
#: Greatest number of an attempt.
ATTEMPT_MAX: Final = 2**31
#: Seconds between two observations, and of silence after which an end is lost.
HEARTBEAT_S: Final = 1.0
EXPIRY_S: Final = 3.0
#: Seconds from a connection's beginning to both proofs.
OPENING_S: Final = 3.0


class Reason(Word):
    """Why a connection is closed; the stable word in ``bye`` and in metrics."""

    #: The length is 0 or over the limit.
    OVERSIZE = "oversize"
    #: Not msgpack.
    GARBAGE = "garbage"
    #: A known message with fields that it does not have.
    BAD_SHAPE = "bad_shape"
    UNKNOWN_MESSAGE = "unknown_message"
    #: A message of the other end, or of our own.
    WRONG_DIRECTION = "wrong_direction"
    #: A message at a time at which it has no meaning.
    OUT_OF_ORDER = "out_of_order"
    NOT_FENCEPOST = "not_fencepost"
    VERSION = "version"
    #: Two routers, or two agents.
    ROLE = "role"
    #: No proof, or a wrong one.
    UNAUTHORIZED = "unauthorized"
    TLS = "tls"
    #: No proof in `OPENING_S`.
    SLOW_OPENING = "slow_opening"
    #: Nothing came for `EXPIRY_S`.
    EXPIRED = "expired"
    #: The peer sends, and does not read.
    OVERFLOW = "overflow"
    #: Another connection of the same agent took this one's place.
    SUPERSEDED = "superseded"
    #: The agent's name is none, or another worker's.
    NAME = "name"
    #: More connections than are taken.
    TOO_MANY = "too_many"
    #: The agent has drained, or the router stops.
    STOPPING = "stopping"
    #: The connection ended without a word.
    LOST = "lost"
    #: A bug of the end that says it.
    INTERNAL = "internal"


class WireError(RouterError):
    """The connection is of no more use; *reason* is told to the peer."""

    def __init__(self, reason: Reason, words: str) -> None:
        """*words*: one sentence for people, without secrets or content."""
        super().__init__(f"{reason.value}: {words}")
        self.reason = reason
        self.words = words


Number: TypeAlias = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Stream: TypeAlias = Annotated[int, Meta(ge=1, le=NUMBER_MAX)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
Sentence: TypeAlias = Annotated[str, Meta(max_length=SENTENCE_MAX)]
Bytes64: TypeAlias = Annotated[bytes, Meta(max_length=64)]


class Message(
    msgspec.Struct,
    array_like=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """One frame's meaning."""


# ---- both ends ----


class Hello(Message, tag=0):
    """Who speaks, and what it understands: the first frame of either end."""

    magic: Name
    version_min: Number
    version_max: Number
    role: Name
    """``router`` or ``agent``."""
    id: Name
    epoch: Number
    """New, and greater, at each start of the process (P1)."""
    nonce: Annotated[bytes, Meta(min_length=16, max_length=64)]
    capabilities: Annotated[list[Name], Meta(max_length=32)]


class Proof(Message, tag=1):
    """The sender knows the token; empty where it was given none."""

    mac: Bytes64


class Bye(Message, tag=2):
    """The last frame: why the sender closes."""

    reason: Name
    words: Sentence = ""


# ---- router to agent ----


class Offer(Message, tag=16):
    """A job of *size* bytes, which follow in parts."""

    stream: Stream
    """Names the assignment on this connection; greater than all before it."""
    request: Name
    attempt: Annotated[int, Meta(ge=1, le=ATTEMPT_MAX)]
    epoch: Number
    """The agent's, as the router knows it."""
    target: Name
    """The model that is asked for."""
    size: Number
    credit: Number
    waiting: Number = 0
    """Jobs for this model that wait at the router behind this one."""
    purpose: Annotated[int, Meta(ge=0, le=1)] = 0
    """0: generate. 1: count the prompt's tokens, which needs no slot."""


class Part(Message, tag=17):
    """A piece of a job."""

    stream: Stream
    offset: Number
    octets: Annotated[bytes, Meta(min_length=1, max_length=PART_MAX)]


class Cancel(Message, tag=18):
    """The assignment is over for the router; nothing more is wanted of it."""

    stream: Stream


class Credit(Message, tag=19):
    """Deltas may cost *total* since the assignment began; it only grows."""

    stream: Stream
    total: Number


class Seen(Message, tag=20):
    """The observation of this number has arrived, and so the router lives."""

    sequence: Number


class EndReasoning(Message, tag=21):
    """Have the engine reason no longer; only where the agent can (J6)."""

    stream: Stream


# ---- agent to router ----


class Accepted(Message, tag=32):
    """A slot is reserved; an engine may get the job after this is said."""

    stream: Stream


class Declined(Message, tag=33):
    """The job was not begun."""

    stream: Stream
    reason: Name
    """See `hosting.Decline`."""
    words: Sentence = ""
    retry_after_ms: Number | None = None


class Waiting(Message, tag=34):
    """What the silence of this assignment's engine means (W)."""

    stream: Stream
    state: Name
    """busy, idle, unavailable: no head yet, or no more: also behind ``head``, as
    long as no delta and no piece came. head: it is here. moves: bytes came behind
    it, and no delta."""


class Deltas(Message, tag=35):
    """All plain deltas of one engine step (P7)."""

    entries: list[tuple[Stream, Number, Annotated[int, Meta(ge=0, le=2)], str]]
    """(stream, index, kind, text); a kind is a place in ``PLAIN_KINDS``."""


class Tool(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Which tool call a delta belongs to."""

    index: Number
    id: str | None
    name: str | None


class RichDelta(Message, tag=36):
    """A delta that has more than a text."""

    stream: Stream
    index: Number
    kind: Name
    text: str
    tool: Tool | None = None
    logprobs: bytes | None = None
    pieces: Number = 0
    """How many of them came for it."""


class Piece(Message, tag=37):
    """Text that belongs before that of the next rich delta, whose index this is."""

    stream: Stream
    index: Number
    place: Number
    """Pieces of this delta before it: no text twice, and none left out (F3, F5)."""
    text: str


class Finishing(Message, tag=38):
    """The finish reason is known; usage may follow, and more deltas."""

    stream: Stream
    count: Number
    """Deltas so far."""
    reason: Name


class Tokens(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Usage."""

    prompt: Number
    completion: Number
    cached: Number | None
    reasoning: Number | None


class Finished(Message, tag=39):
    """The explicit end of a whole answer (F7)."""

    stream: Stream
    count: Number
    reason: Name
    usage: Tokens | None = None
    stop_sequence: str | None = None


class Failed(Message, tag=40):
    """The attempt is over without its end (A4)."""

    stream: Stream
    kind: Name
    """A ``FaultKind``."""
    words: Sentence
    status: Number | None = None
    body: bytes = b""
    error_type: str | None = None
    retry_after_ms: Number | None = None
    param: str | None = None
    code: str | None = None


class Host(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One engine behind an agent, for people to look at."""

    name: str
    state: str
    reason: str
    engine: str | None
    version: str | None
    slots: Number
    busy: Number
    models: list[str]


class Observation(Message, tag=41):
    """What the agent is at this moment (P4); newer ones replace older ones."""

    epoch: Number
    sequence: Number
    slots: Number
    """Of all its engines that serve."""
    load: Number
    """Of these, how many work, for whomever."""
    models: Annotated[
        dict[Name, tuple[Number, Annotated[int, Meta(ge=0, le=2)]]],
        Meta(max_length=MODELS_MAX),
    ]
    """Model to what the router may have there, its own included, and to 0: out,
    1: coming up, 2: serving."""
    context: Number | None
    lacks: Annotated[list[str], Meta(max_length=LACKS_MAX)]
    """Sampling parameters that some engine behind it does not know (J3)."""
    hosts: Annotated[list[Host], Meta(max_length=HOSTS_MAX)] | None = None
    """None: as in the observation before."""


class Draining(Message, tag=42):
    """No offer is accepted any more; what runs may finish (L5)."""


class Counted(Message, tag=43):
    """The answer to an offer whose purpose was to count."""

    stream: Stream
    tokens: Number | None


#: The whitelists, as types, by number (P2).
ROUTER_SENDS: Final[tuple[type[Message], ...]] = (
    Hello,
    Proof,
    Bye,
    Offer,
    Part,
    Cancel,
    Credit,
    Seen,
    EndReasoning,
)
AGENT_SENDS: Final[tuple[type[Message], ...]] = (
    Hello,
    Proof,
    Bye,
    Accepted,
    Declined,
    Waiting,
    Deltas,
    RichDelta,
    Piece,
    Finishing,
    Finished,
    Failed,
    Observation,
    Draining,
    Counted,
)
_NUMBERS: Final = {
    kind: kind.__struct_config__.tag for kind in (*ROUTER_SENDS, *AGENT_SENDS)
}

_encoder: Final = msgspec.msgpack.Encoder()
encode: Final = _encoder.encode
_first: Final = msgspec.msgpack.Decoder().decode


def cost_of(message: RichDelta | Piece) -> int:
    """Count what a delta with more than a text takes of its credit, in bytes."""
    cost = DELTA_COST + len(message.text.encode())
    if isinstance(message, RichDelta):
        cost += len(message.logprobs or b"")
        tool = message.tool
        if tool is not None:
            cost += len((tool.id or "").encode()) + len((tool.name or "").encode())
    return cost


def pack(message: Message) -> bytes:
    """Write a whole frame."""
    body = encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


class Reader:
    """Takes bytes of one direction apart into messages, whatever their cuts."""

    __slots__ = ("_decode", "_known", "_other", "_refused", "_rest", "most")

    def __init__(self, sends: Sequence[type[Message]]) -> None:
        """Understand what the peer *sends*, one of the two whitelists."""
        union: Any = sends[0]
        for kind in sends[1:]:
            union = union | kind
        self._decode = msgspec.msgpack.Decoder(union).decode
        self._known = {_NUMBERS[kind] for kind in sends}
        self._other = set(_NUMBERS.values()) - self._known
        self._rest = b""
        #: A length that is none.
        self._refused = 0
        #: Longest frame that is taken now.
        self.most = FRAME_MAX_UNPROVEN

    @property
    def held(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._rest)

    def pop(self, octets: bytes = b"") -> bytes | None:
        """Take *octets* in, and give one whole frame, without its length.

        For the opening, in which each frame may change what is taken next.

        Raises:
            WireError: a length over the limit, or none.
        """
        held = self._rest = self._rest + octets
        if len(held) < LENGTH:
            return None
        size = int.from_bytes(held[:LENGTH], "big")
        if not 0 < size <= self.most:
            raise WireError(Reason.OVERSIZE, f"a frame of {size} bytes")
        if len(held) < LENGTH + size:
            return None
        self._rest = held[LENGTH + size :]
        return held[LENGTH : LENGTH + size]

    def split(self, octets: bytes) -> list[bytes]:
        """Give each whole frame, without its length; keep the rest.

        Behind a length over the limit, or of none, there are no frames any more:
        an empty one, which ``decode`` refuses, stands for it. So what came whole
        before it is not lost.
        """
        if self._rest:
            octets = self._rest + octets
        at = 0
        end = len(octets)
        frames = []
        while end - at >= LENGTH:
            size = int.from_bytes(octets[at : at + LENGTH], "big")
            if not 0 < size <= self.most:
                self._refused = size
                frames.append(b"")
                break
            if end - at - LENGTH < size:
                break
            at += LENGTH
            frames.append(octets[at : at + size])
            at += size
        self._rest = octets[at:]
        return frames

    def decode(self, frame: bytes) -> Any:
        """Give the message of one *frame*.

        Raises:
            WireError: it is none that the peer may send.
        """
        try:
            return self._decode(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise self._why(frame) from None

    def _why(self, frame: bytes) -> WireError:
        """Say what is wrong with a frame that did not decode."""
        if not frame:
            return WireError(Reason.OVERSIZE, f"a frame of {self._refused} bytes")
        try:
            found = _first(frame)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError):
            return WireError(Reason.GARBAGE, "a frame that is not msgpack")
        number = found[0] if isinstance(found, list) and found else None
        if type(number) is not int:
            return WireError(Reason.BAD_SHAPE, "a frame without a number")
        if number in self._known:
            return WireError(Reason.BAD_SHAPE, f"message {number} with wrong fields")
        if number in self._other:
            return WireError(
                Reason.WRONG_DIRECTION, f"message {number} from the wrong end"
            )
        return WireError(Reason.UNKNOWN_MESSAGE, f"message {number}")
