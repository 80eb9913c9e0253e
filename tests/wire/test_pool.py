"""Owns the connections to the workers: when one is used again, when a request is sent again, what is left behind."""

from __future__ import annotations

import gc
import random
import ssl
from typing import TYPE_CHECKING, cast

import anyio
import anyio.lowlevel
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.upstream.http11 import Pool
from asgi_router.upstream.transport import PooledTransport
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.cancel import cancel_natively
from tests.instruments.raw_http import Truncated
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, RESET, raw_server
from tests.instruments.servers import run_uvicorn, run_uvicorn_in_thread
from tests.routed import completion_body, counters, unreachable_app
from tests.wire.served import LAST_CHUNK, OK, SSE_HEAD, chunk, serve, serve_scripts
from tests.wire.test_failures import FAILED, read_error, refusing_port

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from asgi_router.upstream.http11 import Answer, Http11Transport, Origin
    from tests.instruments.raw_http import RawClient
    from tests.instruments.raw_server import Step
    from tests.wire.served import Served

BODY = completion_body()


async def ask(client: RawClient) -> int:
    """Send a request, read its answer whole, and return the status."""
    await client.post(BODY)
    head = await client.read_head()
    await client.read_body(head)
    return head.status


@pytest.mark.anyio
@asyncio_only
class TestKeepAlive:
    """What becomes of a connection after an answer."""

    async def test_a_connection_is_used_again(self) -> None:
        """Also after an answer of unknown length, and by another client."""
        stream = SSE_HEAD + chunk(b"data: [DONE]\n\n") + LAST_CHUNK
        script: list[Step] = [REQUEST, stream, REQUEST, OK, REQUEST, OK, HANG]
        async with serve_scripts(script) as (worker, served, first), served.connect() as second:
            assert [await ask(first), await ask(second), await ask(first)] == [200] * 3
            assert [len(connection.requests) for connection in worker.connections] == [3]

    async def test_an_idle_connection_is_not_kept_for_long(self) -> None:
        """One that was idle for longer than `keepalive_expiry` is closed, and another one opened.

        ThunderAgent-org/ThunderAgent#35, llm-d/llm-d#1564: the workers closed them first, and requests met that.
        """
        async with serve_scripts([REQUEST, OK, HANG], keepalive_expiry=0) as (worker, _, client):
            assert [await ask(client) for _ in range(3)] == [200] * 3
            assert [len(connection.requests) for connection in worker.connections] == [1, 1, 1]

    @pytest.mark.parametrize("end", [CLOSE, RESET], ids=["close", "reset"])
    async def test_a_worker_that_closes_while_idle(self, end: Step) -> None:
        """A connection that is known to be closed is not used."""
        gate = anyio.Event()
        async with serve_scripts([REQUEST, OK, gate, end], [REQUEST, OK, HANG]) as (worker, _, client):
            assert await ask(client) == 200
            gate.set()
            await worker.connections[0].gone()
            assert await ask(client) == 200
            assert len(worker.connections) == 2

    async def test_a_worker_that_closes_after_each_answer_without_saying_so(self) -> None:
        """However the close and the next request race, every request is answered."""
        async with serve_scripts([REQUEST, OK, CLOSE]) as (worker, _, client):
            assert [await ask(client) for _ in range(20)] == [200] * 20
            assert len(worker.connections) == 20

    @pytest.mark.parametrize("end", [CLOSE, RESET], ids=["close", "reset"])
    async def test_a_request_that_meets_a_closing_connection_is_sent_once_more(self, end: Step) -> None:
        """Closed without a byte of an answer, on a connection used before: the worker was closing it anyway.

        ThunderAgent-org/ThunderAgent#35, agentscope-runtime#468, llm-d/llm-d#1564: such a request failed.
        """
        async with serve_scripts([REQUEST, OK, REQUEST, end], [REQUEST, OK, HANG]) as (worker, _, client):
            assert [await ask(client), await ask(client)] == [200, 200]
            assert [len(connection.requests) for connection in worker.connections] == [2, 1]
            assert worker.connections[0].requests[1] == worker.connections[1].requests[0]

    async def test_it_is_not_sent_a_third_time(self) -> None:
        """A worker that does so on the new connection, too, has failed."""
        async with serve_scripts([REQUEST, OK, REQUEST, CLOSE], [REQUEST, CLOSE]) as (worker, _, client):
            assert await ask(client) == 200
            await client.post(BODY)
            assert await read_error(client) == FAILED
            assert [len(connection.requests) for connection in worker.connections] == [2, 1]

    @pytest.mark.parametrize("end", [CLOSE, RESET], ids=["close", "reset"])
    async def test_f06_a_request_on_a_new_connection_is_never_sent_again(self, end: Step) -> None:
        """F-06: a connection reset after the request was sent is a 502; the worker may have begun, and gets it once."""
        async with serve_scripts([REQUEST, end], [REQUEST, OK, HANG]) as (worker, _, client):
            await client.post(BODY)
            assert await read_error(client) == FAILED
            assert [len(connection.requests) for connection in worker.connections] == [1]

    async def test_an_answer_that_has_begun_is_never_asked_for_again(self) -> None:
        """On a connection used before, too."""
        begun = SSE_HEAD + chunk(b"data: 1\n\n")
        async with serve_scripts([REQUEST, OK, REQUEST, begun, CLOSE], [REQUEST, OK, HANG]) as (worker, _, client):
            assert await ask(client) == 200
            await client.post(BODY)
            with pytest.raises(Truncated):
                await client.read_body(await client.read_head())
            assert [len(connection.requests) for connection in worker.connections] == [2]


