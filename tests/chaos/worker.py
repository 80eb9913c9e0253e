"""A small worker to be a process of its own and to be broken: `python -m tests.chaos.worker PORT [SLOW_START]`.

It answers completions in pieces, with pauses between them, in the way that the request asks for (`Job`), so that
whoever asked knows each byte of the right answer. `POST /control` with a `Fault` as its body breaks it until the next
one. With SLOW_START it listens after half of these seconds, and then answers 503 for as long, as an engine that loads
its model.

It ends when its standard input does: no worker outlives the process that started it.
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

Kind = Literal["stream", "chunked", "plain"]


class Fault(enum.StrEnum):
    """What is wrong with a worker that runs."""

    NONE = ""
    RESET = "reset"
    """Answers are cut by a TCP reset, half-way."""
    STORM = "storm"
    """Completions are answered with 500; the health path is fine."""
    SICK = "sick"
    """Everything is answered with 500."""


@dataclass(frozen=True)
class Job:
    """What a request asks for: an event stream, JSON in chunks, or JSON of a declared length."""

    number: int
    kind: Kind
    pieces: int
    pause: float

    def answer(self) -> list[bytes]:
        """The right answer, piece by piece."""
        if self.kind == "stream":
            events = [{"id": self.number, "choices": [{"delta": {"content": f"{i} "}}]} for i in range(self.pieces)]
            return [*(b"data: %s\n\n" % json.dumps(event).encode() for event in events), b"data: [DONE]\n\n"]

        words = [f"{i} ".encode() for i in range(self.pieces)]
        return [b'{"id": %d, "choices": [{"message": {"content": "' % self.number, *words, b'"}}]}']

    def request(self, prompt: str) -> bytes:
        """A request for this answer."""
        fields = {"stream": self.kind == "stream", "job": asdict(self)}
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}).encode()


class Connection(H11Protocol):
    """uvicorn's connection, which the app can reset."""

    by_client: dict[tuple[str, int], asyncio.Transport] = {}  # noqa: RUF012 - there is one server in this process

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note where it comes from."""
        super().connection_made(transport)
        assert self.client is not None
        self.by_client[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        assert self.client is not None
        self.by_client.pop(self.client, None)
        super().connection_lost(exc)

    @classmethod
    def reset(cls, client: tuple[str, int]) -> None:
        """Close the connection of this client with a RST, and drop what has not been sent."""
        if (transport := cls.by_client.get(client)) is not None:
            sock: socket.socket = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()


class BreakableWorker:
    """The app.

    Args:
        slow_start: seconds until it works.
    """

    def __init__(self, slow_start: float) -> None:
        self._slow_start = slow_start
        self._ready_at = time.monotonic() + slow_start
        self._fault = Fault.NONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return

        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)

        if scope["path"] == "/control":
            self._fault = Fault(body.decode())
            await _reply(send, 200, b"{}")
        elif time.monotonic() < self._ready_at:
            await _reply(send, 503, b'{"error": {"code": "loading"}}')
        elif self._fault is Fault.SICK or (self._fault is Fault.STORM and scope["path"] != "/health"):
            await _reply(send, 500, b'{"error": {"code": "storm"}}')
        elif scope["path"] == "/health":
            await _reply(send, 200, b"{}")
        else:
            await self._complete(Job(**json.loads(body)["job"]), scope, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(self._slow_start / 2)  # uvicorn listens after this
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _complete(self, job: Job, scope: Scope, send: Send) -> None:
        pieces = job.answer()
        if job.kind == "plain":
            await asyncio.sleep(job.pause * len(pieces))
            pieces = [b"".join(pieces)]

        headers = [(b"content-type", b"text/event-stream" if job.kind == "stream" else b"application/json")]
        if job.kind == "plain":
            headers.append((b"content-length", str(len(pieces[0])).encode()))

        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for index, piece in enumerate(pieces):
            if self._fault is Fault.RESET and index >= len(pieces) // 2:
                Connection.reset(tuple(scope["client"]))
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if job.kind != "plain":
                await asyncio.sleep(job.pause)
        await send({"type": "http.response.body", "body": b""})


async def _reply(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main(port: int, slow_start: float) -> None:
    """Serve until killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    app = BreakableWorker(slow_start)
    uvicorn.run(
        app,
        port=port,
        http=Connection,
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_level="critical",
        proxy_headers=False,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
