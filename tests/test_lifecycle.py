"""Owns the router's life: opened and closed by the host's lifespan, drained at shutdown, usable without any of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from asgi_router import Router, RouterMiddleware
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.lifespan import Lifespan
from tests.routed import KINDS, OTHER, WORKER, Kind, Routed, answer, completion_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio


def host_app(events: list[str]) -> Starlette:
    """A host app that notes its own start and stop."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        events.append("host starts")
        yield
        events.append("host stops")

    return Starlette(lifespan=lifespan)


async def test_lifespan_opens_and_closes() -> None:
    """The router closes its transport after the host app has stopped, exactly once."""
    events: list[str] = []
    routed = Routed(answer("json"))
    app = RouterMiddleware(host_app(events), router=routed.router)
    async with Lifespan().running(app) as life:
        assert life.supported
        assert events == ["host starts"]
        exchange = await Exchange(body=completion_body()).run(app)
        assert exchange.status == 200

    assert events == ["host starts", "host stops"]
    assert routed.fleet.close_calls == 1
    assert life.exception is None


async def test_lifespan_again() -> None:
    """A host app that is started a second time, as tests do, finds a router that works."""
    routed = Routed(answer("json"))
    app = RouterMiddleware(host_app([]), router=routed.router)
    for _ in range(2):
        async with Lifespan().running(app):
            routed.fleet.close_calls = 0  # this transport can't be used after its close; stock httpx can
            exchange = await Exchange(body=completion_body()).run(app)
            assert exchange.status == 200


async def test_app_without_lifespan() -> None:
    """An app that raises on the lifespan scope is still an app whose completions are routed."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("no lifespan here")

    routed = Routed(answer("json"))
    wrapped = RouterMiddleware(app, router=routed.router)
    async with Lifespan().running(wrapped) as life:
        assert isinstance(life.exception, LookupError)

    exchange = await Exchange(body=completion_body()).run(wrapped)
    assert exchange.status == 200
    routed.assert_released(exchange)


async def test_app_that_ends_its_lifespan_without_a_word() -> None:
    """The router is closed although the app never said that it has stopped."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        raise LookupError("stopped badly")

    routed = Routed(answer("json"))
    async with Lifespan().running(RouterMiddleware(app, router=routed.router)) as life:
        pass

    assert isinstance(life.exception, LookupError)
    assert routed.fleet.close_calls == 1
    assert not routed.router.stats().draining


