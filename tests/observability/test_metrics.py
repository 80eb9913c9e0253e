"""Shows what a scrape says: names and values, gauges of this moment, and that asking changes nothing."""

from __future__ import annotations

from dataclasses import replace

import anyio.lowlevel
import pytest

from asgi_router import Worker
from asgi_router.errors import RouterError
from tests.instruments.asgi_client import DISCONNECT, Exchange
from tests.instruments.fake_worker import Script
from tests.observability.scraping import OPENMETRICS, finished, scrape
from tests.routed import OTHER, WORKER, Routed, answer, completion_body

pytestmark = pytest.mark.anyio

FORMATS = pytest.mark.parametrize("accept", ["", OPENMETRICS], ids=["text", "openmetrics"])

USAGE = {"prompt_tokens": 950, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 512}}

FAMILIES = {
    "asgi_router_requests": "counter",
    "asgi_router_prompt_tokens": "counter",
    "asgi_router_predicted_cached_tokens": "counter",
    "asgi_router_reported_prompt_tokens": "counter",
    "asgi_router_reported_cached_tokens": "counter",
    "asgi_router_retries": "counter",
    "asgi_router_duration_seconds": "histogram",
    "asgi_router_first_byte_seconds": "histogram",
    "asgi_router_selection_seconds": "histogram",
    "asgi_router_queue_seconds": "histogram",
    "asgi_router_worker_requests": "gauge",
    "asgi_router_worker_prefill_tokens": "gauge",
    "asgi_router_worker_waiting_requests": "gauge",
    "asgi_router_worker_pending_prefill_tokens": "gauge",
    "asgi_router_worker_prefix_blocks": "gauge",
    "asgi_router_worker_prefix_capacity": "gauge",
    "asgi_router_worker_healthy": "gauge",
    "asgi_router_worker_draining": "gauge",
    "asgi_router_worker_backing_off": "gauge",
    "asgi_router_worker_breaker": "gauge",
    "asgi_router_exchanges": "gauge",
    "asgi_router_leases": "gauge",
    "asgi_router_queued": "gauge",
    "asgi_router_draining": "gauge",
}
"""What dashboards may rely on."""


def routed_with_metrics(workers: dict[str, Script] | Script | None = None, **settings: object) -> Routed:
    return Routed(workers or answer("json"), metrics_path="/metrics", **settings)


async def post(routed: Routed, **options: object) -> Exchange:
    exchange = Exchange(**{"body": completion_body(), **options})  # type: ignore[arg-type]
    return await exchange.run(routed.app)


@FORMATS
async def test_names_and_types_are_a_promise(accept: str) -> None:
    """A router that has served nothing shows all metrics, in both formats, each with a help text and its type."""
    found = await scrape(routed_with_metrics(), accept)
    assert {family.name: family.type for family in found.families} == FAMILIES
    assert all(family.documentation for family in found.families)
    assert found.value("retries_total") == 0


@FORMATS
async def test_one_request_is_seen_in_every_metric(accept: str) -> None:
    """A good request is one in each counter and histogram of its worker, with tokens as estimated and reported."""
    routed = routed_with_metrics(Script.json({"choices": [], "usage": USAGE}))
    assert (await post(routed)).status == 200
    assert (await post(routed)).status == 200

    found = await scrape(routed, accept)
    worker = {"worker": WORKER, "role": "mixed"}
    assert found.value("requests_total", **worker, status="200", outcome="ok") == 2
    prompt = found.value("prompt_tokens_total", **worker)
    assert prompt is not None
    assert prompt > 0
    predicted = found.value("predicted_cached_tokens_total", **worker)
    assert predicted is not None
    assert 0 < predicted < prompt * 0.6  # the second had the first one's blocks
    assert found.value("reported_prompt_tokens_total", **worker) == 1900
    assert found.value("reported_cached_tokens_total", **worker) == 1024
    for name in ("duration_seconds", "first_byte_seconds"):
        assert found.value(f"{name}_count", **worker) == found.value(f"{name}_bucket", **worker, le="+Inf") == 2
    assert found.value("selection_seconds_count") == found.value("queue_seconds_count") == 2
    assert found.value("queue_seconds_sum") == 0


