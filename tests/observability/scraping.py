"""Owns what tests of metrics share: finished requests to count, scrapes, and their text read by Prometheus' parsers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from asgi_router.observability.events import RequestFinished
from tests.instruments.asgi_client import Exchange
from tests.routed import WORKER, Routed

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample
    from starlette.types import ASGIApp

OPENMETRICS = "application/openmetrics-text"

FINISHED = RequestFinished(
    request_id="id-1",
    session_id="",
    trace_id="",
    path="/v1/chat/completions",
    model="m",
    stream=False,
    worker=WORKER,
    role="mixed",
    prefill_worker="",
    reason="prefill_cost",
    candidates=2,
    attempts=1,
    status=200,
    outcome="ok",
    prompt_tokens=100,
    predicted_cached_tokens=40,
    real_prompt_tokens=None,
    real_cached_tokens=None,
    real_completion_tokens=None,
    arrived=0.0,
    selection_seconds=0.0001,
    queue_seconds=0.0,
    first_byte_seconds=0.2,
    duration_seconds=2.0,
)


def finished(**changes: object) -> RequestFinished:
    """Return a good request on `WORKER`, changed."""
    return replace(FINISHED, **changes)


class Series(NamedTuple):
    """One time series: its name, and its labels in order."""

    name: str
    labels: tuple[tuple[str, str], ...]


def series(name: str, **labels: str) -> Series:
    """Return the series of this name (without `asgi_router_`) and these labels."""
    return Series(f"asgi_router_{name}", tuple(sorted(labels.items())))


class Scrape:
    """What a scrape answered, as the parser of its format reads it.

    Attributes:
        exchange: the answer itself.
        families: what it holds, in order.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        text = exchange.body.decode()
        is_openmetrics = exchange.header("content-type")[0].startswith(OPENMETRICS.encode())
        parse = parse_openmetrics if is_openmetrics else parse_text
        self.families: list[Metric] = list(parse(text))

    @property
    def samples(self) -> dict[Series, Sample]:
        """All samples; a series that is there twice fails the test."""
        found: dict[Series, Sample] = {}
        for family in self.families:
            for sample in family.samples:
                key = Series(sample.name, tuple(sorted(sample.labels.items())))
                assert key not in found
                found[key] = sample
        return found

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of a series, named as in `series`; None if it isn't there."""
        sample = self.samples.get(series(name, **labels))
        return None if sample is None else sample.value

    def named(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the values of all series of one name, by the values of their labels in the order of their names."""
        full = f"asgi_router_{name}"
        return {tuple(v for _, v in key.labels): s.value for key, s in self.samples.items() if key.name == full}


async def scrape(app: ASGIApp | Routed, accept: str = "", path: str = "/metrics") -> Scrape:
    """Get the metrics, which must be there."""
    headers = [("accept", accept)] if accept else []
    exchange = Exchange(method="GET", path=path, body=b"", headers=headers)
    await exchange.run(app.app if isinstance(app, Routed) else app)
    assert exchange.status == 200
    assert exchange.finished_cleanly
    return Scrape(exchange)