@pytest.mark.parametrize("kind", KINDS)
async def test_f31_shutdown_waits_for_requests_in_flight(kind: Kind) -> None:
    """F-31: requests in flight finish before the host app stops; new ones are told to come back."""
    events: list[str] = []
    gate = anyio.Event()
    routed = Routed(replace(answer(kind), head=[gate]))
    app = RouterMiddleware(host_app(events), router=routed.router)
    exchange = Exchange(body=completion_body())
    async with Lifespan().running(app) as life, exchange.running(app):
        await routed.worker.received(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(life.shutdown)
            while not routed.router.stats().draining:
                await anyio.lowlevel.checkpoint()

            late = await Exchange(body=completion_body()).run(app)
            assert late.status == 503
            assert late.header("retry-after") == [b"1"]
            assert b'"shutting_down"' in late.body
            assert events == ["host starts"]
            gate.set()

    assert exchange.finished_cleanly
    assert events == ["host starts", "host stops"]
    routed.assert_released(exchange)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", [False, True])
async def test_shutdown_cuts_what_outlives_the_drain_timeout(kind: Kind, begun: bool) -> None:
    """After DRAIN_TIMEOUT a request is ended: an honest 503, or an answer that is visibly cut."""
    first, *_ = answer(kind).body
    script = replace(answer(kind), body=[first, HANG] if begun else [HANG])
    routed = Routed(script, drain_timeout=0.05)
    exchange = Exchange(body=completion_body())

    async def run() -> None:
        if begun and kind == "json":
            with pytest.raises(Exception, match="shutting down"):
                await exchange.run(routed.app)
        else:
            await exchange.run(routed.app)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await (exchange.body_at_least(1) if begun else routed.worker.received(1))
        await routed.router.aclose()
        assert routed.counters == [(0, 0, 0, 0)]

    if begun:
        assert (exchange.status, exchange.ends) == (200, 0)
    else:
        assert (exchange.status, exchange.ends) == (503, 1)
    routed.assert_released(exchange)


async def test_shutdown_cuts_an_upload_that_never_ends() -> None:
    """A client that is still sending its body doesn't hold up the shutdown for longer than DRAIN_TIMEOUT."""
    routed = Routed(answer("json"), drain_timeout=0.05)
    exchange = Exchange(body=[completion_body()[:100], HANG])
    async with exchange.running(routed.app):
        while not routed.router.stats().exchanges:
            await anyio.lowlevel.checkpoint()
        await routed.router.aclose()

    assert (exchange.status, routed.worker.connects) == (503, 0)
    routed.assert_released(exchange)


async def test_drain_of_an_idle_router_is_immediate() -> None:
    """Nothing in flight, nothing to wait for."""
    routed = Routed(answer("json"), drain_timeout=1000.0)
    with anyio.fail_after(1):
        async with routed.router as router:
            assert isinstance(router, Router)

    assert routed.fleet.close_calls == 1


async def test_request_while_draining_and_after() -> None:
    """`drain` refuses new requests; `aclose` ends that, so a router can be used again."""
    routed = Routed(answer("json"))
    await routed.router.drain()
    refused = await Exchange(body=completion_body()).run(routed.app)
    assert refused.status == 503
    routed.assert_released(refused)

    await routed.router.aclose()
    assert not routed.router.stats().draining


async def test_mounted_sub_app() -> None:
    """A mounted sub-app never sees the lifespan; its completions are routed by the path below the mount."""
    routed = Routed(answer("json"))
    app = Starlette(routes=[Mount("/team", app=routed.app)])
    exchange = await Exchange(body=completion_body(), path="/team/v1/completions").run(app)
    assert exchange.status == 200
    assert routed.worker.calls[0].url == f"{WORKER}/v1/completions"
    routed.assert_released(exchange)


async def test_f42_a_worker_that_leaves_and_comes_back_is_not_charged_for_old_requests() -> None:
    """F-42: the lease holds the worker object, so an old request ends on the old one (llm-d/llm-d-router#1739)."""
    gate = anyio.Event()
    routed = Routed({WORKER: replace(answer("json"), head=[gate])})
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        (old,) = routed.router.workers
        routed.router.workers.remove(WORKER)
        new = routed.router.workers.add(old.worker)
        assert (old.requests, new.requests, len(new.prefixes)) == (1, 0, 0)
        gate.set()

    assert (old.requests, old.prefill_tokens, new.requests, new.prefill_tokens) == (0, 0, 0, 0)
    assert len(new.prefixes) == 0
    routed.assert_released(exchange)


async def test_two_routers_do_not_meet() -> None:
    """Two routers made from the same settings have their own counters."""
    gate = anyio.Event()
    routed = Routed({WORKER: replace(answer("json"), head=[gate]), OTHER: answer("json")})
    twin = Router(routed.router.settings, transport=routed.fleet)
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await anyio.lowlevel.checkpoint()
        while sum(worker.requests for worker in routed.router.stats().workers) == 0:
            await anyio.lowlevel.checkpoint()
        assert sum(worker.requests for worker in twin.stats().workers) == 0
        gate.set()


async def test_entered_twice_by_one_task() -> None:
    """The inner block's end leaves the router open for the outer one."""
    routed = Routed(answer("json"))
    async with routed.router as router:
        async with router:
            assert router.users == 2
        assert (router.users, routed.fleet.close_calls) == (1, 0)
        exchange = await Exchange(body=completion_body()).run(routed.app)
        assert exchange.status == 200
    assert routed.fleet.close_calls == 1


async def test_an_app_that_never_returns_does_not_hold_up_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word is passed on after a grace, though it is held back for apps that end."""
    monkeypatch.setattr("asgi_router.middleware.LAST_WORD_GRACE", 0.05)

    async def host(scope: Scope, receive: Receive, send: Send) -> None:
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        await anyio.sleep_forever()

    life = Lifespan()
    async with life.running(RouterMiddleware(host, router=Routed(answer("json")).router)):
        assert life.supported
        await life.shutdown()
    assert life.sent == ["startup.complete", "shutdown.complete"]
