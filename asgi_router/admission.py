"""Owns the wait for a place: what happens to a request when every worker that could take it is full.

It waits in a queue that is bounded in length and in time, and leaves it at once when its client does. A place that
becomes free is handed over in the same step: the first request in the queue that it fits gets its lease there and
then, so nobody who comes later can take it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import anyio

from asgi_router.errors import AllBusy, QueueFull, QueueTimeout, RouterError
from asgi_router.time_limit import TimeLimit

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection

    from asgi_router.extraction import CompletionRequest
    from asgi_router.observability.record import Times
    from asgi_router.scheduling.state import WorkerState


class Releasable(Protocol):
    """What is given: a lease, or several that are one."""

    def release(self) -> None:
        """Give it back."""
        ...


Claim = TypeVar("Claim", bound=Releasable)

LOOK_EVERY = 1.0
"""Seconds after which the first in the queue looks itself: that a worker's cool-down has ended, nobody tells it."""


class _Waiter(Generic[Claim]):
    """One request in the queue, and what it was given."""

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.served = anyio.Event()
        self.lease: Claim | None = None
        self.error: RouterError | None = None


class Admission(Generic[Claim]):
    """Gives requests their leases, and lets them wait for one.

    Args:
        select: leases what a request needs, apart from the workers that it has tried, or finds all of them full.
        queue_size: how many requests may wait.
        queue_timeout: seconds that one may wait.
    """

    def __init__(
        self,
        select: Callable[[CompletionRequest, Collection[WorkerState]], Claim],
        *,
        queue_size: int,
        queue_timeout: float,
    ) -> None:
        self._select = select
        self._queue_size = queue_size
        self._queue_timeout = queue_timeout
        self._queue: deque[_Waiter[Claim]] = deque()
        self._serving = False

    def __len__(self) -> int:
        """How many requests are waiting."""
        return len(self._queue)

    async def acquire(
        self,
        request: CompletionRequest,
        times: Times,
        exclude: set[WorkerState],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Claim:
        """Return a lease for `request`, now or when there is a place.

        Nothing is awaited between the making of the lease and the return.

        Args:
            request: what a worker is wanted for.
            times: where the seconds of choosing and waiting are noted.
            exclude: workers that it has tried. It is emptied if the request has to wait: they may be back meanwhile.
            loop: the task's, if it may be cancelled natively. Before 4.16 an `anyio.CancelScope` that is left in the
                very turn in which that happens swallows it (anyio#1214).

        Raises:
            QueueFull: too many requests are waiting.
            QueueTimeout: no place became free in time.
            NoWorker, UnknownModel: as `Scheduler.select`, also while waiting.
        """
        began = times.clock()
        if self._queue:
            self._serve_first()
        try:
            return self._select(request, exclude)
        except AllBusy as exc:
            if len(self._queue) >= self._queue_size:
                raise QueueFull("All workers are busy, and too many requests are waiting.") from exc
        finally:
            times.selecting += times.clock() - began

        began = times.clock()
        exclude.clear()
        waiter: _Waiter[Claim] = _Waiter(request)
        self._queue.append(waiter)
        try:
            # All its waits together: a worker that it waits for may refuse it, and then it waits again.
            with TimeLimit(loop) as wait:
                wait.allow(self._queue_timeout - times.queued)
                while not waiter.served.is_set():
                    with TimeLimit(loop) as look:
                        look.allow(LOOK_EVERY)
                        await waiter.served.wait()
                    if self._queue and self._queue[0] is waiter:
                        self.serve_waiting()
            if waiter.error is not None:
                raise waiter.error
            if waiter.lease is None:
                raise QueueTimeout("All workers are busy.")

            lease, waiter.lease = waiter.lease, None
            return lease
        finally:
            times.queued += times.clock() - began
            if not waiter.served.is_set():
                self._queue.remove(waiter)
            if waiter.lease is not None:  # it was handed over just as the client left
                waiter.lease.release()

    def serve_waiting(self) -> None:
        """Hand free places to those who wait, in their order. To be called whenever a place may have become free."""
        if self._serving or not self._queue:
            return

        self._serving = True  # a lease that is released meanwhile calls this again
        try:
            for waiter in list(self._queue):
                try:
                    waiter.lease = self._select(waiter.request, ())
                except AllBusy:
                    continue
                except RouterError as exc:
                    waiter.error = exc
                self._queue.remove(waiter)
                waiter.served.set()
        finally:
            self._serving = False

    def _serve_first(self) -> None:
        """Let the queue go first if its first request can be served: a cool-down may have ended without a word."""
        try:
            self._queue[0].lease = self._select(self._queue[0].request, ())
        except RouterError:
            return
        self._queue.popleft().served.set()
        self.serve_waiting()
