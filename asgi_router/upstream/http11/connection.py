"""Owns one connection to a worker: one request at a time, its answer read no faster than it is taken.

    connecting ─▶ idle ─ask─▶ sending ─▶ waiting for a head ─▶ in a body ─▶ idle, if it may go on
        │          │            │               │                  │
        └──────────┴────────────┴───────────────┴──────────────────┴─ abort, or the worker's close ─▶ closed

There is no way out of `closed`, and every way to it is synchronous.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

from asgi_router.upstream.http11.answer import Answer
from asgi_router.upstream.http11.errors import (
    AnswerCutShort,
    ConnectionBroken,
    Http11Error,
    InvalidAnswer,
    ReadTimedOut,
    SendTimedOut,
)
from asgi_router.upstream.http11.reader import ResponseReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

JOINED = 16384  # bytes of a body that are copied behind their head, rather than handed over as a second buffer
PIECE = 1_048_576  # bytes handed to the loop at once: what we hold a second time for a worker that doesn't read
PIECE_TLS = 262144  # the same under TLS, whose transports don't tell how much of a piece the worker has taken
PAUSE_ABOVE = 65536  # bytes of an answer that nobody has taken yet; the loop may add 256 KiB, its unit of reading


def _piece(transport: asyncio.Transport) -> int:
    return PIECE if transport.get_extra_info("sslcontext") is None else PIECE_TLS


class Owner(Protocol):
    """Whom a connection tells what becomes of it."""

    def opened(self, connection: Connection) -> None:
        """It has a socket."""

    def freed(self, connection: Connection) -> None:
        """It has answered, and may be asked again."""

    def gone(self, connection: Connection) -> None:
        """It can't be used any more. Called once."""

    def closed(self, connection: Connection) -> None:
        """Its socket is closed."""


