"""Owns the faults of counting that peers have had in public (entries 1 to 8, and 19): each trigger, played to us.

Entry 2 (vllm-project/router#197) is in tests/fleet/test_health.py. Entries 9 to 12, 16 to 18 and 20, of what is counted
down too often or never, are in `test_peer_faults_release.py`; entries 3 and 4 for load that is polled, and 13 to 15, in
`test_peer_faults_load.py`.

Entry 19 is about gRPC, which this version doesn't have. The part that applies is shown.
"""

from __future__ import annotations

import gc
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.admission import _Waiter
from asgi_router.exchange import Exchange as Served
from asgi_router.scheduling.lease import Lease
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import DISCONNECT, HANG, Exchange
from tests.instruments.cancel import cancel_natively
from tests.instruments.fake_worker import FakeFleet, Script
from tests.instruments.raw_server import REQUEST, raw_server
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, exchange_for, interrupted, unreachable_app
from tests.wire.served import OK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Receive, Scope, Send

    from tests.instruments.fake_worker import Scripts

pytestmark = pytest.mark.anyio

GOOD = answer("stream")
UNCONNECTED = replace(GOOD, connect=[HANG])
SILENT = replace(GOOD, head=[HANG])
FLEET = [f"http://w{number}:8000" for number in range(1, 5)]

TURNS = 20
"""Turns of the loop from a disconnect to the release: from task to task, and no waiting for anything."""


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()


def requests(routed: Routed) -> list[int]:
    """The requests counted on each worker."""
    return [counters[0] for counters in routed.counters]


def connects(routed: Routed) -> int:
    """How often any worker has been connected to."""
    return sum(worker.connects for worker in routed.fleet.workers.values())


async def burst(routed: Routed, count: int, *, path: str = "/v1/chat/completions", alike: bool = False) -> list[int]:
    """Let so many requests come at once, and return how they are counted while no connection is made yet.

    Their prompts are of one length, and different unless they are `alike`. In the end all the clients leave.
    """
    for worker in routed.fleet.workers.values():
        worker.scripts = UNCONNECTED
    before = connects(routed)
    texts = [f"{0 if alike else number:04} " * 400 for number in range(count)]
    bodies = [json.dumps({"messages": [{"role": "user", "content": text}], "prompt": text}) for text in texts]
    exchanges = [Exchange(body=body.encode(), path=path) for body in bodies]
    async with anyio.create_task_group() as tasks:
        for exchange in exchanges:
            tasks.start_soon(exchange.run, routed.app)
        await until(lambda: connects(routed) == before + count)
        counted = requests(routed)
        for exchange in exchanges:
            exchange.disconnect()
    routed.assert_released()
    return counted


# --- leaks ---------------------------------------------------------------------------------------------------


async def test_01_clients_that_leave_in_a_long_prefill() -> None:
    """vllm-project/router#215: clients leave before the worker's head; within a few turns no load of theirs is left.

    So a worker that comes back at zero gets its share of what follows, and not everything.
    """
    routed = Routed({WORKER: SILENT, OTHER: SILENT}, policy="request_num")
    twin = routed.router.workers.get(OTHER).worker
    routed.router.workers.remove(OTHER)
    exchanges = [exchange_for() for _ in range(40)]
    async with anyio.create_task_group() as tasks:
        for exchange in exchanges:
            tasks.start_soon(exchange.run, routed.app)
        await routed.worker.received(40)
        assert requests(routed) == [40]
        for exchange in exchanges:
            exchange.disconnect()
        for _ in range(TURNS):
            await anyio.lowlevel.checkpoint()
        assert routed.counters == [(0, 0, 0, 0)]

    routed.router.workers.add(twin)
    assert await burst(routed, 10) == [5, 5]