class Wavering:
    """An ASGI worker that takes a random time, in turns of the loop, for each of its steps."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(5):
            await turns(self.random.randrange(8))
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def turns(count: int) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def visit(served: Served, rng: random.Random) -> None:
    """Send a request, and leave at some point of it."""
    async with served.connect() as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        await client.send((head + BODY)[: rng.choice([10, len(head) + 5, len(head) + len(BODY)])])
        await turns(rng.randrange(40))
        if rng.random() < 0.5:
            with anyio.move_on_after(0.001 * rng.random()):
                await client.read_body(await client.read_head())
        if rng.random() < 0.5:
            client.reset()


@pytest.mark.anyio
@asyncio_only
class TestNothingIsLeft:
    """What the pool holds afterwards."""

    @pytest.mark.parametrize("seed", range(3))
    async def test_clients_that_leave_at_any_point(self, seed: int) -> None:
        """A hundred of them leave no connection in use and no place taken; the next one is served (httpcore#1093)."""
        rng = random.Random(seed)
        async with run_uvicorn(Wavering(seed), lifespan="off") as worker, serve(worker) as served:

            async def visits() -> None:
                for _ in range(20):
                    await visit(served, rng)

            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(visits)
            await served.assert_released()
            async with served.connect() as client:
                assert await ask(client) == 200
            assert served.pool is not None
            assert served.pool.idle

    async def test_native_cancellation_of_stock_httpx_at_any_turn(self) -> None:
        """A host's time-out loses no connection: httpcore would, if it saw the native cancel (encode/httpcore#1093)."""
        script: list[Step] = [REQUEST, SSE_HEAD + chunk(b"data: x\n\n"), HANG]
        stock = PooledTransport(keepalive_expiry=4.0)
        async with (
            raw_server(*[script] * 400) as worker,
            Router(RouterSettings(workers=[worker.url]), transport=stock) as router,
        ):
            app = RouterMiddleware(unreachable_app, router=router)
            for turn in range(60):
                for exchange in [Exchange(body=BODY) for _ in range(5)]:
                    await cancel_natively(exchange.run(app), at=[turn])
            assert {counters(stats) for stats in router.stats().workers} == {(0, 0, 0, 0)}
            transport = stock._pool.get()
            assert transport is not None
            pool = transport._pool
            assert not pool._requests
            assert all(connection.is_idle() for connection in pool.connections), pool

    async def test_native_cancellation_at_any_turn(self) -> None:
        """Our own transport bears it: requests are served in the task that is cancelled, and lose nothing."""
        script: list[Step] = [REQUEST, SSE_HEAD + chunk(b"data: x\n\n"), HANG]
        cut = 0
        async with raw_server(*[script] * 400) as worker, Router(RouterSettings(workers=[worker.url])) as router:
            app = RouterMiddleware(unreachable_app, router=router)
            for turn in range(60):
                exchanges = [Exchange(body=BODY) for _ in range(5)]
                for exchange in exchanges:
                    outcome = await cancel_natively(exchange.run(app), at=[turn])
                    cut += outcome.cancelled

            assert cut == 300
            assert {counters(stats) for stats in router.stats().workers} == {(0, 0, 0, 0)}
            pool = cast("Http11Transport", router._transport).pool()
            assert pool is not None
            assert pool.active == 0, pool

    async def test_f30_more_streams_than_httpx_allows_by_default(self) -> None:
        """F-30: the scheduler decides how much a worker gets; the pool holds no request back."""
        count = 130
        gate = anyio.Event()
        script: list[Step] = [REQUEST, SSE_HEAD, chunk(b"data: 1\n\n"), gate, LAST_CHUNK, HANG]
        async with raw_server(script) as worker, serve(worker) as served:

            async def stream() -> None:
                async with served.connect() as client:
                    assert await ask(client) == 200

            async with anyio.create_task_group() as group:
                for _ in range(count):
                    group.start_soon(stream)
                await worker.connected(count)
                assert served.requests == count
                gate.set()

    async def test_without_a_lifespan_idle_connections_are_closed(self) -> None:
        """Nobody tells a mounted router of the end, so it keeps no connection while it has nothing to do."""

        def mount(app: RouterMiddleware) -> Starlette:
            return Starlette(routes=[Mount("/", app)])

        async with (
            raw_server([REQUEST, OK, HANG]) as worker,
            serve(worker, wrap=mount) as served,
            served.connect() as client,
        ):
            for turn in range(2):
                assert await ask(client) == 200
                await worker.connections[turn].gone()
                await served.finished()
                assert served.pool is None

    async def test_opening_connections_anew_loads_no_certificates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That takes 10 ms and more, in which the loop stands still: it is done once, when the router is made."""

        def mount(app: RouterMiddleware) -> Starlette:
            monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", no_certificates)
            return Starlette(routes=[Mount("/", app)])

        def no_certificates(*args: object, **kwargs: object) -> None:
            raise AssertionError("certificates were loaded while a request waited")

        async with (
            raw_server([REQUEST, OK, HANG]) as worker,
            serve(worker, wrap=mount) as served,
            served.connect() as client,
        ):
            assert await ask(client) == 200


# --- what the environment and the defaults of httpx would do -------------------------------------------------


@pytest.mark.anyio
@asyncio_only
async def test_f30_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """F-30: workers are neighbours, so a machine's proxy never sees their requests (THUDM/slime#1714)."""
    with refusing_port() as dead:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, dead)
        async with serve_scripts([REQUEST, OK, HANG]) as (worker, _, client):
            async with httpx.AsyncClient() as trusting:
                with pytest.raises(httpx.ConnectError):
                    await trusting.post(worker.url)
            assert await ask(client) == 200


