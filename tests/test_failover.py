"""Owns failover: what is tried on another worker before the client has seen a byte, and what never is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router.scheduling.breaker import BACK_OFF_LIMIT, BreakerState
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.cancel import cancel_natively
from tests.routed import KINDS, OTHER, WORKER, Kind, Routed, answer, completion_body, error_of, interrupted
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from tests.instruments.fake_worker import Script

pytestmark = pytest.mark.anyio

GOOD = answer("stream")
MARK = ("Idempotency-Key", "7")
BROKEN = {
    "reset before the head": replace(GOOD, head=[httpx.ReadError("reset")]),
    "reset before the first byte": replace(GOOD, body=[httpx.ReadError("reset")]),
    "late head": replace(GOOD, head=[HANG]),
    "late first byte": replace(GOOD, body=[HANG]),
    "no such status": replace(GOOD, status=799),
}


def busy(*headers: tuple[str, str], status: int = 503) -> Script:
    """A worker that takes no request now."""
    return replace(GOOD, status=status, headers=headers, body=[b"busy"])


def set_event() -> anyio.Event:
    """An event that is set: waiting for it takes a turn and no longer."""
    event = anyio.Event()
    event.set()
    return event


def first_then_second(first: Script, second: Script, **settings: object) -> Routed:
    """Two workers that are asked in turn."""
    return Routed({WORKER: first, OTHER: second}, policy="round_robin", **settings)


async def ask(routed: Routed, *headers: tuple[str, str]) -> Exchange:
    """Send one request, and see that nothing of it is left."""
    exchange = await Exchange(body=completion_body(), headers=headers).run(routed.app)
    routed.assert_released(exchange)
    return exchange


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", BROKEN)
async def test_marked_requests_are_repeated(broken: str, kind: Kind) -> None:
    """F-06: what a worker didn't begin to answer another one answers, if the client says that it may be repeated."""
    routed = first_then_second(BROKEN[broken], answer(kind), first_byte_timeout=0.05)
    exchange = await ask(routed, MARK)
    assert exchange.status == 200
    assert exchange.finished_cleanly
    assert [len(routed.fleet[url].calls) for url in (WORKER, OTHER)] == [1, 1]
    assert {call.body for url in (WORKER, OTHER) for call in routed.fleet[url].calls} == {completion_body()}


async def test_a_long_prompt_is_known_to_each_worker_that_is_asked() -> None:
    """Its text is let go when the first worker was chosen: the body and its blocks are all that a retry needs."""
    body = completion_body("You are a ledger. " * 20_000)  # 360 KB
    routed = first_then_second(BROKEN["reset before the head"], GOOD)
    exchange = await Exchange(body=body, headers=[MARK]).run(routed.app)
    routed.assert_released(exchange)
    assert exchange.status == 200
    assert [routed.fleet[url].calls[0].body for url in (WORKER, OTHER)] == [body, body]
    first, second = (len(state.prefixes) for state in routed.router.workers)
    assert first == 0
    assert second > 600  # blocks of 512 bytes


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("headers", [[], [("Idempotency-Key", "")]], ids=["none", "empty"])
async def test_others_are_not(broken: str, headers: list[tuple[str, str]]) -> None:
    """Without the mark nothing is sent twice: the first worker may be generating."""
    routed = first_then_second(BROKEN[broken], GOOD, first_byte_timeout=0.05)
    exchange = await ask(routed, *headers)
    assert exchange.status in (502, 504)
    assert not routed.fleet[OTHER].calls


async def test_the_mark_is_a_setting() -> None:
    """Another header can be the mark, or none."""
    reset = BROKEN["reset before the head"]
    assert (await ask(first_then_second(reset, GOOD, retry_safe_header="X-Safe"), ("x-safe", "1"))).status == 200
    assert (await ask(first_then_second(reset, GOOD, retry_safe_header="X-Safe"), MARK)).status == 502
    assert (await ask(first_then_second(reset, GOOD, retry_safe_header="none"), MARK)).status == 502


