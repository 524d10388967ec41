"""A connection on paper: byte stream and poll without a socket."""

from workers.poll import WRITE, Poll
from workers.upstream import Upstream


class PaperTransport:
    """A byte stream on paper: a list of what each read brings."""

    def __init__(self, *reads: bytes | Exception | None, room: int = 1000) -> None:
        self.reads = list(reads)
        self.room = room
        self.sent = b""
        self.closed = 0
        self.unsent = False
        self.connect_mask = WRITE
        self.connecting: list[bool | OSError] = [True]

    def fileno(self) -> int:
        return 7

    def advance(self) -> bool:
        step = self.connecting.pop(0)
        if isinstance(step, OSError):
            raise step
        return step

    def send(self, octets: memoryview) -> int:
        if self.room < 0:
            raise BrokenPipeError
        taken = bytes(octets[: self.room])
        self.room -= len(taken)
        self.sent += taken
        return len(taken)

    def recv(self, size: int = 0) -> bytes | None:  # noqa: ARG002 - on paper a read is whole
        step = self.reads.pop(0) if self.reads else None
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.closed += 1


class PaperPoll(Poll):
    """Writes masks down."""

    def __init__(self) -> None:
        self.wanted: list[int] = []

    def want(self, owner: object, mask: int) -> None:
        assert isinstance(owner, Upstream)
        if mask != owner.mask:
            self.wanted.append(mask)
            owner.mask = mask
