"""Owns the queue: who waits, for how long, in which order, and that neither a place nor a request gets lost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Worker
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.cancel import cancel_natively
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, error_of
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.instruments.fake_worker import Script

pytestmark = pytest.mark.anyio

GOOD = answer("stream")


class Gated:
    """A worker whose answers end when they are told to, each by its own gate."""

    def __init__(self) -> None:
        self.gates: list[anyio.Event] = []

    def __call__(self, request: httpx.Request) -> Script:
        self.gates.append(anyio.Event())
        return replace(GOOD, head=[self.gates[-1]])


def limited(gated: Gated, **settings: object) -> Routed:
    """One worker that may have one request in flight."""
    return Routed({WORKER: gated}, **{"max_concurrent_per_worker": 1} | settings)


def asked(name: str) -> Exchange:
    """A request that can be told from others by its query."""
    return Exchange(body=completion_body(), query_string=name.encode())


def names(routed: Routed) -> list[str]:
    """The names of the requests that the worker got, in order."""
    return [call.url.partition("?")[2] for call in routed.worker.calls]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    while not condition():
        await anyio.lowlevel.checkpoint()


async def test_requests_wait_for_a_place_and_get_it_in_order() -> None:
    """With one place three requests are served one after the other, first come, first served."""
    gated = Gated()
    routed = limited(gated)
    queue = routed.router._mode.admission
    exchanges = [asked(name) for name in "abc"]
    async with exchanges[0].running(routed.app), anyio.create_task_group() as tasks:
        await routed.worker.received(1)
        for place, exchange in enumerate(exchanges[1:], start=1):
            tasks.start_soon(exchange.run, routed.app)
            await until(lambda place=place: len(queue) == place)  # type: ignore[misc]
        for served in (1, 2, 3):
            await routed.worker.received(served)
            assert (routed.counters[0][0], len(queue)) == (1, 3 - served)
            gated.gates[-1].set()

    assert names(routed) == ["a", "b", "c"]
    assert all(exchange.finished_cleanly for exchange in exchanges)
    routed.assert_released()


async def test_a_place_is_handed_over_in_the_step_in_which_it_becomes_free() -> None:
    """Nobody who comes later can take it: there is no moment at which it is free."""
    gated = Gated()
    routed = limited(gated)
    first, waiting = asked("first"), asked("waiting")
    async with first.running(routed.app):
        await routed.worker.received(1)
        (serving,) = routed.router._exchanges
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            serving.release()
            assert (routed.counters[0][0], len(routed.router._mode.admission)) == (1, 0)
            await routed.worker.received(2)
            gated.gates[0].set()
            gated.gates[1].set()
    assert waiting.finished_cleanly
    routed.assert_released()


async def test_full_queue() -> None:
    """One more than may wait gets 429 and is told when to come back; those who wait are not disturbed."""
    gated = Gated()
    routed = limited(gated, queue_size=1)
    served, waiting = asked("served"), asked("waiting")
    async with served.running(routed.app):
        await routed.worker.received(1)
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            refused = await asked("refused").run(routed.app)
            assert (refused.status, refused.header("retry-after")) == (429, [b"1"])
            assert b'"queue_full"' in refused.body
            gated.gates[0].set()
            await routed.worker.received(2)
            gated.gates[1].set()

    assert waiting.finished_cleanly
    routed.assert_released()


async def test_no_queue() -> None:
    """With QUEUE_SIZE 0 nobody waits."""
    gated = Gated()
    routed = limited(gated, queue_size=0)
    served = asked("served")
    async with served.running(routed.app):
        await routed.worker.received(1)
        assert (await asked("refused").run(routed.app)).status == 429
        gated.gates[0].set()
    routed.assert_released()


async def test_waiting_too_long() -> None:
    """After QUEUE_TIMEOUT a request that still waits gets 503, and leaves the queue."""
    gated = Gated()
    routed = limited(gated, queue_timeout=0.02)
    served = asked("served")
    async with served.running(routed.app):
        await routed.worker.received(1)
        late = await asked("late").run(routed.app)
        assert (late.status, late.header("retry-after")) == (503, [b"1"])
        assert b'"queue_timeout"' in late.body
        assert len(routed.router._mode.admission) == 0
        gated.gates[0].set()
    assert names(routed) == ["served"]
    routed.assert_released()


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_client_that_leaves_while_it_waits(how: str) -> None:
    """It leaves the queue at once; its place in it goes to the next, and no worker hears of it."""
    gated = Gated()
    routed = limited(gated)
    served, leaving, staying = asked("served"), asked("leaving"), asked("staying")
    async with served.running(routed.app):
        await routed.worker.received(1)
        async with leaving.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            getattr(leaving, how)()
        assert len(routed.router._mode.admission) == 0
        async with staying.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            gated.gates[0].set()
            await routed.worker.received(2)
            gated.gates[1].set()

    assert names(routed) == ["served", "staying"]
    routed.assert_released()


@asyncio_only
async def test_cancelled_natively_at_any_turn_while_it_waits_or_is_handed_a_place() -> None:
    """Also in the very turn of the hand-over: the place is not lost, and the next request gets it."""
    for turn in range(12):
        gated = Gated()
        routed = limited(gated)
        served, cut = asked("served"), asked("cut")

        async def free_the_place(gated: Gated = gated, routed: Routed = routed) -> None:
            await until(lambda: len(routed.router._mode.admission) == 1)
            gated.gates[0].set()

        async with served.running(routed.app):
            await routed.worker.received(1)
            await cancel_natively(cut.run(routed.app), at=[free_the_place, turn])

        assert routed.counters == [(0, 0, 0, 0)]
        assert len(routed.router._mode.admission) == 0
        routed.worker.scripts = GOOD
        assert (await asked("next").run(routed.app)).finished_cleanly
        routed.assert_released()


async def test_a_worker_that_joins_serves_those_who_wait() -> None:
    """A place becomes free also when the fleet grows."""
    gated = Gated()
    routed = Routed({WORKER: gated, OTHER: GOOD}, max_concurrent_per_worker=1)
    routed.router.workers.remove(OTHER)
    served, waiting = asked("served"), asked("waiting")
    async with served.running(routed.app):
        await routed.worker.received(1)
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            routed.router.workers.add(Worker(url=OTHER))
        gated.gates[0].set()
    assert len(routed.fleet[OTHER].calls) == 1
    routed.assert_released()


async def test_the_last_worker_leaves_while_requests_wait() -> None:
    """They are told at once that there is no worker, not when their time is over."""
    gated = Gated()
    routed = limited(gated)
    served, waiting = asked("served"), asked("waiting")
    async with served.running(routed.app):
        await routed.worker.received(1)
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            routed.router.workers.remove(WORKER)
        assert waiting.status == 503
        assert b'"no_worker_available"' in waiting.body
        gated.gates[0].set()
    routed.assert_released()


async def test_one_model_does_not_wait_behind_another() -> None:
    """A place goes to the first in the queue that it fits."""
    gated = Gated()
    routed = Routed({WORKER: gated, OTHER: GOOD}, max_concurrent_per_worker=1)
    for url, model in ((WORKER, "big"), (OTHER, "small")):
        routed.router.workers.add(Worker(url=url, models=(model,)))
    big, waiting = (Exchange(body=completion_body(model="big")) for _ in range(2))
    async with big.running(routed.app):
        await routed.worker.received(1)
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            small = await Exchange(body=completion_body(model="small")).run(routed.app)
            assert small.finished_cleanly
            gated.gates[0].set()
            await routed.worker.received(2)
            gated.gates[1].set()
    routed.assert_released()


async def test_a_refused_connection_leads_to_the_next_place() -> None:
    """A worker that can't be connected to gives its place back; the request waits for another worker's."""
    gated = Gated()
    dead = replace(GOOD, connect=[httpx.ConnectError("refused")])
    routed = Routed({WORKER: gated, OTHER: dead}, max_concurrent_per_worker=1)
    first = asked("first")
    async with first.running(routed.app):
        await routed.worker.changes.until(lambda: len(routed.worker.calls) == 1)
        second = asked("second")
        async with second.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            assert [counters[0] for counters in routed.counters] == [1, 0]
            gated.gates[0].set()
            await routed.worker.received(2)
            gated.gates[1].set()
    assert second.finished_cleanly
    routed.assert_released()


async def test_the_wait_after_a_refused_connection_is_not_the_workers() -> None:
    """The refused try's FIRST_BYTE_TIMEOUT ends with it: of two time-outs, the wait for a place has only its own."""
    busy = replace(GOOD, body=[b"data: 1\n\n", HANG])  # it has its first byte, so only one request's time runs
    dead = replace(GOOD, connect=[httpx.ConnectError("refused")])
    routed = Routed(
        {WORKER: busy, OTHER: dead}, max_concurrent_per_worker=1, first_byte_timeout=0.05, queue_timeout=0.2
    )
    first = asked("first")
    async with first.running(routed.app):
        await routed.worker.changes.until(lambda: len(routed.worker.calls) == 1)
        second = await asked("second").run(routed.app)
        first.disconnect()
    assert second.status == 503
    assert b'"queue_timeout"' in second.body
    assert routed.fleet[OTHER].connects >= 1  # or it would show nothing
    routed.assert_released()


