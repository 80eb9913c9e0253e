"""Shows what finished requests add up to: histograms, exemplars, and who keeps a place when workers come and go."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.observability.tally import EXAMPLE_LENGTH, Histogram, Tally, Totals, bounded_status, example_labels
from tests.observability.scraping import finished
from tests.routed import OTHER, WORKER

if TYPE_CHECKING:
    from collections.abc import Iterable

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def counts(histogram: Histogram) -> list[int]:
    return [count for _, count, _ in histogram.buckets()]


def totals_alive() -> int:
    return sum(isinstance(item, Totals) for item in gc.get_objects())


def urls(tally: Tally) -> list[str]:
    return [url for url, _, _ in tally.by_worker()]


def tally_of(workers: Iterable[object], *events: object) -> Tally:
    tally = Tally(set(workers))
    for event in events:
        tally.add(finished(**event))  # type: ignore[arg-type]
    return tally


def test_buckets_hold_what_is_up_to_their_bound() -> None:
    """A value on a bound is in its bucket, one above all bounds in the last; buckets are cumulative."""
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.0, 0.1, 0.100001, 1.0, 1.5):
        histogram.observe(seconds)
    assert [bound for bound, _, _ in histogram.buckets()] == [0.1, 1.0, math.inf]
    assert counts(histogram) == [2, 4, 5]
    assert histogram.sum == pytest.approx(2.700001)


def test_each_bucket_has_its_latest_example() -> None:
    """A bucket's example is the last request that fell into it, not one of a lower bucket; without a plain id none."""
    histogram = Histogram((0.1, 1.0, 10.0))
    histogram.observe(0.01, finished(request_id="a"))
    histogram.observe(0.02, finished(request_id="b", arrived=1_000.0, duration_seconds=2.0))
    histogram.observe(5.0, finished(request_id="c"))
    histogram.observe(50.0, finished(request_id='not"plain'))
    examples = [example and (dict(example.labels), example.value) for _, _, example in histogram.buckets()]
    assert examples == [({"request_id": "b"}, 0.02), None, ({"request_id": "c"}, 5.0), None]
    assert next(example.timestamp for _, _, example in histogram.buckets() if example) == 1_002.0


@pytest.mark.parametrize(
    ("request_id", "trace_id", "names"),
    [
        ("r", TRACE, ["request_id", "trace_id"]),
        ("r" * 78, TRACE, ["request_id", "trace_id"]),
        ("r" * 79, TRACE, ["request_id"]),
        ("r" * 118, "", ["request_id"]),
        ("r" * 119, "", []),
        ("r" * 119, TRACE, ["trace_id"]),
        ("", "", []),
    ],
)
def test_an_id_that_has_no_room_is_left_out_of_an_exemplar(request_id: str, trace_id: str, names: list[str]) -> None:
    """OpenMetrics allows 128 characters: an id is there whole or not at all, the request's before the trace's."""
    labels = example_labels(finished(request_id=request_id, trace_id=trace_id))
    assert sorted(labels) == names
    assert sum(len(name) + len(value) for name, value in labels.items()) <= EXAMPLE_LENGTH
    assert set(labels.values()) <= {request_id, trace_id}


@given(st.integers())
def test_statuses_are_bounded(status: int) -> None:
    """There are 500 statuses and 0 for all else, whatever a worker says."""
    bounded = bounded_status(status)
    assert bounded == status if 100 <= status <= 599 else bounded == 0


def test_workers_that_have_left_are_dropped() -> None:
    """1,000 workers that join, serve and leave take the place of one."""
    fleet: set[object] = set()
    tally = Tally(fleet)
    before = totals_alive()
    for number in range(1000):
        fleet.add(f"http://w{number}")
        tally.add(finished(worker=f"http://w{number}"))
        assert urls(tally) == [f"http://w{number}"]
        fleet.clear()
        assert urls(tally) == []
    assert totals_alive() - before <= 1
    assert counts(tally.selection)[-1] == 1000


def test_workers_in_the_fleet_stay_when_others_leave() -> None:
    """What a worker has counted stays as long as it is there, whoever comes and goes beside it."""
    fleet: set[object] = {WORKER}
    tally = Tally(fleet)
    tally.add(finished())
    for number in range(3):
        fleet.add(f"http://w{number}")
        tally.add(finished(worker=f"http://w{number}"))
        fleet.discard(f"http://w{number}")
    tally.add(finished())
    assert [(url, dict(totals.finished)) for url, _, totals in tally.by_worker()] == [(WORKER, {(200, "ok"): 2})]


@pytest.mark.parametrize("worker", ["", OTHER])
def test_a_request_without_a_worker_in_the_fleet_is_counted_apart(worker: str) -> None:
    """A request that had no worker, or whose worker has left meanwhile, is counted, under no name."""
    tally = tally_of([WORKER], {"worker": worker, "role": "mixed" if worker else "", "status": 503, "outcome": "x"})
    assert [(url, role, dict(t.finished)) for url, role, t in tally.by_worker()] == [("", "", {(503, "x"): 1})]


def test_retries_are_tries_after_the_first() -> None:
    """A request that no worker was chosen for has no retry, and none takes one away."""
    assert tally_of([WORKER], {"attempts": 0}, {"attempts": 1}, {"attempts": 3}).retries == 2


def test_reported_tokens_are_unknown_until_a_worker_reports_them() -> None:
    """A worker that doesn't say what it has cached is not taken for one that has cached nothing."""
    ((_, _, totals),) = tally_of([WORKER], {}, {"real_prompt_tokens": 7}).by_worker()
    assert (totals.reported_prompt_tokens, totals.reported_cached_tokens) == (7, None)
    totals.add(finished(real_prompt_tokens=5, real_cached_tokens=0))
    assert (totals.reported_prompt_tokens, totals.reported_cached_tokens) == (12, 0)
    assert (totals.prompt_tokens, totals.predicted_cached_tokens) == (300, 120)


def test_times_are_of_those_who_came_so_far() -> None:
    """A request that was refused before a choice has no selection time, and one without a byte no first byte."""
    refused = {"attempts": 0, "selection_seconds": 0.0, "first_byte_seconds": None, "worker": ""}
    waited = {**refused, "queue_seconds": 30.0}
    tally = tally_of([WORKER], refused, waited, {})
    assert counts(tally.selection)[-1] == 1
    assert counts(tally.queue)[-1] == 2
    by_url = {url: (counts(t.first_byte)[-1], counts(t.duration)[-1]) for url, _, t in tally.by_worker()}
    assert by_url == {"": (0, 2), WORKER: (1, 1)}
