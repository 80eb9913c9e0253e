"""Owns the way of a client's request to a worker: over our own transport without httpx, over any other with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.upstream.answer import HttpxAnswer
from asgi_router.upstream.http11 import Http11Transport
from asgi_router.upstream.request import Target, request_bytes, upstream_request
from asgi_router.upstream.transport import open_response, worker_error

if TYPE_CHECKING:
    import httpx

    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.upstream.answer import WorkerAnswer
    from asgi_router.upstream.http11 import Pool
    from asgi_router.upstream.transport import Progress

MAX_TARGETS = 4096
"""Addresses that are remembered: each worker has one for each route."""


class Upstream:
    """Sends requests to workers.

    Args:
        transport: how they go.
        connect_timeout: seconds for a new connection.
        write_timeout: seconds in which a worker has to take some of a request; None: no limit.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport, *, connect_timeout: float, write_timeout: float | None
    ) -> None:
        self.transport = transport
        self._own = transport if isinstance(transport, Http11Transport) else None
        self._connect_timeout = connect_timeout
        self._write_timeout = write_timeout
        self._targets: dict[str, Target] = {}

    def native_pool(self) -> Pool | None:
        """Return our own pool for the running loop: there `task.cancel()` at any await loses nothing.

        None with another transport (httpcore loses connections: encode/httpcore#1093), and where no asyncio loop runs.
        """
        return self._own.pool() if self._own is not None else None

    async def open(
        self, exchange: Exchange, url: str, body: bytes, *, own_headers: RawHeaders, progress: Progress
    ) -> WorkerAnswer:
        """Send the request of `exchange` with this `body` to `url`; return the answer as soon as its head is there.

        Raises:
            RouterError: as `open_response`.
        """
        target = self._target(url)
        pool = exchange.pool
        if pool is None or pool.closed:
            pool = self.native_pool()
        if pool is None:
            return await self._open_httpx(exchange, target, body, own_headers, progress)

        try:
            return await pool.request(
                target.origin,
                request_bytes(exchange, target, body, own_headers=own_headers),
                body,
                connect_timeout=self._connect_timeout,
                send_timeout=self._write_timeout,
                progress=progress,
            )
        except Exception as exc:
            raise worker_error(exc) from exc

    async def _open_httpx(
        self, exchange: Exchange, target: Target, body: bytes, own_headers: RawHeaders, progress: Progress
    ) -> HttpxAnswer:
        request = upstream_request(
            exchange,
            target,
            body,
            own_headers=own_headers,
            connect_timeout=self._connect_timeout,
            write_timeout=self._write_timeout,
        )
        return HttpxAnswer(await open_response(self.transport, request, progress))

    def _target(self, url: str) -> Target:
        target = self._targets.get(url)
        if target is None:
            if len(self._targets) >= MAX_TARGETS:
                self._targets.clear()
            target = self._targets[url] = Target(url)
        return target
