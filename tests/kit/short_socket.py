"""A socket double whose ``send`` takes what a script says."""

from collections import deque
from collections.abc import Iterable

from router.edge.sink import Rooms


class ShortSocket:
    """Sends as told: a number of bytes at most, or an OSError to raise.

    Past the end of the script, everything is taken.
    """

    def __init__(self, script: Iterable[int | OSError] = ()) -> None:
        self.script: deque[int | OSError] = deque(script)
        self.sent = bytearray()
        self.calls = 0

    def send(self, octets: bytes | bytearray, /) -> int:
        self.calls += 1
        step = self.script.popleft() if self.script else len(octets)
        if isinstance(step, OSError):
            raise step
        if step == 0:
            raise BlockingIOError
        taken = bytes(octets[:step])
        self.sent += taken
        return len(taken)

    def fileno(self) -> int:
        return 42


class CountedRooms(Rooms):
    """Keeps what a sink asked the poll for: True wants room, False does not."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def want_room(self, fd: int) -> None:
        assert fd == 42
        self.asked.append(True)

    def enough(self, fd: int) -> None:
        assert fd == 42
        self.asked.append(False)
