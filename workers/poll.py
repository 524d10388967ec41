"""One readiness poll over many sockets, waited for by one task.

An epoll descriptor is itself pollable, so Trio waits for one and a wake takes
all that is ready: tokens of many streams cost one pass of its loop (P7).
Two rules: an event is bound to its owner, not to a number, before any owner
runs; and interest in nothing is no registration (a mask of 0 spins on a RST).
"""

import select
from typing import Final, NoReturn, Protocol, TypeAlias

import trio

from router.cork import Cork

#: Bytes moved in one go before all other tasks get their turn: 128 flooding
#: streams stalled them for 269 ms without it, for 10 ms with it.
WAKE_BUDGET: Final = 256 * 1024
#: Seconds between two tries to open a poll.
RETRY_S: Final = 0.5
#: Events taken from the kernel at once.
_EVENTS_MAX: Final = 256

READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT


class Pollable(Protocol):
    """One socket's owner."""

    mask: int
    """What it is registered for; 0: not registered. Written by `Poll` only."""

    def fileno(self) -> int:
        """Give its socket's number, the same while it is registered."""

    def ready(self, mask: int, now: float) -> int:
        """Do what readiness *mask* allows at *now*; give the bytes moved.

        May close itself or any other owner. What it raises ends the poll.
        """


#: Owners, and what each is ready for.
Batch: TypeAlias = list[tuple[Pollable, int]]


class Poll:
    """The nested epoll and who is registered in it."""

    def __init__(self, cork: Cork) -> None:
        """Open the epoll descriptor; *cork*: for all that one wake brings."""
        self._cork = cork
        self._epoll = select.epoll()
        # Touched by `want` alone.
        self._owners: dict[int, Pollable] = {}

    def want(self, owner: Pollable, mask: int) -> None:
        """Set what *owner* is to be told of; 0 unregisters it.

        Raises:
            OSError: the kernel's limit on watches is reached.
        """
        if mask == owner.mask:
            return
        number = owner.fileno()
        if not owner.mask:
            self._epoll.register(number, mask)
            self._owners[number] = owner
        elif mask:
            self._epoll.modify(number, mask)
        else:
            self._epoll.unregister(number)
            del self._owners[number]
        owner.mask = mask

    async def run(self) -> NoReturn:
        """Wake owners until cancelled; at most `WAKE_BUDGET` between checkpoints."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            owners = self._owners
            # Bound now: an owner that runs may close another and open a third
            # which gets the second's number.
            batch = [
                (owners[number], mask)
                for number, mask in self._epoll.poll(0, _EVENTS_MAX)
            ]
            while batch:
                batch = self._turn(batch)
                if batch:
                    # The rest comes first after it: a new poll would begin with
                    # the same loud streams again.
                    await trio.lowlevel.checkpoint()

    def _turn(self, batch: Batch) -> Batch:
        """Wake owners, up to `WAKE_BUDGET`; give those that were not woken."""
        now = trio.current_time()
        budget = WAKE_BUDGET
        self._cork.hold(now)
        try:
            for place, (owner, mask) in enumerate(batch):
                if not owner.mask:
                    continue
                budget -= owner.ready(mask, now)
                if budget <= 0:
                    return batch[place + 1 :]
        finally:
            self._cork.release()
        return []

    def close(self) -> None:
        """Close the descriptor; whoever waits for it gets ClosedResourceError.

        All owners must be unregistered.
        """
        trio.lowlevel.notify_closing(self._epoll)
        self._epoll.close()


async def open_poll(cork: Cork) -> Poll:
    """Open a poll as soon as the system has a descriptor for it (H6).

    A checkpoint only if it must wait. Cancelled: nothing is open.
    """
    while True:
        try:
            return Poll(cork)
        except OSError:
            await trio.sleep(RETRY_S)
