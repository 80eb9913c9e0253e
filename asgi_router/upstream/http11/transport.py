"""Owns the httpx side: an `httpx.AsyncBaseTransport` over the pool of the running event loop.

It differs from stock httpx where that is slow, leaks or guesses:

1. No limit on connections, so `timeout["pool"]` never passes: how much a worker gets is the scheduler's decision.
2. A stale connection's request is repeated on a *new* connection, not on another idle one, which may be as stale.
3. No proxies, no HTTP/2, no trace extension. Instead of that `extensions["progress"]` may be a `Progress`.
4. Response header names are in lower case.
5. It is stricter in what it takes for an answer: see `reader.py`.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, cast

import httpx

from asgi_router.upstream.http11.errors import (
    AnswerCutShort,
    ConnectFailed,
    ConnectionBroken,
    ConnectTimedOut,
    Http11Error,
    ReadTimedOut,
    RequestRefused,
    SendTimedOut,
)
from asgi_router.upstream.http11.pool import Pool
from asgi_router.upstream.http11.requests import Origin, request_head

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

    from asgi_router.upstream.http11.answer import Answer
    from asgi_router.upstream.http11.pool import Progress

MAX_ORIGINS = 1024  # remembered at once


class Http11Transport(httpx.AsyncBaseTransport):
    """HTTP/1.1 by `Pool`, with one pool for each event loop that uses it.

    A pool belongs to the loop it was made in, but Starlette's TestClient may run each request in a loop of its own.

    Args:
        keepalive_expiry: seconds that an idle connection is kept; see `Pool`.
        ssl_context: for https. None: certificates are loaded now, not while a request waits.
        uds: the path of a Unix socket, to which all requests go.
        fallback: used where no asyncio loop runs: on trio. None: requests raise `RuntimeError` there.
    """

    def __init__(
        self,
        *,
        keepalive_expiry: float,
        ssl_context: ssl.SSLContext | None = None,
        uds: str | None = None,
        fallback: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._keepalive_expiry = keepalive_expiry
        self._ssl = ssl_context or httpx.create_ssl_context(trust_env=False)
        self._uds = uds
        self._fallback = fallback
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self._origins: dict[tuple[bytes, bytes, int | None], Origin] = {}

    def __repr__(self) -> str:
        return f"<Http11Transport {' '.join(map(repr, self._pools.values()))}>"

    def pool(self) -> Pool | None:
        """Return the pool of the running loop; None if that is not asyncio's or uvloop's."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None

        pool = self._pools.get(loop)
        if pool is None or pool.closed:
            for other in list(self._pools):  # loops of other threads do the same
                if other.is_closed():
                    self._pools.pop(other, None)
            pool = self._pools[loop] = Pool(keepalive_expiry=self._keepalive_expiry, ssl_context=self._ssl)
        return pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, as `httpx.AsyncHTTPTransport` does; see the module for where it differs."""
        pool = self.pool()
        if pool is None:
            if self._fallback is None:
                raise RuntimeError("no asyncio event loop is running, and there is no other transport")
            return await self._fallback.handle_async_request(request)

        timeouts: Mapping[str, float | None] = request.extensions.get("timeout", {})
        progress: Progress | None = request.extensions.get("progress")
        read_timeout = timeouts.get("read")
        try:
            origin = self._origin(request.url)
            head, body, more = await _outgoing(request)
            answer = await pool.request(
                origin,
                head,
                body,
                more=more,
                bodiless=request.method == "HEAD",
                connect_timeout=timeouts.get("connect"),
                send_timeout=timeouts.get("write"),
                read_timeout=read_timeout,
                progress=progress,
            )
        except Http11Error as exc:
            raise _as_httpx(exc) from exc

        version = b"HTTP/1.0" if answer.http_10 else b"HTTP/1.1"
        return httpx.Response(
            answer.status,
            headers=answer.headers,
            stream=_AnswerStream(answer, read_timeout),
            extensions={"http_version": version, "reason_phrase": answer.reason},
        )

    async def aclose(self) -> None:
        """Close the connections of the running loop, those in use too. A later request opens new ones."""
        try:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        except RuntimeError:
            pool = None
        if pool is not None:
            await pool.aclose()
        elif self._fallback is not None:
            await self._fallback.aclose()

    def _origin(self, url: httpx.URL) -> Origin:
        key = (url.raw_scheme, url.raw_host, url.port)
        origin = self._origins.get(key)
        if origin is None:
            try:
                origin = Origin(url, uds=self._uds)
            except ValueError:
                raise httpx.UnsupportedProtocol("Only http:// and https:// with a host can be requested.") from None
            if len(self._origins) >= MAX_ORIGINS:
                self._origins.clear()
            self._origins[key] = origin
        return origin


async def _outgoing(request: httpx.Request) -> tuple[bytes, bytes, AsyncIterator[bytes] | None]:
    """Return head, body or its beginning, and the rest of it."""
    headers = request.headers.raw
    target = cast("bytes", request.extensions.get("target", request.url.raw_path))
    head = request_head(request.method.encode("ascii", "replace"), target, headers)
    hosts = [value for name, value in headers if name.lower() == b"host"]
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    codings = [value for name, value in headers if name.lower() == b"transfer-encoding"]
    if len(hosts) != 1 or len(lengths) + len(codings) > 1:
        raise RequestRefused("The request needs one host and at most one framing.")

    if codings:
        if codings[0].lower() != b"chunked":
            raise RequestRefused("The request's transfer coding is unknown.")
        return head, b"", _Chunked(_pieces(request))
    if lengths and not re.fullmatch(rb"[0-9]{1,18}", lengths[0]):
        raise RequestRefused("The request's content length is no number.")

    length = int(lengths[0]) if lengths else 0
    try:
        body = request.content
    except httpx.RequestNotRead:
        pieces = _Measured(_pieces(request), length)
        body = await anext(pieces, b"")
        if len(body) < length:
            return head, body, pieces
        await anext(pieces, b"")  # nothing, or it raises
    if len(body) != length:
        raise RequestRefused("The request's body has not the length that its head announces.")
    return head, body, None


def _pieces(request: httpx.Request) -> AsyncIterator[bytes]:
    if not isinstance(request.stream, httpx.AsyncByteStream):
        raise RequestRefused("The request's body can't be read asynchronously.")
    return aiter(request.stream)


class _Measured:
    """A body in pieces, which must have the length that was announced. No generator: nobody would close it."""

    def __init__(self, pieces: AsyncIterator[bytes], length: int) -> None:
        self._pieces = pieces
        self._left = length

    def __aiter__(self) -> _Measured:
        return self

    async def __anext__(self) -> bytes:
        piece = await anext(self._pieces, None)
        if piece is None:
            if self._left:
                raise RequestRefused("The request's body is shorter than its head announces.")
            raise StopAsyncIteration
        self._left -= len(piece)
        if self._left < 0:
            raise RequestRefused("The request's body is longer than its head announces.")
        return piece


class _Chunked:
    """A body of unknown length, framed (RFC 9112, section 7.1)."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._ended = False

    def __aiter__(self) -> _Chunked:
        return self

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        piece = b""
        while not piece:  # an empty chunk would be the end
            try:
                piece = await anext(self._pieces)
            except StopAsyncIteration:
                self._ended = True
                return b"0\r\n\r\n"
        return b"%x\r\n%b\r\n" % (len(piece), piece)


