"""Owns the faults that peers have had in public with memory, load and storms (entries 65 to 73).

Shown elsewhere, with the reference in the test's docstring:

- entry 65, within one index, in tests/scheduling/test_prefix_index.py; what sessions take, in test_sessions.py there
- entry 70, for the breaker by itself, in tests/scheduling/test_breaker.py
- entry 71 (BerriAI/litellm#3646) and entry 72 (AMD-AGI/Infera#82) there, too, but for requests that are served
"""

from __future__ import annotations

import resource
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import anyio
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.scheduling.breaker import BreakerState
from tests.instruments import BACKENDS, asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import Script
from tests.instruments.servers import run_uvicorn
from tests.routed import OTHER, WORKER, Routed, answer, completion_body, counters, error_of, unreachable_app
from tests.scheduling.builders import Clock, fleet, request, text, warm, worker
from tests.scheduling.test_sessions import Chooser, in_session

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from asgi_router.upstream.http11 import Http11Transport

pytestmark = pytest.mark.anyio

THIRD = "http://w3:8000"
GOOD = answer("json")
REFUSED = replace(GOOD, connect=[httpx.ConnectError("refused")])
CACHE_POLICIES = ["prefill_cost", "cache_aware", "remote_cache_aware"]


async def ask(routed: Routed, **fields: object) -> int | None:
    """Send a request; return its status."""
    return (await Exchange(body=completion_body(**fields)).run(routed.app)).status  # type: ignore[arg-type]


# --- 65: memory ----------------------------------------------------------------------------------------------


async def test_65_a_burst_of_unique_long_prompts() -> None:
    """sgl-project/sglang#16734, lightseekorg/smg#2137, vllm-project/production-stack#687, #711: out of memory.

    Prompts of 100,000 characters that share nothing, all in flight at once and then answered, take no more room than
    the budget at any moment: it is kept when a request comes, not by a sweep.
    """
    gate = anyio.Event()
    routed = Routed(
        dict.fromkeys((WORKER, OTHER, THIRD), replace(GOOD, head=[gate])),
        policy="round_robin",
        health_interval=0,
        prefix_capacity_tokens=250_000,
    )
    states = list(routed.router.workers)
    budget = routed.router.settings.prefix_capacity_tokens * 4 // routed.router.settings.prefix_block_bytes
    seen: list[int] = []

    async def client(number: int) -> None:
        assert await ask(routed, prompt=f"{number} " * 20_000) == 200
        seen.extend(len(state.prefixes) for state in states)

    tracemalloc.start()
    try:
        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(client, number)
            for state in states:
                await routed.fleet[state.worker.url].received(20)
                seen.append(len(state.prefixes))
            gate.set()
        for fake in routed.fleet.workers.values():
            fake.calls.clear()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(seen) == budget
    assert held < 3 * budget * 150 + 2**20
    routed.assert_released()


# --- 66, 67: cache and load ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_66_a_miss_goes_to_the_least_load(policy: str) -> None:
    """sgl-project/sglang#14305, #14532: a prompt that nobody holds went to the smallest tree, however busy its worker.

    Here the idle worker gets it, though it is the one that remembers most.
    """
    states = [worker("busy", requests=3, waiting_requests=3, pending_prefill_tokens=300), worker("idle")]
    for letter in "ABCDEFGH":
        warm(states[1], letter * 8)
    chooser = Chooser(states, policy)
    assert [len(state.prefixes) for state in states] == [0, 64]
    assert chooser.select(request(text("XYZ"))).state is states[1]


def test_67_the_owner_is_preferred_among_the_least_busy() -> None:
    """sgl-project/sglang#32195: while one worker is overloaded, the prompts of all others lose their homes.

    By default a prompt stays with its owner while that is about as busy as the least busy ones, whatever happens
    elsewhere in the fleet; and leaves it if that is the overloaded one itself.
    """
    states = [worker("hot", requests=40, waiting_requests=40, pending_prefill_tokens=4_000), *fleet("abc")]
    for state, blocks in zip(states, ("HHHH", "AAAA", "BBBB", "CCCC"), strict=True):
        warm(state, blocks)
        state.requests += 2
    chooser = Chooser(states, "prefill_cost")
    for state, blocks in zip(states[1:], ("AAAA", "BBBB", "CCCC"), strict=True):
        assert [chooser.serve(request(text(blocks))) for _ in range(10)] == [state] * 10
    assert chooser.serve(request(text("HHHH"))) is not states[0]


