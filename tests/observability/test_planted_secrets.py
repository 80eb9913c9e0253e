"""Shows that what is planted in a request and in the settings is nowhere to be seen afterwards, however it ended."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from tests.fleet.admin_calls import call
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import Script
from tests.observability.scraping import OPENMETRICS, scrape
from tests.observability.ways import IN_EXCEPTIONS, WAYS, Way
from tests.routed import WORKER, Routed, completion_body

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

SETTINGS = {
    "admin_token": "PLANTED-ADMIN-TOKEN",
    "worker_api_key": "PLANTED-WORKER-KEY",
    "peer_token": "PLANTED-PEER-TOKEN",
}
PROMPT = "PLANTED-PROMPT"
SESSION = "PLANTED-SESSION is a text, not an id"
ANSWER = "PLANTED-ANSWER"
HEADERS = [
    ("authorization", "Bearer PLANTED-AUTHORIZATION"),
    ("x-api-key", "PLANTED-API-KEY"),
    ("cookie", "id=PLANTED-COOKIE"),
    ("x-session", SESSION),
    ("traceparent", "PLANTED-TRACE"),
    ("x-request-id", "PLANTED-REQUEST is a text, not an id"),
]
BODY = completion_body(PROMPT * 200, session_id=SESSION, user="PLANTED-USER", request_id=SESSION)

PLANTED = "PLANTED"
"""In each of them."""


def planted_router(script: Script, **settings: object) -> Routed:
    return Routed(
        script,
        **{
            **SETTINGS,
            "admin_prefix": "/router",
            "metrics_path": "/metrics",
            "fastdeploy_metrics": True,
            "decision_headers": True,
            "session_header": "x-session",
            **settings,
        },
    )


def logged(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Give all that a handler could print of each record, whoever's it is."""
    formatter = logging.Formatter("%(name)s %(message)s")
    for record in caplog.records:
        yield formatter.format(record)  # with tracebacks
        yield str(vars(record))


async def seen_from_outside(routed: Routed) -> list[str]:
    """Return what a router tells of itself: metrics in both formats, stats, `repr`, and the admin API."""
    metrics = [(await scrape(routed, accept)).exchange.body.decode() for accept in ("", OPENMETRICS)]
    bearer = ("authorization", f"Bearer {SETTINGS['admin_token']}")
    admin = [(await call(routed, "GET", path, headers=[bearer])).body.decode() for path in ("/workers", "/registered")]
    router = routed.router
    stats = router.stats()
    return [*metrics, *admin, repr(router), repr(stats), str(asdict(stats)), repr(router.settings), repr(vars(router))]


def told(exchange: Exchange) -> list[str]:
    """Return what the client was told by us: headers, and the bodies of our errors."""
    return [repr(exchange.headers), exchange.body.decode()]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_what_is_planted_is_not_seen(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """In no log record at DEBUG, no metric, no header or error of ours, no `repr`, no statistic, whatever happens."""
    caplog.set_level(logging.DEBUG)
    routed = planted_router(way.script, **way.settings)
    exchange = await way.take(routed, body=BODY, headers=HEADERS, query_string=b"key=PLANTED-QUERY")

    places = [*logged(caplog), *told(exchange), *await seen_from_outside(routed)]
    assert [place for place in places if PLANTED in place] == []
    assert any('"outcome"' in place for place in places)  # the log was looked at
    assert any("asgi_router_requests_total{" in place for place in places)
    assert IN_EXCEPTIONS.startswith(PLANTED)
    for sent in routed.worker.calls:
        assert not any(value in str(sent.headers) for value in SETTINGS.values())


async def test_an_answer_is_not_seen(caplog: pytest.LogCaptureFixture) -> None:
    """What a worker answers goes to the client, and nowhere else, though its end is read for `usage`."""
    caplog.set_level(logging.DEBUG)
    answer = {"choices": [{"message": {"content": ANSWER}}], "usage": {"prompt_tokens": 7, "note": ANSWER}}
    routed = planted_router(Script.json(answer))
    exchange = await Exchange(body=BODY, headers=HEADERS).run(routed.app)

    assert json.loads(exchange.body) == answer
    places = [*logged(caplog), repr(exchange.headers), *await seen_from_outside(routed)]
    assert [place for place in places if PLANTED in place] == []
    assert any('"real_prompt_tokens": 7' in place for place in places)


@pytest.mark.parametrize("status", [200, 401, 500])
async def test_the_routers_own_calls_show_nothing(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """Probes, a registration and an admin call with a wrong token leave neither token, nor what was sent."""
    caplog.set_level(logging.DEBUG)
    routed = planted_router(Script.json({"error": ANSWER}, status=status), health_failures=1)
    await routed.router.monitor.probe_all()
    wrong = ("authorization", "Bearer PLANTED-WRONG-TOKEN")
    refused = await call(routed, "GET", "/workers", headers=[wrong])
    right = ("authorization", f"Bearer {SETTINGS['admin_token']}")
    payload = {"role": "PLANTED-ROLE", "host_ip": "PLANTED HOST", "port": 1}
    bad = await call(routed, "POST", "/register", payload, headers=[right])

    assert (refused.status, bad.status) == (403, 400)
    places = [*logged(caplog), *told(refused), *told(bad), *await seen_from_outside(routed)]
    assert [place for place in places if PLANTED in place] == []
    assert (f"{WORKER}: " in " ".join(logged(caplog))) is (status == 500)
