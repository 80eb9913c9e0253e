"""Owns the way to a worker: the connection pool, and what an exception on that way means.

Any `httpx.AsyncBaseTransport` can be used. The one here is stock httpx, with the pool settings that a proxy of
long answers needs. It is called directly, never through an `httpx.AsyncClient`: a client would keep one cookie
jar for all callers, add headers of its own and log every request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import httpx
from anyio import current_time
from anyio.lowlevel import RunVar

from asgi_router.errors import InvalidRequest, RouterError, WorkerError, WorkerTimeout, WorkerUnreachable
from asgi_router.upstream import http11

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

STALE_WITHIN = 1.0
"""Seconds within which a connection that was closed while it was idle shows it. A later break is no such race."""


class Progress(Protocol):
    """Is told how far a request is."""

    def __call__(self, *, sending: bool) -> None: ...


class PooledTransport(httpx.AsyncBaseTransport):
    """Stock httpx, with one connection pool for each event loop that uses it.

    An httpx pool belongs to the loop it was first used in, but Starlette's TestClient may run each request in a
    loop of its own.

    Args:
        keepalive_expiry: seconds that an idle connection is kept. It must be less than the workers keep it (5
            for uvicorn and vLLM), or requests meet connections that are just being closed.
        ssl_context: for https. Loading certificates takes 10 ms and more, in which the loop stands still: once, not
            for each pool.
    """

    def __init__(self, *, keepalive_expiry: float, ssl_context: ssl.SSLContext | None = None) -> None:
        self._keepalive_expiry = keepalive_expiry
        self._ssl_context = ssl_context or httpx.create_ssl_context(trust_env=False)
        self._pool: RunVar[httpx.AsyncHTTPTransport | None] = RunVar("asgi_router_pool", None)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._pool.get()
        if pool is None:
            pool = self._new_pool()
            self._pool.set(pool)

        return await pool.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections of the running loop. A later request opens new ones."""
        pool = self._pool.get()
        self._pool.set(None)
        if pool is not None:
            await pool.aclose()

    def _new_pool(self) -> httpx.AsyncHTTPTransport:
        # No limit on connections: how much a worker gets is the scheduler's decision, and a limited pool loses
        # its places for ever when requests are cancelled (encode/httpcore#1093). No proxy variables: workers
        # are neighbours.
        # Idle ones are limited: the pool looks at all of them at each end of a request, so a thousand that end together
        # would hold up the loop for seconds.
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=256, keepalive_expiry=self._keepalive_expiry
        )
        return httpx.AsyncHTTPTransport(verify=self._ssl_context, limits=limits, trust_env=False, retries=0)


def new_transport(keepalive_expiry: float) -> httpx.AsyncBaseTransport:
    """Return the transport of a router that wasn't given one: our own, and stock httpx where no asyncio loop runs."""
    certificates = httpx.create_ssl_context(trust_env=False)
    stock = PooledTransport(keepalive_expiry=keepalive_expiry, ssl_context=certificates)
    return http11.Http11Transport(keepalive_expiry=keepalive_expiry, ssl_context=certificates, fallback=stock)


async def open_response(
    transport: httpx.AsyncBaseTransport, request: httpx.Request, progress: Progress = lambda *, sending: None
) -> httpx.Response:
    """Send `request` and return the worker's response as soon as its head is there.

    A request that meets a keep-alive connection which the worker has closed meanwhile is sent once more, on
    another connection. That is the only repetition: on a new connection the worker may have begun to work.

    Args:
        transport: how it is sent.
        request: what is sent.
        progress: told when connecting and when sending begins, by our transport and those with httpcore's extension
            `trace`.

    Raises:
        WorkerUnreachable: no connection; the worker has seen nothing.
        WorkerTimeout: the transport's own time-out.
        WorkerError: the connection broke, or what came is not HTTP.
        InvalidRequest: the client's headers can't be sent.
    """
    trace = _ConnectionTrace(progress)
    request.extensions["trace"] = trace
    request.extensions["progress"] = progress  # for our own transport, which repeats by itself
    began = current_time()
    try:
        return await transport.handle_async_request(request)
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as exc:
        was_stale = trace.reused_connection and _means_closed(exc) and current_time() - began < STALE_WITHIN
        if not was_stale:
            raise worker_error(exc) from exc
    except Exception as exc:
        raise worker_error(exc) from exc

    try:
        return await transport.handle_async_request(request)
    except Exception as exc:
        error = worker_error(exc)
        if isinstance(error, WorkerUnreachable):  # it may be the first attempt that brought the worker down
            error = WorkerError(str(error))
        raise error from exc


def worker_error(exc: Exception) -> RouterError:
    """Return what an exception of a transport means for the client."""
    match exc:
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            return WorkerUnreachable("No connection to the worker could be made.")
        case httpx.TimeoutException():
            return WorkerTimeout("The worker did not answer in time.")
        case http11.ConnectFailed():
            return WorkerUnreachable("No connection to the worker could be made.")
        case http11.SendTimedOut() | http11.ReadTimedOut():
            return WorkerTimeout("The worker did not answer in time.")
        case httpx.LocalProtocolError() | httpx.InvalidURL() | http11.RequestRefused():
            return InvalidRequest("The request's headers or query can't be forwarded.")
        case _:
            return WorkerError("The worker failed.")


def _means_closed(exc: httpx.TransportError) -> bool:
    # A protocol error after the head of an answer has another text. (httpx tells nothing of bytes before its end.)
    return not isinstance(exc, httpx.RemoteProtocolError) or "without sending a response" in str(exc)


class _ConnectionTrace:
    """Learns from httpcore's trace extension whether a request went out on a connection that was already open.

    A transport that knows nothing of the extension leaves `reused_connection` False, and nothing is repeated.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._connected = False
        self._sent = False

    @property
    def reused_connection(self) -> bool:
        return self._sent and not self._connected

    async def __call__(self, event: str, info: Mapping[str, object]) -> None:
        if event.startswith("connection.connect_"):
            self._connected = True
            if event.endswith(".started") and not self._sent:
                self._progress(sending=False)
        elif event == "http11.send_request_headers.started":
            self._sent = True
            self._progress(sending=True)
