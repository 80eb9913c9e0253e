"""Owns the request that a worker gets: the client's bytes, at the worker's address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from anyio.lowlevel import checkpoint

from asgi_router.errors import InvalidRequest
from asgi_router.headers import VIA, request_headers

if TYPE_CHECKING:
    from asgi_router.exchange import Exchange, HeldBody
    from asgi_router.headers import RawHeaders


def upstream_request(
    exchange: Exchange,
    url: str,
    body: bytes,
    *,
    own_headers: RawHeaders,
    connect_timeout: float,
    write_timeout: float | None,
) -> httpx.Request:
    """Return the request of `exchange` for the worker's `url`, with the client's query string.

    `body` is let go with the prompt (`Exchange.forget_prompt`), however long the transport keeps the request.

    It has the one `x-request-id` by which it is known here. Reading has no time-out here:
    the exchange's own deadline knows a first byte from a pause.

    Raises:
        InvalidRequest: the query string can't stand in a URL.
    """
    scope = exchange.client.scope
    target = httpx.URL(url)
    try:
        if query := scope.get("query_string"):
            target = target.copy_with(raw_path=target.raw_path + b"?" + query)
    except (httpx.InvalidURL, ValueError) as exc:
        raise InvalidRequest("The request's query string can't be forwarded.") from exc

    timeouts = {"connect": connect_timeout, "write": write_timeout, "read": None, "pool": None}
    length = str(len(body)).encode()
    # One id for client, log and worker: what the client calls a request may be unfit, or not what its body says.
    replaced = {b"x-request-id", *(name for name, _ in own_headers)}
    headers = [header for header in request_headers(scope) if header[0] not in replaced]
    headers += [(b"host", target.netloc), (b"content-length", length), *own_headers]
    if not any(name == b"x-request-id" for name, _ in own_headers):
        headers.append((b"x-request-id", exchange.ids.request_id.encode()))
    headers.append(VIA)
    return httpx.Request(
        "POST", target, headers=headers, stream=_Body(exchange.hold(body)), extensions={"timeout": timeouts}
    )


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