async def test_never_after_a_byte() -> None:
    """A marked request whose answer has begun is cut, with the error in it."""
    routed = first_then_second(interrupted("stream", httpx.ReadError("reset")), GOOD)
    exchange = await ask(routed, MARK)
    assert b'"worker_failed"' in exchange.body
    assert not routed.fleet[OTHER].calls


async def test_marked_requests_are_repeated_a_few_times() -> None:
    """RETRY_ATTEMPTS bounds it, each worker is asked once, and the client gets the last one's failure."""
    reset = BROKEN["reset before the head"]
    routed = Routed({f"http://w{n}:1": reset for n in range(5)}, retry_attempts=3)
    assert error_of(await ask(routed, MARK)) == (502, "worker_failed")
    assert sorted(len(worker.calls) for worker in routed.fleet.workers.values()) == [0, 1, 1, 1, 1]


async def test_the_late_worker_is_left_at_once() -> None:
    """Its response is closed and its lease released before the next worker answers; its failure is noted."""
    gate = anyio.Event()
    routed = first_then_second(BROKEN["late first byte"], replace(GOOD, head=[gate]), first_byte_timeout=0.05)
    exchange = Exchange(body=completion_body(), headers=[MARK])
    async with exchange.running(routed.app):
        await routed.fleet[OTHER].received(1)
        assert [worker.requests for worker in routed.router.stats().workers] == [0, 1]
        assert routed.worker.open_responses == 0
        gate.set()
    assert exchange.status == 200
    first, _ = routed.router.workers
    assert "1 failures" in repr(first.breaker)
    routed.assert_released(exchange)


@asyncio_only
@pytest.mark.parametrize("first", ["reset before the first byte", "busy"])
@pytest.mark.parametrize("apart", [None, 0, 1])
async def test_cancelled_at_every_turn_of_a_failover(first: str, apart: int | None) -> None:
    """Whenever it is cancelled natively, once or twice, on its way from one worker to another: nothing is left."""
    slow = [set_event()] * 3
    script = BROKEN.get(first) or busy()
    moved_on = 0
    for turn in range(300):
        routed = first_then_second(replace(script, close=slow), replace(GOOD, connect=slow, head=slow, close=slow))
        exchange = Exchange(body=completion_body(), headers=[MARK])
        try:
            await cancel_natively(exchange.run(routed.app), at=[turn] if apart is None else [turn, apart])
        except AssertionError:
            break  # the request was over before its turn came
        moved_on += bool(routed.fleet[OTHER].connects)
        routed.assert_released(exchange)
    else:
        pytest.fail("the request outlived the sweep")
    assert moved_on > 5


# --- Busy workers


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_worker_is_replaced(status: int) -> None:
    """What one worker doesn't take another one does; that is no failure of the first, whose answer is closed."""
    routed = first_then_second(busy(status=status), GOOD)
    exchange = await ask(routed)
    assert (exchange.status, exchange.finished_cleanly) == (200, True)
    first, _ = routed.router.workers
    assert "0 failures" in repr(first.breaker)


async def test_when_all_are_busy_the_last_answer_is_passed_on() -> None:
    """The client gets a worker's own words, with its Retry-After, and no more workers are asked than may be."""
    routed = Routed({f"http://w{n}:1": busy(("retry-after", "7")) for n in range(5)}, retry_attempts=2)
    exchange = await ask(routed)
    assert (exchange.status, exchange.body, exchange.header("retry-after")) == (503, b"busy", [b"7"])
    assert sum(len(worker.calls) for worker in routed.fleet.workers.values()) == 3


async def test_retry_after_is_honoured() -> None:
    """The worker gets no requests for that time while there is another, and then gets them again."""
    clock = Clock()
    routed = first_then_second(busy(("Retry-After", "7")), GOOD, clock=clock)
    for _ in range(6):
        assert (await ask(routed)).status == 200
    assert len(routed.worker.calls) == 1
    assert [worker.backing_off for worker in routed.router.stats().workers] == [True, False]

    clock.now += 7
    routed.worker.scripts = GOOD
    for _ in range(6):
        assert (await ask(routed)).status == 200
    assert len(routed.worker.calls) == 4
    assert not routed.router.stats().workers[0].backing_off