async def test_06_nothing_is_kept_of_clients_that_left() -> None:
    """vllm-project/production-stack#1072: clients leave in every phase, again and again, and every table is empty.

    Nor is a phase counted down that the request had left already: another request on the worker keeps its share.
    """
    phases = {
        "connect": UNCONNECTED,
        "head": SILENT,
        "first byte": interrupted("stream", HANG, after=0),
        "answer": interrupted("stream", HANG),
    }
    kinds = (Served, Lease, _Waiter)
    gc.collect()
    before = sum(isinstance(thing, kinds) for thing in gc.get_objects())
    gate = anyio.Event()
    routed = Routed(interrupted("stream", gate), max_concurrent_per_worker=2)
    router = routed.router
    states = list(router.workers)
    staying = exchange_for()
    async with staying.running(routed.app):
        await staying.body_at_least(1)
        share = routed.counters
        assert share[0][0] == 1
        for phase, script in [*phases.items()] * 5:
            routed.worker.scripts = script
            expected = connects(routed) + 1, len(routed.worker.calls) + (phase != "connect")
            leaving, queued = exchange_for(), exchange_for()
            async with leaving.running(routed.app):
                await until(lambda expected=expected: (connects(routed), len(routed.worker.calls)) == expected)  # type: ignore[misc]
                if phase == "answer":
                    await leaving.body_at_least(1)
                async with queued.running(routed.app):
                    await until(lambda: len(router._mode.admission) == 1)
                    queued.disconnect()
                leaving.disconnect()
            await Exchange(body=[completion_body()[:50], DISCONNECT]).run(routed.app)
            assert (phase, routed.counters) == (phase, share)
        gate.set()

    assert staying.finished_cleanly
    for _ in range(2):  # one whose probe counts as under way is not asked again
        await router.monitor.probe_all()
    assert [call.method for call in routed.worker.calls[-2:]] == ["GET", "GET"]
    assert not router._exchanges
    assert len(router._mode.admission) == 0
    assert list(router.workers) == states
    assert len(states[0].prefixes) > 0  # of the one that stayed: it has been answered
    routed.assert_released()
    del leaving, queued, staying
    gc.collect()
    assert sum(isinstance(thing, kinds) for thing in gc.get_objects()) <= before


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
async def test_07_a_cancelled_stream_gives_its_place_back_once(how: str) -> None:
    """BerriAI/litellm#30020, #27955: of two requests that wait behind a stream, one gets in when it is cancelled."""
    routed = Routed(interrupted("stream", HANG), max_concurrent_per_worker=1)
    queue = routed.router._mode.admission
    first, second, third = (exchange_for() for _ in range(3))
    async with first.running(routed.app):
        await first.body_at_least(1)
        async with second.running(routed.app):
            await until(lambda: len(queue) == 1)
            async with third.running(routed.app):
                await until(lambda: len(queue) == 2)
                getattr(first, how)()
                await first.over()
                await second.body_at_least(1)
                assert (requests(routed), len(queue), routed.worker.connects) == ([1], 1, 2)
                second.disconnect()
                await third.body_at_least(1)
                assert (requests(routed), len(queue), routed.worker.connects) == ([1], 0, 3)
                third.disconnect()
    routed.assert_released()


@asyncio_only
async def test_08_a_client_that_leaves_before_the_stream_is_read() -> None:
    """vllm-project/vllm-ascend#10812: natively cancelled between count and stream, again and again: the place is free.

    A worker that takes one request at a time, before which nobody may wait, would soon refuse them all.
    """
    turn = anyio.Event()
    turn.set()
    chunks = list(GOOD.body)
    script = replace(GOOD, connect=[turn] * 2, head=[turn] * 2, body=[turn, turn, *chunks])
    routed = Routed(script, max_concurrent_per_worker=1, queue_size=0)
    unread = 0
    for cancelled_at in range(200):
        try:
            outcome = await cancel_natively(exchange_for().run(routed.app), at=[cancelled_at])
        except AssertionError:
            break  # it was over before its turn came
        assert outcome.cancelled
        streams = routed.worker.streams
        unread += bool(streams) and streams[-1].chunks_given == 0
        assert (await exchange_for().run(routed.app)).status == 200
    else:
        pytest.fail("the request outlived the sweep")

    assert unread > 0
    routed.assert_released()


