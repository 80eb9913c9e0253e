"""Owns what happens to requests while workers join, are replaced, drain and leave: nothing is lost, nothing stays."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import anyio
import pytest

from tests.fleet.admin_calls import PAYLOAD, administered, call, urls
from tests.instruments import BACKENDS
from tests.instruments.asgi_client import Exchange
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, counters

if TYPE_CHECKING:
    from asgi_router.scheduling.state import WorkerState

pytestmark = pytest.mark.anyio

GROWTH = 128 * 1024
"""Bytes that 800 rounds may add: what caches and counters of the interpreter take. A worker kept takes 2 KiB."""


def gated() -> tuple[Routed, anyio.Event]:
    """A router whose only worker, `OTHER`, holds its answers back; it has answered no request yet."""
    gate = anyio.Event()
    routed = administered()
    routed.router.workers.remove(WORKER)
    routed.fleet[OTHER].scripts = lambda request: (
        replace(answer("json"), head=[gate]) if request.method == "POST" else answer("json")
    )
    return routed, gate


@pytest.mark.parametrize("change", ["replace", "remove", "remove and register"])
async def test_f40_leases_end_on_the_old_worker(change: Literal["replace", "remove", "remove and register"]) -> None:
    """F-40: a request in flight ends on the worker object that it began on; the new one starts at zero (F-42, F-65).

    sgl-project/sglang#3877: removing a worker brought the router down.
    """
    routed, gate = gated()
    assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
    old = routed.router.workers.get(OTHER)
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.fleet[OTHER].received(2)
        if change != "replace":
            assert (await call(routed, "DELETE", f"/workers?url={OTHER}")).status == 200
        if change != "remove":
            assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
            assert counters(routed.router.stats().workers[0]) == (0, 0, 0, 0)
            assert routed.router.workers.get(OTHER) is not old
        assert old.requests == 1
        gate.set()

    assert exchange.finished_cleanly
    assert exchange.status == 200
    assert (old.requests, old.prefill_tokens, old.pending_prefill_tokens, old.prefixes.pinned) == (0, 0, 0, 0)
    assert len(old.prefixes) > 0
    assert [worker.prefix_blocks for worker in routed.router.stats().workers] == ([] if change == "remove" else [0])
    routed.assert_released(exchange)


async def test_drain_while_a_request_is_in_flight() -> None:
    """It gets no new request, ends the old one, and says how many it still has; then it can be taken back (F-92)."""
    routed, gate = gated()
    await call(routed, "POST", "/register", PAYLOAD)
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.fleet[OTHER].received(2)
        drained = await call(routed, "POST", f"/workers/drain?url={OTHER}")
        assert drained.json() == {"code": 200, "msg": "Drain success", "draining": True, "requests": 1}
        refused = await Exchange(body=completion_body()).run(routed.app)
        assert refused.status == 503
        gate.set()

    assert exchange.finished_cleanly
    again = await call(routed, "POST", f"/workers/drain?url={OTHER}&draining=false")
    assert again.json() == {"code": 200, "msg": "Undrain success", "draining": False, "requests": 0}
    assert (await Exchange(body=completion_body()).run(routed.app)).status == 200
    routed.assert_released(exchange)


async def test_registration_that_is_late_registers_once() -> None:
    """Two registrations of one worker at once, whose probes end in any order, leave one entry (F-90)."""
    routed = administered()
    gates = [anyio.Event(), anyio.Event()]
    routed.fleet[OTHER].scripts = [replace(answer("json"), head=[gate]) for gate in gates]
    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(call, routed, "POST", "/register", PAYLOAD)
            await routed.fleet[OTHER].received(number + 1)
        gates[1].set()
        gates[0].set()
    assert urls(routed) == [WORKER, OTHER]
    routed.assert_released()


@pytest.mark.parametrize("anyio_backend", BACKENDS[:1])  # the others show nothing more, and it takes seconds
@pytest.mark.timeout(300)
async def test_register_drain_and_remove_1000_times() -> None:
    """Under load no request fails, every worker object goes when it has left, and memory stays flat."""
    routed = administered(policy="round_robin")
    other = routed.fleet[OTHER]
    body = completion_body()
    served = 0
    over = False
    objects: weakref.WeakSet[WorkerState] = weakref.WeakSet()

    async def client() -> None:
        nonlocal served
        while not over:
            exchange = await Exchange(body=body).run(routed.app)
            assert exchange.status == 200
            assert exchange.finished_cleanly
            served += 1

    async def operate(rounds: int) -> int:
        for _ in range(rounds):
            assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
            objects.add(routed.router.workers.get(OTHER))
            probed = other.connects
            await other.changes.until(lambda probed=probed: other.connects > probed)  # type: ignore[misc]
            assert (await call(routed, "POST", f"/workers/drain?url={OTHER}")).status == 200
            assert (await call(routed, "DELETE", f"/workers?url={OTHER}")).status == 200
            for worker in routed.fleet.workers.values():
                worker.calls[:] = [call for call in worker.calls if not call.stream or not call.stream.closed]
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(client)
            before = await operate(200)
            after = await operate(800)
            over = True
    finally:
        tracemalloc.stop()

    gc.collect()
    assert other.connects >= 2000  # a probe and a request in each round
    assert served > 1000
    assert len(objects) == 0
    assert after - before < GROWTH
    assert urls(routed) == [WORKER]
    routed.assert_released()
