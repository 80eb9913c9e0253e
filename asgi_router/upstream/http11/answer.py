"""Owns one answer of a worker as its reader sees it: status, headers, and the body as it comes."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from asgi_router.upstream.http11.errors import ConnectionBroken, Http11Error, ReadTimedOut

if TYPE_CHECKING:
    import asyncio

    from asgi_router.upstream.http11.connection import Connection


class Answer:
    """The answer to one request, from its head on. For one reader at a time.

    Its connection goes back to the pool by itself as soon as the last byte has *arrived*, read or not.

    Attributes:
        status: 200 to 999.
        reason: the reason phrase, which nobody should need.
        headers: names in lower case, in the order in which they came, repeated ones apart.
        http_10: the worker speaks HTTP/1.0.
        reused: the request went out on a connection that had been used before.
        complete: all of the body has arrived: `take` gives the rest of it, and nothing after that.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_failure",
        "_loop",
        "_size",
        "_waiter",
        "complete",
        "headers",
        "http_10",
        "reason",
        "reused",
        "status",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop, *, reused: bool) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.http_10 = False
        self.reused = reused
        self.complete = False
        self._connection: Connection | None = connection
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._failure: Http11Error | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "failed" if self._failure else "complete" if self.complete else "open"
        return f"<Answer {self.status or 'without a head'} {state}, {self._size} bytes to read>"

    def take(self) -> bytes | None:
        """Return what has arrived of the body, in one piece; `b""` at its end; None if it would have to wait.

        Raises:
            ConnectionBroken, InvalidAnswer: the rest will not come. What had come before was given before.
        """
        chunks = self._chunks
        if chunks:
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            chunks.clear()
            self._size = 0
            if self._connection is not None and self._connection.reading_paused:
                self._connection.resume_reading()
            return data
        self.check()
        return b"" if self.complete else None

    async def read(self, timeout: float | None = None) -> bytes:
        """Return the next bytes of the body, `b""` at its end. Returns without a turn of the loop if there are any.

        Args:
            timeout: seconds to wait for them. None: no limit.

        Raises:
            ConnectionBroken, InvalidAnswer: the rest will not come.
            ReadTimedOut: nothing came in time. One may read again.
        """
        while (data := self.take()) is None:
            await self.wait(timeout)
        return data

    def close(self) -> None:
        """Be done with the answer. Idempotent. A connection on which more of it would come is closed."""
        self._chunks.clear()
        self._size = 0
        if self._connection is not None:
            self._connection.abort()
        elif self._failure is None and not self.complete:
            self._failure = ConnectionBroken("The answer was closed.", answered=True)

    async def wait(self, timeout: float | None = None, late: type[Http11Error] = ReadTimedOut) -> None:
        """Return when anything has changed: what, is to be looked at. Not for users of the pool."""
        if self._waiter is not None:
            raise RuntimeError("two tasks read the same answer")

        self._waiter = waiter = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(timeout, _expire, waiter, late)
        try:
            await waiter
        finally:
            self._waiter = None
            del waiter  # it holds its exception, whose traceback holds this frame
            if timer is not None:
                timer.cancel()

    # What follows is for the connection alone.

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add(self, data: bytes) -> None:
        """Append to the body."""
        self._chunks.append(data)
        self._size += len(data)

    @property
    def size(self) -> int:
        """Bytes that have arrived and were not taken yet."""
        return self._size

    def end(self) -> None:
        """The body is complete, and the connection no longer ours."""
        self.complete = True
        self._connection = None
        self.wake()

    def fail(self, failure: Http11Error) -> None:
        """Nothing more will come, and the connection is gone."""
        self._failure = failure
        self._connection = None
        self.wake()

    def check(self) -> None:
        """Raise what the answer has failed with: a copy each time.

        A traceback holds its callers' frames, and so the prompt, and they hold this object. If that held the exception,
        the prompt would stay until a collection of garbage.
        """
        if self._failure is not None:
            raise copy(self._failure) from self._failure.__cause__


def _expire(waiter: asyncio.Future[None], late: type[Http11Error]) -> None:
    if not waiter.done():
        waiter.set_exception(late("The worker paused for too long."))
