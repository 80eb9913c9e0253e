"""Owns what ends a request early: the scope of one task, and a time limit that is moved far oftener than reached.

Each has two forms. Where requests may be cancelled natively (see `Mode.native_pool`), which is on asyncio only,
the scope is asyncio's own way: `task.cancel()` and `task.uncancel()`, as `asyncio.timeout` uses them. An
`anyio.CancelScope`, which is used elsewhere, costs 5 us more: two of them are a twentieth of a request.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import anyio

if TYPE_CHECKING:
    from types import TracebackType

_EARLY = 0.002  # seconds by which a loop's timer may come too soon: uvloop counts in milliseconds


class Scope(Protocol):
    """What is left early when it is cancelled: an `anyio.CancelScope`, or the like."""

    @property
    def cancel_called(self) -> bool:
        """Whether `cancel` was called."""
        ...

    @property
    def cancelled_caught(self) -> bool:
        """Whether it was left early because of that."""
        ...

    def cancel(self) -> None:
        """Leave it, at the next await. Idempotent."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> bool: ...


class TaskScope:
    """A scope of one asyncio task, cancelled by others than this task, once.

    Args:
        loop: the task's. (To ask for the running loop is a system call in CPython 3.11.)
    """

    __slots__ = ("_before", "_loop", "_task", "cancel_called", "cancelled_caught")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.cancel_called = False
        self.cancelled_caught = False
        self._task: asyncio.Task[object] | None = None
        self._before = 0

    def cancel(self) -> None:
        """Leave it, at the await where its task is. One that hasn't been entered, or has been left, stays as it is."""
        if not self.cancel_called and self._task is not None:
            self.cancel_called = True
            self._task.cancel()

    def __enter__(self) -> TaskScope:
        self._task = task = asyncio.current_task(self._loop)
        assert task is not None  # a coroutine runs in one
        self._before = task.cancelling()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> bool:
        task, self._task = self._task, None
        if not self.cancel_called or task is None:
            return False
        # Cancelled by others, too, the task goes on being cancelled.
        self.cancelled_caught = task.uncancel() <= self._before and exc_type is asyncio.CancelledError
        return self.cancelled_caught


class TimeLimit:
    """A scope that is cancelled when a moment has passed, which can be put off at almost no cost.

    Moving the deadline of an `anyio.CancelScope` takes a timer away and makes another. On asyncio this leaves the timer
    where it is, and looks at the moment anew when it rings; elsewhere it is a scope's deadline as ever.

    Args:
        loop: use a `TaskScope` of this loop. None: an `anyio.CancelScope`.

    Attributes:
        scope: what is cancelled.
        until: the moment, by the event loop's clock (`anyio.current_time`); infinity: never.
    """

    __slots__ = ("_loop", "_rings_at", "_timer", "scope", "until")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.scope: TaskScope | anyio.CancelScope = anyio.CancelScope() if loop is None else TaskScope(loop)
        self.until = math.inf
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def __enter__(self) -> TimeLimit:
        if self._loop is None:
            with suppress(RuntimeError):  # no asyncio
                self._loop = asyncio.get_running_loop()
        self.scope.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self.scope.__exit__(exc_type, exc, traceback)

    @property
    def passed(self) -> bool:
        """Whether the scope has been cancelled, by this or by somebody."""
        return self.scope.cancel_called

    def allow(self, seconds: float | None) -> None:
        """Let the moment be in so many seconds; None: never."""
        if seconds is None:
            self.move(math.inf)
        elif self._loop is None:
            self.move(anyio.current_time() + seconds)
        else:
            self.until = until = self._loop.time() + seconds
            if until < self._rings_at:
                self.move(until)

    def move(self, until: float) -> None:
        """Let it be the moment `until`."""
        self.until = until
        if self._loop is not None:
            if until < self._rings_at:
                if self._timer is not None:
                    self._timer.cancel()
                self._set(self._loop, until)
        elif isinstance(self.scope, anyio.CancelScope):
            self.scope.deadline = until

    def _set(self, loop: asyncio.AbstractEventLoop, moment: float) -> None:
        self._rings_at = moment
        self._timer = loop.call_at(moment, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._rings_at = None, math.inf
        if loop.time() + _EARLY >= self.until:
            self.scope.cancel()
        elif self.until < math.inf:
            self._set(loop, self.until)
