"""Owns the ways out of an aborted request, at every stage: what its client gets, and that nothing is left counted."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router.errors import AnswerCut
from tests.abort.calls import ABORT_PATH, abort, aborted, engine, outcomes, request, stuck, until
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.cancel import Moment, cancel_in_scope, cancel_natively, count_turns
from tests.routed import KINDS, Kind, Routed, answer, completion_body, error_of
from tests.test_native_cancel import set_event

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.instruments.fake_worker import Script

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("short_graces"),
    pytest.mark.parametrize("kind", KINDS),
]

EARLY = ("connect", "head", "first byte")
MORE_TURNS_THAN_A_REQUEST_LIVES = 200


def held_at(stage: str, kind: Kind) -> tuple[Routed, Exchange, Callable[[], Awaitable[object]]]:
    """A request that gets as far as `stage` and no further; the last item waits until it is there."""
    script, taken = stuck(kind)
    scripts: dict[str, Script] = {
        "connect": replace(answer(kind), connect=[HANG]),
        "head": replace(answer(kind), head=[HANG]),
        "first byte": replace(answer(kind), body=[HANG]),
        "mid": script,
    }
    routed = Routed(engine(scripts.get(stage, answer(kind))))
    exchange = request("job-1", at={1: HANG} if stage == "send" else {})
    worker = routed.worker

    async def is_there() -> None:
        if stage == "mid":
            await taken.wait()
        elif stage == "send":
            await exchange.changes.until(lambda: exchange.hanging)
        else:
            await worker.changes.until(lambda: worker.connects == 1 and (stage == "connect" or bool(worker.calls)))

    return routed, exchange, is_there


@pytest.mark.parametrize("stage", EARLY)
async def test_aborted_before_the_first_byte(kind: Kind, stage: str) -> None:
    """Nothing has been said yet, so the client gets one clean error; the worker's connection is closed."""
    routed, exchange, is_there = held_at(stage, kind)
    ended = outcomes(routed)
    async with exchange.running(routed.app):
        await is_there()
        assert routed.counters[0][2] == 1
        assert aborted(await abort(routed, "job-1")) == {"job-1": None}

    assert error_of(exchange) == (410, "request_aborted")
    assert exchange.finished_cleanly
    assert ended == [("job-1", "request_aborted")]
    routed.assert_released(exchange)


async def test_aborted_mid_answer(kind: Kind) -> None:
    """An event stream gets an error event and no `[DONE]`, anything else is cut."""
    routed, exchange, is_there = held_at("mid", kind)
    ended = outcomes(routed)
    with pytest.raises(AnswerCut) if kind == "json" else nullcontext():
        async with exchange.running(routed.app):
            await is_there()
            assert routed.counters[0][0] == 1
            await abort(routed, "job-1")

    assert (exchange.status, exchange.ends) == (200, 0)
    assert exchange.body.count(b'"code": "request_aborted"') == (kind == "stream")
    assert b"[DONE]" not in exchange.body
    assert ended == [("job-1", "request_aborted")]
    routed.assert_released(exchange)


async def test_aborted_while_send_blocks(kind: Kind) -> None:
    """A client that doesn't read is cut off: nobody knows what it has taken, so nothing more is sent."""
    routed, exchange, is_there = held_at("send", kind)
    ended = outcomes(routed)
    async with exchange.running(routed.app):
        await is_there()
        await abort(routed, "job-1")

    assert (exchange.starts, exchange.ends, exchange.complete) == (1, 0, False)
    assert ended == [("job-1", "request_aborted")]
    routed.assert_released(exchange)


async def test_aborted_in_its_upload(kind: Kind) -> None:
    """A request whose body hasn't come whole reaches no worker."""
    routed = Routed(engine(answer(kind)))
    ended = outcomes(routed)
    exchange = Exchange(body=[completion_body()[:100], HANG], headers=[("x-request-id", "job-1")])
    async with exchange.running(routed.app):
        await until(lambda: routed.router.stats().exchanges == 1)
        await abort(routed, "job-1")

    assert error_of(exchange) == (410, "request_aborted")
    assert ended == [("job-1", "request_aborted")]
    assert [call.url for call in routed.worker.calls if not call.url.endswith(ABORT_PATH)] == []
    routed.assert_released(exchange)


