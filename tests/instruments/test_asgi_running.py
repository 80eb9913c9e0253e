"""Shows that running an app under the raw ASGI harness hides no exception, cancellation, time-out or early end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from tests.instruments.asgi_client import Exchange
from tests.instruments.test_asgi_client import END, START, sends, watched

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio


async def test_a_swallowed_cancellation_is_noticed() -> None:
    """An app that returns as if nothing were when it is cancelled fails the run, whoever cancelled it."""

    async def swallows(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(START)
            await anyio.sleep_forever()
        except BaseException:
            return

    with pytest.raises(AssertionError, match="swallowed"):
        await Exchange().run(swallows, timeout=0.05)
    exchange = Exchange()
    async with exchange.running(swallows):
        await exchange.started()
        exchange.cancel()
    assert not exchange.cancelled


async def test_an_app_that_dies_early_fails_the_waiting_test_at_once() -> None:
    """Waiting for a message that cannot come any more raises, with the app's exception as the cause."""

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        raise ValueError("bug")

    exchange = Exchange()
    with pytest.raises(AssertionError, match="ended before 1 body messages") as caught:
        async with exchange.running(dies):
            await exchange.body_at_least(1)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="bug"):
        async with (again := Exchange()).running(dies):
            await again.over()


async def test_the_harness_lets_an_outer_cancellation_through() -> None:
    """Neither way of running stops a cancellation from outside."""
    exchange = Exchange()
    with anyio.CancelScope() as outer:
        async with exchange.running(watched):
            await exchange.body_at_least(2)
            outer.cancel()
            await anyio.lowlevel.checkpoint()
    assert outer.cancelled_caught
    assert exchange.ended
    assert not exchange.cancelled


async def test_a_test_that_waits_too_long_is_told_so() -> None:
    """If the app has long returned, the time-out blames nobody for swallowing a cancellation."""
    with pytest.raises(TimeoutError, match="returned"):
        async with Exchange().running(sends(START, END), timeout=0.05):
            await anyio.sleep_forever()
