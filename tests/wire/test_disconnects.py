"""Owns what happens when the client leaves or stops reading: the worker is told at once, or made to wait."""

from __future__ import annotations

import socket
import tracemalloc
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import asgi_router.mixed
from asgi_router.upstream.relay import relay
from tests.instruments.raw_server import HANG, REQUEST
from tests.instruments.servers import run_uvicorn
from tests.routed import completion_body
from tests.wire.served import OK, SOON, SSE_HEAD, Http, chunk, on_both_servers, serve, serve_scripts, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.types import Receive, Scope, Send

    from tests.instruments.raw_http import RawClient
    from tests.instruments.raw_server import Connection, Step
    from tests.instruments.servers import UvicornServer
    from tests.wire.served import Served

pytestmark = on_both_servers

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"


def leave(client: RawClient, how: str) -> None:
    """Go away, in one of the ways that TCP has."""
    {"close": client.close, "reset": client.reset, "half-close": client.finish_sending}[how]()


async def assert_hung_up(served: Served, connection: Connection) -> None:
    """The router has closed this connection to the worker, and nothing is counted any more."""
    with anyio.fail_after(SOON):
        await connection.gone()
    assert (connection.server, connection.client) in [("open", "closed"), ("open", "reset")]
    await served.assert_released()
    assert served.pool is None or not served.pool.sockets


WAYS = pytest.mark.parametrize("how", ["close", "reset", "half-close"])


@WAYS
async def test_client_leaves_in_its_upload(http: Http, how: str) -> None:
    """A request that never comes whole reaches no worker, even if nobody can tell that it isn't whole."""
    async with serve_scripts([REQUEST, OK], http=http) as (worker, served, client):
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-encoding: gzip\r\ncontent-length: 200000\r\n\r\n"
        )
        await client.send(head + b"x" * 100_000)
        await until(lambda: served.router.stats().exchanges == 1)
        leave(client, how)
        await served.assert_released()
        assert worker.connections == []


@WAYS
async def test_client_leaves_before_the_workers_head(http: Http, how: str) -> None:
    """A worker in a long prefill sees its connection close at once (smg#2136)."""
    async with serve_scripts([REQUEST, HANG], http=http) as (worker, served, client):
        await client.post(completion_body())
        await worker.connected(1)
        await worker.connections[0].received_requests(1)
        assert served.requests == 1
        leave(client, how)
        await assert_hung_up(served, worker.connections[0])


@WAYS
@pytest.mark.parametrize("head", [SSE_HEAD, JSON_HEAD], ids=["stream", "json"])
async def test_client_leaves_before_the_first_byte(
    http: Http, how: str, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same when the worker has sent its head, and no more."""
    relaying = anyio.Event()

    async def note(*args: object, **kwargs: object) -> None:
        relaying.set()
        await relay(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(asgi_router.mixed, "relay", note)
    async with serve_scripts([REQUEST, head, HANG], http=http) as (worker, served, client):
        await client.post(completion_body())
        await relaying.wait()
        leave(client, how)
        await assert_hung_up(served, worker.connections[0])
        assert client.buffer == b""


@WAYS
@pytest.mark.parametrize("answer", [SSE_HEAD + chunk(b"data: 1\n\n"), JSON_HEAD + b"{"], ids=["stream", "json"])
async def test_client_leaves_in_the_answer(http: Http, how: str, answer: bytes) -> None:
    """The same in the middle of the answer, while the worker is silent."""
    async with serve_scripts([REQUEST, answer, HANG], http=http) as (worker, served, client):
        await client.post(completion_body())
        await client.read_head()
        await client.read_exactly(1)
        assert served.requests == 1
        leave(client, how)
        await assert_hung_up(served, worker.connections[0])


async def test_one_client_leaves_and_the_others_go_on(http: Http) -> None:
    """Only the connection of the one that left is closed."""
    gate = anyio.Event()
    scripts: list[list[Step]] = [[REQUEST, SSE_HEAD, chunk(b"1"), gate, chunk(b"2") + b"0\r\n\r\n", HANG]]
    async with serve_scripts(*scripts, http=http) as (worker, served, first), served.connect() as second:
        for client in (first, second):
            await client.post(completion_body())
            await client.read_head()
            assert await client.read_chunk() == b"1"
        first.reset()
        with anyio.fail_after(SOON):
            await worker.connections[0].gone()
        assert worker.connections[1].client == "open"
        gate.set()
        assert [await second.read_chunk(), await second.read_chunk()] == [b"2", None]


# --- a client that does not read -----------------------------------------------------------------------------

PIECE = b"x" * 65536
PIECES = 768  # 48 MiB
ACCEPTED_AT_MOST = 8 * 1024 * 1024
SMALL = 65536  # bytes of a socket buffer
HELD_AT_MOST = 4 * 1024 * 1024


class Firehose:
    """An ASGI worker that sends 48 MiB as fast as it is allowed to."""

    def __init__(self) -> None:
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", b"%d" % (PIECES * len(PIECE)))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(PIECES):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.sent += len(PIECE)
        await send({"type": "http.response.body", "body": b""})

    async def stalled(self, *servers: UvicornServer) -> None:
        """Return when nothing moves any more: these servers may not write, and for many turns none did."""
        quiet = 0
        before = -1
        with anyio.fail_after(SOON):
            while quiet < 100:
                paused = all(is_paused(server) for server in servers)
                quiet = quiet + 1 if paused and self.sent == before else 0
                before = self.sent
                await anyio.sleep(0.001)


def is_paused(server: UvicornServer) -> bool:
    """Tell whether the server's only connection takes no more bytes."""
    (connection,) = server.server_state.connections
    assert isinstance(connection, H11Protocol | HttpToolsProtocol)
    return bool(connection.flow.write_paused)


@pytest.mark.parametrize("then", ["read on", "close", "reset"])
async def test_client_that_does_not_read(http: Http, then: str) -> None:
    """The worker has to wait: what the router takes is bounded by socket buffers, what it holds by a few chunks.

    When the client reads on it misses nothing; when it leaves the worker is told, though a send is under way.
    """
    app = Firehose()
    async with (
        run_uvicorn(app, http=http, lifespan="off") as worker,
        serve(worker, http=http) as served,
        connect_with_small_buffers(served) as client,
    ):
        with traced_memory() as held:
            worker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
            await client.post(completion_body())
            await until(lambda: app.sent > 0)
            await app.stalled(worker, served.server)
            assert app.sent < ACCEPTED_AT_MOST
            assert held() < HELD_AT_MOST
        assert served.requests == 1
        if then == "read on":
            head = await client.read_head()
            assert await client.read_body(head) == PIECE * PIECES
        else:
            leave(client, then)
            await until(lambda: not worker.server_state.connections)
        await served.assert_released()


@asynccontextmanager
async def connect_with_small_buffers(served: Served) -> AsyncIterator[RawClient]:
    """Connect so that the kernel, which would take many megabytes on its own, takes next to nothing."""
    served.server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # connections inherit it
    async with served.connect() as client:
        client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        yield client


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Inside the block, the function tells the most bytes that Python has held more than at its beginning."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
