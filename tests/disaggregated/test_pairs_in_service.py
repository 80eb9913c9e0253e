"""Owns pairs as clients and operators see them: no pair, the queue, sessions, headers, events, metrics, registration.

How a pair is chosen is in `test_pairing.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router import Role, Worker
from asgi_router.scheduling.breaker import BreakerState
from tests.disaggregated.routed_apart import (
    DECODE,
    DECODE_2,
    DIALECTS,
    PREFILL,
    PREFILL_2,
    PREFILLED,
    RESET,
    RoutedApart,
    request,
    settle,
)
from tests.fleet.admin_calls import BEARER, TOKEN, call
from tests.instruments.fake_worker import Script
from tests.observability.scraping import scrape
from tests.routed import KINDS, answer, completion_body, error_of
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    import httpx

    from tests.disaggregated.routed_apart import Dialect
    from tests.instruments.asgi_client import Exchange
    from tests.routed import Kind

pytestmark = pytest.mark.anyio

every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
GOOD = answer("stream")


class Gated:
    """A worker whose answers begin when they are told to, each by its own gate."""

    def __init__(self) -> None:
        self.gates: list[anyio.Event] = []

    def __call__(self, request: httpx.Request) -> Script:
        self.gates.append(anyio.Event())
        return replace(GOOD, head=[self.gates[-1]])


def pairs(prefills: int = 1, decodes: int = 1, **settings: object) -> RoutedApart:
    """A router before this many workers of each role, whose answers are good."""
    prefill = dict.fromkeys([PREFILL, PREFILL_2][:prefills], PREFILLED)
    decode = dict.fromkeys([DECODE, DECODE_2][:decodes], GOOD)
    return RoutedApart(prefill, decode, None, **settings)


async def ask(routed: RoutedApart, **fields: object) -> Exchange:
    """Send one request, and see that nothing of it is left."""
    exchange = await request(**fields).run(routed.app)  # type: ignore[arg-type]
    routed.assert_released(exchange)
    return exchange


async def test_what_a_decode_worker_says_of_its_cache_teaches_nothing() -> None:
    """Its `cached_tokens` are what it was sent: no picture changes by them. Its count of the prompt is believed."""
    said = {"prompt_tokens": 2_000, "prompt_tokens_details": {"cached_tokens": 0}}
    routed = RoutedApart(PREFILLED, Script.json({"choices": [], "usage": said}))
    before = [state.prefixes.capacity for state in routed.router.workers]
    for _ in range(3):
        await ask(routed, kind="json")
    assert [state.prefixes.capacity for state in routed.router.workers] == before
    assert routed.events[0].prompt_tokens < 1_500
    assert routed.events[-1].prompt_tokens == pytest.approx(2_000, rel=0.01)


# --- no pair ----------------------------------------------------------------------------------------------------


@every_dialect
@pytest.mark.parametrize("missing", [PREFILL, DECODE])
@pytest.mark.parametrize("why", ["gone", "unhealthy", "draining"])
async def test_no_pair(dialect: Dialect, missing: str, why: str) -> None:
    """Without a full pair: 503, when to come back, and no word to the worker that is there (peer entry 35)."""
    routed = pairs(pd_dialect=dialect)
    if why == "gone":
        routed.router.workers.remove(missing)
    elif why == "draining":
        routed.router.workers.drain(missing)
    else:
        routed.state(missing).healthy = False
    exchange = await ask(routed)
    assert error_of(exchange) == (503, "no_worker_available")
    assert exchange.header("retry-after") == [b"1"]
    assert set(routed.calls.values()) == {0}


async def test_workers_that_do_not_fit() -> None:
    """F-87: workers of different tensor parallel sizes are no pair."""
    routed = RoutedApart(GOOD, GOOD, {PREFILL: {"tp_size": 2}, DECODE: {"tp_size": 4}})
    assert error_of(await ask(routed)) == (503, "no_worker_available")
    assert set(routed.calls.values()) == {0}


@every_dialect
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_peer_35_an_outage_ends_by_itself(dialect: Dialect, failing: str) -> None:
    """sgl-project/sglang#31206 (peer entry 35): a breaker that an outage has opened closes when the worker is back."""
    clock = Clock()
    routed = pairs(pd_dialect=dialect, breaker_failures=2, clock=clock)
    url = PREFILL if failing == "prefill" else DECODE
    worker = routed.fleet[url]
    good, worker.scripts = worker.scripts, Script(head=[RESET])
    for _ in range(3):
        assert (await ask(routed)).status == 502
    assert routed.state(url).breaker.state is BreakerState.OPEN

    clock.now += 60
    other = DECODE if failing == "prefill" else PREFILL
    routed.router.workers.drain(other)
    for _ in range(3):
        assert (await ask(routed)).status == 503
    assert routed.state(url).breaker.state is BreakerState.HALF_OPEN
    routed.router.workers.drain(other, draining=False)
    worker.scripts = good
    assert (await ask(routed)).status == 200
    assert routed.state(url).breaker.state is BreakerState.CLOSED


