"""Owns the metrics by the names of FastDeploy's router (`FASTDEPLOY_METRICS`): its dashboards go on.

Where they differ from FastDeploy's:

1. `inference_requests_total` counts every request: FastDeploy's leaves out those whose worker could not be reached.
2. `http_requests_total` and `http_request_duration_seconds` are there: FastDeploy never installs what counts them. They
   count completions; the label `endpoint` is one of `PATHS`, never a path as a client wrote it.
3. `http_request_duration_seconds` has no quantiles, only count and sum. `asgi_router_duration_seconds` has buckets.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

from asgi_router.observability.tally import bounded_status
from asgi_router.worker import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from asgi_router.observability.events import RequestFinished
    from asgi_router.observability.tally import Tally

SESSIONS = 10_000
"""How many sessions are remembered, the latest ones."""


class FastDeployMetrics:
    """Counts what `Tally` doesn't know: HTTP requests by path, and how often a session came back to its worker."""

    def __init__(self) -> None:
        self._http: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[str, float] = {}
        self._workers_of_sessions: OrderedDict[str, str] = OrderedDict()
        self._asked = 0
        self._hits = 0

    def add(self, event: RequestFinished) -> None:
        """Count a request that is over."""
        self._http[event.path, bounded_status(event.status)] += 1
        self._seconds[event.path] = self._seconds.get(event.path, 0.0) + event.duration_seconds
        if event.session_id and event.worker:
            self._asked += 1
            self._hits += self._workers_of_sessions.get(event.session_id) == event.worker
            self._workers_of_sessions[event.session_id] = event.worker
            self._workers_of_sessions.move_to_end(event.session_id)
            if len(self._workers_of_sessions) > SESSIONS:
                self._workers_of_sessions.popitem(last=False)

    def collect(self, tally: Tally) -> Iterator[Metric]:
        """Give these metrics as they are now; those by worker come from `tally`."""
        inference = CounterMetricFamily(
            "inference_requests",
            "Completion requests by their workers and status.",
            labels=["mixed_worker", "prefill_worker", "decode_worker", "status_code"],
        )
        for url, role, totals in tally.by_worker():
            by_status: Counter[int] = Counter()
            for (status, _), count in list(totals.finished.items()):
                by_status[status] += count
            workers = [url if role == column else "" for column in (Role.MIXED, Role.PREFILL, Role.DECODE)]
            for status, count in sorted(by_status.items()):
                inference.add_metric([*workers, str(status)], count)
        yield inference

        yield CounterMetricFamily("router_cache_request", "Requests of a session.", self._asked)
        yield CounterMetricFamily("router_cache_hit", "Those that went to the same worker as the last.", self._hits)

        requests = CounterMetricFamily(
            "http_requests", "Completion requests.", labels=["method", "endpoint", "status_code"]
        )
        counts: Counter[str] = Counter()
        for (path, status), count in sorted(self._http.items()):
            requests.add_metric(["POST", path, str(status)], count)
            counts[path] += count
        yield requests
        seconds = SummaryMetricFamily(
            "http_request_duration_seconds", "Seconds of completion requests.", labels=["method", "endpoint"]
        )
        for path, count in counts.items():
            seconds.add_metric(["POST", path], count, self._seconds[path])
        yield seconds
