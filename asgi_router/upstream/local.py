"""Owns serving a request by the wrapped app itself: a worker in this process, reached without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asgi_router.client import ClientGone
from asgi_router.errors import WorkerError, WorkerTimeout
from asgi_router.peers import without_hop

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.scheduling.lease import Lease


async def serve_locally(
    app: ASGIApp,
    exchange: Exchange,
    lease: Lease,
    *,
    own_headers: RawHeaders,
    idle_timeout: float | None,
    send_timeout: float | None,
) -> None:
    """Let `app` answer the request of `exchange`. Its messages pass as they are, but for `own_headers`.

    The app is called with the whole body at hand. When the client leaves, a time-out passes or the server shuts
    down it is cancelled, as Starlette does with the source of a streaming response. The lease is released with the
    last message.

    Raises:
        WorkerError: the app returned without an answer, or with half of one.
        ClientGone: the client did.
        Exception: what the app raises, as if the router weren't there.
    """
    client = exchange.client
    gone = ClientGone()
    late = WorkerTimeout("The worker paused for too long.")
    unread: list[bytes] = [exchange.body]
    ended = anyio.Event()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await ended.wait()  # a client that leaves earlier ends all this
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            exchange.forget_prompt()
            message = {**message, "headers": [*own_headers, *message.get("headers", ())]}
        elif kind == "http.response.body":
            if message.get("body") and exchange.times.first_byte is None:
                exchange.times.first_byte = exchange.times.clock()
                lease.first_byte(prefilled=client.status < 400)
            if not message.get("more_body", False):
                lease.release()

            if message.get("body") or not message.get("more_body", False):
                exchange.allow(send_timeout, gone)
        try:
            await client.forward(message)
        except ClientGone as exc:
            exchange.stop(exc)
            raise OSError("the client has gone") from exc
        if client.finished:
            ended.set()
        elif exchange.times.first_byte is not None:
            exchange.allow(idle_timeout, late)

    await app({**client.scope, "headers": without_hop(client.scope.get("headers") or ())}, receive, send)
    if not client.finished:
        raise WorkerError("The app gave no whole answer.")