# --- the queue --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", ["prefill", "decode"])
async def test_requests_wait_for_a_place_on_both(full: str) -> None:
    """A request waits while either role is full, holding nothing meanwhile, and goes on when there is a place."""
    gated = Gated()
    routed = pairs(1 if full == "prefill" else 2, 1 if full == "decode" else 2, max_concurrent_per_worker=1)
    (routed.prefill if full == "prefill" else routed.decode).scripts = gated
    first, second = request("json"), request("json")
    async with first.running(routed.app), second.running(routed.app):
        await settle()
        stats = routed.router.stats()
        assert (stats.queued, len(gated.gates)) == (1, 1)
        assert stats.leases == (2 if full == "prefill" else 1)  # the other prefill worker has answered
        gated.gates[0].set()
        await settle()
        assert routed.router.stats().queued == 0
        gated.gates[1].set()
    assert first.finished_cleanly
    assert second.finished_cleanly
    routed.assert_released()


async def test_a_place_of_a_pair_is_given_to_the_next_in_order() -> None:
    """As many requests are at work as there are pairs; the others follow one by one, none is lost."""
    gated = Gated()
    routed = pairs(2, 1, max_concurrent_per_worker=2)
    routed.decode.scripts = gated
    exchanges = [request() for _ in range(5)]
    async with anyio.create_task_group() as tasks:
        for exchange in exchanges:
            tasks.start_soon(exchange.run, routed.app)
            await settle()
        for done in range(5):
            stats = routed.router.stats()
            assert (stats.queued, routed.requests[DECODE]) == (max(0, 3 - done), min(2, 5 - done))
            gated.gates[done].set()
            await settle()
    assert all(exchange.finished_cleanly for exchange in exchanges)
    routed.assert_released()


async def test_full_queue_and_no_queue() -> None:
    """Where nobody may wait a full fleet is told at once."""
    routed = pairs(max_concurrent_per_worker=1, queue_size=0)
    routed.decode.scripts = gated = Gated()
    first = request()
    async with first.running(routed.app):
        await settle()
        second = await request().run(routed.app)
        assert error_of(second) == (429, "queue_full")
        gated.gates[0].set()
    routed.assert_released()


# --- sessions, cache, policies ----------------------------------------------------------------------------------


@every_dialect
async def test_a_session_stays_with_its_pair(dialect: Dialect) -> None:
    """Both roles remember a session: its requests go to the same two workers while others take turns."""
    policies = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
    routed = pairs(2, 2, pd_dialect=dialect, decision_headers=True, **policies)
    of_session = []
    for _ in range(3):
        exchange = await ask(routed, session_id="s")
        of_session.append((exchange.header("x-router-prefill-url"), exchange.header("x-router-decode-url")))
        await ask(routed)
    assert len({str(pair) for pair in of_session}) == 1
    assert b"prefill=session" in exchange.header("x-router-decision")[0]
    assert b"decode=session" in exchange.header("x-router-decision")[0]


async def test_f50_round_robin_of_each_role() -> None:
    """F-50: with one counter for both roles, two prefill and two decode workers got one of each: all get their turn."""
    routed = pairs(2, 2, prefill_policy="round_robin", decode_policy="round_robin")
    for _ in range(4):
        assert (await ask(routed)).status == 200
    assert routed.calls == {PREFILL: 2, PREFILL_2: 2, DECODE: 2, DECODE_2: 2}


async def test_prefill_goes_where_the_prompt_is() -> None:
    """PREFILL_POLICY counts what prefill workers hold: a prompt comes back to the one that has prefilled it."""
    routed = pairs(2, 2, prefill_policy="prefill_cost", decode_policy="round_robin")
    for _ in range(4):
        assert (await ask(routed)).status == 200
    assert sorted((routed.calls[PREFILL], routed.calls[PREFILL_2])) == [0, 4]
    assert (routed.calls[DECODE], routed.calls[DECODE_2]) == (2, 2)


@pytest.mark.parametrize(("below", "prefills"), [(0, 2), (200, 1)])
async def test_pd_skip_prefill_below(below: int, prefills: int) -> None:
    """A decode worker that holds the prompt but for PD_SKIP_PREFILL_BELOW tokens serves alone, by the client's body."""
    routed = pairs(pd_dialect="vllm", pd_skip_prefill_below=below, decision_headers=True)
    assert (await ask(routed)).status == 200
    exchange = await ask(routed)
    assert routed.calls == {PREFILL: prefills, DECODE: 2}
    alone = prefills == 1
    assert exchange.header("x-router-prefill-url") == ([] if alone else [PREFILL.encode()])
    assert (routed.events[1].prefill_worker == "") == alone
    if alone:
        assert routed.decode.calls[1].body == completion_body(stream=True)


async def test_pd_skip_prefill_below_is_of_no_use_to_other_dialects() -> None:
    """FastDeploy's decode workers wait for a prefill worker whatever they hold."""
    routed = pairs(pd_dialect="fastdeploy", pd_skip_prefill_below=1000)
    for _ in range(2):
        assert (await ask(routed)).status == 200
    assert routed.calls == {PREFILL: 2, DECODE: 2}


