"""One Trio run in a thread of its own, and calls into it from any other thread.

Rule 1: whatever is asked runs in that one thread; a caller only waits for its
``Call``. Rule 2: a caller that is interrupted while it waits leaves nothing behind:
its call is cancelled, or undone where it had been done already.
"""

import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

import trio

from router.engine.opening import open_router
from router.engine.router import Router
from router.errors import RouterError
from router.ports import Worker
from router.settings import Settings, WorkerSettings

#: Seconds that an interrupted caller waits for its call to be gone.
ABANDON_S: Final = 5.0

T = TypeVar("T")


class RouterClosed(RouterError):
    """The router was closed, or has ended on a bug, which is then the cause."""

    def __init__(self) -> None:
        """Say so."""
        super().__init__("the router is closed")


class Call(Generic[T]):
    """One call into the run. All but ``done`` belongs to the run's thread."""

    def __init__(self, undo: Callable[[T], object] | None) -> None:
        """*undo* takes back what came of it where the caller has gone."""
        self._undo = undo
        self._scope = trio.CancelScope()
        self._begun = self._abandoned = False
        self._given: list[T] = []
        self._error: Exception = RouterClosed()
        self.done = threading.Event()

    def do(self, action: Callable[[], T]) -> None:
        """Do *action*, which does not wait, at once. Not a checkpoint."""
        self._begun = True
        try:
            if not self._abandoned:
                self._given.append(action())
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._error = error
        self._conclude()

    async def run(self, action: Callable[[], Awaitable[T]]) -> None:
        """Do *action*, however long it takes. A checkpoint.

        Cancelled: the caller is told that the router is closed.
        """
        self._begun = True
        try:
            with self._scope:
                self._given.append(await action())
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self._error = error
        finally:
            self._conclude()

    def refuse(self) -> None:
        """Tell the caller that the router is closed. Not a checkpoint."""
        self.done.set()

    def abandon(self) -> None:
        """Forget the caller: cancel, or undo. Not a checkpoint."""
        self._abandoned = True
        self._scope.cancel()
        if self.done.is_set():
            self._take_back()
        elif not self._begun:
            self.done.set()

    def result(self) -> T:
        """Give what came of it. In the caller's thread, once it is done.

        Raises:
            Exception: what the action raised.
            RouterClosed: it was not done.
        """
        if not self._given:
            raise self._error
        return self._given[0]

    def _conclude(self) -> None:
        if self._abandoned:
            self._take_back()
        self.done.set()

    def _take_back(self) -> None:
        if self._given and self._undo is not None:
            self._undo(self._given.pop())


class BackgroundRun:
    """A router inside a Trio run inside a thread, from ``start`` to ``stop``."""

    def __init__(
        self,
        settings: Settings | None,
        workers: Sequence[str | WorkerSettings | Worker],
        rng: random.Random | None,
    ) -> None:
        """Take what ``open_router`` takes; nothing runs yet."""
        self._settings = settings
        self._workers = workers
        self._rng = rng
        self._opened = threading.Event()
        self._crash: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._router: Router | None = None
        # A daemon: a program that forgets to close it must still end. What
        # stops it then is the finalizer of its owner.
        self._thread = threading.Thread(
            target=self._main, name="fencepost router", daemon=True
        )

    # --- for other threads -------------------------------------------------

    @property
    def router(self) -> Router:
        """The router, for use in the run's own thread alone.

        Raises:
            RouterClosed: it has ended.
        """
        if self._router is None:
            raise RouterClosed from self._crash
        return self._router

    @property
    def nursery(self) -> trio.Nursery:
        """Where this run's tasks live; for its own thread alone.

        Raises:
            RouterClosed: it ends.
        """
        if self._nursery is None:
            raise RouterClosed
        return self._nursery

    def start(self) -> None:
        """Start the thread, and wait until its router is open.

        Raises:
            Exception: what ``open_router`` raised.
        """
        self._thread.start()
        self._opened.wait()
        if self._token is None and self._crash is not None:
            self._thread.join()
            raise self._crash

    def stop(self, within_s: float | None = None) -> None:
        """End the run and wait for its end, at most *within_s*. From any thread;
        from the run's own it only asks."""
        self.soon(self._scope.cancel)
        if self._is_here():
            return
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def now(self, action: Callable[[], T], undo: Callable[[T], object] | None) -> T:
        """Have a call done that does not wait. Blocks for one turn of the loop."""
        call = Call(undo)
        return self._await(call, lambda: call.do(action), None)

    def wait(
        self,
        action: Callable[[], Awaitable[T]],
        undo: Callable[[T], object] | None = None,
        within_s: float | None = None,
    ) -> T:
        """Have a call done that may wait. Blocks.

        Raises:
            TimeoutError: it took longer than *within_s*, and was cancelled.
        """
        call = Call(undo)
        return self._await(call, lambda: self._start(call, action), within_s)

    def soon(self, action: Callable[[], object]) -> bool:
        """Have a call done at some time. Does not block. False: never."""
        token = self._token
        if token is None:
            return False
        try:
            # What is posted runs before the run ends: Trio's own promise.
            token.run_sync_soon(action)
        except trio.RunFinishedError:
            return False
        return True

    # --- a caller ----------------------------------------------------------

    def _await(
        self, call: Call[T], begin: Callable[[], object], within_s: float | None
    ) -> T:
        """Post *begin*, which begins *call*, and wait until it is done."""
        if self._is_here():
            raise RuntimeError("called from within the router's own thread")
        waits = True
        try:
            waits = self.soon(begin) and not call.done.wait(within_s)
        finally:
            if waits:
                # Out of time, or interrupted: KeyboardInterrupt above all.
                self.soon(call.abandon)
                call.done.wait(ABANDON_S)
        if waits:
            raise TimeoutError
        try:
            return call.result()
        except RouterClosed as closed:
            raise closed from self._crash

    # --- the run's own thread ----------------------------------------------

    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _start(self, call: Call[T], action: Callable[[], Awaitable[T]]) -> None:
        if self._nursery is None:
            call.refuse()
        else:
            self._nursery.start_soon(call.run, action)

    def _main(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:
            self._crash = only(error)
            if self._token is not None:
                # A bug: threading.excepthook shows it.
                raise
        finally:
            self._nursery = self._router = None
            self._opened.set()

    async def _serve(self) -> None:
        with self._scope:
            async with (
                open_router(
                    self._settings, workers=self._workers, rng=self._rng
                ) as router,
                trio.open_nursery() as nursery,
            ):
                self._router = router
                self._nursery = nursery
                self._token = trio.lowlevel.current_trio_token()
                self._opened.set()
                try:
                    await trio.sleep_forever()
                finally:
                    self._nursery = None


def only(error: BaseException) -> BaseException:
    """Take the groups off an error that is alone in them."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
