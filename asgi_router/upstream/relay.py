"""Owns the passing on of one response, worker to client: bytes unchanged, no faster than the client reads."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, cast

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from asgi_router.client import ClientGone
from asgi_router.errors import WorkerError, WorkerTimeout
from asgi_router.headers import header, response_headers
from asgi_router.upstream.transport import worker_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import httpx

    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.scheduling.lease import Lease

CLOSE_GRACE = 1.0
"""Seconds that closing a response may take. An unfinished HTTP/1.1 response is closed by dropping its socket."""

CHECKPOINT_EVERY = 64  # chunks

logger = logging.getLogger("asgi_router")


async def relay(
    response: httpx.Response,
    exchange: Exchange,
    lease: Lease,
    *,
    own_headers: RawHeaders,
    idle_timeout: float | None,
    send_timeout: float | None,
    before_start: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Send `response` to the client of `exchange`, and close it whatever happens.

    The status goes out together with the first body byte: until then the worker's failure can still be told
    to the client as a clean error. The lease is released when the worker's last byte has come.
    `before_start` is awaited ahead of that: when it returns the answer may be passed on.

    Raises:
        WorkerError: the worker failed; `exchange.client.started` says whether the client has seen anything.
        ClientGone: the client did.
    """
    client = exchange.client
    late = WorkerTimeout("The worker paused for too long.")
    gone = ClientGone()
    chunks = aiter(cast("httpx.AsyncByteStream", response.stream))
    try:
        status = response.status_code
        if not 200 <= status <= 599:
            # Servers raise over any other, and the client would get no answer at all.
            raise WorkerError("The worker answered with a status that does not exist.")

        headers = response_headers(response.headers.raw)
        bodiless = status in (204, 304)
        length = header(headers, b"content-length")
        missing = int(length) if re.fullmatch("[0-9]{1,18}", length) and not bodiless else None
        if missing is None:
            # Either no number, or the length of a body that isn't there: forbidden with 204; with 304 uvicorn
            # would wait for it.
            headers = [(name, value) for name, value in headers if name != b"content-length"]

        # First byte: the deadline is still the one that was set when the request was sent.
        chunk = b"" if bodiless else await read_chunk(chunks)
        if chunk:
            lease.first_byte(prefilled=status < 400)
            exchange.times.first_byte = exchange.times.clock()
        if before_start is not None:
            await before_start()
        await checkpoint_if_cancelled()  # a deadline that passed in this very tick is still a clean error
        exchange.allow(send_timeout, gone)
        exchange.forget_prompt()
        await client.start(status, [*(own for own in own_headers if not header(headers, own[0])), *headers])

        count = 0
        while chunk:
            if missing is not None:
                missing -= len(chunk)
                if missing <= 0:
                    break

            exchange.allow(send_timeout, gone)
            await client.write(chunk)
            count += 1
            if count % CHECKPOINT_EVERY == 0:
                await checkpoint()  # or a transport that never waits would starve the watcher
            exchange.allow(idle_timeout, late)
            chunk = await read_chunk(chunks)

        if missing:
            # HTTP transports notice this themselves. Servers raise over it, and their clients see no reason.
            raise WorkerError("The worker's answer has not the length that it announced.")
        if chunk:
            exchange.allow(idle_timeout, late)
            await _finish(chunks)

        lease.release()
        exchange.allow(send_timeout, gone)
        await client.end(chunk)
    finally:
        # Closing may take its time. Whatever comes now, the worker is done with this request.
        lease.release()
        await close_response(response, chunks)


async def read_chunk(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the next bytes of a body, or none at its end.

    Raises:
        RouterError: the worker failed.
    """
    try:
        while not (chunk := bytes(await anext(chunks))):  # bytes() of bytes is no copy
            await checkpoint()  # as in `relay`: a transport that gives nothing for ever must not stop the loop
    except StopAsyncIteration:
        return b""
    except Exception as exc:
        raise worker_error(exc) from exc

    return chunk


async def _finish(chunks: AsyncIterator[bytes]) -> None:
    """Read the end of a body that is complete by its length, so that its connection can be used again."""
    try:
        await anext(chunks, None)
    except Exception as exc:
        logger.debug("worker failed after a complete answer: %s", type(exc).__name__)


async def close_response(response: httpx.Response, chunks: AsyncIterator[bytes] | None = None) -> None:
    """Close a response, and the iterator over its body if there is one. Bounded in time, never raises.

    Nothing that must happen may stand behind this: a native cancellation gets through the shield.
    """
    with anyio.move_on_after(CLOSE_GRACE, shield=True):
        try:
            try:
                if (aclose := getattr(chunks, "aclose", None)) is not None:
                    await aclose()
            finally:
                await response.aclose()
        except Exception as exc:
            logger.debug("closing a worker's response failed: %s", type(exc).__name__)