# --- what is told -----------------------------------------------------------------------------------------------


@every_dialect
@pytest.mark.parametrize("kind", KINDS)
async def test_decision_headers_and_event(dialect: Dialect, kind: Kind) -> None:
    """Client and observers are told both workers; without DECISION_HEADERS the client is told nothing."""
    routed = RoutedApart(PREFILLED, answer(kind), pd_dialect=dialect, decision_headers=True)
    exchange = await request(kind).run(routed.app)
    assert exchange.header("x-router-prefill-url") == [PREFILL.encode()]
    assert exchange.header("x-router-decode-url") == [DECODE.encode()]
    assert exchange.header("x-router-worker") == []
    (event,) = routed.events
    assert (event.prefill_worker, event.worker, event.role) == (PREFILL, DECODE, "decode")
    assert (event.status, event.outcome, event.attempts) == (200, "ok", 1)
    assert exchange.header("x-request-id") == [event.request_id.encode()]

    silent = await request(kind).run(RoutedApart(PREFILLED, answer(kind), pd_dialect=dialect).app)
    assert not [name for name, _ in silent.headers if name.startswith(b"x-r")]


async def test_metrics() -> None:
    """Gauges by role while a pair is at work; finished requests count for the decode worker, and retries count."""
    gate = anyio.Event()
    routed = pairs(1, 2, metrics_path="/metrics", decode_policy="round_robin")
    routed.decode.scripts = Script(head=[RESET])
    routed.fleet[DECODE_2].scripts = replace(GOOD, head=[gate])
    exchange = request()
    async with exchange.running(routed.app):
        await routed.fleet[DECODE_2].received(1)
        await settle()
        running = await scrape(routed)
        gate.set()
    roles = {PREFILL: "prefill", DECODE: "decode", DECODE_2: "decode"}
    requests = {url: running.value("worker_requests", worker=url, role=role) for url, role in roles.items()}
    assert requests == {PREFILL: 0, DECODE: 0, DECODE_2: 1}  # the stream's first byte has come from prefill
    done = await scrape(routed)
    finished = {"worker": DECODE_2, "role": "decode", "status": "200", "outcome": "ok"}
    assert done.value("requests_total", **finished) == 1
    assert done.value("retries_total") == 1
    assert [done.value("worker_requests", worker=url, role=role) for url, role in roles.items()] == [0, 0, 0]


@pytest.mark.parametrize("down", ["", PREFILL, DECODE])
async def test_health_generate(down: str) -> None:
    """`/health_generate` asks the workers of both roles."""
    routed = pairs(admin_prefix="/router", admin_token=TOKEN)
    for url in (PREFILL, DECODE):
        routed.fleet[url].scripts = Script.json({}, status=500 if url == down else 200)
    exchange = await call(routed, "GET", "/health_generate")
    assert exchange.status == (503 if down else 200)
    body = exchange.json()
    assert isinstance(body, dict)
    assert body["workers"] == {PREFILL: down != PREFILL, DECODE: down != DECODE}


@pytest.mark.parametrize("mode", ["disaggregated", "splitwise"])
async def test_registration_of_both_roles(mode: str) -> None:
    """Engines of either role register over HTTP, and serve a request as soon as there is a pair; mixed ones may not."""
    routed = pairs(mode=mode, admin_prefix="/router", admin_token=TOKEN)
    routed.router.workers.remove(PREFILL)
    routed.router.workers.remove(DECODE)

    async def register(role: str, host: str) -> int | None:
        payload = {"role": role, "host_ip": host, "port": 8000, "connector_port": 9001, "tp_size": 1}
        return (await call(routed, "POST", "/register", payload, headers=(BEARER,))).status

    assert (await ask(routed)).status == 503
    assert await register("prefill", "p1") == 200
    assert (await ask(routed)).status == 503
    assert await register("decode", "d1") == 200
    assert await register("mixed", "p2") == 400
    assert (await ask(routed)).status == 200
    assert json.loads(routed.decode.calls[-1].body)["disaggregate_info"]["decode_connector_port"] == 9001
    registered = (await call(routed, "GET", "/registered_number")).json()
    assert registered == {"mixed": 0, "prefill": 1, "decode": 1}


async def test_a_pair_that_leaves_while_it_serves() -> None:
    """Workers that leave the fleet finish what they have; what was leased on them is released on them."""
    gate = anyio.Event()
    routed = RoutedApart(replace(GOOD, head=[gate]), GOOD)
    exchange = request()
    async with exchange.running(routed.app):
        await routed.prefill.received(1)
        states = [routed.state(url) for url in (PREFILL, DECODE)]
        for url, role in ((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)):
            routed.router.workers.remove(url)
            routed.router.workers.add(Worker(url=url, role=role))
        assert [state.requests for state in states] == [1, 1]
        assert set(routed.requests.values()) == {0}
        gate.set()
    assert exchange.finished_cleanly
    assert [state.requests for state in states] == [0, 0]
    routed.assert_released(exchange)
