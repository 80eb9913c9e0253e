"""Shows that what the ASGI specification leaves open is taken in any of its forms: other servers have other types."""

from __future__ import annotations

from collections import ChainMap
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from asgi_router import RouterMiddleware
from asgi_router.upstream.http11 import Http11Transport
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.raw_server import CLOSE, REQUEST, raw_server
from tests.routed import Routed, answer, completion_body, counters, unreachable_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import Message, Receive, Scope, Send

    from tests.instruments.raw_server import RawServer


class Other(dict[str, Any]):
    """A scope of a class of its own."""


SCOPES: dict[str, Callable[[Scope], object]] = {
    "headers in a tuple": lambda scope: {**scope, "headers": tuple(scope["headers"])},
    "headers of lists": lambda scope: {**scope, "headers": [list(pair) for pair in scope["headers"]]},
    "headers in a dict's view": lambda scope: {**scope, "headers": dict(scope["headers"]).items()},
    "a read-only mapping": lambda scope: MappingProxyType(dict(scope)),
    "a chain of mappings": lambda scope: ChainMap({}, dict(scope)),
    "a subclass of dict": Other,
    "a client in a list": lambda scope: {**scope, "client": ["127.0.0.1", 50000]},
    "no client": lambda scope: {**scope, "client": None},
    "no query string": lambda scope: {name: value for name, value in scope.items() if name != "query_string"},
    "text of a subclass": lambda scope: {**scope, "path": type("Text", (str,), {})(scope["path"])},
}


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n42"


@asynccontextmanager
async def routed_to(worker: RawServer) -> AsyncIterator[RouterMiddleware]:
    """A router before one worker, over the transport that users get; when the block is left, all counters are back."""
    app = RouterMiddleware(unreachable_app, workers=[worker.url])
    yield app
    assert counters(app.router.stats().workers[0]) == (0, 0, 0, 0)
    await app.router.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("change", SCOPES.values(), ids=SCOPES)
async def test_scopes_of_other_servers(change: Callable[[Scope], object]) -> None:
    """What a server may put into a scope, beside what uvicorn does, is taken as it is."""
    exchange = Exchange(body=completion_body(), headers=[("cookie", "a=b"), ("x-forwarded-for", "10.1.1.1")])
    exchange.scope = change(exchange.scope)  # type: ignore[assignment]
    async with raw_server([REQUEST, OK, CLOSE]) as worker, routed_to(worker) as app:
        await exchange.run(app)
        assert (exchange.status, exchange.body) == (200, b"42")
        head, body = worker.connections[0].requests[0]
        assert body == completion_body()
        assert head.header("cookie") == [b"a=b"]


@pytest.mark.anyio
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("make", [bytearray, memoryview, type("Bytes", (bytes,), {})])
async def test_bodies_of_other_servers(make: Callable[[bytes], object], parts: int) -> None:
    """A body that comes in buffers of another kind is forwarded byte for byte."""
    exchange = Exchange(body=completion_body())
    size = -(-len(completion_body()) // parts)
    pieces = [completion_body()[at : at + size] for at in range(0, len(completion_body()), size)]

    async def receive() -> Message:
        if not pieces:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": make(pieces.pop(0)), "more_body": 1 if pieces else 0}

    async with raw_server([REQUEST, OK, CLOSE]) as worker, routed_to(worker) as app:
        with anyio.fail_after(5):
            await app(exchange.scope, receive, exchange.send)
        assert worker.connections[0].requests[0][1] == completion_body()


@pytest.mark.anyio
@pytest.mark.parametrize("make", [tuple, list, lambda pair: [bytearray(part) for part in pair]])
async def test_answers_of_the_wrapped_app(make: Callable[[tuple[bytes, bytes]], object]) -> None:
    """The app that is wrapped, as a worker, may write its headers and its body in other types, too."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [make((b"content-type", b"text/plain")), make((b"X-A", b"1"))]
        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": tuple(headers)})
        await send({"type": "http.response.body", "body": bytearray(b"42"), "more_body": 0})

    async def send(message: Message) -> None:
        sent.append(message)

    exchange = Exchange(body=completion_body())
    with anyio.fail_after(5):
        await RouterMiddleware(app, workers=["local"])(exchange.scope, exchange.receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"42")


@pytest.mark.anyio
async def test_a_clock_of_whole_numbers() -> None:
    """A clock that gives integers does."""
    routed = Routed(answer("json"), clock=lambda: 5)
    exchange = await Exchange(body=completion_body()).run(routed.app)
    assert exchange.status == 200
    routed.assert_released(exchange)


@pytest.mark.anyio
@asyncio_only
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
async def test_our_transport_under_httpx(make: Callable[[bytes], bytes]) -> None:
    """Our transport takes whole seconds as time-outs, and bodies in buffers, as httpx's own does."""

    class Body(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in (b"ab", b"cd"):
                yield make(piece)

    request = httpx.Request(
        "POST",
        "http://w",
        headers={"content-length": "4"},
        stream=Body(),
        extensions={"timeout": {"connect": 5, "write": 5, "read": 5, "pool": 5}},
    )
    async with raw_server([REQUEST, OK, CLOSE]) as worker, Http11Transport(keepalive_expiry=5) as transport:
        request.url = httpx.URL(worker.url)
        request.headers["host"] = "w"
        answer = await transport.handle_async_request(request)
        assert await answer.aread() == b"42"
        assert worker.connections[0].requests[0][1] == b"abcd"
