"""Shows that the dashboard in docs/ asks for metrics and labels that exist, and shows all there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.observability.scraping import finished, scrape
from tests.observability.test_metrics import FAMILIES
from tests.routed import Routed, answer

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VARIABLES = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]

FROM_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds."""

METRIC = re.compile(r"(asgi_router_\w+)(?:\{([^}]*)\})?")


@pytest.mark.anyio
async def test_every_metric_and_label_of_the_dashboard_exists() -> None:
    """Each series that a panel or a variable asks for is in a scrape, with all the labels that are asked for."""
    routed = Routed(answer("json"), metrics_path="/metrics")
    routed.router.metrics.observe(finished(real_prompt_tokens=3, real_cached_tokens=2))
    labels: dict[str, set[str]] = {}
    for series in (await scrape(routed)).samples:
        labels.setdefault(series.name, set()).update(name for name, _ in series.labels)

    for query in [*QUERIES, *VARIABLES]:
        found = METRIC.findall(query)
        assert found, query
        for name, matchers in found:
            assert name in labels, query
            known = labels[name] | FROM_PROMETHEUS
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= known, query
            assert {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")} <= known, query


def test_every_metric_is_on_the_dashboard() -> None:
    """What the router tells, the dashboard shows."""
    asked = {re.sub("_(total|bucket)$", "", name) for query in QUERIES for name, _ in METRIC.findall(query)}
    assert asked == set(FAMILIES)


def test_the_dashboard_is_well_formed() -> None:
    """Panels have a title, a description and a place of their own; brackets close; legends name labels of the query."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            query = target["expr"]
            assert all(query.count(left) == query.count(right) for left, right in ("()", "{}", "[]"))
            grouped = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped | FROM_PROMETHEUS
