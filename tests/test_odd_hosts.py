"""Owns what hosts, servers and transports do that they shouldn't: none of it may stop the loop or break ASGI."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router import RouterMiddleware, Worker
from asgi_router.errors import AnswerCut
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.lifespan import Lifespan
from tests.routed import KINDS, OTHER, WORKER, Kind, Routed, answer, completion_body, unreachable_app

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Message

    from tests.instruments.asgi_wire import Moment

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]


async def test_receive_that_replays_the_body_for_ever() -> None:
    """A common recipe of body-logging middleware: it never suspends, and never tells of a disconnect."""
    gate = anyio.Event()
    routed = Routed(replace(answer("json"), head=[gate]))
    exchange = Exchange(body=completion_body())

    async def replay() -> Message:
        return {"type": "http.request", "body": completion_body(), "more_body": False}

    exchange.receive = replay  # type: ignore[method-assign]
    async with exchange.running(routed.app):
        await routed.worker.received(1)  # so others run
        gate.set()

    assert exchange.finished_cleanly
    routed.assert_released(exchange)


async def test_upload_of_nothing_without_end() -> None:
    """A `receive` that gives empty parts for ever, without suspending, costs this request alone."""
    routed = Routed(answer("json"))
    exchange = Exchange()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": True}

    exchange.receive = receive  # type: ignore[method-assign]
    async with exchange.running(routed.app):
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        exchange.cancel()

    routed.assert_released(exchange)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["start", 1, "end"])
async def test_nothing_is_sent_after_a_send_that_was_broken_off(kind: Kind, moment: Moment) -> None:
    """A shutdown that breaks off a parked `send` sends no error after it: nobody knows what has been taken."""
    routed = Routed(answer(kind), drain_timeout=0.01)
    exchange = Exchange(body=completion_body(), at={moment: HANG})
    async with exchange.running(routed.app):
        await exchange.hung()
        sent = list(exchange.sent)
        await routed.router.aclose()

    assert exchange.sent == sent
    routed.assert_released(exchange)


@pytest.mark.parametrize("late", [0, 1, 2, 3])
@pytest.mark.parametrize("timeout", ["first_byte_timeout", "idle_timeout"])
async def test_time_out_in_the_tick_of_the_data(timeout: str, late: int) -> None:
    """A deadline that passes just as the awaited bytes come still ends as that time-out, with an error event."""
    routed = Routed(answer("stream"), **{timeout: 60.0})
    first = timeout == "first_byte_timeout"

    class Racing(httpx.AsyncByteStream):
        chunks = 0

        def __aiter__(self) -> Racing:
            return self

        async def __anext__(self) -> bytes:
            self.chunks += 1
            if self.chunks == (1 if first else 2):
                (exchange,) = routed.router._exchanges
                assert exchange._attempt is not None
                exchange._attempt.scope.cancel()  # as its deadline does: no reason is left but the one of `allow`
                for _ in range(late):
                    await anyio.lowlevel.cancel_shielded_checkpoint()
            return b"data: x\n\n"

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Racing())

    routed.router._mode._upstream.transport = Transport()
    exchange = await Exchange(body=completion_body(), send_suspends=False).run(routed.app)  # as uvicorn's
    assert b'"worker_timeout"' in exchange.body
    assert exchange.ends == (exchange.status == 504)
    routed.assert_released(exchange)


async def test_client_that_does_not_take_our_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any SEND_TIMEOUT, too, an error that nobody takes ends."""
    monkeypatch.setattr("asgi_router.dispatcher.ERROR_GRACE", 0.05)
    routed = Routed(replace(answer("json"), head=[httpx.ReadError("reset")]))
    exchange = await Exchange(body=completion_body(), at={"start": HANG}).run(routed.app)
    assert exchange.status is None
    routed.assert_released(exchange)


async def test_shared_router_is_closed_by_the_last_app() -> None:
    """Two apps share a router: the first one that stops leaves it open, and doesn't refuse the other's requests."""
    routed = Routed(answer("json"))

    async def app(scope: object, receive: object, send: object) -> None:
        for step in ("startup", "shutdown"):
            await receive()  # type: ignore[operator]
            await send({"type": f"lifespan.{step}.complete"})  # type: ignore[operator]

    one, two = (RouterMiddleware(app, router=routed.router) for _ in range(2))
    async with Lifespan().running(one):
        async with Lifespan().running(two):
            assert routed.router.users == 2
        assert (routed.router.users, routed.fleet.close_calls) == (1, 0)
        exchange = await Exchange(body=completion_body()).run(RouterMiddleware(unreachable_app, router=routed.router))
        assert exchange.status == 200

    assert (routed.router.users, routed.fleet.close_calls) == (0, 1)