# --- what is not counted -------------------------------------------------------------------------------------

BY_LOAD = ["cache_aware", "fd_metrics_score", "prefill_cost", "process_tokens", "request_num"]


@pytest.mark.parametrize("policy", BY_LOAD)
async def test_03_a_burst_is_spread_though_no_time_passes(policy: str) -> None:
    """vllm-project/router#177: each request is counted when it is given its worker, so the next one sees it there.

    No probe runs, no connection is made, no worker has answered anything.
    """
    routed = Routed(dict.fromkeys(FLEET, UNCONNECTED), policy=policy)
    assert await burst(routed, 24) == [6, 6, 6, 6]


@pytest.mark.parametrize("policy", BY_LOAD)
async def test_04_an_engine_without_the_path_that_is_polled(policy: str) -> None:
    """vllm-project/router#174: engines that answer 404 to what they are polled for are still chosen by their load."""
    routed = Routed(dict.fromkeys(FLEET, Script(status=404, body=[b"not found"])), policy=policy)
    for _ in range(routed.router.settings.health_failures + 1):
        await routed.router.monitor.probe_all()
    assert connects(routed) == 4 * (routed.router.settings.health_failures + 1)
    assert all(worker.healthy for worker in routed.router.stats().workers)
    assert await burst(routed, 24) == [6, 6, 6, 6]


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate"]


@pytest.mark.parametrize("path", PATHS)
async def test_05_every_path_that_is_forwarded_is_counted(path: str) -> None:
    """vllm-project/router#179: equal prompts on a path that was added all hold a lease, and don't pile up on one."""
    routed = Routed(dict.fromkeys(FLEET, UNCONNECTED), paths=PATHS)
    counted = await burst(routed, 48, path=path, alike=True)
    assert sum(counted) == 48
    assert max(counted) <= 24


@asynccontextmanager
async def two_workers(transport: str, gate: anyio.Event) -> AsyncIterator[Router]:
    """A router that reaches two workers by a transport of this kind; they answer when the gate opens."""

    async def worker(scope: Scope, receive: Receive, send: Send) -> None:
        await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    if transport == "sockets":
        async with raw_server([REQUEST, gate, OK]) as first, raw_server([REQUEST, gate, OK]) as second:
            yield Router(RouterSettings(workers=[first.url, second.url], policy="request_num"))
    else:
        scripts: dict[str, Scripts] = dict.fromkeys((WORKER, OTHER), replace(GOOD, head=[gate]))
        given = httpx.ASGITransport(worker) if transport == "asgi" else FakeFleet(scripts)
        yield Router(RouterSettings(workers=[WORKER, OTHER], policy="request_num"), transport=given)


@pytest.mark.parametrize("transport", ["scripted", "asgi", "sockets"])
async def test_19_requests_are_counted_whatever_carries_them(transport: str) -> None:
    """sgl-project/sglang#15473: counting isn't the transport's: by any of them the load is seen, and spread."""
    gate = anyio.Event()
    async with two_workers(transport, gate) as router:
        app = RouterMiddleware(unreachable_app, router=router)
        exchanges = [exchange_for() for _ in range(6)]
        async with anyio.create_task_group() as tasks:
            for exchange in exchanges:
                tasks.start_soon(exchange.run, app)
            await until(lambda: sum(worker.requests for worker in router.stats().workers) == 6)
            assert [worker.requests for worker in router.stats().workers] == [3, 3]
            gate.set()
        assert [exchange.status for exchange in exchanges] == [200] * 6
        assert [(worker.requests, worker.prefill_tokens) for worker in router.stats().workers] == [(0, 0)] * 2