async def test_aborted_in_the_queue(kind: Kind) -> None:
    """A request that waits for a place leaves the queue; the one that has the place goes on."""
    gate = anyio.Event()
    routed = Routed(engine(replace(answer(kind), head=[gate])), max_concurrent_per_worker=1)
    first, second = request("first"), request("second")
    async with first.running(routed.app):
        await routed.worker.received(1)
        async with second.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            await abort(routed, "second")

        assert error_of(second) == (410, "request_aborted")
        assert len(routed.router._mode.admission) == 0
        assert routed.counters[0][0] == 1
        gate.set()

    assert first.finished_cleanly
    routed.assert_released(second)


async def test_the_place_of_an_aborted_request_is_given_on(kind: Kind) -> None:
    """An abort makes room for the next in the queue, at once."""
    gate = anyio.Event()
    routed = Routed(engine(replace(answer(kind), head=[gate])), max_concurrent_per_worker=1)
    first, second = request("first"), request("second")
    async with first.running(routed.app), second.running(routed.app):
        await routed.worker.received(1)
        await until(lambda: len(routed.router._mode.admission) == 1)
        await abort(routed, "first")
        gate.set()

    assert error_of(first) == (410, "request_aborted")
    assert second.finished_cleanly
    routed.assert_released(second)


@pytest.mark.parametrize("stage", [*EARLY, "mid", "send"])
async def test_scope_cancelled_with_the_abort(kind: Kind, stage: str) -> None:
    """A host that cancels the request in the very moment of its abort finds nothing left."""
    routed, exchange, is_there = held_at(stage, kind)

    async def stopped() -> None:
        await is_there()
        for own in routed.router._exchanges:
            own.stop(RuntimeError("never seen"))

    with suppress(AnswerCut):
        await cancel_in_scope(lambda: exchange.run(routed.app), at=stopped)
    routed.assert_released(exchange)


# --- native cancellation -------------------------------------------------------------------------------------


@asyncio_only
@pytest.mark.parametrize("stage", [*EARLY, "mid", "send"])
@pytest.mark.parametrize("times", [1, 3])
async def test_cancelled_natively_at_every_turn(kind: Kind, stage: str, times: int) -> None:
    """However an abort and a native cancellation of the same request meet, both counters are back."""
    met = 0
    for turn in range(MORE_TURNS_THAN_A_REQUEST_LIVES):
        routed, exchange, is_there = held_at(stage, kind)
        asked = False
        moments: list[Moment] = [turn, *[1] * (times - 1)]
        over = False
        async with anyio.create_task_group() as tasks:

            async def stop(is_there: Callable[[], Awaitable[object]] = is_there, routed: Routed = routed) -> None:
                nonlocal asked
                await is_there()
                asked = True
                await abort(routed, "job-1")

            tasks.start_soon(stop)
            try:
                outcome = await cancel_natively(exchange.run(routed.app), at=moments)
                met += asked and outcome.cancelled
            except AssertionError:
                over = True  # before its turn came
            tasks.cancel_scope.cancel()

        routed.assert_released(exchange)
        if over:
            break
    else:
        pytest.fail("the request outlived the sweep")
    assert met > 1


@asyncio_only
async def test_the_asking_is_cancelled_natively_at_every_turn(kind: Kind) -> None:
    """Whoever asks may be cancelled at any moment: either the request has ended or it goes on, and none leaks."""
    slow = [set_event()] * 3
    ended = 0
    for turn in range(MORE_TURNS_THAN_A_REQUEST_LIVES):
        told = replace(answer("json"), connect=slow, head=slow, close=slow, status=404)
        script, taken = stuck(kind)
        routed = Routed(engine(script, told))
        exchange = request("job-1")
        over = False
        with suppress(AnswerCut):
            async with exchange.running(routed.app):
                await taken.wait()
                asking = Exchange(path=ABORT_PATH, body=b'{"req_ids": ["job-1"]}')
                try:
                    outcome = await cancel_natively(asking.run(routed.app), at=[turn])
                    assert outcome.cancelled
                except AssertionError:
                    over = True
                ended += not exchange.ended
                exchange.disconnect()

        routed.assert_released(exchange)
        assert routed.router._aborts.busy == 0
        if over:
            break
    else:
        pytest.fail("the abort outlived the sweep")
    assert turn > 10


@asyncio_only
async def test_the_sweep_is_long_enough(kind: Kind) -> None:
    """The sweeps above end because a request does, not because they are short."""
    routed = Routed(answer(kind))
    assert await count_turns(Exchange(body=completion_body()).run(routed.app)) < MORE_TURNS_THAN_A_REQUEST_LIVES