@pytest.mark.anyio
@asyncio_only
async def test_a_pause_of_any_length_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill takes as long as it takes; what limits a request are our own settings."""
    seen: list[dict[str, object]] = []
    request = Pool.request

    async def note(self: Pool, origin: Origin, head: bytes, body: bytes = b"", **options: object) -> Answer:
        seen.append({name: value for name, value in options.items() if name.endswith("timeout")})
        return await request(self, origin, head, body, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "request", note)
    async with serve_scripts([REQUEST, OK, HANG], connect_timeout=7, idle_timeout=8) as (_, _, client):
        assert await ask(client) == 200
    assert seen == [{"connect_timeout": 7, "send_timeout": 8}]


def test_a_test_client_with_a_loop_for_each_request() -> None:
    """Without `with`, Starlette's TestClient runs each request in a new loop; nothing is left open in the old one."""
    with run_uvicorn_in_thread(Wavering(0), lifespan="off") as worker:
        router = Router(RouterSettings(workers=[worker.url]))
        client = TestClient(RouterMiddleware(Starlette(), router=router))
        for _ in range(2):
            answer = client.post("/v1/completions", content=BODY)
            assert answer.text == "".join(f"data: {number}\n\n" for number in range(5))
            assert counters(router.stats().workers[0]) == (0, 0, 0, 0)
        gc.collect()  # what was left open would warn now, and warnings are errors
    client.close()
