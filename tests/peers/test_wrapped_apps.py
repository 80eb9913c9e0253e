"""Owns what only a wrapped app may do: go on after its answer, be told of a disconnect, raise, begin twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

from tests.instruments import asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.asgi_rules import ASGIViolation
from tests.peers.wrapped import GOOD, Engine, Local, body, start
from tests.routed import OTHER, completion_body, counters, error_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]


async def test_what_the_app_does_after_its_answer_is_its_own_affair() -> None:
    """A background task of the app's goes on for as long as it likes, when the client has its answer and has gone."""
    answered, go_on, done = anyio.Event(), anyio.Event(), anyio.Event()

    async def background() -> None:
        answered.set()
        await go_on.wait()
        done.set()

    local = Local(Engine(*GOOD, background), send_timeout=0.05, idle_timeout=0.05)
    exchange = Exchange(body=completion_body())
    async with exchange.running(local.app):
        await answered.wait()
        assert counters(local.router.stats().workers[0]) == (0, 0, 0, 0)
        exchange.disconnect()
        await anyio.sleep(0.4)  # longer than any grace
        go_on.set()
    assert done.is_set()
    assert local.events[0].outcome == "ok"
    local.assert_released()


async def test_the_app_is_told_of_a_disconnect_before_it_is_cancelled() -> None:
    """Handlers in a task of their own (vLLM's) are only stopped by the message; the lease is back before that."""
    told = anyio.Event()

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        async with anyio.create_task_group() as tasks:

            async def handle() -> None:
                with anyio.CancelScope(shield=True) as work:  # nothing but the message ends it
                    works.append(work)
                    started.set()
                    await anyio.sleep_forever()

            tasks.start_soon(handle)
            assert (await receive())["type"] == "http.disconnect"
            told.set()
            assert [counters(worker) for worker in local.router.stats().workers] == [(0, 0, 0, 0)]
            works[0].cancel()

    works: list[anyio.CancelScope] = []
    started = anyio.Event()
    local = Local(engine)
    exchange = Exchange(body=completion_body())
    async with exchange.running(local.app):
        await started.wait()
        exchange.disconnect()
    assert told.is_set()
    assert local.events[0].outcome == "client_gone"
    local.assert_released()


@pytest.mark.parametrize("status", [429, 503])
async def test_an_app_that_is_busy_is_replaced_and_left_alone(status: int) -> None:
    """As any worker: another one gets the request, and its Retry-After is honoured."""
    busy = [
        {**start(status), "headers": [(b"Retry-After", b"60")]},
        body(b"busy", more=False),
    ]
    local = Local(Engine(*busy), OTHER, policy="round_robin")
    for _ in range(5):
        exchange = await Exchange(body=completion_body()).run(local.app)
        assert exchange.status == 200
    assert [worker.backing_off for worker in local.router.stats().workers] == [True, False]

    local.router.workers.remove(OTHER)
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert (exchange.status, exchange.body) == (status, b"busy")
    local.assert_released()


@asyncio_only
async def test_a_cancellation_of_the_apps_own_is_a_failure() -> None:
    """An app that awaits a task which somebody has cancelled hasn't answered: 502, and it counts."""
    local = Local(Engine(asyncio.CancelledError()), breaker_failures=1)
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert error_of(exchange) == (502, "worker_failed")
    local.assert_released()


async def test_an_exception_after_a_whole_answer_is_no_failure() -> None:
    """It goes to the server; the answer was whole, and the breaker hears nothing."""
    local = Local(Engine(*GOOD, RuntimeError("in the background")), breaker_failures=1)
    exchange = Exchange(body=completion_body())
    with pytest.raises(RuntimeError, match="in the background"):
        await exchange.run(local.app)
    assert (exchange.status, local.events[0].outcome) == (200, "ok")
    assert local.router.stats().workers[0].breaker == "closed"
    local.assert_released()


async def test_ids_and_headers() -> None:
    """The app gets the one id of the request; what it says as if it were the router is dropped."""
    own = [(b"X-Router-Worker", b"http://evil"), (b"x-app", b"1")]
    engine = Engine({**start(), "headers": own}, GOOD[2])
    local = Local(engine, decision_headers=True)
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert exchange.header("x-router-worker") == [b"local"]
    assert exchange.header("x-app") == [b"1"]
    assert exchange.header("x-request-id") == [dict(engine.scopes[0]["headers"])[b"x-request-id"]]
    assert exchange.header("x-request-id") == [local.events[0].request_id.encode()]


async def test_what_routing_finds_is_seen_outside() -> None:
    """Host middleware around the router looks for the endpoint in the scope that it has given."""

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint"] = "completions"
        await receive()
        await send(start())
        await send(GOOD[2])

    local = Local(engine)
    exchange = Exchange(body=completion_body())
    await exchange.run(local.app)
    assert exchange.scope["endpoint"] == "completions"


async def test_routers_without_a_common_token_do_not_go_round_for_ever() -> None:
    """A request that has come through eight routers is refused, whoever they are."""
    local = Local(Engine(*GOOD), OTHER)
    local.router.workers.drain("local")
    await Exchange(body=completion_body(), headers=[("via", "1.1 a, 1.1 asgi-router")] * 7).run(local.app)
    (call,) = local.fleet[OTHER].calls
    assert [value for name, value in call.headers if name.lower() == b"via"][-1] == b"1.1 asgi-router"
    exchange = await Exchange(body=completion_body(), headers=[("via", "1.1 asgi-router")] * 8).run(local.app)
    assert error_of(exchange) == (508, "routed_twice")
    local.assert_released()


async def test_a_second_start_is_not_taken_for_a_busy_worker() -> None:
    """An app that begins anew after its first bytes is its own affair: nothing goes to another worker."""
    local = Local(Engine(start(), body(b"data: one\n\n"), start(503), GOOD[2]), OTHER, policy="round_robin")
    with pytest.raises(ASGIViolation, match="second start"):
        await Exchange(body=completion_body()).run(local.app)
    assert not local.fleet[OTHER].calls
