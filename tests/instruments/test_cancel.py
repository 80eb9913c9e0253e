"""Shows that the cancel helpers land where they say, and notice shields, swallowing and misses."""

from __future__ import annotations

import contextlib

import anyio
import pytest

from tests.instruments import asyncio_only
from tests.instruments.cancel import cancel_in_scope, cancel_natively, count_turns

pytestmark = pytest.mark.anyio


class Steps:
    """A coroutine of ten steps with a cleanup, which may be shielded."""

    def __init__(self, *, shield: bool = True) -> None:
        self.shield = shield
        self.done = 0
        self.fifth = anyio.Event()
        self.cleaning = anyio.Event()
        self.cleaned = False

    async def run(self) -> str:
        """Make the steps, then clean up, which takes ten more."""
        try:
            for _ in range(10):
                self.done += 1
                if self.done == 5:
                    self.fifth.set()
                    await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
            return "done"
        finally:
            self.cleaning.set()
            with anyio.CancelScope(shield=self.shield):
                for _ in range(10):
                    await anyio.lowlevel.checkpoint()
                self.cleaned = True


@asyncio_only
@pytest.mark.parametrize(("turns", "steps"), [(0, 0), (1, 1), (3, 3)])
async def test_a_native_cancel_lands_at_its_turn(turns: int, steps: int) -> None:
    """Turn 0 is before the first step; each further turn is one more step."""
    work = Steps()
    outcome = await cancel_natively(work.run(), at=[turns])
    assert (outcome.cancelled, outcome.sent, work.done) == (True, 1, steps)


@asyncio_only
async def test_a_native_cancel_waits_for_an_event() -> None:
    """An event and a function to await are moments, too."""
    for as_function in (False, True):
        work = Steps()
        outcome = await cancel_natively(work.run(), at=[work.fifth.wait if as_function else work.fifth])
        assert (outcome.cancelled, work.done) == (True, 5)


@asyncio_only
async def test_a_second_native_cancel_goes_through_a_shield() -> None:
    """One native cancel leaves a shielded cleanup whole; a second one, inside it, does not."""
    once, twice = Steps(), Steps()
    assert (await cancel_natively(once.run(), at=[once.fifth])).cancelled
    outcome = await cancel_natively(twice.run(), at=[twice.fifth, twice.cleaning])
    assert (outcome.cancelled, outcome.sent) == (True, 2)
    assert (once.cleaned, twice.cleaned) == (True, False)


@asyncio_only
async def test_later_cancels_that_come_too_late_are_not_counted() -> None:
    """`sent` counts only those that found the task alive."""
    work = Steps()
    outcome = await cancel_natively(work.run(), at=[work.fifth, 500, 500])
    assert (outcome.sent, work.cleaned) == (1, True)


@asyncio_only
async def test_a_native_cancel_that_misses_fails() -> None:
    """A test that cancels after the end tests nothing, and is told so."""
    with pytest.raises(AssertionError, match="before it could be cancelled"):
        await cancel_natively(Steps().run(), at=[500])
    with pytest.raises(AssertionError, match="before it could be cancelled"):
        await cancel_natively(Steps().run(), at=[anyio.Event()])


@asyncio_only
async def test_a_task_that_hangs_in_its_cleanup_is_put_down() -> None:
    """The helper gives up after its time, and takes the task with it."""
    ended = anyio.Event()

    async def stubborn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

    with pytest.raises(TimeoutError):
        await cancel_natively(stubborn(), at=[3], timeout=0.05)
    assert ended.is_set()


@asyncio_only
async def test_every_turn_of_a_run_can_be_hit() -> None:
    """Cancelling at each of the counted turns finds the task alive each time."""
    turns = await count_turns(Steps().run())
    assert turns > 20
    for turn in range(turns):
        assert (await cancel_natively(Steps().run(), at=[turn])).sent == 1


async def test_a_cancelled_scope_tells_a_shield_from_none() -> None:
    """A shielded cleanup comes to its end under a cancelled scope, an unshielded one does not."""
    for shield in (True, False):
        work = Steps(shield=shield)
        outcome = await cancel_in_scope(work.run, at=work.fifth)
        assert (outcome.cancelled, work.done, work.cleaned) == (True, 5, shield)


async def test_a_scope_cancelled_before_the_start_lets_the_first_step_run() -> None:
    """Unlike a native cancel at turn 0."""
    work = Steps()
    outcome = await cancel_in_scope(work.run, at=0)
    assert (outcome.cancelled, work.done) == (True, 1)


async def test_a_scope_cancel_that_misses_fails() -> None:
    """A moment after the end, or one that never comes, is an error."""
    for moment in (500, anyio.Event()):
        with pytest.raises(AssertionError, match="before it could be cancelled"):
            await cancel_in_scope(Steps().run, at=moment)


async def test_swallowing_a_scope_cancel_is_noticed() -> None:
    """A function that returns in spite of its cancellation is not `cancelled`."""

    async def swallows() -> str:
        with contextlib.suppress(BaseException):
            await anyio.sleep_forever()
        return "fine"

    outcome = await cancel_in_scope(swallows, at=3)
    assert (outcome.result, outcome.cancelled, outcome.swallowed) == ("fine", False, True)


@asyncio_only
async def test_swallowing_a_native_cancel_is_noticed() -> None:
    """The same for a task; a task that turns it into an exception has not swallowed it."""

    async def swallows(error: Exception | None) -> str:
        try:
            await anyio.sleep_forever()
        except BaseException:
            if error is not None:
                raise error from None
        return "fine"

    outcome = await cancel_natively(swallows(None), at=[3])
    assert (outcome.result, outcome.swallowed) == ("fine", True)
    turned = await cancel_natively(swallows(error := ValueError("bug")), at=[3])
    assert (turned.exception, turned.swallowed, turned.cancelled) == (error, False, False)