class _AnswerStream(httpx.AsyncByteStream):
    """The body of an answer; its own iterator, so that there is nothing to be closed but the answer."""

    def __init__(self, answer: Answer, timeout: float | None) -> None:
        self._answer = answer
        self._timeout = timeout

    def __aiter__(self) -> _AnswerStream:
        return self

    async def __anext__(self) -> bytes:
        try:
            data = await self._answer.read(self._timeout)
        except Http11Error as exc:
            self._answer.close()
            raise _as_httpx(exc) from exc
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        self._answer.close()


def _as_httpx(exc: Http11Error) -> httpx.TransportError:
    """Return the exception by which httpx's users know this one."""
    match exc:
        case RequestRefused():
            return httpx.LocalProtocolError(str(exc))
        case ConnectTimedOut():
            return httpx.ConnectTimeout(str(exc))
        case ConnectFailed():
            return httpx.ConnectError(str(exc))
        case SendTimedOut():
            return httpx.WriteTimeout(str(exc))
        case ReadTimedOut():
            return httpx.ReadTimeout(str(exc))
        case AnswerCutShort(answered=False, sending=False):
            return httpx.RemoteProtocolError("Server disconnected without sending a response.")
        case AnswerCutShort(sending=False):
            return httpx.RemoteProtocolError("The server closed the connection in the middle of its response.")
        case ConnectionBroken(sending=True):
            return httpx.WriteError(str(exc))
        case ConnectionBroken():
            return httpx.ReadError(str(exc))
        case _:
            return httpx.RemoteProtocolError(str(exc))
