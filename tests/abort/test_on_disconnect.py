"""Owns F-32: with ABORT_ON_DISCONNECT, the worker of a request that was left is told, after and beside all else."""

from __future__ import annotations

from dataclasses import replace

import anyio
import httpx
import pytest

from tests.abort.calls import ABORT_PATH, abort, engine, knows, outcomes, request, stuck, told, until
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import DISCONNECT, HANG, Exchange
from tests.instruments.cancel import cancel_natively
from tests.instruments.fake_worker import Script
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, error_of
from tests.test_native_cancel import set_event

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

ENDLESS = replace(answer("stream"), head=[HANG])


@pytest.fixture
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the call 100 ms, not two seconds: for tests that show that it ends, not when."""
    monkeypatch.setattr("asgi_router.abort.LEFT_TIMEOUT", 0.1)


def telling(completion: Script, tell: Script | None = None, **settings: object) -> Routed:
    """A router that tells its only worker of requests that were left."""
    return Routed(engine(completion, tell or knows()), abort_on_disconnect=True, **settings)


async def left(routed: Routed, exchange: Exchange | None = None) -> Exchange:
    """Let a request wait for its worker, and leave it."""
    exchange = exchange or request("job-1")
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        assert routed.counters[0][0] == 1
        exchange.disconnect()
    return exchange


@pytest.mark.parametrize("stage", ["head", "first byte", "mid"])
async def test_f32_the_worker_is_told_after_the_release(stage: str) -> None:
    """F-32: when the client has left, its worker is told once to abort that request; by then nothing is counted."""
    script, taken = stuck()
    scripts = {"head": ENDLESS, "first byte": replace(answer("stream"), body=[HANG]), "mid": script}
    when_told: list[tuple[object, int, list[tuple[str, str]]]] = []

    def work(request: httpx.Request) -> Script:
        if request.url.path != ABORT_PATH:
            return scripts[stage]
        when_told.append((routed.counters[0], routed.router.stats().exchanges, list(ended)))
        return knows({"job-1": 3})

    routed = Routed(work, abort_on_disconnect=True)
    ended = outcomes(routed)
    exchange = request("job-1")
    async with exchange.running(routed.app):
        await (taken.wait() if stage == "mid" else routed.worker.received(1))
        exchange.disconnect()

    assert told(routed.worker) == [{"req_ids": ["job-1"]}]
    assert when_told == [((0, 0, 0, 0), 0, [("job-1", "client_gone")])]
    routed.assert_released(exchange)


async def test_f32_by_default_nobody_is_told() -> None:
    """F-32: without ABORT_ON_DISCONNECT a worker learns of it by its connection alone."""
    routed = Routed(engine(ENDLESS, knows()))
    exchange = await left(routed)
    assert told(routed.worker) == []
    routed.assert_released(exchange)


async def test_the_id_in_the_body_is_told() -> None:
    """FastDeploy knows a request by the id in its body."""
    routed = telling(ENDLESS)
    await left(routed, request("from-header", body_id="from-body"))
    assert told(routed.worker) == [{"req_ids": ["from-body"]}]


async def test_only_the_worker_at_work_is_told() -> None:
    """After a failed try at another worker, the one that has the request is told."""
    routed = Routed(
        {
            WORKER: engine(replace(answer("stream"), connect=[httpx.ConnectError("refused")]), knows()),
            OTHER: engine(ENDLESS, knows()),
        },
        abort_on_disconnect=True,
    )
    for _ in range(4):  # whichever is chosen first
        exchange = request()
        async with exchange.running(routed.app):
            calls = len(routed.fleet[OTHER].calls)
            await routed.fleet[OTHER].received(calls + 1)
            exchange.disconnect()

    assert told(routed.worker) == []
    assert told(routed.fleet[OTHER]) == [{"req_ids": ["job-1"]}] * 4
    routed.assert_released(exchange)


async def test_requests_that_are_over_are_not_told_of() -> None:
    """A client that has its answer, or our error, may leave: nothing is left to be aborted."""
    routed = telling(answer("json"))
    await request(at={"end": DISCONNECT}).run(routed.app)
    await request(at={"end": OSError("gone")}).run(routed.app)
    routed.worker.scripts = engine(replace(answer("json"), head=[httpx.ReadError("reset")]), knows())
    await request(at={"end": DISCONNECT}).run(routed.app)
    await request(at={"start": OSError("gone")}).run(routed.app)
    assert len(routed.worker.calls) == 4
    assert told(routed.worker) == []
    routed.assert_released()


async def test_requests_that_no_worker_had_are_not_told_of() -> None:
    """A client that leaves in its upload, or in the queue, has given no worker anything to do."""
    routed = telling(ENDLESS, max_concurrent_per_worker=1)
    await Exchange(body=[completion_body()[:50], DISCONNECT]).run(routed.app)
    first, second = request("first"), request("second")
    async with first.running(routed.app):
        await routed.worker.received(1)
        async with second.running(routed.app):
            await until(lambda: routed.router.stats().queued == 1)
            second.disconnect()

        assert told(routed.worker) == []
        first.disconnect()

    assert told(routed.worker) == [{"req_ids": ["first"]}]
    routed.assert_released(first)


async def test_an_aborted_request_is_not_told_of_twice() -> None:
    """Whoever aborts a request has had all workers told."""
    routed = telling(ENDLESS)
    exchange = request()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        await abort(routed, "job-1")

    assert len(told(routed.worker)) == 1
    assert error_of(exchange) == (410, "request_aborted")


async def test_a_request_that_is_back_is_not_aborted() -> None:
    """A client that left and has sent its request again, by the same id, keeps the second one."""
    routed = telling(ENDLESS)
    first, second = request("same"), request("same")
    async with second.running(routed.app):
        async with first.running(routed.app):
            await routed.worker.received(2)
            first.disconnect()

        assert told(routed.worker) == []
        second.disconnect()

    assert told(routed.worker) == [{"req_ids": ["same"]}]
    routed.assert_released(second)


async def test_what_a_shutdown_cuts_is_told() -> None:
    """A request that is cut because DRAIN_TIMEOUT is over is left, too."""
    routed = telling(ENDLESS, drain_timeout=0)
    exchange = request()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        await routed.router.drain()

    assert error_of(exchange) == (503, "shutting_down")
    assert told(routed.worker) == [{"req_ids": ["job-1"]}]
    routed.assert_released(exchange)


@pytest.mark.usefixtures("short_bound")
@pytest.mark.parametrize(
    "tell",
    [
        Script(connect=[HANG]),
        Script(head=[HANG]),
        Script(body=[HANG]),
        Script(connect=[httpx.ConnectError("refused")]),
        Script(head=[RuntimeError("odd")]),
        Script.json({}, status=500),
        Script.json({}, status=404),
    ],
    ids=str,
)
async def test_a_worker_that_can_not_be_told(tell: Script, caplog: pytest.LogCaptureFixture) -> None:
    """It costs a bounded time and a line at DEBUG; the worker's breaker doesn't hear of it."""
    caplog.set_level("DEBUG", "asgi_router")
    routed = telling(ENDLESS, tell, breaker_failures=1)
    with anyio.fail_after(3):
        exchange = await left(routed)

    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert routed.worker.connects == 2
    assert next(iter(routed.router.workers)).breaker.admits
    routed.assert_released(exchange)


async def test_a_cancelled_scope_does_not_cut_it_short() -> None:
    """The call is shielded: a host that cancels the request meanwhile doesn't keep it from the worker."""
    gate = anyio.Event()
    routed = telling(ENDLESS, Script(head=[gate]))

    def stages() -> list[str]:
        return [call.stage for call in routed.worker.calls]

    exchange = request()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        exchange.disconnect()
        await routed.worker.received(2)
        exchange.cancel()
        await anyio.wait_all_tasks_blocked()
        assert stages() == ["cancelled", "head"]
        gate.set()

    assert stages() == ["cancelled", "answered"]
    routed.assert_released(exchange)


