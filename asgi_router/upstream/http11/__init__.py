"""Owns HTTP/1.1 to the workers on asyncio and uvloop: connections, the pool, and an httpx transport over it.

The lean way, for the data path (no httpx object, no task, no lock, one future for a request that is not streamed):

    origin = Origin(worker_url)                        # once for each worker
    head = request_head(b"POST", target, headers)      # bytes; raises RequestRefused
    pool = transport.pool()                            # None where there is no asyncio: use httpx's interface
    answer = await pool.request(origin, head, body, connect_timeout=5.0, progress=exchange.progress)
    try:
        answer.status, answer.headers                  # int, list[tuple[bytes, bytes]] with lower-case names
        while data := await answer.read():             # b"" at the end; returns at once what is there
            ...                                        # answer.complete: nothing will follow `data`
    finally:
        answer.close()                                 # synchronous, idempotent

Signatures:

    Origin(url: str | httpx.URL, *, uds: str | None = None)
        .authority: bytes                              # for the Host field
    request_head(method: bytes, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bytes
    Pool(*, keepalive_expiry: float, ssl_context: SSLContext | None = None, max_idle: int = 1024)
        async .request(origin, head: bytes, body: bytes = b"", *, more: AsyncIterator[bytes] | None = None,
            bodiless: bool = False, connect_timeout: float | None = None, send_timeout: float | None = None,
            read_timeout: float | None = None, progress: Progress | None = None) -> Answer
        .active, .idle, .sockets: int;  .abort() -> None;  async .aclose() -> None
    Answer
        .status: int  .headers: list[tuple[bytes, bytes]]  .reason: bytes  .reused: bool  .complete: bool
        .take() -> bytes | None                        # None: one would have to wait
        async .read(timeout: float | None = None) -> bytes
        .close() -> None
    Http11Transport(*, keepalive_expiry: float, ssl_context: SSLContext | None = None, uds: str | None = None,
            fallback: httpx.AsyncBaseTransport | None = None)       # httpx.AsyncBaseTransport
        .pool() -> Pool | None                         # of the running loop

The connection goes back to the pool when the answer's last byte has arrived, whether or not it was read; a stale one is
dealt with inside `request`, so its errors say how far a request was: `ConnectFailed` (and `ConnectTimedOut`): nothing
was sent; anything else: the worker may have begun.
"""

from asgi_router.upstream.http11.answer import Answer
from asgi_router.upstream.http11.errors import (
    AnswerCutShort,
    ConnectFailed,
    ConnectionBroken,
    ConnectTimedOut,
    Http11Error,
    InvalidAnswer,
    ReadTimedOut,
    RequestRefused,
    SendTimedOut,
)
from asgi_router.upstream.http11.pool import Pool, Progress
from asgi_router.upstream.http11.requests import Origin, request_head
from asgi_router.upstream.http11.transport import Http11Transport

__all__ = [
    "Answer",
    "AnswerCutShort",
    "ConnectFailed",
    "ConnectTimedOut",
    "ConnectionBroken",
    "Http11Error",
    "Http11Transport",
    "InvalidAnswer",
    "Origin",
    "Pool",
    "Progress",
    "ReadTimedOut",
    "RequestRefused",
    "SendTimedOut",
    "request_head",
]
