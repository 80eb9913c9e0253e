"""Owns the seed's faults F-05 to F-31, on the way of a request: each test pulls the trigger and asks for what is right.

What a test elsewhere shows already is there, under its number:

- F-05 also in `test_exit_paths.py`: time-outs for a first byte and for a pause
- F-06 in `wire/test_pool.py` (a new connection is reset) and `test_exit_paths.py` (with another worker to go to)
- F-07 also in `test_exit_paths.py`: each worker is tried once, and the lease moves
- F-08 in `wire/test_failures.py`, for mixed mode
- F-20 also in `test_headers.py`: each header, both ways
- F-21 in `test_middleware.py` (`x-router-worker`) and `test_headers.py` (what else a worker has no say in)
- F-23 in `test_exit_paths.py`
- F-25 in `test_exit_paths.py` (what the client sees) and `fleet/test_breaker_in_service.py` (it counts as a failure)
- F-26 in `wire/test_heads.py`
- F-30 also in `wire/test_pool.py`: more streams than httpx allows by default, and no proxy
- F-31 also in `test_lifecycle.py`: what new requests are told meanwhile, and when the host app stops
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpx
import pytest
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware, RouterSettings, Worker
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.lifespan import Lifespan
from tests.instruments.raw_server import REQUEST, raw_server
from tests.routed import (
    OTHER,
    WORKER,
    Routed,
    answer,
    completion_body,
    counters,
    error_of,
    exchange_for,
    unreachable_app,
)
from tests.wire.served import LAST_CHUNK, SSE_HEAD, chunk, serve, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.instruments.asgi_wire import Upload
    from tests.instruments.fake_worker import Script
    from tests.instruments.raw_server import Step

pytestmark = pytest.mark.anyio

GOOD = answer("json")
REFUSED = httpx.ConnectError("refused")


# --- the worker is away ----------------------------------------------------------------------------------------


async def test_f05_a_worker_that_never_accepts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """F-05: there was no time-out at all; CONNECT_TIMEOUT ends a connection that is never made, with both counters."""
    connecting = anyio.Event()

    async def never(*args: object, **kwargs: object) -> None:
        connecting.set()
        await anyio.sleep_forever()

    monkeypatch.setattr("asgi_router.upstream.http11.dial.Dial._look_up", never)  # on asyncio
    monkeypatch.setattr("trio.open_tcp_stream", never)
    router = Router(RouterSettings(workers=["http://worker.test:8000"], connect_timeout=0.05))
    exchange = exchange_for()
    async with exchange.running(RouterMiddleware(unreachable_app, router=router)):
        await connecting.wait()
        requests, tokens, *_ = counters(router.stats().workers[0])
        assert requests == 1
        assert tokens > 900

    assert error_of(exchange) == (502, "worker_unreachable")
    assert counters(router.stats().workers[0]) == (0, 0, 0, 0)


@pytest.mark.parametrize("leaves_at", [1, 2])
async def test_f07_no_worker_is_tried_after_the_client_has_left(leaves_at: int) -> None:
    """F-07: the tries went on after the client had gone; its leaving ends the one under way, and none follows."""
    urls = [WORKER, OTHER, "http://w3:8000"]
    gate = anyio.Event()
    scripts = {
        url: replace(GOOD, connect=[REFUSED] if number < leaves_at else [gate, REFUSED])
        for number, url in enumerate(urls, start=1)
    }
    routed = Routed(scripts, policy="round_robin")
    trying = routed.fleet[urls[leaves_at - 1]]
    exchange = exchange_for()
    async with exchange.running(routed.app):
        await trying.changes.until(lambda: trying.connects == 1)
        assert [requests for requests, *_ in routed.counters] == [number == leaves_at for number in (1, 2, 3)]
        exchange.disconnect()
        with anyio.move_on_after(1):
            await exchange.over()
        gate.set()  # which would lead to the next worker

    assert exchange.starts == 0
    assert [worker.connects for worker in routed.fleet.workers.values()] == [1] * leaves_at + [0] * (3 - leaves_at)
    routed.assert_released(exchange)


# --- headers ---------------------------------------------------------------------------------------------------

OF_A_CONNECTION = [
    ("connection", "close, x-listed"),
    ("x-listed", "1"),
    ("keep-alive", "timeout=5"),
    ("proxy-authenticate", "Basic"),
    ("proxy-authorization", "Basic x"),
    ("proxy-connection", "keep-alive"),
    ("te", "trailers"),
    ("trailer", "x-sum"),
    ("transfer-encoding", "chunked"),
    ("upgrade", "h2c"),
]


async def test_f20_hop_by_hop_headers_cross_neither_way() -> None:
    """F-20: all headers were passed on, by slices that two requests shared; each try has its own, of what may cross."""
    tries: list[httpx.Request] = []
    end_to_end = [("authorization", "Bearer t"), ("x-custom", "1"), ("x-custom", "2"), ("x-request-id", "7")]

    def script(request: httpx.Request) -> Script:
        tries.append(request)
        if len(tries) == 1:
            return replace(GOOD, connect=[REFUSED])
        return replace(GOOD, headers=[*OF_A_CONNECTION, ("x-custom", "3"), ("x-custom", "4")])

    routed = Routed({WORKER: script, OTHER: script})
    exchange = exchange_for(headers=[*OF_A_CONNECTION, ("expect", "100-continue"), *end_to_end])
    came = list(exchange.scope["headers"])
    await exchange.run(routed.app)

    first, second = (request.headers for request in tries)
    assert first is not second
    for headers in (first, second):
        added = {"host": headers["host"], "content-type": "application/json", "x-forwarded-for": "127.0.0.1"}
        added |= {"content-length": str(len(completion_body())), "via": "1.1 asgi-router"}
        assert sorted(headers.multi_items()) == sorted([*added.items(), *end_to_end])
    assert exchange.scope["headers"] == came
    assert exchange.headers == [(b"x-custom", b"3"), (b"x-custom", b"4")]
    routed.assert_released(exchange)


# --- errors ----------------------------------------------------------------------------------------------------


async def failing(code: str) -> tuple[Routed, Exchange]:
    """A router that was made to answer a request with the error of this code."""
    body = completion_body()
    match code:
        case "invalid_request":
            routed, body = Routed(GOOD), b"[]"
        case "model_not_found":
            routed = Routed(GOOD)
            routed.router.workers.add(Worker(url=WORKER, models=("another",)))
        case "no_worker_available":
            routed = Routed(GOOD)
            routed.router.workers.remove(WORKER)
        case "request_too_large":
            routed = Routed(GOOD, max_body_bytes=9)
        case "shutting_down":
            routed = Routed(GOOD)
            await routed.router.drain()
        case "worker_failed":
            routed = Routed(replace(GOOD, head=[httpx.ReadError("reset")]))
        case "worker_timeout":
            routed = Routed(replace(GOOD, head=[HANG]), first_byte_timeout=0.01)
        case "worker_unreachable":
            routed = Routed(replace(GOOD, connect=[REFUSED]))
    return routed, await Exchange(body=body).run(routed.app)


async def crowded(code: str) -> tuple[Routed, Exchange]:
    """The same for an error that needs a request in flight."""
    limit = {"queue_size": 0} if code == "queue_full" else {"queue_timeout": 0.01}
    routed = Routed(replace(GOOD, head=[HANG]), max_concurrent_per_worker=1, **limit)
    served = exchange_for()
    async with served.running(routed.app):
        await routed.worker.received(1)
        exchange = await exchange_for().run(routed.app)
        served.disconnect()
    return routed, exchange


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_request"),
        (404, "model_not_found"),
        (413, "request_too_large"),
        (429, "queue_full"),
        (502, "worker_unreachable"),
        (502, "worker_failed"),
        (503, "no_worker_available"),
        (503, "queue_timeout"),
        (503, "shutting_down"),
        (504, "worker_timeout"),
    ],
)
async def test_f22_every_error_is_json_in_openais_shape(status: int, code: str) -> None:
    """F-22: errors had no type and a shape of their own; each is `application/json`, an OpenAI error, and whole."""
    routed, exchange = await (crowded(code) if code.startswith("queue_") else failing(code))
    assert error_of(exchange) == (status, code)
    assert exchange.header("content-type") == [b"application/json"]
    assert exchange.header("content-length") == [str(len(exchange.body)).encode()]
    routed.assert_released(exchange)


# --- bodies ----------------------------------------------------------------------------------------------------

LIMIT = 1000


@pytest.mark.parametrize(
    ("announced", "upload"),
    [
        (str(LIMIT + 1), [HANG]),
        (None, [b"x" * 100] * 10 + [b"x", HANG]),
        ("5", [b"x" * 100] * 10 + [b"x", HANG]),
        ("5", [b"x" * (LIMIT + 1)]),
    ],
    ids=["announced", "unannounced", "announced as less", "in one piece"],
)
async def test_f24_a_body_beyond_the_limit_is_not_read(announced: str | None, upload: Sequence[Upload]) -> None:
    """F-24: bodies were read without bound; beyond MAX_BODY_BYTES it is a 413 at the first byte too many, or sooner."""
    routed = Routed(GOOD, max_body_bytes=LIMIT)
    exchange = Exchange(body=upload, headers=[] if announced is None else [("content-length", announced)])
    await exchange.run(routed.app)
    assert error_of(exchange) == (413, "request_too_large")
    assert routed.worker.connects == 0
    routed.assert_released(exchange)


async def test_f24_a_body_at_the_limit_is_served() -> None:
    """F-24: the limit is the size of the largest body that is served, whole or in pieces."""
    body = completion_body()
    for upload in (body, [body[:100], body[100:]]):
        routed = Routed(GOOD, max_body_bytes=len(body))
        exchange = await Exchange(body=upload).run(routed.app)
        assert exchange.status == 200
        assert routed.worker.calls[0].body == body


# --- connections -----------------------------------------------------------------------------------------------


@asyncio_only
async def test_f30_a_burst_of_streams_finds_the_connections_of_the_last_one() -> None:
    """F-30: two idle connections per worker were kept; all are, so that 40 streams twice over take 40 connections."""
    count = 40
    gates = [anyio.Event(), anyio.Event()]
    begun = SSE_HEAD + chunk(b"data: 1\n\n")
    script: list[Step] = [step for gate in gates for step in (REQUEST, begun, gate, LAST_CHUNK)]
    async with raw_server([*script, HANG]) as worker, serve(worker, settings={"keepalive_expiry": 60}) as served:

        async def stream() -> None:
            async with served.connect() as client:
                await client.post(completion_body(stream=True))
                assert await client.read_body(await client.read_head()) == b"data: 1\n\n"

        async def burst(requests: int, gate: anyio.Event) -> None:
            async with anyio.create_task_group() as group:
                for _ in range(count):
                    group.start_soon(stream)
                await until(lambda: sum(len(connection.requests) for connection in worker.connections) == requests)
                assert served.requests == count
                gate.set()
            await served.finished()

        for turn, gate in enumerate(gates, start=1):
            await burst(turn * count, gate)
        assert len(worker.connections) == count


# --- shutdown --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
async def test_f31_a_stream_in_flight_goes_on_to_its_end(begun: bool) -> None:
    """F-31: SIGTERM cut the streams in flight; servers pass it on as the lifespan's shutdown, which waits for them."""
    gate = anyio.Event()
    whole = answer("stream")
    first, *rest = whole.body
    routed = Routed(replace(whole, body=[first, gate, *rest]) if begun else replace(whole, head=[gate]))
    app = RouterMiddleware(Starlette(), router=routed.router)
    exchange = exchange_for()
    async with Lifespan().running(app) as life, exchange.running(app):
        await (exchange.body_at_least(1) if begun else routed.worker.received(1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(life.shutdown)
            while not routed.router.stats().draining:
                await anyio.lowlevel.checkpoint()
            assert life.sent == ["startup.complete"]
            gate.set()

    assert (exchange.status, exchange.ends) == (200, 1)
    assert exchange.body == b"".join(chunk for chunk in whole.body if isinstance(chunk, bytes))
    assert life.sent == ["startup.complete", "shutdown.complete"]
    routed.assert_released(exchange)
