"""What waits to be written to one connection, in the order in which it goes.

Frames first, then one part of one body: a body of any size delays no frame
(P1). Deltas of one step are gathered into one frame, which is closed by
whatever has to come behind it (P7). Pure: somebody else writes.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from workers.wire.frames import STEP_MAX, Deltas, Message, encode, pack

#: Bytes of frames that may wait before their sources are paused (section 5 of
#: the design); they go on when those are being written.
HIGH: Final = 1024 * 1024
#: Bytes that no honest peer makes wait, be they a large document in each of many
#: slots: it is cut. Whether it reads at all is seen long before (``Link``).
CEILING: Final = 256 * 1024 * 1024


class Body(Protocol):
    """Bytes that go in parts, when nothing else waits."""

    def next_part(self) -> bytes:
        """Give the next frame; b"": there is none any more."""

    def written(self) -> None:
        """The last part is with the kernel."""


def _nothing() -> None:
    """Stand in for a call that nobody waits for."""


class Outbox:
    """Frames and bodies on their way. Nothing here raises."""

    __slots__ = (
        "_bodies",
        "_cost",
        "_frames",
        "_last",
        "_ring",
        "_step",
        "on_room",
        "size",
    )

    def __init__(self, ring: Callable[[], None]) -> None:
        """*ring*: called when there is something to write; often."""
        self._ring = ring
        self._frames: list[bytes] = []
        self._bodies: OrderedDict[Body, None] = OrderedDict()
        self._last: Body | None = None
        self._step: list[tuple[int, int, int, str]] = []
        self._cost = 0
        #: Bytes of frames that wait.
        self.size = 0
        #: Called when more than `HIGH` waited, and is now being written.
        self.on_room: Callable[[], None] = _nothing

    @property
    def waits(self) -> bool:
        """Something is to be written."""
        return bool(self._frames or self._step or self._bodies)

    def put(self, message: Message) -> None:
        """Queue *message* behind all that was queued before."""
        self.put_frame(pack(message))

    def put_frame(self, frame: bytes) -> None:
        """Queue a whole frame."""
        if self._step:
            self._close_step()
        self._frames.append(frame)
        self.size += len(frame)
        self._ring()

    def put_delta(self, entry: tuple[int, int, int, str], cost: int) -> None:
        """Queue one plain delta; it shares a frame with its neighbours."""
        step = self._step
        if not step:
            self._ring()
        step.append(entry)
        self._cost += cost
        if self._cost >= STEP_MAX:
            self._close_step()

    def put_body(self, body: Body) -> None:
        """Send *body* in parts, in turns with others, behind all frames."""
        self._bodies[body] = None
        self._ring()

    def drop_body(self, body: Body) -> None:
        """Send no more of *body*, and forget it. Idempotent."""
        self._bodies.pop(body, None)

    def pull(self) -> bytes:
        """Give what is to be written next; b"": nothing waits.

        Call ``wrote`` when the kernel has all of it.
        """
        if self._step:
            self._close_step()
        frames = self._frames
        if frames:
            whole = frames[0] if len(frames) == 1 else b"".join(frames)
            frames.clear()
            was_full, self.size = self.size > HIGH, 0
            if was_full:
                self.on_room()
            return whole
        while self._bodies:
            body, _ = self._bodies.popitem(last=False)
            part = body.next_part()
            if part:
                self._last = body
                self._bodies[body] = None
                return part
        return b""

    def wrote(self) -> None:
        """What ``pull`` gave last is with the kernel."""
        body, self._last = self._last, None
        if body is not None:
            body.written()

    def _close_step(self) -> None:
        body = encode(Deltas(self._step))
        frame = len(body).to_bytes(4, "big") + body
        self._frames.append(frame)
        self.size += len(frame)
        self._step = []
        self._cost = 0
