"""Shows one request followed by its ids: what the client was told, the log, an exemplar, and what the worker got."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import Script
from tests.observability.scraping import OPENMETRICS, scrape
from tests.routed import OTHER, WORKER, Routed, answer, completion_body

if TYPE_CHECKING:
    from prometheus_client.samples import Exemplar

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def follow(routed: Routed, **options: object) -> tuple[Exchange, dict[str, str], list[Exemplar]]:
    """Send a request; return it, the headers that the worker got, and the exemplars of a scrape after it."""
    exchange = Exchange(**{"body": completion_body(), **options})  # type: ignore[arg-type]
    await exchange.run(routed.app)
    (call,) = [call for worker in routed.fleet.workers.values() for call in worker.calls]
    sent = {name.decode().lower(): value.decode() for name, value in call.headers}
    found = await scrape(routed, OPENMETRICS)
    return exchange, sent, [sample.exemplar for sample in found.samples.values() if sample.exemplar]


@pytest.mark.parametrize("where", ["header", "body", "both", "unfit", "nowhere"])
async def test_a_request_is_found_everywhere_by_its_ids(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Header, log, exemplar and worker know one request id, the client's or ours, its trace, and the same worker."""
    caplog.set_level(logging.INFO, logger="asgi_router")
    script = Script.json({"choices": [], "usage": {"prompt_tokens": 3}})
    routed = Routed({WORKER: script, OTHER: script}, metrics_path="/metrics", decision_headers=True)
    fields = {"session_id": "session-7"}
    headers = [("traceparent", TRACEPARENT)]
    if where == "header":
        headers.append(("x-request-id", "req-4711"))
    elif where == "unfit":
        headers.append(("x-request-id", "a b"))
    elif where == "both":
        headers.append(("x-request-id", "of-a-gateway"))
    if where in ("body", "both"):
        fields["request_id"] = "req-4711"
    exchange, sent, exemplars = await follow(routed, body=completion_body(**fields), headers=headers)

    (told,) = exchange.header("x-request-id")
    request_id = told.decode()
    assert request_id == "req-4711" or where in ("nowhere", "unfit")
    assert len(request_id) >= 8

    (record,) = [record for record in caplog.records if record.name == "asgi_router.requests"]
    logged = json.loads(record.getMessage())
    assert (logged["request_id"], logged["trace_id"], logged["session_id"]) == (request_id, TRACE, "session-7")
    assert [logged["worker"].encode()] == exchange.header("x-router-worker")
    assert exchange.header("x-router-decision")[0].decode().startswith(f"{logged['reason']}; candidates=2; cached=0/")

    assert (sent["x-request-id"], sent["traceparent"]) == (request_id, TRACEPARENT)
    assert len(routed.fleet[logged["worker"]].calls) == 1

    (exemplar,) = exemplars
    assert exemplar.labels == {"request_id": request_id, "trace_id": TRACE}
    assert exemplar.value == logged["duration_seconds"]


async def test_two_requests_in_a_bucket_leave_the_latter() -> None:
    """A bucket of the duration histogram names the request that it counted last."""
    routed = Routed(answer("json"), metrics_path="/metrics", clock=lambda: 0.0)
    for name in ("one", "two"):
        await Exchange(body=completion_body(request_id=name)).run(routed.app)
    exemplars = [sample.exemplar for sample in (await scrape(routed, OPENMETRICS)).samples.values() if sample.exemplar]
    assert [exemplar.labels for exemplar in exemplars] == [{"request_id": "two"}]


@pytest.mark.parametrize("request_id", ['a"b', "a\\nb", "a\\", '"}1#{y="', "#", "{}", "a,b=c", "%s", "'", "a%20b"])
async def test_an_odd_id_keeps_nobody_from_reading_the_metrics(request_id: str) -> None:
    """Quotes, backslashes and braces can't break the text for any reader: such an id is in no exemplar."""
    routed = Routed(answer("json"), metrics_path="/metrics", decision_headers=True)
    headers = [("x-request-id", request_id), ("traceparent", TRACEPARENT)]
    exchange, sent, exemplars = await follow(routed, headers=headers)
    assert sent["x-request-id"] == exchange.header("x-request-id")[0].decode() == request_id
    assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": TRACE}]


async def test_an_id_too_long_for_an_exemplar_is_left_out() -> None:
    """With the longest id that is accepted the text is valid; log and header have it, the exemplar has the trace."""
    routed = Routed(answer("json"), metrics_path="/metrics", decision_headers=True)
    headers = [("x-request-id", "r" * 128), ("traceparent", TRACEPARENT)]
    exchange, _, exemplars = await follow(routed, headers=headers)
    assert exchange.header("x-request-id") == [b"r" * 128]
    assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": TRACE}]


async def test_plain_text_has_no_exemplars() -> None:
    """The older format knows none: no id is in it."""
    routed = Routed(answer("json"), metrics_path="/metrics")
    await follow(routed, headers=[("x-request-id", "req-4711"), ("traceparent", TRACEPARENT)])
    text = (await scrape(routed)).exchange.body
    assert b"req-4711" not in text
    assert TRACE.encode() not in text
