"""Owns the worker `local`: the wrapped app serves under a lease, and every way out gives it back."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings, Worker
from asgi_router.peers import HOP, Peers
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.asgi_rules import ASGIViolation
from tests.instruments.cancel import cancel_natively
from tests.instruments.fake_worker import FakeFleet
from tests.routed import OTHER, answer, completion_body, counters, error_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from asgi_router.observability.events import RequestFinished

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

SSE = [(b"content-type", b"text/event-stream")]
REQUEST_ID = ("x-request-id", "id-1")


class Engine:
    """A scripted app. `steps` are its messages, or what is awaited or raised between them."""

    def __init__(self, *steps: Message | Callable[[], Awaitable[object]] | BaseException) -> None:
        self.steps = steps
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []
        self.after: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        message = await receive()
        self.bodies.append(message["body"])
        assert not message["more_body"]
        for step in self.steps:
            if isinstance(step, BaseException):
                raise step
            await (step() if callable(step) else send(step))
        self.after.append(await receive())


def start(status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": SSE}


def body(chunk: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


GOOD = (start(), body(b"data: one\n\n"), body(b"data: [DONE]\n\n", more=False))


class Local:
    """A router around an engine, with `local` and maybe others as workers."""

    def __init__(self, engine: ASGIApp, *others: str, **settings: object) -> None:
        self.fleet = FakeFleet(dict.fromkeys(others, answer("stream")))
        self.router = Router(RouterSettings(workers=["local", *others], **settings), transport=self.fleet)
        self.app = RouterMiddleware(engine, router=self.router)
        self.events: list[RequestFinished] = []
        self.router.observers.append(self.events.append)

    def assert_released(self) -> None:
        assert [counters(worker) for worker in self.router.stats().workers] == [(0,) * 4] * len(self.router.workers)
        assert self.router.stats().exchanges == 0
        assert all(state.prefixes.pinned == 0 for state in self.router.workers)
        self.fleet.assert_clean()


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


# --- Peers


def hop(token: str = "fleet", request_id: str = "id-1") -> tuple[str, str]:
    ((name, value),) = Peers(token).signed(request_id)
    return name.decode(), value.decode()


async def test_what_a_peer_has_placed_is_served_here() -> None:
    """Whatever the policy, the load and the limit say: it is not routed again. The app doesn't see the header."""
    engine = Engine(*GOOD)
    local = Local(engine, OTHER, peer_token="fleet", policy="round_robin", decision_headers=True)
    local.router.workers.drain("local")
    for _ in range(3):
        exchange = await Exchange(body=completion_body(), headers=[REQUEST_ID, hop()]).run(local.app)
        assert exchange.header("x-router-decision")[0].startswith(b"placed_by_peer;")
    assert (len(engine.bodies), len(local.fleet[OTHER].calls)) == (3, 0)
    assert all(name != HOP for name, _ in engine.scopes[0]["headers"])
    local.assert_released()


@pytest.mark.parametrize(
    "headers",
    [
        [hop("another token")],
        [hop(request_id="id-2")],
        [hop(), hop()],
        [("x-router-hop", "fleet")],
        [("x-router-hop", "1")],
        [("x-router-hop", "")],
    ],
    ids=["token", "of another request", "twice", "the token itself", "text", "empty"],
)
@pytest.mark.parametrize("token", ["fleet", None])
async def test_what_a_client_makes_up_is_not_believed(headers: list[tuple[str, str]], token: str | None) -> None:
    """Without the fleet's signature the header is dropped: the request is routed, and signed by this router."""
    local = Local(Engine(*GOOD), OTHER, peer_token=token)
    local.router.workers.drain("local")
    exchange = await Exchange(body=completion_body(), headers=[REQUEST_ID, *headers]).run(local.app)
    assert exchange.status == 200
    (call,) = local.fleet[OTHER].calls
    sent = [value.decode() for name, value in call.headers if name.lower() == HOP]
    assert sent == ([hop()[1]] if token else [])
    assert "fleet" not in json.dumps(sent)


async def test_a_router_without_an_engine_does_not_route_what_is_placed() -> None:
    """Else two routers that name each other would send a request around for ever."""
    local = Local(Engine(*GOOD), OTHER, peer_token="fleet")
    local.router.workers.remove("local")
    exchange = await Exchange(body=completion_body(), headers=[REQUEST_ID, hop()]).run(local.app)
    assert error_of(exchange) == (508, "routed_twice")
    assert not local.fleet[OTHER].calls
    local.assert_released()


async def test_a_placed_request_does_not_fail_over() -> None:
    """Its failure is the peer's to deal with: here it would be routed twice."""

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    local = Local(engine, OTHER, peer_token="fleet")
    headers = [REQUEST_ID, hop(), ("idempotency-key", "1")]
    exchange = await Exchange(body=completion_body(), headers=headers).run(local.app)
    assert error_of(exchange) == (502, "worker_failed")
    assert not local.fleet[OTHER].calls
    local.assert_released()


def test_how_local_is_written() -> None:
    """It stands for itself, in any case, and a host of that name is told from it by a scheme."""
    assert Worker(url=" LOCAL ").is_local
    assert not Worker(url="http://local").is_local
    assert Worker(url="http://local").url == "http://local"


# --- What an app may do that no worker elsewhere can


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
    local = Local(Engine(*busy), OTHER, policy="request_num")
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
