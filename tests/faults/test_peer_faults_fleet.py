"""Owns the faults that peers have had in public with who is in service (entries 61 to 64), and with how it is named.

Shown elsewhere, with the reference in the test's docstring:

- entry 61 (sgl-project/sglang#39464, #40218) in tests/fleet/test_breaker_in_service.py, but for the place of the probe
- entry 62 (sgl-project/sglang#26713) there, too
- entry 64 (sgl-project/sglang#3877), workers that leave, in tests/fleet/test_fleet_in_service.py

The last tests are of what was read in the source of vllm-project/production-stack, and not reported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.scheduling.breaker import BreakerState
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import FakeFleet, Script
from tests.instruments.lifespan import Lifespan
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, exchange_for, unreachable_app
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio

GOOD = answer("json")
DOWN = replace(GOOD, connect=[httpx.ConnectError("refused")])


def may_be_tried(routed: Routed) -> bool:
    """Whether the first worker's breaker lets a request in."""
    (state, *_) = routed.router.workers
    return state.breaker.admits


async def ask(routed: Routed) -> int | None:
    """Send a request; return its status."""
    return (await exchange_for().run(routed.app)).status


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("body", [[], [b"queue full"]], ids=["empty", "with a body"])
async def test_61_a_busy_answer_frees_the_place_of_the_probe(status: int, body: Sequence[bytes]) -> None:
    """sgl-project/sglang#39464: a worker on trial answers that it is full; the next request may try it at once.

    Its answer reaches the client as it is, and no time has to pass.
    """
    clock = Clock()
    routed = Routed(DOWN, clock=clock, breaker_failures=1)
    assert await ask(routed) == 502
    assert not may_be_tried(routed)

    clock.now += routed.router.settings.breaker_cooldown
    assert may_be_tried(routed)
    gate = anyio.Event()
    routed.worker.scripts = Script(status=status, headers=[], head=[gate], body=body)
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        assert not may_be_tried(routed)  # this is the one request that may
        gate.set()
    assert (exchange.status, exchange.body) == (status, b"".join(body))
    assert may_be_tried(routed)

    routed.worker.scripts = GOOD
    assert await ask(routed) == 200
    assert routed.router.stats().workers[0].breaker is BreakerState.CLOSED
    routed.assert_released()


async def test_63_a_busy_worker_that_is_slow_to_answer_a_probe() -> None:
    """sgl-project/sglang#9198: a probe that times out, or two in a row, takes no worker out of service.

    It goes on with what it does and gets new requests; and one good probe makes it even.
    """
    gate = anyio.Event()
    slow = iter([True, True, False, True, True])

    def script(request: httpx.Request) -> Script:
        if request.method == "GET":
            return Script(head=[HANG] if next(slow) else [])
        return replace(GOOD, head=[] if routed.worker.streams else [gate])

    routed = Routed({WORKER: script}, health_timeout=0.05)
    assert routed.router.settings.health_failures == 3
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        for _ in range(5):
            await routed.router.monitor.probe_all()
            assert routed.router.stats().workers[0].healthy
        assert len(routed.worker.calls) == 6
        assert routed.counters[0][0] == 1
        assert await ask(routed) == 200
        gate.set()

    assert exchange.finished_cleanly
    routed.assert_released(exchange)


async def test_64_no_worker_is_up_at_the_start() -> None:
    """sgl-project/sglang#3802: the app starts all the same, says so to clients, and serves them once a worker is up."""
    routed = Routed({WORKER: DOWN, OTHER: DOWN})
    app = RouterMiddleware(Starlette(), router=routed.router)
    async with Lifespan().running(app) as life:
        assert life.supported
        assert life.exception is None
        assert await ask(routed) == 502
        routed.fleet[OTHER].scripts = GOOD
        assert [await ask(routed) for _ in range(4)] == [200] * 4

        for _ in range(routed.router.settings.health_failures):
            await routed.router.monitor.probe_all()
        assert [worker.healthy for worker in routed.router.stats().workers] == [False, True]
        assert await ask(routed) == 200
        routed.worker.scripts = GOOD
        for _ in range(routed.router.settings.health_successes):
            await routed.router.monitor.probe_all()
        assert [worker.healthy for worker in routed.router.stats().workers] == [True, True]
        assert await ask(routed) == 200
    routed.assert_released()


# --- how workers are named -----------------------------------------------------------------------------------

NAMED = {
    "worker-0": "http://worker-0",
    "engine:8000": "http://engine:8000",
    "http://[::1]:8001": "http://[::1]:8001",
    "[2001:DB8::2]:8000": "http://[2001:db8::2]:8000",
    "http://w3:8000/": "http://w3:8000",
    "http://w4:8000/base//": "http://w4:8000/base",
    "http://llm.svc.cluster.local.:8000": "http://llm.svc.cluster.local.:8000",
}
"""URLs as they are written, and as they have to be asked."""


async def test_workers_are_asked_by_any_name_that_a_url_may_have() -> None:
    """vllm-project/production-stack: host names without a dot and IPv6 addresses are skipped, and models misplaced.

    Each worker here lists a model of its own, and gets the requests for that one, whatever its neighbours are called.
    A slash at the end of a URL isn't doubled.
    """
    workers = [{"url": url, "models": [f"model {number}"]} for number, url in enumerate(NAMED)]
    fleet = FakeFleet(dict.fromkeys(NAMED.values(), GOOD))
    router = Router(RouterSettings(workers=workers), transport=fleet)
    app = RouterMiddleware(unreachable_app, router=router)
    assert [worker.url for worker in router.stats().workers] == list(NAMED.values())
    for number, url in enumerate(NAMED.values()):
        exchange = await Exchange(body=completion_body(model=f"model {number}")).run(app)
        assert (url, exchange.status) == (url, 200)
        (call,) = fleet[url].calls
        assert call.url == f"{url}/v1/chat/completions"
        host = url.removeprefix("http://").partition("/")[0].encode()
        assert [value for name, value in call.headers if name.lower() == b"host"] == [host]
        (state,) = [state for state in router.workers if state.worker.models == (f"model {number}",)]
        assert state.worker.url == url
    fleet.assert_clean()


@pytest.mark.parametrize("model", ["llama:8b-q4", "org/llama:8b", "a:b:c", ":", "urn:model:1"])
async def test_a_model_name_may_have_colons(model: str) -> None:
    """vllm-project/production-stack: an alias with a colon crashes the router; here a name is a name."""
    workers = [{"url": WORKER, "models": [model]}, {"url": OTHER, "models": [model.split(":")[0] or "other", "plain"]}]
    routed = Routed({WORKER: GOOD, OTHER: GOOD})
    routed.router = routed.app.router = Router(RouterSettings(workers=workers), transport=routed.fleet)
    for _ in range(4):
        assert (await Exchange(body=completion_body(model=model)).run(routed.app)).status == 200
    assert (await Exchange(body=completion_body(model="plain")).run(routed.app)).status == 200
    assert (await Exchange(body=completion_body(model=model + "x")).run(routed.app)).status == 404
    assert [len(worker.calls) for worker in routed.fleet.workers.values()] == [4, 1]
    routed.assert_released()