async def test_shutdown_while_requests_wait() -> None:
    """What still waits after DRAIN_TIMEOUT gets 503, as what is being served."""
    routed = Routed({WORKER: replace(GOOD, head=[HANG])}, max_concurrent_per_worker=1, drain_timeout=0.02)
    exchanges = [asked("a"), asked("b")]
    async with exchanges[0].running(routed.app), exchanges[1].running(routed.app):
        await until(lambda: len(routed.router._mode.admission) == 1)
        await routed.router.aclose()
    assert [exchange.status for exchange in exchanges] == [503, 503]
    routed.assert_released()


# --- A request that was refused by a worker, and then waits


async def test_a_worker_that_is_back_is_asked_again_after_a_wait() -> None:
    """Refused by one worker, then queued for the other one, which leaves: the first one, back meanwhile, serves it."""
    gated = Gated()
    refused = replace(GOOD, connect=[httpx.ConnectError("refused")])
    routed = Routed({WORKER: [refused, GOOD], OTHER: gated}, policy="round_robin", max_concurrent_per_worker=1)
    routed.router.workers.drain(WORKER)
    holder, waiting = asked("holder"), asked("waiting")
    async with holder.running(routed.app):
        await routed.fleet[OTHER].received(1)
        routed.router.workers.drain(WORKER, draining=False)
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            assert routed.worker.connects == 1
            routed.router.workers.remove(OTHER)
        gated.gates[0].set()

    assert (waiting.status, routed.worker.connects) == (200, 2)
    routed.assert_released()


