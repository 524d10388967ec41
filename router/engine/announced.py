"""Agents that come by themselves: who connects is a worker of its own name (P1).

A worker that came so is kept while its agent is away, so that its models stay
known (O6), and is forgotten when that has lasted long. One that the router's owner
removed is out until its agent connects anew (L5).
"""

import random
import socket
from collections.abc import Sequence
from typing import Final

import trio

from router.engine.router import Router
from router.ids import WorkerId
from workers.door import Door
from workers.link import Link, contain
from workers.remote import RemoteWorker
from workers.wire.frames import Reason, WireError
from workers.wire.opening import ByeHeard, Role

#: Seconds without a connection after which an agent is forgotten, and between
#: two looks at that.
FORGET_S: Final = 600.0
LOOK_S: Final = 10.0
#: Seconds after the start in which agents that knew an earlier router here come
#: again: they try at gaps of at most five seconds. Till then no model is unknown.
ARRIVE_S: Final = 10.0
#: Longest name of a worker.
_NAME_MAX: Final = 64


class Greeter:
    """Takes agents in that announce themselves to one router."""

    def __init__(self, router: Router, *, forget_s: float = FORGET_S) -> None:
        """Hire for *router*; an agent that stays away *forget_s* is forgotten."""
        self._router = router
        self._forget_s = forget_s
        self._door = Door(
            router.access, self._host, self._refused, router.cork, Role.AGENT
        )
        self._hired: dict[str, RemoteWorker] = {}
        #: Of these, whom the router does not have yet.
        self._coming: set[str] = set()

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Take agents in at *listeners*, which are closed at the end.

        Returns only when cancelled. A checkpoint.
        """
        self._router.fleet.await_strangers(trio.current_time() + ARRIVE_S)
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(self._door.listen, listener)
            nursery.start_soon(self._forget)
            task_status.started()

    async def _host(self, link: Link) -> None:
        """See one agent's connection to its end."""
        why = WireError(Reason.STOPPING, "the router stops")
        try:
            await self._door.open(link)
            worker = await self._worker_of(link)
            why = await worker.carry(link)
            if why.reason is Reason.SUPERSEDED:
                # Two agents of one name take turns at this.
                self._door.tell(link, why)
        except WireError as reason:
            why = reason
            self._door.tell(link, why)
            who = "heard" if isinstance(why, ByeHeard) else "said"
            self._router.tally.wire[who, why.reason.value] += 1
        except (Exception, BaseExceptionGroup) as raised:  # noqa: BLE001
            why = contain(raised, self._router.cork)
        finally:
            await link.part(why)

    async def _worker_of(self, link: Link) -> RemoteWorker:
        """Find the worker of the agent behind *link*, or hire it.

        Raises:
            WireError: its name is none, or another worker's.
        """
        peer = link.opening.peer
        name = "" if peer is None else peer.id
        known = self._hired.get(name)
        if known is not None and not self._removed(name):
            return known
        if not _is_name(name):
            raise WireError(Reason.NAME, "needs letters, digits, dots, dashes only")
        router = self._router
        if WorkerId(name) in router.workers:
            raise WireError(Reason.NAME, "another worker of this router has the name")
        worker = RemoteWorker(
            name,
            None,
            router.access,
            tally=router.tally,
            report_bug=router.report_bug,
            rng=random.Random(0),  # noqa: S311 - it never dials
            waiting=router.fleet.room.depth,
            cork=router.cork,
        )
        # First: a second connection of it may come while this one is hired.
        self._hired[name] = worker
        self._coming.add(name)
        try:
            await router.add_worker(worker)
        finally:
            self._coming.discard(name)
        return worker

    def _removed(self, name: str) -> bool:
        """Say whether the router has let go whom we hired as *name*."""
        had = self._router.workers.get(WorkerId(name)) is self._hired[name]
        return not had and name not in self._coming

    async def _forget(self) -> None:
        """Let agents go that have been away for long."""
        while True:
            await trio.sleep(min(LOOK_S, self._forget_s))
            now = trio.current_time()
            for name, worker in list(self._hired.items()):
                if self._removed(name):
                    # The name may be another worker's by now.
                    del self._hired[name]
                elif worker.route is None and now - worker.away_since >= self._forget_s:
                    del self._hired[name]
                    self._router.remove_worker(name)

    def _refused(self) -> None:
        self._router.tally.wire["said", Reason.TOO_MANY.value] += 1


def _is_name(name: str) -> bool:
    """Tell a worker's name as the configuration knows them."""
    bare = name.replace(".", "").replace("-", "").replace("_", "")
    return (
        name.isascii()
        and bare.isalnum()
        and name[0].isalnum()
        and len(name) <= _NAME_MAX
    )