async def test_no_worker_is_shed_alone() -> None:
    """sglang#39464: the only worker is asked in spite of its Retry-After: its own answer is better than none."""
    routed = Routed(busy(("Retry-After", "60")))
    for _ in range(3):
        assert (await ask(routed)).status == 503
    assert len(routed.worker.calls) == 3
    assert routed.router.stats().workers[0].breaker is BreakerState.CLOSED


@pytest.mark.parametrize("date", ["Wed, 21 Oct 2026 07:28:00 +99999999999999", "", "nonsense"])
async def test_the_dates_of_a_busy_worker_can_be_anything(date: str) -> None:
    """Its answer is passed on, or replaced by another worker's, whatever its headers say."""
    routed = first_then_second(busy(("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"), ("date", date)), GOOD)
    assert (await ask(routed)).status == 200


async def test_its_own_word_is_not_thrown_away_for_a_worker_that_can_not_help() -> None:
    """A 503 with Retry-After reaches the client if the other worker is known to be dead, or is full."""
    said = busy(("retry-after", "5"))
    dead = first_then_second(said, replace(GOOD, connect=[httpx.ConnectError("refused")]))
    dead.router.workers.get(OTHER).breaker.open()
    exchange = await ask(dead)
    assert (exchange.status, exchange.body, exchange.header("retry-after")) == (503, b"busy", [b"5"])

    gate = anyio.Event()
    full = first_then_second(said, replace(GOOD, head=[gate]), max_concurrent_per_worker=1, queue_size=0)
    full.router.workers.drain(WORKER)
    holder = Exchange(body=completion_body())
    async with holder.running(full.app):
        await full.fleet[OTHER].received(1)
        full.router.workers.drain(WORKER, draining=False)
        exchange = await Exchange(body=completion_body()).run(full.app)
        assert (exchange.status, exchange.body, exchange.header("retry-after")) == (503, b"busy", [b"5"])
        gate.set()
    full.assert_released()


async def test_no_one_is_asked_who_wants_to_be_left_alone() -> None:
    """A busy worker's request doesn't go to another one that has asked for time: that would only add to its load."""
    routed = first_then_second(busy(("retry-after", "60")), busy(("retry-after", "60")))
    assert (await ask(routed)).status == 503
    assert (await ask(routed)).status == 503
    assert sum(len(worker.calls) for worker in routed.fleet.workers.values()) == 3


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("-7", 0.0),
        ("soon", 0.0),
        ("", 0.0),
        ("7.5", 0.0),
        ("99999999999999", BACK_OFF_LIMIT),
        ("3600", BACK_OFF_LIMIT),
        ("Wed, 21 Oct 2026 07:28:12 GMT", 12.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
        ("Wed, 21 Oct 2026 07:28:12", 12.0),
        ("Wed Oct 21 07:28:12 2026", 12.0),
        ("Wed, 21 Oct 2026 07:28:00 +99999999999999", 0.0),
        ("Wed, 21 Oct 99999999999 07:28:00 GMT", 0.0),
        ("1" * 10_000, 0.0),
    ],
)
async def test_retry_after_forms(value: str, seconds: float) -> None:
    """Seconds, or a date relative to the answer's own; nonsense asks for nothing, and nothing lasts for ever."""
    clock = Clock()
    routed = Routed(busy(("retry-after", value), ("date", "Wed, 21 Oct 2026 07:28:00 GMT")), clock=clock)
    await ask(routed)
    breaker = next(iter(routed.router.workers)).breaker
    assert breaker.backing_off == (seconds > 0)
    clock.now += max(seconds - 0.001, 0)
    assert breaker.backing_off == (seconds > 0)
    clock.now += 0.001
    assert not breaker.backing_off
