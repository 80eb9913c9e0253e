"""Owns the passing on of one response, worker to client: bytes unchanged, no faster than the client reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from asgi_router.client import ClientGone
from asgi_router.errors import WorkerError, paused
from asgi_router.headers import header, response_headers
from asgi_router.upstream.answer import close, finish, read
from asgi_router.upstream.transport import worker_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.scheduling.lease import Lease
    from asgi_router.upstream.answer import WorkerAnswer

CHECKPOINT_EVERY = 64  # chunks
MAX_DIGITS = 18  # of a length that is a length


async def relay(
    answer: WorkerAnswer,
    exchange: Exchange,
    lease: Lease,
    *,
    own_headers: RawHeaders,
    idle_timeout: float | None,
    send_timeout: float | None,
    before_start: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Send `answer` to the client of `exchange`, and close it whatever happens.

    The status goes out together with the first body byte: until then the worker's failure can still be told
    to the client as a clean error. The lease is released when the worker's last byte has come.
    `before_start` is awaited ahead of that: when it returns the answer may be passed on.

    Raises:
        WorkerError: the worker failed; `exchange.client.started` says whether the client has seen anything.
        ClientGone: the client did.
    """
    client = exchange.client
    try:
        status = answer.status
        if not 200 <= status <= 599:
            # Servers raise over any other, and the client would get no answer at all.
            raise WorkerError("The worker answered with a status that does not exist.")

        headers, events = response_headers(answer.headers)
        bodiless = status in (204, 304)
        missing: int | None = None
        length = header(headers, b"content-length")
        if length.isdecimal() and len(length) <= MAX_DIGITS and not bodiless:
            missing = int(length)
        else:
            # Either no number, or the length of a body that isn't there: forbidden with 204; with 304 uvicorn
            # would wait for it.
            headers = [(name, value) for name, value in headers if name != b"content-length"]

        # First byte: the deadline is still the one that was set when the request was sent.
        chunk = b"" if bodiless else _take(answer)
        if chunk is None:
            chunk = await read(answer)
        if chunk:
            lease.first_byte(prefilled=status < 400)
            exchange.times.first_byte = exchange.times.clock()
        if before_start is not None:
            await before_start()
        if exchange.pool is None:
            await checkpoint_if_cancelled()  # a deadline that passed in this very tick is still a clean error
        exchange.allow(send_timeout, ClientGone)
        exchange.forget_prompt()
        if own_headers:
            names = {name for name, _ in headers}
            headers = [*(own for own in own_headers if own[0] not in names), *headers]
        await client.start(status, headers, events=events)

        count = 0
        while chunk:
            if answer.complete:
                chunk += _take(answer) or b""  # what has come since
            if missing is not None:
                missing -= len(chunk)
            if answer.complete or (missing is not None and missing <= 0):
                break

            exchange.allow(send_timeout, ClientGone)
            await client.write(chunk)
            exchange.check()  # should a host's `send` have swallowed the cancellation
            count += 1
            if count % CHECKPOINT_EVERY == 0:
                await checkpoint()  # or a worker that is always ahead would starve the watcher
            if (ready := _take(answer)) is not None:
                chunk = ready
            else:
                exchange.allow(idle_timeout, paused)
                chunk = await read(answer)

        if missing:
            # HTTP transports notice this themselves. Servers raise over it, and their clients see no reason.
            raise WorkerError("The worker's answer has not the length that it announced.")
        if chunk and not answer.complete:
            exchange.allow(idle_timeout, paused)
            await finish(answer)

        lease.release()
        exchange.allow(send_timeout, ClientGone)
        await client.end(chunk)
    finally:
        # Closing may take its time. Whatever comes now, the worker is done with this request.
        lease.release()
        if not answer.complete:
            await close(answer)


def _take(answer: WorkerAnswer) -> bytes | None:
    try:
        return answer.take()
    except Exception as exc:
        raise worker_error(exc) from exc
