"""Owns the metrics of a router as Prometheus reads them: their names, and how they are served. Needs `[prometheus]`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from asgi_router.observability.tally import Tally
from asgi_router.scheduling.breaker import BreakerState

try:
    from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.exposition import choose_encoder
except ImportError as exc:
    raise ImportError("metrics need the extra: pip install 'asgi-router[prometheus]'") from exc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric
    from starlette.types import Receive, Scope, Send

    from asgi_router.fleet.registry import Registry
    from asgi_router.observability.events import Observer, RequestFinished
    from asgi_router.observability.fastdeploy_metrics import FastDeployMetrics
    from asgi_router.observability.tally import Histogram
    from asgi_router.settings import RouterSettings
    from asgi_router.stats import RouterStats

PREFIX = "asgi_router_"
WORKER = ("worker", "role")

TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text"

TOTALS = {
    "prompt_tokens": "Estimated prompt tokens of finished requests.",
    "predicted_cached_tokens": "How many of the estimated prompt tokens the worker was believed to hold.",
    "reported_prompt_tokens": "Prompt tokens as the worker's answers say in usage.",
    "reported_cached_tokens": "Cached prompt tokens as the worker's answers say in usage.",
}
"""Counters, by their attribute of `Totals`."""

SECONDS = {
    "duration": "Seconds from a request's start to the end of its answer.",
    "first_byte": "Seconds from a request's start to the first byte of its answer's body.",
}
"""Histograms, by their attribute of `Totals`."""

WORKER_GAUGES = {
    "requests": "Requests in flight.",
    "prefill_tokens": "Estimated prompt tokens of the requests in flight.",
    "waiting_requests": "Requests in flight whose first byte has not come yet.",
    "pending_prefill_tokens": "Uncached prompt tokens of the waiting requests: the queue.",
    "prefix_blocks": "Blocks that the worker is believed to hold in its prefix cache, longer ones counted as several.",
    "prefix_capacity": "Blocks that the worker is believed to have room for.",
    "healthy": "1, or 0 if it failed its health probes.",
    "draining": "1 if it gets no new requests, else 0.",
    "backing_off": "1 while it wants no requests (Retry-After), else 0.",
}
"""Gauges, by their attribute of `WorkerStats`."""

ROUTER_GAUGES = {
    "exchanges": "Requests being served, from their upload to the end of the answer.",
    "leases": "Claims on workers that are not released yet.",
    "queued": "Requests that wait for a place on a worker.",
    "draining": "1 if the router is shutting down, else 0.",
}
"""Gauges, by their attribute of `RouterStats`."""


class Measured(Protocol):
    """What metrics need of a router."""

    @property
    def settings(self) -> RouterSettings: ...
    @property
    def workers(self) -> Registry: ...
    @property
    def observers(self) -> list[Observer]: ...
    def stats(self) -> RouterStats:
        """Return the counters of this moment."""
        ...


class RouterMetrics:
    """The metrics of one router, counted from when this is made; gauges are read when somebody asks.

    It is a collector, for a `prometheus_client` registry that the host app has (`REGISTRY.register(router.metrics)`),
    and an ASGI app that serves what it collects. It keeps to itself: no registry knows it unless you tell one.

    Series have no label that a client could fill: workers are those of the fleet now, and requests without a worker,
    or whose worker has left meanwhile, are counted under `worker=""`. A scrape changes nothing.
    """

    def __init__(self, router: Measured) -> None:
        self._router = router
        self._tally = Tally(router.workers)
        self._fastdeploy: FastDeployMetrics | None = None
        if router.settings.fastdeploy_metrics:
            from asgi_router.observability.fastdeploy_metrics import FastDeployMetrics  # it needs the extra, too

            self._fastdeploy = FastDeployMetrics()
        router.observers.append(self.observe)

    def observe(self, event: RequestFinished) -> None:
        """Count a request that is over."""
        self._tally.add(event)
        if self._fastdeploy is not None:
            self._fastdeploy.add(event)

    def collect(self) -> Iterator[Metric]:
        """Give all metrics as they are now."""
        yield from self._requests()
        yield from self._seconds()
        yield from self._gauges()
        if self._fastdeploy is not None:
            yield from self._fastdeploy.collect(self._tally)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer GET and HEAD with the metrics, as text or OpenMetrics, whichever `Accept` prefers."""
        if scope.get("method") not in ("GET", "HEAD"):
            await Response("use GET", 405, headers={"allow": "GET, HEAD"})(scope, receive, send)
            return

        accept = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
        # Not with the client's own words: `prometheus_client` ignores preferences, and sends back what it is sent.
        encode, content_type = choose_encoder(f"{OPENMETRICS}; version=1.0.0" if prefers_openmetrics(accept) else TEXT)
        body = encode(self)
        headers = {"content-type": content_type, "content-length": str(len(body))}
        await Response(b"" if scope["method"] == "HEAD" else body, headers=headers)(scope, receive, send)

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            PREFIX + "requests", "Finished requests; status 0: no answer.", labels=[*WORKER, "status", "outcome"]
        )
        counters = {name: CounterMetricFamily(PREFIX + name, text, labels=WORKER) for name, text in TOTALS.items()}
        for url, role, totals in self._tally.by_worker():
            for (status, outcome), count in sorted(totals.finished.items()):
                requests.add_metric([url, role, str(status), outcome], count)
            for name, counter in counters.items():
                if (value := getattr(totals, name)) is not None:
                    counter.add_metric([url, role], value)
        yield requests
        yield from counters.values()
        yield CounterMetricFamily(PREFIX + "retries", "Tries at a worker after a request's first.", self._tally.retries)

    def _seconds(self) -> Iterator[Metric]:
        histograms = {
            name: HistogramMetricFamily(f"{PREFIX}{name}_seconds", text, labels=WORKER)
            for name, text in SECONDS.items()
        }
        for url, role, totals in self._tally.by_worker():
            for name, histogram in histograms.items():
                _add(histogram, [url, role], getattr(totals, name))
        yield from histograms.values()

        selection = HistogramMetricFamily(
            PREFIX + "selection_seconds", "Seconds spent on reading a prompt and choosing its worker.", labels=()
        )
        _add(selection, (), self._tally.selection)
        yield selection
        queue = HistogramMetricFamily(
            PREFIX + "queue_seconds", "Seconds that a request waited for a place on a worker.", labels=()
        )
        _add(queue, (), self._tally.queue)
        yield queue

    def _gauges(self) -> Iterator[Metric]:
        stats = self._router.stats()
        for name, text in WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}worker_{name}", text, labels=WORKER)
            for worker in stats.workers:
                gauge.add_metric([worker.url, worker.role.value], getattr(worker, name))
            yield gauge

        breaker = GaugeMetricFamily(
            PREFIX + "worker_breaker", "1 for the state of the worker's breaker, 0 else.", labels=[*WORKER, "state"]
        )
        for worker in stats.workers:
            for state in BreakerState:
                breaker.add_metric([worker.url, worker.role.value, state.value], worker.breaker is state)
        yield breaker

        for name, text in ROUTER_GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, text, getattr(stats, name))


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    for bound, count, example in histogram.buckets():
        name = "+Inf" if bound == math.inf else str(bound)
        if example is None:
            buckets.append((name, count))
        else:
            buckets.append((name, count, Exemplar(dict(example.labels), example.value, example.timestamp)))
    family.add_metric(labels, buckets, histogram.sum)


def prefers_openmetrics(accept: str) -> bool:
    """Tell whether an `Accept` header wants OpenMetrics at least as much as plain text (RFC 9110, section 12.5.1)."""
    wanted = {OPENMETRICS: 0.0, TEXT: 0.0}
    for choice in accept.lower().split(","):
        media_type, *parameters = (part.strip() for part in choice.split(";"))
        if media_type in wanted:
            wanted[media_type] = max(wanted[media_type], _quality(parameters))
    openmetrics, text = wanted.values()
    return openmetrics > 0 and openmetrics >= text


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
