"""Owns the circuit breaker under traffic: what of a request's fate counts, and what a broken worker gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Router, RouterSettings
from asgi_router.scheduling.breaker import BreakerState
from tests.instruments.asgi_client import HANG, Exchange
from tests.routed import OTHER, WORKER, Routed, answer, completion_body
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from tests.instruments.fake_worker import Script

pytestmark = pytest.mark.anyio

GOOD = answer("stream")
REFUSED = replace(GOOD, connect=[httpx.ConnectError("refused")])


async def ask(routed: Routed, times: int = 1) -> list[int | None]:
    """Send requests one after the other; return their statuses."""
    return [(await Exchange(body=completion_body()).run(routed.app)).status for _ in range(times)]


def breaker(routed: Routed) -> BreakerState:
    """The first worker's breaker."""
    return routed.router.stats().workers[0].breaker


async def test_a_dead_worker_is_tried_a_few_times_and_then_left_alone() -> None:
    """No request fails for it, and after five attempts none is spent on it."""
    routed = Routed({WORKER: REFUSED, OTHER: GOOD}, policy="round_robin")
    assert await ask(routed, 30) == [200] * 30
    assert routed.worker.connects == 5
    assert breaker(routed) is BreakerState.OPEN
    routed.assert_released()


@pytest.mark.parametrize(
    "script",
    [
        replace(GOOD, head=[httpx.ReadError("reset")]),
        replace(GOOD, head=[httpx.ReadTimeout("late")]),
        replace(GOOD, body=[b"data: x\n\n", httpx.ReadError("reset")]),
        replace(GOOD, body=[HANG]),
    ],
    ids=["reset", "late", "mid answer", "first byte late"],
)
async def test_f25_what_counts_as_a_failure(script: Script) -> None:
    """F-25: whatever breaks the connection, also within an answer, or doesn't answer in time."""
    routed = Routed(script, first_byte_timeout=0.01)
    await ask(routed, 5)
    assert breaker(routed) is BreakerState.OPEN
    routed.assert_released()


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_worker_that_only_fails_does_not_draw_all_requests(status: int) -> None:
    """Answering with an error at once makes it the least busy one; after five in a row it is passed over."""
    routed = Routed({WORKER: replace(answer("json"), status=status), OTHER: GOOD}, policy="request_num")
    gate = anyio.Event()
    routed.fleet[OTHER].scripts = [replace(GOOD, head=[gate]), GOOD]
    routed.router.workers.drain(WORKER)
    async with Exchange(body=completion_body()).running(routed.app):
        await routed.fleet[OTHER].received(1)
        routed.router.workers.drain(WORKER, draining=False)
        assert await ask(routed, 10) == [status] * 5 + [200] * 5
        gate.set()
    assert breaker(routed) is BreakerState.OPEN
    routed.assert_released()


async def test_a_probe_that_is_answered_with_an_error_is_none() -> None:
    """Half-open, a 500 opens the breaker anew and a 503 leaves it half-open for the next request."""
    clock = Clock()
    routed = Routed(REFUSED, clock=clock, breaker_failures=1)
    await ask(routed)
    for status, expected in [(500, BreakerState.OPEN), (503, BreakerState.HALF_OPEN), (404, BreakerState.CLOSED)]:
        clock.now += 10
        routed.worker.scripts = replace(answer("json"), status=status)
        await ask(routed)
        assert breaker(routed) is expected
    routed.assert_released()


@pytest.mark.parametrize("status", [400, 401, 404, 429, 503])
async def test_answers_are_no_failures(status: int) -> None:
    """4xx is the client's fault, 429 and 503 say that it is busy (sgl-project/sglang#39464, #26713)."""
    routed = Routed(replace(GOOD, status=status))
    assert await ask(routed, 20) == [status] * 20
    assert breaker(routed) is BreakerState.CLOSED


async def test_busy_answers_do_not_end_a_row_of_failures() -> None:
    """A 503 between failures is neutral (sgl-project/sglang#40218); a whole answer ends the row."""
    routed = Routed(GOOD)
    reset, busy = replace(GOOD, head=[httpx.ReadError("reset")]), replace(GOOD, status=503)
    for script in (reset, reset, busy, reset, reset, GOOD, reset, reset, reset, reset):
        routed.worker.scripts = script
        await ask(routed)
    assert breaker(routed) is BreakerState.CLOSED
    for script in (busy, reset):
        routed.worker.scripts = script
        await ask(routed)
    assert breaker(routed) is BreakerState.OPEN


async def test_clients_that_leave_are_no_failures() -> None:
    """Impatient clients can't take a slow worker out of service."""
    routed = Routed(replace(GOOD, head=[HANG]))
    for number in range(1, 11):
        exchange = Exchange(body=completion_body())
        async with exchange.running(routed.app):
            await routed.worker.received(number)
            exchange.disconnect()
    assert breaker(routed) is BreakerState.CLOSED
    routed.assert_released()


async def test_one_probe_brings_it_back() -> None:
    """After the cool-down one request tries the worker while the others stay away; its first byte ends that."""
    clock = Clock()
    routed = Routed({WORKER: REFUSED, OTHER: GOOD})
    settings = RouterSettings(workers=[WORKER, OTHER], policy="round_robin", breaker_failures=1)
    routed.router = routed.app.router = Router(settings, transport=routed.fleet, clock=clock)
    assert await ask(routed, 4) == [200] * 4
    assert (routed.worker.connects, breaker(routed)) == (1, BreakerState.OPEN)

    clock.now += settings.breaker_cooldown
    gate = anyio.Event()
    routed.worker.scripts = replace(GOOD, head=[gate])
    probes = [Exchange(body=completion_body()) for _ in range(2)]
    async with probes[0].running(routed.app), probes[1].running(routed.app):
        await routed.worker.received(1)
        assert await ask(routed, 4) == [200] * 4
        assert routed.worker.connects == 2
        gate.set()

    assert breaker(routed) is BreakerState.CLOSED
    await ask(routed, 4)
    assert routed.worker.connects == 4
    routed.assert_released()


async def test_a_probe_whose_client_leaves_makes_room_for_the_next() -> None:
    """The probe's place is given back with the lease (sglang#31206)."""
    clock = Clock()
    routed = Routed({WORKER: REFUSED, OTHER: GOOD})
    settings = RouterSettings(workers=[WORKER, OTHER], policy="round_robin", breaker_failures=1)
    routed.router = routed.app.router = Router(settings, transport=routed.fleet, clock=clock)
    await ask(routed, 2)
    clock.now += settings.breaker_cooldown
    routed.worker.scripts = replace(GOOD, head=[HANG])
    for number in (1, 2):
        probes = [Exchange(body=completion_body()) for _ in range(2)]
        async with probes[0].running(routed.app), probes[1].running(routed.app):
            await routed.worker.received(number)
            for probe in probes:
                probe.disconnect()
    assert breaker(routed) is BreakerState.HALF_OPEN
    routed.assert_released()
