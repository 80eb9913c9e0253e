"""Owns the request that a worker gets: the client's bytes, at the worker's address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from anyio.lowlevel import checkpoint

from asgi_router.errors import InvalidRequest
from asgi_router.headers import VIA, request_headers
from asgi_router.upstream.http11 import Origin, request_head

if TYPE_CHECKING:
    from asgi_router.exchange import Exchange, HeldBody
    from asgi_router.headers import RawHeaders


class Target:
    """The address of a worker's route, taken apart once.

    Args:
        url: the worker's URL with the route's path.
    """

    __slots__ = ("origin", "path", "url")

    def __init__(self, url: str) -> None:
        self.url = httpx.URL(url)
        self.origin = Origin(self.url)
        self.path = self.url.raw_path


def request_bytes(exchange: Exchange, target: Target, body: bytes, *, own_headers: RawHeaders) -> bytes:
    """Return the head of the request of `exchange` to `target` with this `body`, as our own transport sends it.

    Raises:
        RequestRefused: the client's query string or headers can't be forwarded.
    """
    path = target.path
    if query := exchange.client.scope.get("query_string"):
        path = b"%b?%b" % (path, query)
    return request_head(b"POST", path, _headers(exchange, target.origin.authority, len(body), own_headers))


def upstream_request(
    exchange: Exchange,
    target: Target,
    body: bytes,
    *,
    own_headers: RawHeaders,
    connect_timeout: float,
    write_timeout: float | None,
) -> httpx.Request:
    """Return the request of `exchange` to `target`, with the client's query string, for an httpx transport.

    `body` is let go with the prompt (`Exchange.forget_prompt`), however long the transport keeps the request.

    Reading has no time-out here: the exchange's own deadline knows a first byte from a pause.

    Raises:
        InvalidRequest: the query string can't stand in a URL.
    """
    url = target.url
    try:
        if query := exchange.client.scope.get("query_string"):
            url = url.copy_with(raw_path=target.path + b"?" + query)
    except (httpx.InvalidURL, ValueError) as exc:
        raise InvalidRequest("The request's query string can't be forwarded.") from exc

    timeouts = {"connect": connect_timeout, "write": write_timeout, "read": None, "pool": None}
    return httpx.Request(
        "POST",
        url,
        headers=_headers(exchange, url.netloc, len(body), own_headers),
        stream=_Body(exchange.hold(body)),
        extensions={"timeout": timeouts},
    )


def _headers(exchange: Exchange, host: bytes, length: int, own_headers: RawHeaders) -> RawHeaders:
    """Return all headers of a request. It has the one `x-request-id` by which it is known here."""
    # One id for client, log and worker: what the client calls a request may be unfit, or not what its body says.
    own_names = [name for name, _ in own_headers]
    headers = request_headers(exchange.client.scope, (b"x-request-id", *own_names))
    headers.append((b"host", host))
    headers.append((b"content-length", b"%d" % length))
    headers += own_headers
    if b"x-request-id" not in own_names:
        headers.append((b"x-request-id", exchange.ids.request_id.encode()))
    headers.append(VIA)
    return headers


class _Body(httpx.AsyncByteStream):
    def __init__(self, held: HeldBody) -> None:
        self._held = held

    def __aiter__(self) -> _Chunk:
        return _Chunk(self._held.content)


class _Chunk:
    """An iterator over one chunk. No async generator: one that is left half-way is finalised whenever, in any task."""

    def __init__(self, chunk: bytes) -> None:
        self._chunk = chunk

    async def __anext__(self) -> bytes:
        await checkpoint()
        chunk, self._chunk = self._chunk, b""
        if not chunk:
            raise StopAsyncIteration
        return chunk

    def __aiter__(self) -> _Chunk:
        return self
