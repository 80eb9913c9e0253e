"""Owns the httpx side: what its users give, get and catch, on every event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asgi_router.upstream.http11 import Http11Transport
from tests.http11.certificate import client_context, server_context
from tests.http11.test_connecting import listening
from tests.http11.wire import NO_TLS, SOON
from tests.instruments import asyncio_only
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, RESET, raw_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from pathlib import Path

    from tests.instruments.raw_server import Step

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 Fine\r\nX-A: 1\r\nx-a: 2\r\ncontent-length: 2\r\n\r\nok"


def new_transport(**options: str) -> Http11Transport:
    """One that trusts nobody."""
    return Http11Transport(keepalive_expiry=3.0, ssl_context=NO_TLS, uds=options.get("uds"))


class Pieces(httpx.AsyncByteStream):
    """A body that comes in these pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            await anyio.lowlevel.checkpoint()
            yield piece


@asyncio_only
class TestTransport:
    """Through an `httpx.AsyncClient`, which knows its transports by their interface alone."""

    async def test_a_client(self) -> None:
        """Status, reason, version, headers and body; keep-alive; streams; HEAD; `aclose` closes."""
        head = b"HTTP/1.0 204 Nothing\r\nconnection: keep-alive\r\n\r\n"
        transport = new_transport()
        async with raw_server([REQUEST, OK, REQUEST, OK, REQUEST, head, REQUEST, OK, HANG]) as server:
            async with httpx.AsyncClient(transport=transport) as client:
                answer = await client.post(server.url, json={"a": 1})
                assert (answer.status_code, answer.reason_phrase, answer.http_version) == (200, "Fine", "HTTP/1.1")
                assert (answer.headers.get_list("x-a"), answer.content) == (["1", "2"], b"ok")
                async with client.stream("GET", server.url + "/a%2Fb?c=d") as streamed:
                    assert [chunk async for chunk in streamed.aiter_raw()] == [b"ok"]
                answer = await client.get(server.url)
                assert (answer.status_code, answer.http_version) == (204, "HTTP/1.0")
                answer = await client.head(server.url)
                assert (answer.headers["content-length"], answer.content) == ("2", b"")
                first = server.connections[0].requests[0]
                assert first[1] == b'{"a":1}'
                assert server.connections[0].requests[1][0].first_line == b"GET /a%2Fb?c=d HTTP/1.1"
                where = server.url.removeprefix("http://")
                assert repr(transport) in (
                    f"<Http11Transport <Pool [{where}: 0 active, 1 idle]>>",
                    "<Http11Transport <Pool []>>",  # the body behind the HEAD has come by now
                )
            assert len(server.connections) == 1
            await server.connections[0].gone()
            assert repr(transport) == "<Http11Transport >"

    @pytest.mark.parametrize("pieces", [[b"{", b"}"], [b"{}"], [b"", b"{}", b""]], ids=len)
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_body_in_pieces(self, pieces: list[bytes], chunked: bool) -> None:
        """With a length or in chunks; an empty piece is no end."""
        framing = ("transfer-encoding", "chunked") if chunked else ("content-length", "2")
        async with raw_server([REQUEST, OK, HANG]) as server, new_transport() as transport:
            headers = [("host", "w"), framing]
            request = httpx.Request("POST", server.url, headers=headers, stream=Pieces(pieces))
            response = await transport.handle_async_request(request)
            assert await response.aread() == b"ok"
            assert server.connections[0].requests[0][1] == b"{}"
            pool = transport.pool()
            assert pool is not None
            assert (pool.active, pool.idle) == (0, 1)

    async def test_a_body_that_breaks_off(self) -> None:
        """What its iterator raises is the caller's; the connection is closed."""

        def breaks() -> Iterable[bytes]:
            yield b"{"
            raise ZeroDivisionError

        async with raw_server([REQUEST, HANG]) as server, new_transport() as transport:
            headers = [("host", "w"), ("content-length", "2")]
            request = httpx.Request("POST", server.url, headers=headers, stream=Pieces(breaks()))
            with pytest.raises(ZeroDivisionError):
                await transport.handle_async_request(request)
            await server.connections[0].gone()

    @pytest.mark.parametrize(
        ("headers", "body"),
        [
            ([("host", "w"), ("content-length", "3")], [b"{}"]),
            ([("host", "w"), ("content-length", "3")], [b"{", b"}"]),
            ([("host", "w"), ("content-length", "1")], [b"{", b"}"]),
            ([("host", "w"), ("content-length", "1")], [b"{}"]),
            ([("host", "w")], [b"{}"]),
            ([("host", "w"), ("content-length", "two")], [b"{}"]),
            ([("host", "w"), ("content-length", "2"), ("content-length", "2")], [b"{}"]),
            ([("host", "w"), ("content-length", "2"), ("transfer-encoding", "chunked")], [b"{}"]),
            ([("host", "w"), ("transfer-encoding", "gzip")], [b"{}"]),
            ([("host", "w"), ("host", "v"), ("content-length", "2")], [b"{}"]),
            ([("host", "w"), ("x", "a\r\nb: c"), ("content-length", "2")], [b"{}"]),
        ],
        ids=str,
    )
    async def test_a_request_that_is_none(self, headers: list[tuple[str, str]], body: list[bytes]) -> None:
        """No host or two, no framing or two, another length than announced, a header that is two: never sent whole."""
        async with raw_server([REQUEST, OK, HANG]) as server, new_transport() as transport:
            request = httpx.Request("POST", server.url, headers=headers, stream=Pieces(body))
            with pytest.raises(httpx.LocalProtocolError):
                await transport.handle_async_request(request)
            pool = transport.pool()
            assert pool is not None
            assert (pool.active, pool.idle) == (0, 0)
            assert [connection.requests for connection in server.connections] in ([], [[]])

    async def test_a_target_that_is_given(self) -> None:
        """httpx's extension `target`; and no target that would end the first line."""
        async with raw_server([REQUEST, OK, HANG]) as server, new_transport() as transport:
            for target, fits in ((b"/a?b=%zz", True), (b"/ HTTP/1.1\r\nx: y", False)):
                request = httpx.Request("GET", server.url, extensions={"target": target})
                if fits:
                    await (await transport.handle_async_request(request)).aread()
                else:
                    with pytest.raises(httpx.LocalProtocolError):
                        await transport.handle_async_request(request)
            assert server.connections[0].requests[0][0].first_line == b"GET /a?b=%zz HTTP/1.1"

    @pytest.mark.parametrize(
        ("script", "error"),
        [
            ([REQUEST, CLOSE], httpx.RemoteProtocolError),
            ([REQUEST, RESET], httpx.ReadError),
            ([REQUEST, b"HTTP/1.1 200 OK\r\n", CLOSE], httpx.RemoteProtocolError),
            ([REQUEST, OK[:-1], CLOSE], httpx.RemoteProtocolError),
            ([REQUEST, OK[:-1], RESET], httpx.ReadError),
            ([REQUEST, b"SSH-2.0\r\n", HANG], httpx.RemoteProtocolError),
            ([REQUEST, HANG], httpx.ReadTimeout),
            ([REQUEST, OK[:-1], HANG], httpx.ReadTimeout),
        ],
    )
    async def test_exceptions(self, script: list[Step], error: type[Exception]) -> None:
        """They are those of stock httpx; the last words of a connection that was only closed are its own, too."""
        async with (
            raw_server(script) as server,
            new_transport() as transport,
            httpx.AsyncClient(transport=transport) as c,
        ):
            with pytest.raises(httpx.TransportError) as caught:
                await c.post(server.url, content=b"{}", timeout=httpx.Timeout(SOON, read=0.1))
            assert type(caught.value) is error
            if script == [REQUEST, CLOSE]:
                assert str(caught.value) == "Server disconnected without sending a response."
            await server.connections[0].gone()

    async def test_exceptions_of_connecting(self) -> None:
        """Refused, not in time (TLS included), and no such scheme."""
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            async with raw_server([HANG]) as server, new_transport() as transport:
                client = httpx.AsyncClient(transport=transport)
                with pytest.raises(httpx.ConnectError):
                    await client.get(f"http://127.0.0.1:{sock.getsockname()[1]}")
                with pytest.raises(httpx.ConnectTimeout):
                    await client.get(server.url.replace("http", "https"), timeout=httpx.Timeout(SOON, connect=0.1))
                with pytest.raises(httpx.UnsupportedProtocol):
                    await transport.handle_async_request(httpx.Request("GET", "ftp://w/"))

    async def test_exceptions_of_sending(self) -> None:
        """A worker that reads nothing, and one that goes."""
        body = b"x" * 20_000_000
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with raw_server([RESET]) as server, httpx.AsyncClient(transport=new_transport()) as client:
                with pytest.raises(httpx.WriteTimeout):
                    await client.post(url, content=body, timeout=httpx.Timeout(SOON, write=0.1))
                with pytest.raises(httpx.NetworkError):
                    await client.post(server.url, content=body, timeout=SOON)

    async def test_tls_and_unix_sockets(self, tmp_path: Path) -> None:
        """The context and the path that it was given."""
        trusting = Http11Transport(keepalive_expiry=3.0, ssl_context=client_context())
        async with listening(ssl_context=server_context()) as port, httpx.AsyncClient(transport=trusting) as client:
            assert (await client.get(f"https://localhost:{port}")).text == "ok"
        path = str(tmp_path / "worker")
        async with listening(path=path), httpx.AsyncClient(transport=new_transport(uds=path)) as client:
            assert (await client.get("http://w")).text == "ok"

    async def test_a_response_that_is_left(self) -> None:
        """`aclose` in the middle closes the connection; at the end it is kept. Twice is once."""
        async with raw_server([REQUEST, OK[:-1], HANG], [REQUEST, OK, HANG]) as server, new_transport() as transport:
            for kept in (0, 1):
                response = await transport.handle_async_request(httpx.Request("GET", server.url))
                if kept:
                    await response.aread()
                for _ in range(2):
                    await response.aclose()
                pool = transport.pool()
                assert pool is not None
                assert (pool.active, pool.idle) == (0, kept)

    async def test_progress(self) -> None:
        """The extension is told what the pool does."""
        told: list[bool] = []

        def progress(*, sending: bool) -> None:
            told.append(sending)

        async with raw_server([REQUEST, OK, REQUEST, OK, HANG]) as server, new_transport() as transport:
            for _ in range(2):
                request = httpx.Request("GET", server.url, extensions={"progress": progress})
                await (await transport.handle_async_request(request)).aread()
        assert told == [False, True, True]

    async def test_origins_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Workers come and go, by any number of names."""
        monkeypatch.setattr("asgi_router.upstream.http11.transport.MAX_ORIGINS", 3)
        async with new_transport() as transport:
            for number in range(10):
                url = httpx.URL(f"http://w{number}")
                assert transport._origin(url) is transport._origin(url)
                assert len(transport._origins) <= 3


async def test_where_no_asyncio_runs(anyio_backend_name: str) -> None:
    """On trio the other transport is used, and closed; on asyncio never."""
    fallback = Fallback()
    transport = Http11Transport(keepalive_expiry=3.0, ssl_context=NO_TLS, fallback=fallback)
    async with raw_server([REQUEST, OK, HANG]) as server, transport:
        response = await transport.handle_async_request(httpx.Request("GET", server.url))
        assert await response.aread() in (b"ok", b"other")
        assert (transport.pool() is None) == (anyio_backend_name == "trio")
    assert fallback.used == (["request", "close"] if anyio_backend_name == "trio" else [])

    if anyio_backend_name == "trio":
        with pytest.raises(RuntimeError):
            await new_transport().handle_async_request(httpx.Request("GET", "http://w"))
        await new_transport().aclose()


class Fallback(httpx.AsyncBaseTransport):
    """Notes its use."""

    def __init__(self) -> None:
        self.used: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.used.append("request")
        return httpx.Response(200, content=b"other")

    async def aclose(self) -> None:
        self.used.append("close")


def test_a_loop_for_each_request() -> None:
    """Each has its own pool; those of loops that are gone are forgotten."""
    transport = new_transport()

    async def ask() -> None:
        async with raw_server([REQUEST, OK, HANG]) as server:
            response = await transport.handle_async_request(httpx.Request("GET", server.url))
            assert await response.aread() == b"ok"

    for _ in range(3):
        asyncio.run(ask())
        assert len(transport._pools) == 1