async def test_seconds_are_those_of_the_routers_clock() -> None:
    """First byte, duration and queue are seconds, in the bucket that they belong to."""
    routed = routed_with_metrics()
    routed.router.metrics.observe(finished(queue_seconds=3.0, first_byte_seconds=3.5, duration_seconds=45.0))
    found = await scrape(routed)
    worker = {"worker": WORKER, "role": "mixed"}
    assert found.value("queue_seconds_bucket", le="2.5") == 0
    assert found.value("queue_seconds_bucket", le="5.0") == 1
    assert found.value("first_byte_seconds_sum", **worker) == 3.5
    assert found.value("duration_seconds_bucket", **worker, le="30.0") == 0
    assert found.value("duration_seconds_bucket", **worker, le="60.0") == 1
    assert found.value("selection_seconds_bucket", le="5e-05") == 0
    assert found.value("selection_seconds_bucket", le="0.0001") == 1


async def test_gauges_are_the_state_of_this_moment() -> None:
    """While requests are in flight and waiting the gauges are `stats()`, with leases and queue; then they are zero."""
    gate = anyio.Event()
    routed = routed_with_metrics(replace(answer("json"), head=[gate]), max_concurrent_per_worker=1)
    first, second = (Exchange(body=completion_body()) for _ in range(2))
    async with first.running(routed.app):
        await routed.worker.received(1)
        async with second.running(routed.app):
            with anyio.fail_after(5):
                while not routed.router.stats().queued:
                    await anyio.lowlevel.checkpoint()
            found = await scrape(routed)
            stats = routed.router.stats()
            gate.set()

    worker = {"worker": WORKER, "role": "mixed"}
    assert stats.workers[0].requests == 1
    for name in ("requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens", "prefix_blocks"):
        assert found.value(f"worker_{name}", **worker) == getattr(stats.workers[0], name) > 0
    assert [found.value(name) for name in ("exchanges", "leases", "queued")] == [2, 1, 1]

    after = await scrape(routed)
    for name in ("requests", "prefill_tokens", "waiting_requests", "pending_prefill_tokens"):
        assert after.value(f"worker_{name}", **worker) == 0
    assert [after.value(name) for name in ("exchanges", "leases", "queued")] == [0, 0, 0]
    assert after.value("queue_seconds_bucket", le="+Inf") == 2
    routed.assert_released(first)


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_lease_on_a_worker_that_has_left_is_alive(replaced: bool) -> None:
    """A worker that is removed or replaced is in no gauge, while the lease on it is counted until its request ends."""
    gate = anyio.Event()
    routed = routed_with_metrics({WORKER: replace(answer("json"), head=[gate]), OTHER: answer("json")})
    routed.router.workers.drain(OTHER)
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        routed.router.workers.remove(WORKER)
        if replaced:
            routed.router.workers.add(Worker(url=WORKER))
        found = await scrape(routed)
        gate.set()

    here = {("mixed", WORKER): 0.0} if replaced else {}
    assert found.named("worker_requests") == {("mixed", OTHER): 0, **here}
    assert found.value("leases") == 1
    after = await scrape(routed)
    assert after.value("leases") == 0
    counted = ("ok", "mixed", "200", WORKER) if replaced else ("ok", "", "200", "")
    assert after.named("requests_total") == {counted: 1}


async def test_states_of_a_worker_are_seen() -> None:
    """Draining, unhealthy and backing off are 1 or 0, and exactly one state of the breaker is 1 (litellm#25504)."""
    routed = routed_with_metrics({WORKER: answer("json"), OTHER: answer("json")})
    routed.router.workers.drain(WORKER)
    routed.router.workers.set_breaker(WORKER, open=True)
    routed.router.workers.get(WORKER).healthy = False
    routed.router.workers.get(OTHER).breaker.back_off(30)
    found = await scrape(routed)
    for name, ours, others in (("draining", 1, 0), ("healthy", 0, 1), ("backing_off", 0, 1)):
        assert found.named(f"worker_{name}") == {("mixed", WORKER): ours, ("mixed", OTHER): others}
    assert {labels[1:]: value for labels, value in found.named("worker_breaker").items() if value} == {
        ("open", WORKER): 1,
        ("closed", OTHER): 1,
    }
    assert len(found.named("worker_breaker")) == 6


