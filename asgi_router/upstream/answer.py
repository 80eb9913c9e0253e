"""Owns what the rest of the router sees of a worker's answer, whichever transport it came by."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import anyio
from anyio.lowlevel import checkpoint

from asgi_router.headers import without_controls
from asgi_router.upstream.http11 import Answer
from asgi_router.upstream.transport import worker_error

if TYPE_CHECKING:
    import httpx

    from asgi_router.headers import RawHeaders

CLOSE_GRACE = 1.0
"""Seconds that closing a response may take. An unfinished HTTP/1.1 response is closed by dropping its socket."""

logger = logging.getLogger("asgi_router")


class HttpxAnswer:
    """An answer that an httpx transport gives, under the interface of our own (`http11.Answer`).

    Attributes:
        status: as the worker sent it.
        headers: names in lower case, values without control characters.
        complete: never True: when a body is over only its reading tells.
    """

    __slots__ = ("_chunks", "_response", "complete", "headers", "status")

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._chunks = aiter(cast("httpx.AsyncByteStream", response.stream))
        self.status = response.status_code
        self.headers: RawHeaders = [(name.lower(), without_controls(value)) for name, value in response.headers.raw]
        self.complete = False

    def take(self) -> bytes | None:
        """Return None: one has to wait."""
        return None

    async def read(self) -> bytes:
        """Return the next bytes of the body, or none at its end.

        Raises:
            Exception: what the transport raises; see `worker_error`.
        """
        try:
            while not (chunk := bytes(await anext(self._chunks))):  # bytes() of bytes is no copy
                await checkpoint()  # a transport that gives nothing for ever must not stop the loop
        except StopAsyncIteration:
            return b""
        return chunk

    async def finish(self) -> None:
        """Read the end of a body that is complete by its length, so that its connection can be used again."""
        try:
            await anext(self._chunks, None)
        except Exception as exc:
            logger.debug("worker failed after a complete answer: %s", type(exc).__name__)

    async def aclose(self) -> None:
        """Close it, and the iterator over its body. Bounded in time, never raises.

        Nothing that must happen may stand behind this: a native cancellation gets through the shield.
        """
        with anyio.move_on_after(CLOSE_GRACE, shield=True):
            try:
                try:
                    if (aclose := getattr(self._chunks, "aclose", None)) is not None:
                        await aclose()
                finally:
                    await self._response.aclose()
            except Exception as exc:
                logger.debug("closing a worker's response failed: %s", type(exc).__name__)


WorkerAnswer = Answer | HttpxAnswer


async def read(answer: WorkerAnswer) -> bytes:
    """Return the next bytes of an answer's body, or none at its end.

    Raises:
        RouterError: the worker failed.
    """
    try:
        return await answer.read()
    except Exception as exc:
        raise worker_error(exc) from exc


async def finish(answer: WorkerAnswer) -> None:
    """Do with an answer that is complete by its length what its connection needs to be used again."""
    if isinstance(answer, HttpxAnswer):
        await answer.finish()


async def close(answer: WorkerAnswer) -> None:
    """Close an answer, read or not. Ours are closed at once, without a turn of the loop."""
    if isinstance(answer, HttpxAnswer):
        await answer.aclose()
    else:
        answer.close()
