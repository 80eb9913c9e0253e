"""Shows that each figure is what its name says, by outcomes that can be reckoned by hand."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from asgi_router.replay.report import COLUMNS, cells, figures, plain_table, quantile
from asgi_router.replay.simulate import Outcome


def test_figures() -> None:
    """Means, quantiles and shares of what happened."""
    outcome = Outcome(
        policy="x",
        ttft=array("d", [number / 100 for number in reversed(range(100))]),
        per_token=array("d", [0.01, 0.03]),
        prompt_tokens=1_000,
        predicted_tokens=400,
        cached_tokens=300,
        busy=[2.0, 4.0],
        chosen=[75, 25],
        reasons=Counter({"x": 60, "out_of_balance": 40}),
        hot_spots=20,
        failed=1,
        retried=2,
        refused=3,
        seconds=6.0,
    )
    line = figures(outcome)
    assert (line.requests, line.hit_rate, line.predicted_hit_rate) == (100, 0.3, 0.4)
    assert line.ttft_mean == pytest.approx(0.495)
    assert (line.ttft_p50, line.ttft_p90, line.ttft_p99) == (0.5, 0.9, 0.99)
    assert (line.per_token_mean, line.per_token_p99) == (0.02, 0.03)
    assert (line.busy, line.load_spread, line.hot_spots, line.fell_back) == (0.5, 1.5, 0.2, 0.4)
    assert (line.failed, line.retried, line.refused) == (1, 2, 3)
    shown = ("x", "30.0", "40.0", "0.495", "0.500", "0.900", "0.990", "20.0", "30.0", "50", "1.50", "20.0", "40.0")
    assert cells(line) == shown
    head, row = plain_table([line]).splitlines()
    assert len(head) == len(row)
    assert head.startswith(COLUMNS[0])


def test_figures_of_nothing() -> None:
    """No request at all is no division by zero."""
    line = figures(Outcome(policy="x", chosen=[0, 0], busy=[0.0, 0.0]))
    assert (line.requests, line.ttft_mean, line.hit_rate, line.load_spread) == (0, 0.0, 0.0, 0.0)


def test_quantiles() -> None:
    """The value below which the share of the others is."""
    ordered = [float(number) for number in range(100)]
    assert [quantile(ordered, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [0.0, 50.0, 90.0, 99.0, 99.0]