async def test_a_scrape_changes_nothing() -> None:
    """However often and in whichever format it is asked, stats and metrics read the same afterwards."""
    routed = routed_with_metrics({WORKER: answer("json"), OTHER: Script.json({}, status=503)}, fastdeploy_metrics=True)
    for _ in range(3):
        await post(routed)
    routed.router.workers.remove(OTHER)  # what a worker has left behind isn't touched either
    stats, first = routed.router.stats(), (await scrape(routed)).exchange.body
    for accept in (OPENMETRICS, "", "*/*"):
        await scrape(routed, accept)
    await Exchange(method="HEAD", path="/metrics", body=b"").run(routed.app)
    assert (await scrape(routed)).exchange.body == first
    assert routed.router.stats() == stats


@FORMATS
async def test_nothing_a_client_says_makes_a_series(accept: str) -> None:
    """Any model, session, id, trace, query and user agent: the series are those of one plain request."""
    routed = routed_with_metrics(fastdeploy_metrics=True)
    await post(routed)
    before = set((await scrape(routed, accept)).samples)
    for number in range(20):
        body = completion_body(model=f"m{number}", session_id=f"s{number}", request_id=f"r{number}", user=f"u{number}")
        headers = [("x-request-id", f"h{number}"), ("user-agent", f"a{number}"), ("traceparent", f"t{number}")]
        await post(routed, body=body, headers=headers, query_string=f"q={number}".encode())
    assert set((await scrape(routed, accept)).samples) == before


async def test_outcomes_are_words_of_ours() -> None:
    """Each way out has its outcome, from a fixed set, and the status that the client got; 0 where it got none."""
    routed = routed_with_metrics(max_body_bytes=10_000)
    await post(routed)
    await post(routed, body=b"[]")
    await post(routed, body=b"x" * 10_001)
    await post(routed, body=[b"{", DISCONNECT])
    routed.router.workers.remove(WORKER)
    await post(routed)
    found = (await scrape(routed)).named("requests_total")
    assert {labels[:1] + labels[2:3]: count for labels, count in found.items()} == {
        ("invalid_request", "400"): 1,
        ("request_too_large", "413"): 1,
        ("client_gone", "0"): 1,
        ("no_worker_available", "503"): 1,
    }
    assert {labels[0] for labels in found} <= {"ok", "client_gone", "cancelled", *codes(RouterError)}


def codes(error: type[RouterError]) -> set[str]:
    return {error.code}.union(*map(codes, error.__subclasses__()))


async def test_retries_are_counted() -> None:
    """A request that found its worker at the third try has been repeated twice."""
    busy = Script.json({}, status=503)
    routed = routed_with_metrics({WORKER: busy, OTHER: busy, "http://w3:8000": answer("json")}, policy="round_robin")
    for _ in range(3):
        assert (await post(routed)).status == 200
    calls = sum(len(worker.calls) for worker in routed.fleet.workers.values())
    assert (await scrape(routed)).value("retries_total") == calls - 3 > 0


async def test_two_routers_never_meet() -> None:
    """Each router counts its own requests, also if both have the same worker."""
    one, two = routed_with_metrics(), routed_with_metrics()
    await post(one)
    assert (await scrape(one)).named("requests_total") == {("ok", "mixed", "200", WORKER): 1}
    assert (await scrape(two)).named("requests_total") == {}


async def test_the_series_follow_the_fleet() -> None:
    """Workers that join and leave appear and disappear, in counters as in gauges."""
    routed = routed_with_metrics()
    await post(routed)
    routed.router.workers.add(Worker(url=OTHER))
    routed.router.workers.remove(WORKER)
    found = await scrape(routed)
    assert found.named("worker_requests") == {("mixed", OTHER): 0}
    assert found.named("requests_total") == found.named("duration_seconds_count") == {}