@pytest.mark.parametrize("query", [b"a=\xff", b"a=\x00", "a=é".encode()])
async def test_query_that_is_no_query(query: bytes) -> None:
    """Bytes that can't stand in a URL are the client's fault, or are escaped; never an exception."""
    routed = Routed(answer("json"))
    exchange = await Exchange(body=completion_body(), query_string=query).run(routed.app)
    assert exchange.status in (200, 400)
    routed.assert_released(exchange)


async def test_scope_without_optional_keys() -> None:
    """ASGI lets a server leave out what is empty."""
    routed = Routed(answer("json"))
    exchange = Exchange(body=completion_body())
    for key in ("headers", "query_string", "client", "root_path", "raw_path", "asgi"):
        exchange.scope.pop(key)
    await exchange.run(routed.app)
    assert exchange.status == 200
    routed.assert_released(exchange)


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "x", ""])
async def test_content_length_that_is_no_length(length: str) -> None:
    """A worker's Content-Length that means nothing is left out: servers raise over it."""
    routed = Routed(replace(answer("json"), headers=[("content-length", length)]))
    exchange = Exchange(body=completion_body())
    await exchange.run(routed.app)
    assert exchange.body == b'{"answer": 42}'
    routed.assert_released(exchange)


@pytest.mark.parametrize(
    ("chunks", "whole"), [([bytearray(b"ab"), memoryview(b"cd")], True), (["text"], False), ([None], False)]
)
async def test_chunks_that_are_no_bytes(chunks: Sequence[object], whole: bool) -> None:
    """What can be made bytes is; anything else is the worker's failure."""
    routed = Routed(answer("stream"))

    class Stream(httpx.AsyncByteStream):
        def __init__(self) -> None:
            self.chunks = iter(chunks)

        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> bytes:
            await anyio.lowlevel.checkpoint()
            try:
                return next(self.chunks)  # type: ignore[return-value]
            except StopIteration:
                raise StopAsyncIteration from None

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Stream())

    routed.router._mode._upstream.transport = Transport()
    exchange = await Exchange(body=completion_body()).run(routed.app)
    assert (exchange.status, exchange.body == b"abcd") == ((200, True) if whole else (502, False))
    routed.assert_released(exchange)


async def test_worker_that_sends_nothing_without_end() -> None:
    """A transport that gives empty chunks for ever, without suspending, costs this request alone."""
    routed = Routed(answer("stream"))

    class Empty(httpx.AsyncByteStream):
        def __aiter__(self) -> Empty:
            return self

        async def __anext__(self) -> bytes:
            return b""

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Empty())

    routed.router._mode._upstream.transport = Transport()
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        while not routed.counters[0][0]:
            await anyio.lowlevel.checkpoint()
        exchange.disconnect()

    assert exchange.starts == 0
    routed.assert_released(exchange)


async def test_prompt_is_let_go_while_the_answer_is_written() -> None:
    """A long answer to a long prompt holds the prompt at most once: the transport's own reference to the body."""
    size = 4_000_000
    gate = anyio.Event()
    routed = Routed(replace(answer("stream"), body=[b"data: x\n\n", gate]))
    exchange = Exchange(body=completion_body("x" * size))
    tracemalloc.start()
    try:
        async with exchange.running(routed.app):
            await exchange.body_at_least(1)
            routed.worker.calls[0].body = b""  # the instrument's own
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 1.5 * size
            gate.set()
    finally:
        tracemalloc.stop()
    routed.assert_released(exchange)


async def test_cut_does_not_quote_the_worker() -> None:
    """What a server prints of our exception holds nothing of the worker's bytes."""
    leak = httpx.RemoteProtocolError("illegal chunk header: b'PROMPT'")
    routed = Routed(replace(answer("json"), body=[b'{"answ', leak]))
    with pytest.raises(AnswerCut) as caught:
        await Exchange(body=completion_body()).run(routed.app)

    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_fleet_may_change_while_it_is_read() -> None:
    """A thread that reads the counters sees one fleet, whatever joins or leaves meanwhile."""
    routed = Routed({WORKER: answer("json"), OTHER: answer("json")})
    seen = []
    for state in routed.router.workers:
        routed.router.workers.add(Worker(url="http://new:1"))
        routed.router.workers.remove(state.worker.url + "/")  # spelt differently
        seen.append(state.worker.url)
    assert seen == [WORKER, OTHER]
    assert [worker.url for worker in routed.router.stats().workers] == ["http://new:1"]
    with pytest.raises(KeyError):
        routed.router.workers.remove(WORKER)
