"""Owns the making of connections: names, addresses, Unix sockets, TLS, time-outs, and failures of all of them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest

from asgi_router.upstream.http11 import ConnectFailed, ConnectTimedOut, Origin, Pool
from asgi_router.upstream.http11 import dial as module
from asgi_router.upstream.http11.dial import Dial
from tests.http11.certificate import client_context, server_context
from tests.http11.wire import NO_TLS, SOON, fetch, head, new_pool, on_asyncio, served, until
from tests.instruments.raw_server import HANG, REQUEST, raw_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from asgi_router.upstream.http11.connection import Connection

pytestmark = on_asyncio

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@asynccontextmanager
async def listening(
    host: str = "127.0.0.1", *, ssl_context: ssl.SSLContext | None = None, path: str | None = None
) -> AsyncIterator[int]:
    """A worker on asyncio's streams: it answers `OK` until its client leaves. Gives its port."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        try:
            while await reader.read(65536):
                writer.write(OK)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()
            tasks.discard(asyncio.current_task())

    if path is not None:
        server = await asyncio.start_unix_server(serve, path, ssl=ssl_context)
    else:
        server = await asyncio.start_server(serve, host, 0, ssl=ssl_context)
    try:
        yield 0 if path is not None else server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await until(lambda: not tasks)


@asynccontextmanager
async def tls_pool(context: ssl.SSLContext | None = None) -> AsyncIterator[Pool]:
    """A pool that trusts our own certificate, or as the context says."""
    pool = Pool(keepalive_expiry=3.0, ssl_context=context or client_context())
    try:
        yield pool
        assert pool.active == 0
    finally:
        await pool.aclose()
    assert pool.sockets == 0


@pytest.mark.parametrize(
    ("host", "literal"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("127.0.0.1", "LocalHost")]
)
async def test_hosts(host: str, literal: str) -> None:
    """IPv4, IPv6 and names; the Host field has brackets, a port, and lower case."""
    async with listening("::1" if literal == "[::1]" else "127.0.0.1") as port, new_pool() as pool:
        origin = Origin(f"http://{literal}:{port}/base")
        assert origin.authority == f"{literal.lower()}:{port}".encode()
        assert (await fetch(pool, origin)).body == b"ok"


async def test_unix_socket(tmp_path: Path) -> None:
    """A Unix socket in the place of host and port; it has connections of its own."""
    path = str(tmp_path / "worker")
    async with listening(path=path), new_pool() as pool:
        origin = Origin("http://worker", uds=path)
        assert origin.key != Origin("http://worker").key
        for _ in range(2):
            assert (await fetch(pool, origin)).body == b"ok"
        assert pool.idle == 1
        with pytest.raises(ConnectFailed):
            await fetch(pool, Origin("http://worker", uds=path + "-none"))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
async def test_tls(host: str) -> None:
    """A certificate that is trusted and bears the name; the connection is used again; no ALPN."""
    bind = "::1" if host == "[::1]" else "127.0.0.1"
    async with listening(bind, ssl_context=server_context()) as port, tls_pool() as pool:
        origin = Origin(f"https://{host}:{port}")
        for _ in range(2):
            assert (await fetch(pool, origin)).body == b"ok"
        assert (pool.idle, pool.sockets) == (1, 1)
        (connection,) = pool._open
        assert connection._transport is not None
        assert connection._transport.get_extra_info("ssl_object").selected_alpn_protocol() is None