@pytest.mark.usefixtures("short_bound")
async def test_a_drain_waits_for_no_more_than_the_bound() -> None:
    """While a worker is being told, no request is in flight: a shutdown finds nothing to wait for."""
    routed = telling(ENDLESS, Script(head=[HANG]), drain_timeout=3600)
    exchange = request()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        exchange.disconnect()
        await routed.worker.received(2)
        with anyio.fail_after(1):
            await routed.router.drain()


@asyncio_only
@pytest.mark.usefixtures("short_bound")
async def test_cancelled_natively_at_every_turn_of_the_telling() -> None:
    """A native cancellation while the worker is told harms nothing: a drain that waits is woken all the same."""
    slow = [set_event()] * 3
    while_told = 0
    for turn in range(100):
        routed = telling(ENDLESS, replace(knows(), connect=slow, head=slow, close=slow), drain_timeout=3600)
        exchange = request()
        over = False

        async def leave(routed: Routed = routed, exchange: Exchange = exchange) -> None:
            await routed.worker.received(1)
            exchange.disconnect()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            tasks.start_soon(_drain_when_asked, routed)
            try:
                outcome = await cancel_natively(exchange.run(routed.app), at=[turn])
                assert outcome.cancelled
                while_told += routed.worker.connects == 2
            except AssertionError:
                over = True
            with anyio.fail_after(2):
                await until(lambda routed=routed: routed.router._idle is None)  # type: ignore[misc]
            tasks.cancel_scope.cancel()

        routed.assert_released(exchange)
        assert routed.router._aborts.busy == 0
        if over:
            break
    else:
        pytest.fail("the request outlived the sweep")
    assert while_told > 5


async def _drain_when_asked(routed: Routed) -> None:
    await routed.worker.received(1)
    await routed.router.drain()