@pytest.mark.parametrize(
    "first",
    [replace(GOOD, connect=[httpx.ConnectError("refused")]), replace(GOOD, status=503, body=[b"busy"])],
    ids=["refused", "busy"],
)
async def test_a_request_that_waits_takes_any_place(first: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned away by one worker and queued for another: it goes to the first one again if that is what is free."""
    monkeypatch.setattr("asgi_router.admission.LOOK_EVERY", 0.01)
    gated = Gated()
    routed = Routed({WORKER: [first, GOOD], OTHER: gated}, policy="round_robin", max_concurrent_per_worker=1)
    routed.router.workers.drain(WORKER)
    holder, waiting = asked("holder"), asked("waiting")
    async with holder.running(routed.app):
        await routed.fleet[OTHER].received(1)
        routed.router.workers.drain(WORKER, draining=False)
        await waiting.run(routed.app)
        if waiting.status == 503:  # there was no room elsewhere, so it got the worker's own word
            assert waiting.body == b"busy"
            await asked("later").run(routed.app)
        gated.gates[0].set()

    assert routed.worker.connects == 2
    assert waiting.status == (503 if first.status == 503 else 200)
    routed.assert_released()


async def test_queue_timeout_counts_from_the_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that refuses whoever comes from the queue doesn't keep a request waiting anew each time."""
    monkeypatch.setattr("asgi_router.admission.LOOK_EVERY", 0.01)
    refused = replace(GOOD, connect=[httpx.ConnectError("refused")])
    gated = Gated()
    routed = Routed({WORKER: refused, OTHER: gated}, max_concurrent_per_worker=1, queue_timeout=0.2)
    routed.router.workers.drain(WORKER)
    holder, waiting = asked("holder"), asked("waiting")
    async with holder.running(routed.app):
        await routed.fleet[OTHER].received(1)
        routed.router.workers.drain(WORKER, draining=False)
        await waiting.run(routed.app)
        gated.gates[0].set()
    assert (waiting.status, error_of(waiting)[1]) == (503, "queue_timeout")
    assert routed.worker.connects > 2
    routed.assert_released()


async def test_nobody_overtakes_the_queue_when_a_cool_down_ends() -> None:
    """The end of a cool-down is no event, but a newcomer that finds the worker free lets the queue go first."""
    clock = Clock()
    gated = Gated()
    held = Gated()
    routed = Routed({WORKER: held, OTHER: gated}, clock=clock, max_concurrent_per_worker=1)
    routed.router.workers.get(WORKER).breaker.open()
    holder, first, second = asked("holder"), asked("first"), asked("second")
    async with holder.running(routed.app):
        await routed.fleet[OTHER].received(1)
        async with first.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            clock.now += 10
            async with second.running(routed.app):
                await routed.worker.received(1)
                assert names(routed) == ["first"]
                held.gates[0].set()
                gated.gates[0].set()
                await until(lambda: len(held.gates) + len(gated.gates) == 3)
                for gate in (*held.gates, *gated.gates):
                    gate.set()
    assert [exchange.status for exchange in (holder, first, second)] == [200] * 3
    routed.assert_released()


async def test_the_end_of_a_cool_down_is_noticed_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens when a worker may be asked again, so the first in the queue looks from time to time."""
    monkeypatch.setattr("asgi_router.admission.LOOK_EVERY", 0.01)
    clock = Clock()
    gated = Gated()
    routed = Routed({WORKER: GOOD, OTHER: gated}, clock=clock, max_concurrent_per_worker=1)
    routed.router.workers.get(WORKER).breaker.open()
    holder, waiting = asked("holder"), asked("waiting")
    async with holder.running(routed.app):
        await routed.fleet[OTHER].received(1)
        async with waiting.running(routed.app):
            await until(lambda: len(routed.router._mode.admission) == 1)
            clock.now += 10
        assert waiting.status == 200
        gated.gates[0].set()
    routed.assert_released()
