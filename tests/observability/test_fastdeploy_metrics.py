"""Shows the metrics by the names of FastDeploy's router: dashboards made for it find theirs, with its faults mended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from asgi_router import Worker
from asgi_router.observability.fastdeploy_metrics import SESSIONS
from tests.instruments.asgi_client import Exchange
from tests.observability.scraping import OPENMETRICS, Scrape, finished, scrape
from tests.routed import OTHER, WORKER, Routed, answer, completion_body

if TYPE_CHECKING:
    from tests.instruments.fake_worker import Script

pytestmark = pytest.mark.anyio

NAMES = {
    "inference_requests": "counter",
    "router_cache_hit": "counter",
    "router_cache_request": "counter",
    "http_requests": "counter",
    "http_request_duration_seconds": "summary",
}


def routed_with_metrics(script: Script | None = None, **settings: object) -> Routed:
    return Routed(script or answer("json"), metrics_path="/metrics", fastdeploy_metrics=True, **settings)


def values(found: Scrape, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return {key.labels: sample.value for key, sample in found.samples.items() if key.name == name}


def inference(status: str, **workers: str) -> tuple[tuple[str, str], ...]:
    labels = {"decode_worker": "", "mixed_worker": "", "prefill_worker": "", "status_code": status, **workers}
    return tuple(sorted(labels.items()))


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
@pytest.mark.parametrize("wanted", [False, True])
async def test_the_names_are_there_only_if_wanted(accept: str, wanted: bool) -> None:
    """FASTDEPLOY_METRICS adds the five names, with FastDeploy's types; without it none of them is there."""
    routed = Routed(answer("json"), metrics_path="/metrics", fastdeploy_metrics=wanted)
    found = await scrape(routed, accept)
    families = {family.name: family.type for family in found.families if not family.name.startswith("asgi_router_")}
    assert families == (NAMES if wanted else {})


async def test_f34_a_request_whose_worker_is_away_is_counted() -> None:
    """F-34: a failed connection left `inference_requests_total` as it was; it is one with code 502."""
    routed = routed_with_metrics(replace(answer("json"), connect=[httpx.ConnectError("refused")]))
    assert (await Exchange(body=completion_body()).run(routed.app)).status == 502
    found = await scrape(routed)
    assert values(found, "inference_requests_total") == {inference("502", mixed_worker=WORKER): 1}


async def test_inference_requests_go_by_role_and_status() -> None:
    """A worker stands under its role, others are empty, outcomes of one status are one series; leavers are dropped."""
    routed = routed_with_metrics()
    metrics = routed.router.metrics
    routed.router.workers.add(Worker(url=OTHER))
    metrics.observe(finished())
    metrics.observe(finished(outcome="client_gone"))
    metrics.observe(finished(worker=OTHER, role="prefill", status=500))
    metrics.observe(finished(worker="", role="", status=503))
    expected = {
        inference("200", mixed_worker=WORKER): 2,
        inference("500", prefill_worker=OTHER): 1,
        inference("503"): 1,
    }
    assert values(await scrape(routed), "inference_requests_total") == expected
    routed.router.workers.remove(OTHER)
    del expected[inference("500", prefill_worker=OTHER)]
    assert values(await scrape(routed), "inference_requests_total") == expected


async def test_f95_http_metrics_are_there_and_know_no_path_of_a_clients() -> None:
    """F-95: HTTP metrics were never installed, and would have had raw paths; here `endpoint` is one of PATHS."""
    routed = routed_with_metrics(paths=["/v1/completions"])
    for mount in ("", "/tenant-1", "/tenant-2"):
        options = {"path": f"{mount}/v1/completions", "root_path": mount, "query_string": b"user=4711"}
        exchange = Exchange(body=completion_body(), **options)  # type: ignore[arg-type]
        assert (await exchange.run(routed.app)).status == 200
    assert (await Exchange(path="/v1/completions", body=b"[").run(routed.app)).status == 400

    found = await scrape(routed)
    endpoint = (("endpoint", "/v1/completions"), ("method", "POST"))
    assert values(found, "http_requests_total") == {
        (*endpoint, ("status_code", "200")): 3,
        (*endpoint, ("status_code", "400")): 1,
    }
    assert values(found, "http_request_duration_seconds_count") == {endpoint: 4}
    (seconds,) = values(found, "http_request_duration_seconds_sum").values()
    assert seconds > 0


async def test_sessions_that_come_back_to_their_worker_are_hits() -> None:
    """A session's first request is no hit, the next is if its worker is the same; requests without one don't count."""
    metrics = routed_with_metrics().router.metrics
    for session_id, worker in [("a", WORKER), ("a", WORKER), ("a", OTHER), ("a", OTHER), ("b", OTHER), ("", OTHER)]:
        metrics.observe(finished(session_id=session_id, worker=worker))
    metrics.observe(finished(session_id="a", worker="", role=""))  # no worker was chosen
    found = await scrape(metrics)
    assert values(found, "router_cache_request_total") == {(): 5}
    assert values(found, "router_cache_hit_total") == {(): 2}


async def test_sessions_are_bounded() -> None:
    """The sessions used last are remembered, 10,000 of them."""
    metrics = routed_with_metrics().router.metrics
    metrics.observe(finished(session_id="kept"))
    metrics.observe(finished(session_id="lost"))
    for number in range(SESSIONS - 1):
        if number == SESSIONS - 2:
            metrics.observe(finished(session_id="kept"))
        metrics.observe(finished(session_id=f"s{number}"))
    before = values(await scrape(metrics), "router_cache_hit_total")[()]
    metrics.observe(finished(session_id="lost"))
    metrics.observe(finished(session_id="kept"))
    assert before == 1
    assert values(await scrape(metrics), "router_cache_hit_total") == {(): 2}
