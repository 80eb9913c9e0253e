"""Owns native cancellation: `asyncio.Task.cancel()` goes through anyio shields, at any moment, many times.

uvicorn sends it at the end of its grace period, `asyncio.Runner` when it closes, host code by `wait_for`. The
sweep cancels at every turn of the event loop that a request lives, so at every await there is.
"""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.cancel import Moment, cancel_natively
from tests.routed import KINDS, Kind, Routed, answer, completion_body

pytestmark = [
    pytest.mark.anyio,
    asyncio_only,
    pytest.mark.parametrize("kind", KINDS),
]

MORE_TURNS_THAN_A_REQUEST_LIVES = 200


def set_event() -> anyio.Event:
    """An event that is set: waiting for it takes a turn and no longer."""
    event = anyio.Event()
    event.set()
    return event


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("apart", [0, 1, 3])
async def test_cancelled_at_every_turn(kind: Kind, times: int, apart: int) -> None:
    """Whenever a request is cancelled natively, once or again in its clean-up, both counters are back."""
    first, *rest = answer(kind).body
    slow = [set_event()] * 4
    script = replace(answer(kind), connect=slow, head=slow, close=slow, body=[first, *slow, *rest])
    cut_in_flight = 0
    for turn in range(MORE_TURNS_THAN_A_REQUEST_LIVES):
        routed = Routed(script)
        exchange = Exchange(body=completion_body())
        moments: list[Moment] = [turn, *[apart] * (times - 1)]
        try:
            outcome = await cancel_natively(exchange.run(routed.app), at=moments)
        except AssertionError:
            break  # the request was over before its turn came

        assert outcome.cancelled
        cut_in_flight += bool(routed.worker.calls)
        routed.assert_released(exchange)
    else:
        pytest.fail("the request outlived the sweep")

    assert cut_in_flight > 10


@pytest.mark.usefixtures("short_graces")
@pytest.mark.parametrize("phase", ["connect", "head", "first byte", "mid", "send", "close"])
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancelled_while_it_waits(kind: Kind, phase: str, times: int) -> None:
    """The same for a request that waits for something that never comes."""
    good = answer(kind)
    script = {
        "connect": replace(good, connect=[HANG]),
        "head": replace(good, head=[HANG]),
        "first byte": replace(good, body=[HANG]),
        "mid": replace(good, body=[*list(good.body)[:1], HANG]),
        "send": good,
        "close": replace(good, close=[HANG]),
    }[phase]
    routed = Routed(script)
    exchange = Exchange(body=completion_body(), at={1: HANG} if phase == "send" else {})
    first: Moment = {
        "mid": lambda: exchange.body_at_least(1),
        "send": exchange.hung,
        "close": lambda: routed.worker.closing(1),
        "connect": lambda: routed.worker.changes.until(lambda: routed.worker.connects == 1),
    }.get(phase, lambda: routed.worker.received(1))
    outcome = await cancel_natively(exchange.run(routed.app), at=[first, *[1] * (times - 1)])

    assert outcome.cancelled
    routed.assert_released(exchange, responses_closed=phase != "close")
