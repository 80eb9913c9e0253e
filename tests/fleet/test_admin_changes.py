"""Owns what the admin API changes beyond who is there: the breaker by hand, what stays; and who may not ask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asgi_router import Worker
from asgi_router.scheduling.breaker import BreakerState
from tests.fleet.admin_calls import BEARER, PAYLOAD, administered, call, urls
from tests.instruments.asgi_client import Exchange
from tests.routed import OTHER, WORKER, answer, completion_body

pytestmark = pytest.mark.anyio


async def test_breaker_set_by_hand() -> None:
    """litellm#25504: it can be read, opened for one cool-down, and closed; an open one keeps requests away."""
    routed = administered(admin_open=True, register_allow="w*", policy="round_robin")
    routed.router.workers.add(Worker(url=OTHER))
    opened = await call(routed, "POST", f"/workers/breaker?url={WORKER}&state=open")
    assert (opened.status, opened.json()) == (200, {"code": 200, "msg": "Breaker success", "breaker": "open"})
    for _ in range(4):
        await Exchange(body=completion_body()).run(routed.app)
    assert len(routed.worker.calls) == 0

    closed = await call(routed, "POST", f"/workers/breaker?url={WORKER}&state=CLOSED")
    assert (closed.status, routed.router.stats().workers[0].breaker) == (200, BreakerState.CLOSED)
    for _ in range(4):
        await Exchange(body=completion_body()).run(routed.app)
    assert len(routed.worker.calls) == 2
    shown = (await call(routed, "GET", "/workers")).json()
    assert isinstance(shown, dict)
    assert [worker["breaker"] for worker in shown["workers"]] == ["closed", "closed"]


async def test_closing_by_hand_ends_a_retry_after() -> None:
    """Whoever closes the breaker wants the worker asked now."""
    routed = administered()
    routed.worker.scripts = replace(answer("json"), status=503, headers=[("retry-after", "60")])
    await Exchange(body=completion_body()).run(routed.app)
    assert routed.router.stats().workers[0].backing_off
    await call(routed, "POST", f"/workers/breaker?url={WORKER}&state=closed")
    assert not routed.router.stats().workers[0].backing_off


@pytest.mark.parametrize(
    ("query", "status"),
    [(f"url={WORKER}", 400), (f"url={WORKER}&state=half_open", 400), ("state=open", 400), ("url=x&state=open", 404)],
)
async def test_breaker_calls_that_are_refused(query: str, status: int) -> None:
    """A state that is none, or a worker that isn't there, changes nothing and says so."""
    routed = administered()
    assert (await call(routed, "POST", f"/workers/breaker?{query}")).status == status
    assert routed.router.stats().workers[0].breaker is BreakerState.CLOSED


async def test_models_and_slots_survive_a_registration() -> None:
    """An engine that registers again tells neither; those that its operator gave still hold."""
    routed = administered()
    routed.router.workers.add(Worker(url=OTHER, models=("m",), slots=2))
    for more, models, slots in (({}, ("m",), 2), ({"models": ["n"]}, ("n",), 2), ({"slots": 3}, ("n",), 3)):
        assert (await call(routed, "POST", "/register", PAYLOAD | more)).status == 200
        worker = routed.router.workers.get(OTHER).worker
        assert (worker.models, worker.slots) == (models, slots)


async def test_methods_are_told() -> None:
    """405 names every method that the path knows."""
    exchange = await call(administered(), "PUT", "/workers")
    assert exchange.status == 405
    assert {method.strip() for method in exchange.header("allow")[0].split(b",")} >= {b"GET", b"DELETE"}


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://router.internal:81"])
async def test_open_is_not_open_to_web_pages(origin: str) -> None:
    """A page that somebody on the trusted network has open can't make their browser change the fleet."""
    routed = administered(admin_open=True, register_allow="w*")
    headers = [("host", "router.internal"), ("origin", origin), ("content-type", "text/plain")]
    assert (await call(routed, "POST", "/register", PAYLOAD, headers=headers)).status == 403
    assert (await call(routed, "DELETE", f"/workers?url={WORKER}", headers=headers)).status == 403
    assert urls(routed) == [WORKER]
    assert (await call(routed, "POST", "/register", PAYLOAD, headers=[*headers, BEARER])).status == 200


async def test_open_to_engines_and_to_pages_of_its_own() -> None:
    """Engines send no origin, and a page of the host app's own may call."""
    routed = administered(admin_open=True, register_allow="w*")
    assert (await call(routed, "POST", "/register", PAYLOAD, headers=[("host", "router.internal")])).status == 200
    own = [("host", "router.internal"), ("origin", "https://router.internal")]
    assert (await call(routed, "DELETE", f"/workers?url={OTHER}", headers=own)).status == 200
