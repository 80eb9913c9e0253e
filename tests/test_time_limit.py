"""Shows the scope of a task, and a time limit that is moved far oftener than reached."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest
import sniffio

from asgi_router.time_limit import TaskScope, TimeLimit
from tests.instruments import asyncio_only

pytestmark = pytest.mark.anyio


def forms() -> tuple[asyncio.AbstractEventLoop | None, ...]:
    """Both forms of a scope where there are both: on asyncio."""
    return (None, asyncio.get_running_loop()) if sniffio.current_async_library() == "asyncio" else (None,)


@asyncio_only
async def test_a_cancelled_scope_is_left_and_the_task_goes_on() -> None:
    """What is awaited in it ends, what comes after it doesn't."""
    with TaskScope(asyncio.get_running_loop()) as scope:
        asyncio.get_running_loop().call_soon(scope.cancel)
        await anyio.sleep_forever()
    assert scope.cancel_called
    assert scope.cancelled_caught
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@asyncio_only
async def test_a_task_that_others_cancel_goes_on_being_cancelled() -> None:
    """A cancellation of the task itself comes out of the scope, also if the scope was cancelled in the same tick."""

    async def work() -> None:
        with TaskScope(asyncio.get_running_loop()) as scope:
            scopes.append(scope)
            await anyio.sleep_forever()

    for both in (False, True):
        scopes: list[TaskScope] = []
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        if both:
            scopes[0].cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not scopes[0].cancelled_caught


@asyncio_only
async def test_the_outer_scope_is_left_when_it_is_the_one() -> None:
    """Of two scopes, one in the other, cancelled both or one, the right one is left."""
    for inner_too in (False, True):
        with TaskScope(asyncio.get_running_loop()) as outer:
            with TaskScope(asyncio.get_running_loop()) as inner:
                loop = asyncio.get_running_loop()
                loop.call_soon(outer.cancel)
                if inner_too:
                    loop.call_soon(inner.cancel)
                await anyio.sleep_forever()
            raise AssertionError("the outer scope was to be left")
        assert outer.cancelled_caught
        assert not inner.cancelled_caught


@asyncio_only
async def test_cancelling_what_is_not_entered_does_nothing() -> None:
    """Neither before nor after it does a scope cancel anything."""
    scope = TaskScope(asyncio.get_running_loop())
    scope.cancel()
    with scope:
        await asyncio.sleep(0)
    scope.cancel()
    await asyncio.sleep(0)
    assert not scope.cancel_called


async def test_time_runs_out() -> None:
    """When the moment has passed, what is enclosed is left."""
    for loop in forms():
        with anyio.fail_after(5), TimeLimit(loop) as limit:
            limit.allow(0.01)
            await anyio.sleep_forever()
        assert limit.passed
        assert limit.scope.cancelled_caught


async def test_a_limit_that_is_put_off_is_not_reached() -> None:
    """Each call moves the moment, either way; None takes it away."""
    for loop in forms():
        with anyio.fail_after(5):
            with TimeLimit(loop) as limit:
                for _ in range(3):
                    limit.allow(0.05)
                    limit.allow(60.0)
                    await anyio.sleep(0.06)
                limit.allow(0.05)
                limit.allow(None)
                assert limit.until == math.inf
                await anyio.sleep(0.06)
            assert not limit.passed
            with TimeLimit(loop) as limit:
                limit.allow(0.01)
                limit.allow(60.0)
                await anyio.sleep(0.06)  # the timer rings, and is set anew
                limit.allow(0.2)
                await anyio.sleep_forever()
            assert limit.passed
            with TimeLimit(loop) as limit:
                limit.allow(0.01)
                limit.allow(0.05)  # later, and yet not for ever
                await anyio.sleep_forever()
            assert limit.passed


@asyncio_only
async def test_putting_it_off_costs_no_timer() -> None:
    """On asyncio there is one timer, however often the moment is moved away; none when the scope is left."""
    with TimeLimit() as limit:
        limit.allow(60.0)
        timer = limit._timer
        for _ in range(100):
            limit.allow(60.0)
            limit.allow(None)
            limit.allow(90.0)
        assert limit._timer is timer
    assert timer is not None
    assert timer.cancelled()
