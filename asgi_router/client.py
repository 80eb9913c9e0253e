"""Owns the client's side of one exchange: reading its body, noticing that it leaves, writing its answer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from anyio import sleep_forever
from anyio.lowlevel import checkpoint

from asgi_router.errors import AnswerCut, BodyTooLarge, RouterError
from asgi_router.headers import is_event_stream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from asgi_router.headers import RawHeaders

_STRAY_MESSAGES = 8  # body messages out of turn that are ignored
_END_BYTES = 64 * 1024
_MAX_PARTS = 4096  # of a body, before they become one: a million of one byte each would take 40 times their size
_EVENT_ENDS = (b"\n\n", b"\r\r", b"\r\n\r\n")


class ClientGone(Exception):
    """The client left, or stopped reading for longer than `SEND_TIMEOUT`. There is nobody to be told."""


class Client:
    """The peer behind one ASGI call.

    Attributes:
        status: what has been sent; 0: nothing. It can't be taken back.
        finished: the last message of the answer is on its way: what follows is no disconnect any more.
        writable: a message may be sent: the answer is not finished, and no `send` was broken off.
    """

    __slots__ = ("_event_stream", "_last", "_receive", "_send", "_sending", "finished", "scope", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.status = 0
        self.finished = False
        self._sending = False
        self._event_stream = False
        self._last: deque[bytes] = deque(maxlen=4)  # chunks

    @property
    def started(self) -> bool:
        return self.status != 0

    @property
    def end_of_answer(self) -> bytes:
        """The last few chunks that were sent, or the last 64 KiB of them."""
        return b"".join(self._last)[-_END_BYTES:]

    @property
    def writable(self) -> bool:
        return not self.finished and not self._sending

    async def read_body(self, limit: int, announced: bytes = b"") -> bytes:
        """Return the whole request body.

        Args:
            limit: bytes that it may have.
            announced: its length, as the request's head says.

        Raises:
            BodyTooLarge: it is larger, by its own announcement or by count.
            ClientGone: the client left before its end.
        """
        if announced.isdigit() and int(announced[:20]) > limit:
            raise _too_large(limit)

        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = bytes(message.get("body", b""))  # of bytes that is no copy
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            if not part:
                await checkpoint()  # a `receive` that never suspends must not be able to stop the loop
            parts.append(part)
            if len(parts) > _MAX_PARTS:
                parts = [b"".join(parts)]
            more = message.get("more_body", False)

        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def wait_gone(self) -> None:
        """Return when the client has left. To be called after the body was read, and by one task only."""
        for _ in range(_STRAY_MESSAGES):
            # After a disconnect some servers never return again.
            if (await self._receive())["type"] == "http.disconnect":
                return
            await checkpoint()

        # Host middleware that replays the body for ever: from it we will never hear of a disconnect.
        await sleep_forever()

    async def forward(self, message: Message, *, last: bool) -> None:
        """Send a message of the wrapped app's, as it is; `last` if it ends the answer."""
        if message["type"] == "http.response.start":
            headers = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
            self._begin(message["status"], headers, is_event_stream(headers))
        else:
            self._last.append(message.get("body", b""))
            self.finished = self.finished or last
        await self._deliver(message)

    # These three are no coroutine functions, for one coroutine is enough: each is awaited at once.

    def start(self, status: int, headers: RawHeaders, *, events: bool = False) -> Awaitable[None]:
        """Send the status and the headers, whose names are in lower case; `events` if they announce such."""
        self._begin(status, headers, events)
        return self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, chunk: bytes) -> Awaitable[None]:
        """Send a part of the body."""
        self._last.append(chunk)
        return self._deliver({"type": "http.response.body", "body": chunk, "more_body": True})

    def end(self, chunk: bytes = b"") -> Awaitable[None]:
        """Send the last part of the body."""
        # Servers report a disconnect as soon as the answer is complete, and may do so inside this send.
        self.finished = True
        self._last.append(chunk)
        return self._deliver({"type": "http.response.body", "body": chunk, "more_body": False})

    async def fail(self, error: RouterError, own_headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send an OpenAI-shaped error as the whole answer, with these headers."""
        body = error.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self.start(error.status, [*headers, *error.headers, *own_headers])
        await self.end(body)

    async def cut(self, error: RouterError) -> None:
        """Leave an answer that has begun so that nobody can take it for whole: no last message is sent.

        Server-sent events get one more event, with the error in it, and no `[DONE]`. That also survives host
        middleware which ends cut answers as if they were whole (`BaseHTTPMiddleware` does).

        Raises:
            AnswerCut: it is no event stream. The server closes the connection, the host app sees the reason.
        """
        if not self._event_stream:
            raise AnswerCut(str(error)) from None  # another library's exception may quote the worker's bytes

        # An event that the worker left unfinished is ended first, or ours would be glued to it.
        gap = b"\n\n" if self._last and not self.end_of_answer.endswith(_EVENT_ENDS) else b""
        await self.write(gap + b"data: " + error.body() + b"\n\n")

    def _begin(self, status: int, headers: RawHeaders, events: bool) -> None:
        self.status = status
        # To a body that is encoded, or has a declared length, nothing can be added.
        self._event_stream = events and not {name for name, _ in headers} & {b"content-encoding", b"content-length"}

    async def _deliver(self, message: Message) -> None:
        self._sending = True  # and so it stays if the send is broken off: nobody knows what has been taken
        try:
            await self._send(message)
            self._sending = False
        except OSError as exc:  # what ASGI 2.4 asks of a server whose client has gone
            raise ClientGone from exc


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes.")
