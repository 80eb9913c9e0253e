"""Owns the health probes: thresholds in a row, no overlap, no forgetting, no effect on counters."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router.fleet.health import HealthMonitor
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import HANG, Script
from tests.instruments.lifespan import Lifespan
from tests.routed import OTHER, WORKER, Routed, answer, completion_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Receive, Scope, Send

    from tests.instruments.fake_worker import Scripts

pytestmark = pytest.mark.anyio

UP = Script(body=[b"ok"])
DOWN = replace(UP, connect=[httpx.ConnectError("refused")])


def monitored(workers: Mapping[str, Scripts] | Script, **options: float) -> tuple[Routed, HealthMonitor]:
    """A router's fleet, and a monitor that is run by hand."""
    routed = Routed(workers)
    settings: dict[str, float] = {"interval": 1.0, "timeout": 1.0, "failures": 3, "successes": 2} | options
    monitor = HealthMonitor(
        routed.router.workers,
        routed.fleet,
        path="/health",
        interval=settings["interval"],
        timeout=settings["timeout"],
        failures=int(settings["failures"]),
        successes=int(settings["successes"]),
    )
    return routed, monitor


async def rounds(routed: Routed, monitor: HealthMonitor, *scripts: Script) -> list[bool]:
    """Probe once with each script; return the worker's health after each."""
    health = []
    for script in scripts:
        routed.worker.scripts = script
        await monitor.probe_all()
        health.append(routed.router.stats().workers[0].healthy)
    return health


async def test_thresholds_in_a_row() -> None:
    """Three failed probes in a row make it unhealthy, two good ones healthy again (F-80, F-84, sglang#9198)."""
    routed, monitor = monitored(UP)
    assert await rounds(routed, monitor, DOWN, DOWN, UP, DOWN, DOWN) == [True] * 5
    assert await rounds(routed, monitor, DOWN) == [False]
    assert await rounds(routed, monitor, UP, DOWN, UP) == [False] * 3
    assert await rounds(routed, monitor, UP) == [True]
    routed.assert_released()


async def test_a_worker_that_comes_back_has_lost_its_cache() -> None:
    """It has probably been restarted, so what it held is forgotten; a failed probe alone forgets nothing."""
    routed, monitor = monitored(answer("json"), failures=2, successes=1)
    await Exchange(body=completion_body()).run(routed.app)
    blocks = routed.router.stats().workers[0].prefix_blocks
    assert blocks > 0
    for script, held in ((DOWN, blocks), (UP, blocks), (DOWN, blocks), (DOWN, blocks), (UP, 0)):
        await rounds(routed, monitor, script)
        assert routed.router.stats().workers[0].prefix_blocks == held


async def test_unhealthy_workers_get_no_requests_and_are_not_forgotten() -> None:
    """No new request goes to a sick worker; with all of them sick: 503. It is still there when it recovers."""
    routed, monitor = monitored({WORKER: DOWN, OTHER: answer("json")}, failures=1, successes=1)
    await monitor.probe_all()
    for _ in range(8):
        await Exchange(body=completion_body()).run(routed.app)
    assert [call.method for call in routed.worker.calls] == []

    routed.fleet[OTHER].scripts = DOWN
    await monitor.probe_all()
    exchange = await Exchange(body=completion_body()).run(routed.app)
    assert (exchange.status, exchange.header("retry-after")) == (503, [b"1"])

    routed.worker.scripts = answer("json")
    await monitor.probe_all()
    exchange = await Exchange(body=completion_body()).run(routed.app)
    assert exchange.status == 200
    routed.assert_released()


@pytest.mark.parametrize("status", [200, 204, 301, 401, 403, 404, 429])
async def test_any_answer_below_500_is_healthy(status: int) -> None:
    """A worker that wants a key, or has no such path, is there (sglang#3031)."""
    routed, monitor = monitored(replace(UP, status=status), failures=1)
    assert await rounds(routed, monitor, replace(UP, status=status)) == [True]


@pytest.mark.parametrize(
    "script",
    [
        replace(UP, status=500),
        replace(UP, status=503),
        replace(UP, head=[httpx.ReadError("reset")]),
        replace(UP, head=[RuntimeError("odd")]),
    ],
    ids=["500", "503", "reset", "odd"],
)
async def test_what_is_unhealthy(script: Script) -> None:
    """Its own word, or none at all."""
    routed, monitor = monitored(script, failures=1)
    assert await rounds(routed, monitor, script) == [False]
    routed.assert_released()


