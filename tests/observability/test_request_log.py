"""Shows the log of requests: one record for each, however it ends, which no client can break, and no prompt in it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import anyio
import pytest

from asgi_router import Worker
from asgi_router.observability.events import RequestFinished
from asgi_router.observability.logs import MODEL_LENGTH
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.cancel import cancel_natively
from tests.observability.ways import BROKEN, HANGING, REFUSED, WAYS, Way
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, interrupted

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]


@pytest.fixture(autouse=True)
def shown(caplog: pytest.LogCaptureFixture) -> None:
    """Let INFO be logged, as a host does that wants to see requests."""
    caplog.set_level(logging.INFO, logger="asgi_router")


def requests_logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    """Return the records' JSON, after a look at their form."""
    found = []
    for record in caplog.records:
        if record.name == "asgi_router.requests":
            line = logging.Formatter("%(message)s").format(record)
            assert record.levelno == logging.INFO
            assert line.isascii()
            assert line.isprintable()  # and so it is one line
            found.append(json.loads(line))
            assert vars(record)["request"] == found[-1]
    return found


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_one_record_however_a_request_ends(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """Each way out is one record with the client's status, the outcome, and the worker if there was one."""
    routed = Routed(way.script, **way.settings)
    exchange = await way.take(routed)
    (logged,) = requests_logged(caplog)
    assert (logged["status"], logged["outcome"], logged["worker"]) == (way.status, way.outcome, way.worker)
    assert logged["attempts"] == (1 if way.worker else 0)
    assert set(logged) == set(RequestFinished.__struct_fields__)
    assert float(str(logged["duration_seconds"])) >= 0
    routed.assert_released(exchange)


@asyncio_only
async def test_a_native_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A task that is cancelled, as uvicorn does at the end of its grace period, leaves its record."""
    routed = Routed(HANGING)
    outcome = await cancel_natively(
        Exchange(body=completion_body()).run(routed.app), at=[lambda: routed.worker.received(1)]
    )
    assert outcome.cancelled
    (logged,) = requests_logged(caplog)
    assert (logged["status"], logged["outcome"], logged["worker"]) == (0, "cancelled", WORKER)


@pytest.mark.parametrize(
    ("queue_size", "status", "outcome"), [(0, 429, "queue_full"), (1, 503, "queue_timeout")], ids=["full", "late"]
)
async def test_a_request_without_a_place_is_logged(
    queue_size: int, status: int, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that found no place has waited `queue_seconds`, and no worker."""
    routed = Routed(HANGING, max_concurrent_per_worker=1, queue_size=queue_size, queue_timeout=0.05)
    first = Exchange(body=completion_body())
    async with first.running(routed.app):
        await routed.worker.received(1)
        await Exchange(body=completion_body()).run(routed.app)
        (logged,) = requests_logged(caplog)
        first.disconnect()

    assert (logged["status"], logged["outcome"], logged["worker"]) == (status, outcome, "")
    assert (float(str(logged["queue_seconds"])) >= 0.04) is (outcome == "queue_timeout")


async def test_a_router_that_shuts_down_logs_whom_it_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """A request that comes while the router drains is one record, too."""
    routed = Routed(answer("json"))
    await routed.router.drain()
    await Exchange(body=completion_body()).run(routed.app)
    (logged,) = requests_logged(caplog)
    assert (logged["status"], logged["outcome"]) == (503, "shutting_down")


async def test_a_retried_request_is_one_record(caplog: pytest.LogCaptureFixture) -> None:
    """Three tries are one request: the record names the last worker, and how many there were."""
    refusing = replace(answer("json"), connect=[REFUSED])
    routed = Routed({WORKER: refusing, OTHER: refusing, "http://w3:8000": answer("json")}, policy="round_robin")
    for _ in range(3):
        await Exchange(body=completion_body()).run(routed.app)
    logged = requests_logged(caplog)
    assert [(entry["outcome"], entry["worker"]) for entry in logged] == [("ok", "http://w3:8000")] * 3
    connects = sum(worker.connects for worker in routed.fleet.workers.values())
    assert sum(int(str(entry["attempts"])) for entry in logged) == connects > 3


async def test_a_record_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """It holds what the choice was made by: reason, candidates, tokens, and how many were believed to be cached."""
    routed = Routed({WORKER: answer("json"), OTHER: answer("json")})
    for _ in range(2):
        await Exchange(body=completion_body(model="m", stream=True)).run(routed.app)
    first, second = requests_logged(caplog)
    assert (first["reason"], first["candidates"], first["model"], first["stream"]) == ("prefill_cost", 2, "m", True)
    assert first["worker"] == second["worker"]
    assert first["predicted_cached_tokens"] == 0
    assert 0 < int(str(second["predicted_cached_tokens"])) < int(str(second["prompt_tokens"]))


@pytest.mark.parametrize(
    "text", ["%s%n%(x)s{0}", "a\nCRITICAL root: forged", "\x1b[31m\r\u2028", '"}', "\ud800", "é" * 9]
)
async def test_f93_no_text_of_a_client_forges_a_record(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """F-93: ids were part of a format string; here they, and a model, are data: one line, whatever is in them."""
    body = completion_body(model=text, request_id=text, session_id=text)
    headers = [("x-request-id", text.encode("utf-8", "replace").decode("latin-1"))]
    exchange = await Exchange(body=body, headers=headers).run(Routed(answer("json"), decision_headers=True).app)
    (logged,) = requests_logged(caplog)
    assert logged["model"] == text
    fit = text.isascii() and text.isprintable() and " " not in text
    assert (logged["request_id"] == text, logged["session_id"] == text) == (fit, fit)
    assert str(logged["request_id"]).isascii()
    assert exchange.header("x-request-id") == [str(logged["request_id"]).encode()]


async def test_a_long_model_makes_no_long_line(caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends a megabyte as the model's name gets its 404, and a short record."""
    routed = Routed(answer("json"))
    routed.router.workers.add(Worker(url=WORKER, models=("other",)))
    await Exchange(body=completion_body(model="m" * 2**20)).run(routed.app)
    (logged,) = requests_logged(caplog)
    assert logged["model"] == "m" * MODEL_LENGTH
    assert sum(len(record.getMessage()) for record in caplog.records) < 2000


@pytest.mark.parametrize("phase", ["head", "body"])
async def test_f27_a_worker_that_breaks_does_not_get_the_prompt_logged(
    phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    """F-27: a read error logged the whole prompt; here no record has a word of it, at any level."""
    caplog.set_level(logging.DEBUG)
    script = replace(answer("stream"), head=[BROKEN]) if phase == "head" else interrupted("stream", BROKEN)
    await Exchange(body=completion_body("the codeword is xyzzy " * 50)).run(Routed(script).app)
    assert any(record.levelno == logging.WARNING for record in caplog.records)
    assert len(requests_logged(caplog)) == 1
    assert all("xyzzy" not in str(vars(record)) for record in caplog.records if record.name.startswith("asgi_router"))


async def test_nothing_is_made_that_nobody_wants(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the default level, WARNING, no record and no event is built."""
    caplog.set_level(logging.WARNING, logger="asgi_router")
    monkeypatch.setattr("asgi_router.router.finished", lambda exchange: pytest.fail("an event was built"))
    exchange = await Exchange(body=completion_body()).run(Routed(answer("json")).app)
    assert exchange.finished_cleanly
    assert requests_logged(caplog) == []


async def test_the_duration_is_that_of_the_whole_request(caplog: pytest.LogCaptureFixture) -> None:
    """Seconds are those of the router's clock, counted from when the request came."""
    now = 100.0
    head, tail = anyio.Event(), anyio.Event()
    routed = Routed(interrupted("json", tail, b'er": 42}'), clock=lambda: now)
    routed.worker.scripts = replace(routed.worker.scripts, head=[head])  # type: ignore[type-var]
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        now = 102.0
        head.set()
        await exchange.body_at_least(1)
        now = 107.0
        tail.set()

    (logged,) = requests_logged(caplog)
    assert (logged["first_byte_seconds"], logged["duration_seconds"]) == (2.0, 7.0)
    assert (logged["selection_seconds"], logged["queue_seconds"]) == (0.0, 0.0)