@pytest.mark.parametrize("policy", ["cache_aware", "request_num", "prefill_cost"])
def test_67_a_session_is_not_moved_by_somebody_elses_load(policy: str) -> None:
    """sgl-project/sglang#32195: with any policy a session stays with its worker while another one is overloaded."""
    states = fleet("abcd")
    chooser = Chooser(states, policy)
    home = chooser.serve(in_session())
    hot = next(state for state in states if state is not home)
    hot.requests, home.requests = 40, 2
    assert [chooser.serve(in_session()) for _ in range(10)] == [home] * 10
    home.requests, hot.requests = 40, 0
    assert chooser.serve(in_session()) is not home


# --- 68, 73: storms ------------------------------------------------------------------------------------------


class Engine:
    """An ASGI worker that keeps its answers back until it may give them; counts the requests that are there."""

    def __init__(self) -> None:
        self.gate = anyio.Event()
        self.here = 0
        self.most = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http"
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            await self.gate.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"{}"})
        finally:
            self.here -= 1


def raise_file_limit(files: int) -> None:
    """Let this process open so many files: both ends of every connection are in it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (files if hard == resource.RLIM_INFINITY else min(files, hard), hard)
        )


def open_connections(router: Router) -> int:
    """How many connections to workers the running loop has."""
    pool = cast("Http11Transport", router._transport).pool()
    assert pool is not None
    return pool.sockets


@asyncio_only
async def test_68_the_pool_recovers_from_a_storm() -> None:
    """BerriAI/litellm#30192: after a spike every request timed out until a restart.

    300 requests at once to a worker that doesn't answer in time end with 504; the next one, to the worker that is back,
    is served at once, with nothing done by anybody.
    """
    raise_file_limit(1_000)
    engine = Engine()
    async with run_uvicorn(engine, lifespan="off") as served:
        router = Router(RouterSettings(workers=[served.url], first_byte_timeout=0.5, health_interval=0))
        app = RouterMiddleware(unreachable_app, router=router)
        async with router:
            statuses: list[int | None] = []

            async def client() -> None:
                statuses.append((await Exchange(body=completion_body("Hi")).run(app, timeout=20)).status)

            async with anyio.create_task_group() as tasks:
                for _ in range(300):
                    tasks.start_soon(client)
            assert statuses == [504] * 300
            assert router.stats().workers[0].breaker is BreakerState.OPEN
            assert open_connections(router) == 0

            engine.gate.set()
            assert (await Exchange(body=completion_body("Hi")).run(app)).status == 200
            assert [counters(stats) for stats in router.stats().workers] == [(0, 0, 0, 0)]
            assert open_connections(router) == 1


@pytest.mark.parametrize("anyio_backend", BACKENDS[:1])  # the others show nothing more, and it takes seconds
async def test_73_a_thousand_requests_at_once() -> None:
    """vllm-project/production-stack#612, #448: only the first N were served, or the router fell over.

    A thousand are with the worker at the same time, on as many connections, and each gets its answer.
    """
    raise_file_limit(4_096)
    engine = Engine()
    async with run_uvicorn(engine, lifespan="off") as served:
        router = Router(RouterSettings(workers=[served.url], connect_timeout=30, health_interval=0))
        app = RouterMiddleware(unreachable_app, router=router)
        statuses: list[int | None] = []

        async def client() -> None:
            statuses.append((await Exchange(body=completion_body("Hi")).run(app, timeout=60)).status)

        async with router:
            async with anyio.create_task_group() as tasks:
                for _ in range(1_000):
                    tasks.start_soon(client)
                with anyio.fail_after(60):
                    while engine.here < 1_000:  # noqa: ASYNC110 - there is no event to wait for
                        await anyio.sleep(0.01)
                assert router.stats().workers[0].requests == 1_000
                engine.gate.set()
            assert statuses == [200] * 1_000
            assert engine.most == 1_000
            assert [counters(stats) for stats in router.stats().workers] == [(0, 0, 0, 0)]
        assert open_connections(router) == 0


# --- 69 to 72: what a worker's failure means -----------------------------------------------------------------


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_69_a_429_stays_a_429(content_type: str) -> None:
    """BerriAI/litellm#22218: an engine's 429 was told as a 503. Here its status, headers and words are the client's."""
    headers = [("content-type", content_type), ("retry-after", "7"), ("x-ratelimit-remaining", "0")]
    routed = Routed(Script(status=429, headers=headers, body=[b'{"error": {"code": "rate_', b'limit"}}']))
    exchange = await Exchange(body=completion_body(stream=True)).run(routed.app)
    assert (exchange.status, exchange.body) == (429, b'{"error": {"code": "rate_limit"}}')
    assert (exchange.header("retry-after"), exchange.header("x-ratelimit-remaining")) == ([b"7"], [b"0"])
    routed.assert_released(exchange)