async def test_a_large_body_over_tls() -> None:
    """It arrives as it was given."""
    body = bytes(range(256)) * 8192  # 2 MiB
    got = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        await reader.readuntil(b"\r\n\r\n")
        got = await reader.readexactly(len(body))
        writer.write(OK)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context())
    async with tls_pool() as pool:
        origin = Origin(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert (await fetch(pool, origin, body)).body == b"ok"
        assert (got == body, pool.idle) == (True, 1)
    server.close()


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_certificate_that_will_not_do(trusted: bool) -> None:
    """Not trusted, or of another name: no connection, and no byte of the request."""
    everywhere = listening("0.0.0.0", ssl_context=server_context())
    async with everywhere as port, tls_pool() as trusting, tls_pool(NO_TLS) as trusts_nobody:
        pool = trusting if trusted else trusts_nobody
        origin = Origin(f"https://127.0.0.2:{port}" if trusted else f"https://127.0.0.1:{port}")
        with pytest.raises(ConnectFailed) as caught:
            await fetch(pool, origin)
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        assert pool.active == 0


async def test_tls_to_a_worker_without() -> None:
    """What is no TLS is no connection."""
    async with listening() as port, tls_pool() as pool:
        with pytest.raises(ConnectFailed):
            await fetch(pool, Origin(f"https://127.0.0.1:{port}"))


async def test_nobody_listens() -> None:
    """Nothing was sent."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        async with new_pool() as pool:
            with pytest.raises(ConnectFailed) as caught:
                await fetch(pool, Origin(f"http://127.0.0.1:{sock.getsockname()[1]}"))
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)
            assert str(caught.value) == "No connection could be made."


async def test_the_time_limit_covers_tls() -> None:
    """A worker that accepts and then is silent is as bad as one that doesn't accept; nothing is left of it."""
    with anyio.fail_after(SOON):
        async with raw_server([HANG]) as server, tls_pool() as pool:
            origin = Origin(server.url.replace("http", "https"))
            with pytest.raises(ConnectTimedOut):
                await pool.request(origin, head(origin), b"{}", connect_timeout=0.05)
            await server.connections[0].gone()


async def test_a_small_request_waits_for_no_other() -> None:
    """TCP_NODELAY: Nagle's algorithm would hold back the end of a request for 40 ms."""
    async with served([REQUEST, OK, HANG]) as (_, pool, origin):
        await fetch(pool, origin)
        (connection,) = pool._open
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Addresses:
    """What a name resolves to, and which of the addresses answer never (`.1`) or refuse (`.2`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.tried: list[str] = []
        self.cancelled: list[str] = []
        attempt = Dial._try

        async def look_up(_: Dial) -> list[str]:
            await anyio.lowlevel.checkpoint()
            if not hosts:
                raise socket.gaierror("no such host")
            return list(hosts)

        async def attempt_one(dial: Dial, host: str, connection: Connection) -> None:
            self.tried.append(host)
            if host.endswith(".1"):
                try:
                    await anyio.sleep_forever()
                finally:
                    self.cancelled.append(host)
            if host.endswith(".2"):
                raise ConnectionRefusedError
            await attempt(dial, "127.0.0.1", connection)

        monkeypatch.setattr(Dial, "_look_up", look_up)
        monkeypatch.setattr(Dial, "_try", attempt_one)


async def test_an_address_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 8305: the next one is tried soon, and the first to answer wins; the others are given up."""
    monkeypatch.setattr(module, "STAGGER", 0.01)
    async with listening() as port, new_pool() as pool:
        hosts = Addresses(monkeypatch, "a.1", "b.1", "c", "d")
        assert (await fetch(pool, Origin(f"http://name:{port}"))).body == b"ok"
        assert hosts.tried[:3] == ["a.1", "b.1", "c"]
        assert sorted(hosts.cancelled) == ["a.1", "b.1"]
        await until(lambda: pool.sockets == 1)
        assert (pool.active, pool.idle) == (0, 1)


async def test_an_address_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is tried at once."""
    monkeypatch.setattr(module, "STAGGER", 1e6)
    async with listening() as port, new_pool() as pool:
        hosts = Addresses(monkeypatch, "a.2", "b.2", "c", "d")
        assert (await fetch(pool, Origin(f"http://name:{port}"))).body == b"ok"
        assert hosts.tried == ["a.2", "b.2", "c"]


@pytest.mark.parametrize("hosts", [[], ["a.2"], ["a.2", "b.2"]], ids=len)
async def test_no_address_answers(monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> None:
    """The name has none, or all refuse: one error."""
    Addresses(monkeypatch, *hosts)
    async with new_pool() as pool:
        with pytest.raises(ConnectFailed):
            await fetch(pool, Origin("http://name:1"))
        assert pool.active == 0


async def test_the_time_limit_covers_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends them all."""
    monkeypatch.setattr(module, "STAGGER", 0.001)
    hosts = Addresses(monkeypatch, "a.1", "b.1", "c.1")
    async with new_pool() as pool:
        origin = Origin("http://name:1")
        with pytest.raises(ConnectTimedOut):
            await pool.request(origin, head(origin), connect_timeout=0.1)
        await until(lambda: len(hosts.cancelled) == 3)


async def test_look_up() -> None:
    """Families take turns, beginning with the first; a link-local address keeps its link."""
    loop = asyncio.get_running_loop()

    class Loop:
        """Its look-up is scripted."""

        create_future = staticmethod(loop.create_future)

        async def getaddrinfo(self, host: str, port: int, *, type: int) -> list[tuple[object, ...]]:
            found = [("fe80::1", 7, 0, 3), ("2001:db8::1", 7, 0, 0), ("2001:db8::1", 7, 0, 0), ("192.0.2.1", 7)]
            families = {4: socket.AF_INET6, 2: socket.AF_INET}
            return [(families[len(where)], type, 6, "", where) for where in found]

    dial = Dial(Origin("http://name:7"), lambda: None, Loop(), None)  # type: ignore[arg-type, return-value]
    assert await dial._look_up() == ["fe80::1%3", "192.0.2.1", "2001:db8::1"]


@pytest.mark.parametrize("url", ["ftp://w", "w:1", "http://", "/path", "http+unix://x"])
async def test_what_is_no_origin(url: str) -> None:
    """Other schemes, or no host."""
    with pytest.raises(ValueError, match="an origin is"):
        Origin(url)