async def test_probe_that_hangs_is_a_failed_probe() -> None:
    """A stopped worker is found by the time-out, and holds up nobody else's probe."""
    routed, monitor = monitored({WORKER: replace(UP, head=[HANG]), OTHER: UP}, timeout=0.05, failures=1)
    with anyio.fail_after(2):
        await monitor.probe_all()
    assert [worker.healthy for worker in routed.router.stats().workers] == [False, True]


async def test_probes_do_not_touch_counters() -> None:
    """While a request is in flight, probes leave its counters alone, and its end releases them.

    vllm-project/router#197: a health check set them to zero.
    """
    gate = anyio.Event()
    routed, monitor = monitored({WORKER: [replace(answer("json"), head=[gate]), DOWN, DOWN, DOWN]})
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        before = routed.counters
        for _ in range(3):
            await monitor.probe_all()
        assert routed.counters == before
        assert not routed.router.stats().workers[0].healthy
        gate.set()

    assert exchange.finished_cleanly
    routed.assert_released(exchange)


async def test_a_worker_that_has_left_is_not_asked() -> None:
    """Each round asks those who are there now."""
    routed, monitor = monitored({WORKER: UP, OTHER: UP})
    routed.router.workers.remove(WORKER)
    await monitor.probe_all()
    assert [len(worker.calls) for worker in routed.fleet.workers.values()] == [0, 1]


async def test_what_is_asked() -> None:
    """GET on the path below the worker's URL, with the time-out handed to the transport."""
    routed, monitor = monitored(UP)
    await monitor.probe_all()
    (call,) = routed.worker.calls
    assert (call.method, call.url, call.timeout["connect"]) == ("GET", f"{WORKER}/health", 1.0)


async def test_rounds_never_overlap_and_one_runner_probes() -> None:
    """Two apps that share a router probe its workers once; when one stops, the other takes over (F-82)."""
    gate = anyio.Event()
    routed, monitor = monitored(replace(UP, head=[gate]), interval=0.001, timeout=100.0)
    async with anyio.create_task_group() as first, anyio.create_task_group() as second:
        first.start_soon(monitor.run)
        second.start_soon(monitor.run)
        await routed.worker.received(1)
        await anyio.sleep(0.02)  # many intervals long: nothing may happen, so there is no event to wait for
        assert len(routed.worker.calls) == 1
        gate.set()
        await routed.worker.received(3)
        first.cancel_scope.cancel()
        await routed.worker.received(len(routed.worker.calls) + 3)
        second.cancel_scope.cancel()


async def test_a_hanging_worker_holds_up_nobody_elses_probe() -> None:
    """While one worker's probe is under way the others are asked again and again."""
    workers = {WORKER: replace(UP, head=[HANG]), OTHER: UP}
    routed, monitor = monitored(workers, interval=0.001, timeout=100.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(monitor.run)
        await routed.fleet[OTHER].received(5)
        tasks.cancel_scope.cancel()
    assert len(routed.worker.calls) == 1


async def app_with_lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """A host app that starts and stops."""
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


@pytest.mark.parametrize("opened_by", ["lifespan", "async with"])
async def test_probes_run_while_the_router_is_open(opened_by: str) -> None:
    """The host's lifespan, or `async with router`, starts the probes and ends them."""
    routed = Routed(UP, health_interval=0.001)
    routed.app.app = app_with_lifespan
    if opened_by == "lifespan":
        async with Lifespan().running(routed.app):
            await routed.worker.received(2)
    else:
        async with routed.router:
            await routed.worker.received(2)

    asked = len(routed.worker.calls)
    await anyio.sleep(0.02)
    assert len(routed.worker.calls) == asked
    assert routed.fleet.close_calls == 1


async def test_an_exception_leaves_async_with_bare() -> None:
    """The group that runs the probes doesn't wrap what the user's block raises."""
    routed = Routed(UP)
    with pytest.raises(LookupError, match="mine"):
        async with routed.router:
            raise LookupError("mine")
    assert routed.fleet.close_calls == 1
