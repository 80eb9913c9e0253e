"""Owns the worker `local`: the wrapped app serves under a lease, and every way out gives it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Worker
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.cancel import cancel_natively
from tests.peers.wrapped import GOOD, SSE, Engine, Local, body, start
from tests.routed import OTHER, answer, completion_body, counters

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]


async def test_the_app_serves_under_a_lease() -> None:
    """It gets the client's bytes and scope, its messages go out as they are, and the counters tell of it meanwhile."""
    middle, go_on = anyio.Event(), anyio.Event()

    async def pause() -> None:
        middle.set()
        await go_on.wait()

    engine = Engine(GOOD[0], GOOD[1], pause, GOOD[2])
    local = Local(engine)
    exchange = Exchange(body=completion_body(), headers=[("authorization", "Bearer t")])
    async with exchange.running(local.app):
        await middle.wait()
        assert counters(local.router.stats().workers[0])[:3:2] == (1, 0)  # in flight, and past its first byte
        assert exchange.body == b"data: one\n\n"
        go_on.set()

    assert (exchange.status, exchange.headers, exchange.body) == (200, SSE, b"data: one\n\ndata: [DONE]\n\n")
    assert engine.bodies == [completion_body()]
    assert engine.scopes[0]["path"] == "/v1/chat/completions"
    assert (b"authorization", b"Bearer t") in engine.scopes[0]["headers"]
    assert engine.after == [{"type": "http.disconnect"}]
    assert local.events[0].worker == "local"
    local.assert_released()


async def test_it_is_a_worker_as_any_other() -> None:
    """The policy chooses between it and the others, it can be drained, and it needs no health probe to be healthy."""
    engine = Engine(*GOOD)
    local = Local(engine, OTHER, policy="round_robin", decision_headers=True)
    for _ in range(6):
        exchange = await Exchange(body=completion_body()).run(local.app)
        assert exchange.status == 200
    assert (len(engine.bodies), len(local.fleet[OTHER].calls)) == (3, 3)
    await local.router.monitor.probe_all()
    assert [worker.healthy for worker in local.router.stats().workers] == [True, True]
    assert len(engine.bodies) == 3

    local.router.workers.drain("local")
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert exchange.header("x-router-worker") == [OTHER.encode()]
    local.router.workers.drain("local", draining=False)
    local.router.workers.remove(OTHER)
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert exchange.header("x-router-worker") == [b"local"]
    assert exchange.header("x-router-decision")[0].startswith(b"only_candidate; candidates=1;")
    local.assert_released()


async def test_a_worker_that_refuses_is_replaced_by_the_app() -> None:
    """Failover goes to `local` as to any other worker."""
    engine = Engine(*GOOD)
    local = Local(engine, OTHER, policy="round_robin")
    local.fleet[OTHER].scripts = answer("stream").__class__(connect=[httpx.ConnectError("refused")])
    for _ in range(4):
        assert (await Exchange(body=completion_body()).run(local.app)).status == 200
    assert len(engine.bodies) == 4
    local.assert_released()


@pytest.mark.parametrize("position", range(4))
async def test_the_client_leaves(position: int) -> None:
    """The app is cancelled wherever it is, and the lease is back."""
    hanging, cancelled = anyio.Event(), anyio.Event()

    async def hang() -> None:
        hanging.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    steps = [start(), body(b""), body(b"data: one\n\n")]
    engine = Engine(*steps[:position], hang)
    local = Local(engine)
    exchange = Exchange(body=completion_body())
    async with exchange.running(local.app):
        await hanging.wait()
        exchange.disconnect()
    assert cancelled.is_set()
    assert local.events[0].outcome == "client_gone"
    local.assert_released()


@asyncio_only
async def test_cancelled_at_every_turn() -> None:
    """Whenever the server cancels it natively, once or twice: nothing is left."""
    for turn in range(200):
        local = Local(Engine(start(), anyio.lowlevel.checkpoint, body(b"x"), anyio.lowlevel.checkpoint, GOOD[2]))
        exchange = Exchange(body=completion_body())
        try:
            await cancel_natively(exchange.run(local.app), at=[turn, turn % 3])
        except AssertionError:
            break  # the request was over before its turn came
        local.assert_released()
    else:
        pytest.fail("the request outlived the sweep")
    assert turn > 5


async def test_an_app_that_raises() -> None:
    """Before its answer its exception goes on to the server, as if there were no router; it counts as a failure."""
    local = Local(Engine(RuntimeError("of the app")), breaker_failures=1)
    exchange = Exchange(body=completion_body())
    with pytest.raises(RuntimeError, match="of the app"):
        await exchange.run(local.app)
    assert local.events[0].outcome == "app_failed"
    assert local.router.stats().workers[0].breaker == "open"
    local.assert_released()


@pytest.mark.parametrize(
    ("steps", "status", "end"),
    [
        ((), 502, b'"worker_failed"'),
        ((start(), body(b"data: one\n\n")), 200, b'"code": "worker_failed"}}\n\n'),
    ],
    ids=["nothing", "half an answer"],
)
async def test_an_app_that_gives_no_whole_answer(steps: tuple[Message, ...], status: int, end: bytes) -> None:
    """It is told to the client as of any worker."""

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for step in steps:
            await send(step)

    local = Local(engine)
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert (exchange.status, end in exchange.body) == (status, True)
    local.assert_released()


@pytest.mark.parametrize(
    ("setting", "steps", "status"),
    [
        ("first_byte_timeout", (anyio.sleep_forever,), 504),
        ("first_byte_timeout", (start(), anyio.sleep_forever), 200),
        ("idle_timeout", (start(), body(b"data: one\n\n"), anyio.sleep_forever), 200),
    ],
    ids=["head", "first byte", "pause"],
)
async def test_time_outs(setting: str, steps: tuple[Message, ...], status: int) -> None:
    """A hanging app is given up like a hanging worker."""
    local = Local(Engine(*steps), **{setting: 0.05})
    exchange = await Exchange(body=completion_body()).run(local.app)
    assert exchange.status == status
    assert b'"worker_timeout"' in exchange.body
    local.assert_released()


async def test_a_client_that_does_not_read() -> None:
    """SEND_TIMEOUT holds for the app's messages, too."""
    local = Local(Engine(*GOOD), send_timeout=0.05)
    await Exchange(body=completion_body(), at={1: HANG}).run(local.app)
    assert local.events[0].outcome == "client_gone"
    local.assert_released()


def test_how_local_is_written() -> None:
    """It stands for itself, in any case, and a host of that name is told from it by a scheme."""
    assert Worker(url=" LOCAL ").is_local
    assert not Worker(url="http://local").is_local
    assert Worker(url="http://local").url == "http://local"
