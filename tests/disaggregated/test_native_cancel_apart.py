"""Owns native cancellation where prefill and decode are apart: at every turn of the loop that a request lives.

See `tests/test_native_cancel.py` for what it is. Here it meets two legs in tasks of their own, and a change of pair.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.disaggregated.routed_apart import (
    DECODE,
    DECODE_2,
    PREFILL,
    PREFILLED,
    RESET,
    RoutedApart,
    request,
)
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.cancel import Moment, cancel_natively
from tests.routed import KINDS, answer, completion_body, interrupted
from tests.test_native_cancel import MORE_TURNS_THAN_A_REQUEST_LIVES, set_event

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.disaggregated.routed_apart import Dialect
    from tests.instruments.fake_worker import Script
    from tests.routed import Kind

pytestmark = [pytest.mark.anyio, asyncio_only, pytest.mark.parametrize("kind", KINDS)]

either_order = pytest.mark.parametrize("dialect", ["fastdeploy", "vllm"])


def slowly(script: Script) -> Script:
    """The same worker, which takes a few turns for everything."""
    first, *rest = script.body
    slow = [set_event()] * 3
    return replace(script, connect=slow, head=slow, close=slow, body=[first, *slow, *rest])


async def sweep(
    routed: Callable[[], RoutedApart], kind: Kind, apart: int | None, seen: Callable[[RoutedApart], bool]
) -> int:
    """Cancel at every turn, once or, `apart` turns later, twice; return at how many of them something was seen."""
    count = 0
    for turn in range(MORE_TURNS_THAN_A_REQUEST_LIVES):
        one = routed()
        exchange = request(kind)
        moments: list[Moment] = [turn] if apart is None else [turn, apart]
        try:
            outcome = await cancel_natively(exchange.run(one.app), at=moments)
        except AssertionError:
            return count  # the request was over before its turn came

        assert outcome.cancelled
        count += seen(one)
        one.assert_released(exchange)
    pytest.fail("the request outlived the sweep")


@either_order
@pytest.mark.parametrize("apart", [None, 0, 1, 3])
async def test_cancelled_at_every_turn(dialect: Dialect, kind: Kind, apart: int | None) -> None:
    """Whenever a request is cancelled natively, once or again in its clean-up, both leases and both legs are gone."""
    prefill = PREFILLED if dialect == "vllm" else answer(kind)

    def routed() -> RoutedApart:
        return RoutedApart(slowly(prefill), slowly(answer(kind)), pd_dialect=dialect)

    def both_asked(one: RoutedApart) -> bool:
        return one.calls == {PREFILL: 1, DECODE: 1}

    assert await sweep(routed, kind, apart, both_asked) > 10


@either_order
@pytest.mark.parametrize("apart", [None, 1])
async def test_cancelled_at_every_turn_of_a_new_pair(dialect: Dialect, kind: Kind, apart: int | None) -> None:
    """The same on the way from one pair to another."""
    prefill = PREFILLED if dialect == "vllm" else answer(kind)
    broken = replace(slowly(answer(kind)), body=[set_event(), RESET])

    def routed() -> RoutedApart:
        decodes = {DECODE: broken, DECODE_2: slowly(answer(kind))}
        return RoutedApart(slowly(prefill), decodes, pd_dialect=dialect, decode_policy="round_robin")

    def moved_on(one: RoutedApart) -> bool:
        return one.fleet[DECODE_2].connects > 0

    assert await sweep(routed, kind, apart, moved_on) > 10


@pytest.mark.parametrize("refuses", ["prefill", "decode"])
@pytest.mark.parametrize("apart", [None, 1])
async def test_cancelled_at_every_turn_of_a_refusal(kind: Kind, refuses: str, apart: int | None) -> None:
    """The same while one worker's error is passed on, and the other leg is ended."""
    refusal = slowly(replace(answer(kind), status=400))
    other = slowly(replace(interrupted(kind, HANG, after=1)))
    scripts = (refusal, other) if refuses == "prefill" else (other, refusal)

    def routed() -> RoutedApart:
        return RoutedApart(*scripts)

    def refused(one: RoutedApart) -> bool:
        return bool((one.prefill if refuses == "prefill" else one.decode).streams)

    assert await sweep(routed, kind, apart, refused) > 5


@pytest.mark.usefixtures("short_graces")
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    "phase", ["connect", "head", "first byte", "mid", "send", "close of prefill", "close of decode"]
)
async def test_cancelled_while_it_waits(kind: Kind, phase: str, times: int) -> None:
    """The same for legs that both wait for something that never comes."""
    good = answer(kind)
    hanging = {
        "connect": replace(good, connect=[HANG]),
        "head": replace(good, head=[HANG]),
        "first byte": replace(good, body=[HANG]),
        "mid": interrupted(kind, HANG),
    }.get(phase, good)
    closes = {f"close of {role}": replace(hanging, close=[HANG]) for role in ("prefill", "decode")}
    prefill = closes[phase] if phase == "close of prefill" else hanging
    decode = closes[phase] if phase == "close of decode" else hanging
    routed = RoutedApart(prefill, decode)
    body = completion_body(stream=kind == "stream")
    exchange = Exchange(body=body, at={1: HANG} if phase == "send" else {})
    workers = (routed.prefill, routed.decode)

    async def reached() -> None:
        for worker in workers:
            await worker.changes.until(lambda worker=worker: worker.connects == 1)  # type: ignore[misc]
            if phase != "connect":
                await worker.received(1)

    first: Moment = {
        "mid": lambda: exchange.body_at_least(1),
        "send": exchange.hung,
        "close of prefill": lambda: routed.prefill.closing(1),
        "close of decode": lambda: routed.decode.closing(1),
    }.get(phase, reached)
    outcome = await cancel_natively(exchange.run(routed.app), at=[first, *[1] * (times - 1)])
    assert outcome.cancelled
    routed.assert_released(exchange, responses_closed=not phase.startswith("close"))
