"""Cancel a coroutine at a chosen moment: natively, as `asyncio.Task.cancel()` does, or through an anyio scope.

Shows: what is left behind when the cancellation lands at a given moment, once or several times, and that it was not
swallowed. A native cancel (uvicorn's at the end of its grace period, `asyncio.Runner` on closing) goes through anyio
shields and comes once per call; a cancelled scope raises again at every await that is not shielded: test both.
Cannot show: what happens when the process dies; and loop turns are no time, so a turn number means something only for
code that waits on nothing outside the loop.

    outcome = await cancel_natively(exchange.run(app), at=[exchange.started, 0, 1])  # three times; asyncio only
    outcome = await cancel_in_scope(lambda: exchange.run(app), at=gate)  # on any loop
    assert outcome.cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

T = TypeVar("T")

# So many loop turns after the moment before (0: at once), or in the turn after an event, or after what is awaited.
Moment = int | anyio.Event | Callable[[], Awaitable[object]]

_GIVE_UP_AFTER = 100


@dataclass
class Outcome(Generic[T]):
    """What became of the coroutine: exactly one of a result, an exception, or `cancelled`."""

    result: T | None = None
    exception: Exception | None = None
    cancelled: bool = False
    sent: int = 0  # cancellations that found the coroutine still running

    @property
    def swallowed(self) -> bool:
        """It was cancelled and ended as if nothing were."""
        return self.sent > 0 and not self.cancelled and self.exception is None


async def cancel_natively(
    coroutine: Coroutine[object, object, T], *, at: Sequence[Moment], timeout: float = 5.0
) -> Outcome[T]:
    """Run it as an asyncio task, `cancel()` it at each moment in turn, and wait for its end.

    `at=[0]` cancels it before its first step. Later moments that it does not live to see are left out; if it does not
    live to see the first, that is an `AssertionError`. `TimeoutError` if it is not over after `timeout` seconds.
    """
    task = asyncio.create_task(coroutine)
    ended = anyio.Event()
    task.add_done_callback(lambda _: ended.set())
    outcome: Outcome[T] = Outcome()

    def cancel() -> None:
        outcome.sent += task.cancel()  # false if it is over

    try:
        with anyio.fail_after(timeout):
            for moment in at:
                try:
                    await _act_at(moment, ended, cancel)
                except AssertionError:
                    if outcome.sent == 0:
                        raise
            await ended.wait()
    finally:
        await _put_down(task)
    if task.cancelled():
        outcome.cancelled = True
    elif (error := task.exception()) is None:
        outcome.result = task.result()
    elif isinstance(error, Exception):
        outcome.exception = error
    else:
        raise error
    return _judged(outcome)


async def cancel_in_scope(function: Callable[[], Awaitable[T]], *, at: Moment, timeout: float = 5.0) -> Outcome[T]:
    """Await `function()` inside an anyio scope, cancel that at the moment, and wait for the end. Errors as above.

    `at=0` cancels the scope before it is entered: unlike a native cancel, that lets the function run to its first
    await.
    """
    outcome: Outcome[T] = Outcome()
    scope = anyio.CancelScope()
    ended = anyio.Event()

    async def run() -> None:
        try:
            with scope:
                outcome.result = await function()
            outcome.cancelled = scope.cancelled_caught
        except Exception as error:
            outcome.exception = error
        finally:
            ended.set()

    def cancel() -> None:
        outcome.sent = int(not ended.is_set())
        scope.cancel()

    early: AssertionError | None = None
    with anyio.fail_after(timeout):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            try:
                await _act_at(at, ended, cancel)
            except AssertionError as error:
                early = error
                group.cancel_scope.cancel()
    if early is not None:
        raise early
    return _judged(outcome)


async def count_turns(coroutine: Coroutine[object, object, object]) -> int:
    """How many loop turns an undisturbed run takes, so that a test can cancel at each: `for n in range(turns)`."""
    task = asyncio.create_task(coroutine)
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    task.result()
    return turns


async def _act_at(moment: Moment, ended: anyio.Event, act: Callable[[], None]) -> None:
    """Act in the very turn of the moment, if it comes before the end. Raises what the moment raises, never a group."""
    if isinstance(moment, int):
        for _ in range(moment):
            await anyio.lowlevel.checkpoint()
        act()
        return
    wait = moment.wait if isinstance(moment, anyio.Event) else moment
    failure: Exception | None = None
    async with anyio.create_task_group() as group:

        async def stop_waiting() -> None:
            await ended.wait()
            group.cancel_scope.cancel()

        group.start_soon(stop_waiting)
        try:
            await wait()
            act()
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _put_down(task: asyncio.Task[T]) -> None:
    """End a task that outlived its time: it must not disturb the next test."""
    with anyio.CancelScope(shield=True):
        for _ in range(_GIVE_UP_AFTER):
            if task.done():
                return
            task.cancel()
            await asyncio.sleep(0)


def _judged(outcome: Outcome[T]) -> Outcome[T]:
    if outcome.sent == 0:
        raise AssertionError(f"it was over before it could be cancelled: {outcome!r}") from outcome.exception
    return outcome