async def test_69_an_error_within_a_stream_stays_what_it_is() -> None:
    """BerriAI/litellm#22218: a 429 that an engine reports after its stream has begun is passed on, byte by byte."""
    events = [b'data: {"choices": []}\n\n', b'data: {"error": {"code": 429, "message": "slow down"}}\n\n']
    routed = Routed({WORKER: Script(body=events), OTHER: GOOD}, policy="round_robin")
    exchange = await Exchange(body=completion_body(stream=True)).run(routed.app)
    assert (exchange.status, exchange.body, exchange.finished_cleanly) == (200, b"".join(events), True)
    assert len(routed.fleet[OTHER].calls) == 0
    routed.assert_released(exchange)


@pytest.mark.parametrize("waits", [(30, 5), (5, 30)])
async def test_70_the_longest_cool_down_wins(waits: tuple[int, int]) -> None:
    """BerriAI/litellm#40130: a second failure kept the shorter one. Two requests are refused, in either order."""
    clock = Clock()
    gates = [anyio.Event(), anyio.Event()]
    refusals = [
        Script(status=503, headers=[("retry-after", str(wait))], head=[gate], body=[])
        for wait, gate in zip(waits, gates, strict=True)
    ]
    routed = Routed({WORKER: [*refusals, GOOD], OTHER: GOOD}, clock=clock, policy="request_num")
    routed.router.workers.drain(OTHER)
    exchanges = [Exchange(body=completion_body()) for _ in gates]
    async with exchanges[0].running(routed.app):
        await routed.worker.received(1)
        async with exchanges[1].running(routed.app):
            await routed.worker.received(2)
            routed.router.workers.drain(OTHER, draining=False)
            for gate, exchange in zip(gates, exchanges, strict=True):
                gate.set()
                await exchange.over()
    assert [exchange.status for exchange in exchanges] == [200, 200]

    for passed, back in ((0, False), (29.5, False), (0.5, True)):
        clock.now += passed
        assert routed.router.stats().workers[0].backing_off != back
        for _ in range(6):
            assert await ask(routed) == 200
        assert (len(routed.worker.calls) > 2) == back
    routed.assert_released()


async def test_71_all_are_cooling_down() -> None:
    """BerriAI/litellm#3646: with every worker in its cool-down requests failed at once, without a try.

    Here each is tried: one that is back answers although its cool-down isn't over, and that ends it.
    """
    routed = Routed({WORKER: REFUSED, OTHER: REFUSED}, clock=Clock(), policy="round_robin")
    assert [await ask(routed) for _ in range(6)] == [502] * 6
    assert {stats.breaker for stats in routed.router.stats().workers} == {BreakerState.OPEN}
    before = routed.worker.connects
    exchange = await Exchange(body=completion_body()).run(routed.app)
    assert error_of(exchange) == (502, "worker_unreachable")
    assert routed.worker.connects == before + 1

    routed.worker.scripts = GOOD
    assert [await ask(routed) for _ in range(4)] == [200] * 4
    routed.assert_released()


async def test_72_what_was_tried_is_remembered() -> None:
    """AMD-AGI/Infera#82: each request tried the broken worker first, since it held the prompt's prefix.

    Here each failure counts for all: after five the worker isn't tried, however warm it is, nor for a session of its.
    """
    routed = Routed({WORKER: GOOD, OTHER: GOOD, THIRD: GOOD}, clock=Clock())
    home = ""
    for _ in range(3):
        exchange = await Exchange(body=completion_body(session_id="s")).run(routed.app)
        (home,) = [url for url, fake in routed.fleet.workers.items() if fake.calls]
    routed.fleet[home].scripts = REFUSED
    tried = routed.fleet[home].connects
    assert [await ask(routed) for _ in range(10)] == [200] * 10
    assert [await ask(routed, session_id=str(number % 3)) for number in range(10)] == [200] * 10
    assert routed.fleet[home].connects - tried <= routed.router.settings.breaker_failures
    routed.assert_released(exchange)
