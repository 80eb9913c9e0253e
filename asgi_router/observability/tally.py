"""Owns the numbers that metrics are made of: what finished requests add up to, in all and by worker.

Plain Python, which needs no extra and knows no exposition format. `prometheus_client` has counters of its own, but they
change with `PROMETHEUS_MULTIPROC_DIR`, which vLLM sets in the process that may carry this router: then two routers in
one process would share their numbers, and those of workers that have left could not be dropped.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from asgi_router.observability.events import RequestFinished

SELECTION_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2)
QUEUE_BOUNDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
FIRST_BYTE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the histograms, in seconds."""

EXAMPLE_LENGTH = 128
"""Characters that names and values of an exemplar's labels may have together, says OpenMetrics."""

# Ids are the clients' words. One with a quote in it would be escaped, which not every reader of OpenMetrics understands
# (`prometheus_client` doesn't, at this place), and then one request would keep all metrics from being read.
_PLAIN = re.compile(r"[\w.:/+=@-]+", re.ASCII)


class Example(NamedTuple):
    """One request in a bucket: an exemplar."""

    labels: Mapping[str, str]
    value: float
    timestamp: float
    """Seconds since 1970."""


class Histogram:
    """Seconds, counted by size.

    Args:
        bounds: the buckets' upper bounds, ascending. One without a bound comes after them.
    """

    __slots__ = ("_counts", "_examples", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = (*bounds, math.inf)
        self.sum = 0.0
        self._counts = [0] * len(self.bounds)
        self._examples: list[tuple[float, RequestFinished] | None] = [None] * len(self.bounds)

    def observe(self, seconds: float, event: RequestFinished | None = None) -> None:
        """Count `seconds`; with an event this is the example of its bucket until the next one."""
        bucket = bisect_left(self.bounds, seconds)
        self._counts[bucket] += 1
        self.sum += seconds
        if event is not None:
            self._examples[bucket] = seconds, event

    def buckets(self) -> Iterator[tuple[float, int, Example | None]]:
        """Give each bound, how many came up to it, and an example of those between it and the bound before."""
        for bound, count, kept in zip(self.bounds, accumulate(self._counts), self._examples, strict=True):
            example = None
            if kept is not None and (labels := example_labels(kept[1])):
                seconds, event = kept
                example = Example(labels, seconds, event.arrived + event.duration_seconds)
            yield bound, count, example


class Totals:
    """What the requests of one worker add up to.

    Attributes:
        finished: how many, by status and outcome.
        prompt_tokens, predicted_cached_tokens: of these requests, estimated.
        reported_prompt_tokens, reported_cached_tokens: of those whose answer says so; None until one does.
        first_byte, duration: see `RequestFinished`.
    """

    __slots__ = (
        "duration",
        "finished",
        "first_byte",
        "predicted_cached_tokens",
        "prompt_tokens",
        "reported_cached_tokens",
        "reported_prompt_tokens",
    )

    def __init__(self) -> None:
        self.finished: Counter[tuple[int, str]] = Counter()
        self.prompt_tokens = 0
        self.predicted_cached_tokens = 0
        self.reported_prompt_tokens: int | None = None
        self.reported_cached_tokens: int | None = None
        self.first_byte = Histogram(FIRST_BYTE_BOUNDS)
        self.duration = Histogram(DURATION_BOUNDS)

    def add(self, event: RequestFinished) -> None:
        """Add a request."""
        self.finished[bounded_status(event.status), event.outcome] += 1
        self.prompt_tokens += event.prompt_tokens
        self.predicted_cached_tokens += event.predicted_cached_tokens
        if event.real_prompt_tokens is not None:
            self.reported_prompt_tokens = (self.reported_prompt_tokens or 0) + event.real_prompt_tokens
        if event.real_cached_tokens is not None:
            self.reported_cached_tokens = (self.reported_cached_tokens or 0) + event.real_cached_tokens
        if event.first_byte_seconds is not None:
            self.first_byte.observe(event.first_byte_seconds)
        self.duration.observe(event.duration_seconds, event)


class Tally:
    """What all requests of one router add up to. It may be read in another thread.

    Args:
        workers: tells which URLs are in the fleet. Requests without a worker, or whose worker has left, are counted
            under the empty URL.

    Attributes:
        retries: tries at a worker after a request's first.
        selection, queue: of requests that came so far; see `RequestFinished`.
    """

    def __init__(self, workers: Container[object]) -> None:
        self._workers = workers
        self._totals: dict[tuple[str, str], Totals] = {}  # never changed, only replaced
        self.retries = 0
        self.selection = Histogram(SELECTION_BOUNDS)
        self.queue = Histogram(QUEUE_BOUNDS)

    def add(self, event: RequestFinished) -> None:
        """Add a request."""
        self._of(event).add(event)
        self.retries += max(0, event.attempts - 1)
        if event.attempts:
            self.selection.observe(event.selection_seconds)
        if event.attempts or event.queue_seconds:
            self.queue.observe(event.queue_seconds)

    def by_worker(self) -> Iterator[tuple[str, str, Totals]]:
        """Give URL, role and totals of each worker in the fleet that has had a request, and of none (empty texts)."""
        return ((url, role, totals) for (url, role), totals in self._totals.items() if self._is_here(url))

    def _of(self, event: RequestFinished) -> Totals:
        key = (event.worker, event.role) if event.worker in self._workers else ("", "")
        if (totals := self._totals.get(key)) is None:
            # Those that have left are dropped here, not by a scrape, which changes nothing and may never come.
            present = {known: totals for known, totals in self._totals.items() if self._is_here(known[0])}
            totals = Totals()
            self._totals = present | {key: totals}
        return totals

    def _is_here(self, url: str) -> bool:
        return not url or url in self._workers


def bounded_status(status: int) -> int:
    """Return an HTTP status as it is, and 0 for what is none."""
    return status if 100 <= status <= 599 else 0


def example_labels(event: RequestFinished) -> dict[str, str]:
    """Return the ids by which a request can be found in the log, as far as they fit into an exemplar and are plain."""
    labels = {}
    room = EXAMPLE_LENGTH
    for name, value in (("request_id", event.request_id), ("trace_id", event.trace_id)):
        if len(name) + len(value) <= room and _PLAIN.fullmatch(value):
            labels[name] = value
            room -= len(name) + len(value)
    return labels
