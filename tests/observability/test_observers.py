"""Shows what an observer may rely on, and that none can do harm."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.instruments.asgi_client import Exchange
from tests.observability.scraping import scrape
from tests.routed import WORKER, Routed, answer, completion_body

if TYPE_CHECKING:
    from asgi_router.observability.events import RequestFinished

pytestmark = pytest.mark.anyio


async def test_releases_come_before_observers() -> None:
    """When a request is told of, its counters are back and it is no exchange any more."""
    routed = Routed(answer("stream"))
    seen: list[object] = []
    routed.router.observers.append(lambda event: seen.append((routed.counters, routed.router.stats().exchanges)))
    await Exchange(body=completion_body()).run(routed.app)
    assert seen == [([(0, 0, 0, 0)], 0)]


async def test_an_observer_that_raises_is_logged_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The client has its answer, the counters are back, later observers and the log hear of the request."""
    caplog.set_level(logging.INFO, logger="asgi_router")
    routed = Routed(answer("json"))

    def fail(event: RequestFinished) -> None:
        raise ValueError(f"no room for {event.session_id}")

    routed.router.observers.append(fail)
    metrics = routed.router.metrics  # an observer after the one that raises
    exchange = await Exchange(body=completion_body(session_id="s-1")).run(routed.app)

    assert exchange.finished_cleanly
    assert (await scrape(metrics)).value("requests_total", worker=WORKER, role="mixed", status="200", outcome="ok") == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "an observer failed: ValueError"
    ]
    assert [record.name for record in caplog.records].count("asgi_router.requests") == 1
    routed.assert_released(exchange)


async def test_an_event_can_not_be_changed() -> None:
    """What one observer is told is what the next one is told."""
    routed = Routed(answer("json"))
    events: list[RequestFinished] = []
    routed.router.observers.append(events.append)
    await Exchange(body=completion_body()).run(routed.app)
    with pytest.raises(AttributeError):
        events[0].status = 0  # type: ignore[misc]
