"""Owns asking every worker something again and again: how often, and that a slow one holds up nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from anyio.abc import TaskGroup

    from asgi_router.scheduling.state import WorkerState


class Rounds:
    """Asks the workers, all at the same time, once an interval.

    A worker that is slow to answer is not asked again before it has answered. The answer to a worker that has left
    meanwhile goes to its old state, which nobody reads.

    Args:
        workers: the fleet, iterated anew for each round.
        ask: asks one worker and notes the answer. It bounds its own time, and doesn't raise.
        interval: seconds from one round to the next. The first one is that long after the start.
    """

    def __init__(
        self,
        workers: Iterable[WorkerState],
        ask: Callable[[WorkerState], Awaitable[None]],
        *,
        interval: float,
    ) -> None:
        self._workers = workers
        self._ask = ask
        self._interval = interval
        self._runner: object | None = None
        self._asked: set[WorkerState] = set()  # who has not answered yet

    async def run(self, first: Iterable[WorkerState] = ()) -> None:
        """Ask until cancelled; those in `first` at once.

        It may run several times at once, once for each app that shares a router: one of them does the asking, and
        when that ends another one takes over.
        """
        me = object()
        try:
            async with anyio.create_task_group() as tasks:
                self._start(tasks, first)
                while True:
                    await anyio.sleep(self._interval)
                    self._runner = self._runner or me
                    if self._runner is me:
                        self._start(tasks, self._workers)
        finally:
            if self._runner is me:
                self._runner = None

    async def once(self, workers: Iterable[WorkerState] | None = None) -> None:
        """Ask each worker (of `workers`, if they are given) once, but for those that have not answered yet."""
        async with anyio.create_task_group() as tasks:
            self._start(tasks, self._workers if workers is None else workers)

    def _start(self, tasks: TaskGroup, workers: Iterable[WorkerState]) -> None:
        for state in workers:
            if state not in self._asked:
                self._asked.add(state)
                tasks.start_soon(self._ask_one, state)

    async def _ask_one(self, state: WorkerState) -> None:
        try:
            await self._ask(state)
        finally:
            self._asked.discard(state)