class Connection(asyncio.Protocol):
    """One connection, from before it is made.

    Attributes:
        used: an answer has come on it.
        freed_at: when it became idle, by the loop's clock; its owner's to set.
        reading_paused: the socket is not read, because the answer isn't taken.
    """

    __slots__ = (
        "_answer",
        "_closed",
        "_loop",
        "_owner",
        "_reader",
        "_sending",
        "_transport",
        "_writing_paused",
        "freed_at",
        "reading_paused",
        "used",
    )

    def __init__(self, owner: Owner, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = ResponseReader()
        self._answer: Answer | None = None
        self._closed = False
        self._sending = False
        self._writing_paused = False
        self.reading_paused = False
        self.used = False
        self.freed_at = 0.0

    def __repr__(self) -> str:
        return f"<Connection {self.state}{', used before' if self.used else ''}>"

    @property
    def state(self) -> str:
        """What it is doing, in a few words."""
        if self._closed:
            return "closed"
        if self._transport is None:
            return "connecting"
        if self._answer is None:
            return "idle"
        if self._sending:
            return "sending"
        return "in a body" if self._reader.has_head else "waiting for a head"

    @property
    def usable(self) -> bool:
        """Whether it may be asked: nothing is known of its end yet."""
        return self._transport is not None and not self._closed and not self._transport.is_closing()

    async def ask(
        self,
        head: bytes,
        body: bytes,
        *,
        more: AsyncIterator[bytes] | None = None,
        bodiless: bool = False,
        send_timeout: float | None = None,
        read_timeout: float | None = None,
    ) -> Answer:
        """Send a request, and return its answer as soon as that has a head. If this raises, the connection is closed.

        Args:
            head: the request's head, complete.
            body: its body, or the beginning of it, as framed in `head`.
            more: the rest. No more of it is asked for once the worker has answered.
            bodiless: it is a HEAD request.
            send_timeout: seconds in which the worker has to take some of what is sent.
            read_timeout: seconds without a byte of the answer's head.

        Raises:
            ConnectionBroken, InvalidAnswer, SendTimedOut, ReadTimedOut: as they say.
        """
        transport = self._transport
        if transport is None or self._answer is not None:
            raise ConnectionBroken("The connection can't be used.", sending=True)

        self._answer = answer = Answer(self, self._loop, reused=self.used)
        self._reader.expect(answer, bodiless=bodiless)
        self._sending = True
        try:
            if len(body) <= JOINED:
                transport.write(head + body)
                at = len(body)
            else:
                at = _piece(transport)
                transport.writelines((head, memoryview(body)[:at]))
            if at < len(body):
                await self._send(transport, answer, memoryview(body)[at:], send_timeout)
            if more is not None:
                async for piece in more:
                    await self._send(transport, answer, memoryview(piece), send_timeout)
                    if answer.status:
                        break
            self._sending = answer.status != 0  # an answer before the end: there may be bytes that were not sent
            while not answer.status:
                answer.check()
                if self._writing_paused:
                    await self._drain(transport, answer, send_timeout)
                else:
                    await answer.wait(read_timeout, ReadTimedOut)
        except BaseException:
            self.abort()
            raise
        return answer

    async def _send(
        self, transport: asyncio.Transport, answer: Answer, data: memoryview, timeout: float | None
    ) -> None:
        """Hand over `data` as the worker takes it; stop at an answer."""
        piece = _piece(transport)
        while len(data) and not answer.status:
            answer.check()
            if self._writing_paused or transport.is_closing():  # its loss is told in the loop's next turn
                await self._drain(transport, answer, timeout)
            else:
                transport.write(data[:piece])
                data = data[piece:]

    async def _drain(self, transport: asyncio.Transport, answer: Answer, timeout: float | None) -> None:
        """Return when more may be sent, or when the answer has changed; raise if nothing moves in time."""
        left = transport.get_write_buffer_size()
        try:
            await answer.wait(timeout, SendTimedOut)
        except SendTimedOut:
            if transport.get_write_buffer_size() >= left:
                raise

    def abort(self) -> None:
        """Close it now, whatever it does. Its answer, if there is one, fails. Idempotent."""
        self._end(None)
        if self._transport is not None:
            self._transport.abort()

    def resume_reading(self) -> None:
        """Read the socket again: what was there has been taken."""
        self.reading_paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    def _end(self, failure: Http11Error | None) -> None:
        if self._closed:
            return

        self._closed = True
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.fail(failure or ConnectionBroken("The connection was closed.", answered=self._reader.began))
        self._reader.close()
        self._owner.gone(self)

    def _broken(self, kind: type[ConnectionBroken]) -> ConnectionBroken:
        return kind("The worker closed the connection.", answered=self._reader.began, sending=self._sending)

    def _complete(self, answer: Answer) -> None:
        transport = self._transport
        assert transport is not None  # it has just been read
        self._answer = None
        self.used = True
        if self.reading_paused:
            self.resume_reading()
        answer.end()
        if self._reader.keeps_alive and not self._sending and transport.get_write_buffer_size() == 0:
            self._owner.freed(self)
        else:
            self.abort()

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by their class
        if self._closed:
            self._transport.abort()  # its making was cancelled: uvloop may never tell of its end
        else:
            self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody has asked
            self.abort()
            return

        reader = self._reader
        try:
            reader.feed(data)
        except InvalidAnswer as exc:
            self._end(exc.with_traceback(None))
            self.abort()
            return

        if reader.complete:
            self._complete(answer)
        elif reader.has_head:
            if answer.size > PAUSE_ABOVE and not self.reading_paused:
                self.reading_paused = True
                assert self._transport is not None  # it has just been read
                self._transport.pause_reading()
            answer.wake()

    def eof_received(self) -> None:
        answer = self._answer
        if answer is not None and self._reader.has_head and self._reader.until_close:
            self._complete(answer)
        self._end(self._broken(AnswerCutShort))
        self.abort()  # the loop's own close would wait for a worker that doesn't read the rest of the request

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(self._broken(AnswerCutShort if exc is None else ConnectionBroken))
        self._transport = None
        self._owner.closed(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._answer is not None:
            self._answer.wake()
