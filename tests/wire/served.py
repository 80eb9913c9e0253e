"""Owns what the wire tests share: the router on a real uvicorn with its own pool, and what must hold afterwards."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, cast

import anyio
import pytest
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware, RouterSettings
from tests.instruments import asyncio_only
from tests.instruments.raw_http import connect
from tests.instruments.raw_server import RawServer, raw_server
from tests.instruments.servers import UvicornServer, run_uvicorn
from tests.routed import counters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from starlette.types import ASGIApp

    from asgi_router.upstream.http11 import Http11Transport, Pool
    from tests.instruments.raw_http import RawClient
    from tests.instruments.raw_server import Step

Http = Literal["h11", "httptools"]

on_both_servers = [
    pytest.mark.anyio,
    asyncio_only,
    pytest.mark.parametrize("http", ["h11", "httptools"]),
]
"""Marks of a test that runs on both of uvicorn's HTTP implementations, on asyncio and on uvloop."""

SOON = 20.0
"""Seconds within which everything that is awaited here has to happen; most of it takes milliseconds."""

TEST_LIMIT = 50.0
"""Seconds that a router is served, at most."""

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
OK = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 13\r\n\r\n{"answer":42}'


def chunk(data: bytes) -> bytes:
    """Frame one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds. For what nobody tells of: the insides of uvicorn and of httpcore."""
    with anyio.fail_after(SOON):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await anyio.sleep(0.001)


class Served:
    """A router behind a listening uvicorn."""

    def __init__(self, router: Router, server: UvicornServer) -> None:
        self.router = router
        self.server = server

    def connect(self) -> AbstractAsyncContextManager[RawClient]:
        """A new client connection."""
        return connect(self.server.host, self.server.port)

    @property
    def requests(self) -> int:
        """Requests counted on all workers."""
        return sum(worker.requests for worker in self.router.stats().workers)

    @property
    def pool(self) -> Pool | None:
        """The connections of the running loop; None if they are closed."""
        return cast("Http11Transport", self.router._transport)._pools.get(asyncio.get_running_loop())

    async def finished(self) -> None:
        """Return when the server has nothing more to do."""
        with anyio.fail_after(SOON):
            while tasks := set(self.server.server_state.tasks):
                await asyncio.wait(tasks)

    async def assert_released(self) -> None:
        """When the server has nothing more to do, all counters are zero and no connection to a worker is in use."""
        await self.finished()
        stats = self.router.stats()
        assert [counters(worker) for worker in stats.workers] == [(0, 0, 0, 0)] * len(stats.workers)
        assert stats.exchanges == 0
        assert all(state.prefixes.pinned == 0 for state in self.router.workers)
        if self.pool is not None:
            assert self.pool.active == 0


@asynccontextmanager
async def serve(
    *workers: RawServer | UvicornServer | str,
    http: Http = "h11",
    wrap: Callable[[RouterMiddleware], ASGIApp] = lambda app: app,
    root_path: str = "",
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[Served]:
    """Serve the middleware (`wrap` may put a host app around it); afterwards nothing may be left, anywhere."""
    urls = [worker if isinstance(worker, str) else worker.url for worker in workers]
    router = Router(RouterSettings(workers=urls, **settings or {}))
    app = wrap(RouterMiddleware(Starlette(), router=router))
    with anyio.fail_after(TEST_LIMIT):
        async with run_uvicorn(app, http=http, root_path=root_path, proxy_headers=False) as server:
            served = Served(router, server)
            yield served
            await served.assert_released()

    assert served.pool is None
    for worker in workers:
        if isinstance(worker, RawServer):
            with anyio.fail_after(SOON):
                for connection in worker.connections:
                    await connection.gone()
        elif isinstance(worker, UvicornServer):
            connections = worker.server_state.connections
            await until(lambda left=connections: not left)  # type: ignore[misc]


@asynccontextmanager
async def serve_scripts(
    *scripts: Sequence[Step], http: Http = "h11", **settings: object
) -> AsyncIterator[tuple[RawServer, Served, RawClient]]:
    """A scripted worker (one script for each connection), the router before it, and a client connected to that."""
    async with (
        raw_server(*scripts) as worker,
        serve(worker, http=http, settings=settings) as served,
        served.connect() as client,
    ):
        yield worker, served, client
