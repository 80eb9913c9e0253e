"""Owns a connection without a socket: what it is fed comes in exactly the pieces that a test chooses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asgi_router.upstream.http11.connection import Connection
from asgi_router.upstream.http11.errors import Http11Error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asgi_router.upstream.http11 import Answer


class MemoryTransport(asyncio.Transport):
    """Takes all that is written; closes in the loop's next turn, as real ones do."""

    def __init__(self, protocol: Connection) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.writes = 0
        self.unsent = 0  # what is said to be in the write buffer
        self.reading = True
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes += 1
        self.written += data

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes += 1
        for data in list_of_data:
            self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    close = abort


class Log:
    """An owner that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def opened(self, connection: Connection) -> None:
        self.told.append("opened")

    def freed(self, connection: Connection) -> None:
        self.told.append("freed")

    def gone(self, connection: Connection) -> None:
        self.told.append("gone")

    def closed(self, connection: Connection) -> None:
        self.told.append("closed")


Outcome = tuple[int, list[tuple[bytes, bytes]], bytes, str]
"""Status, headers, body as far as it came, and how it ended: "ended", "open", or the name of an exception."""


class Line:
    """A connection, its transport, and what its owner was told."""

    def __init__(self) -> None:
        self.log = Log()
        self.connection = Connection(self.log, asyncio.get_running_loop())
        self.transport = MemoryTransport(self.connection)
        self.connection.connection_made(self.transport)

    async def play(self, pieces: Iterable[bytes], *, ends: bool = False, bodiless: bool = False) -> Outcome:
        """Send a request, get these pieces, and maybe the end of the connection; return what the reader saw."""
        task = asyncio.create_task(self.connection.ask(b"", b"", bodiless=bodiless))
        await asyncio.sleep(0)
        for piece in pieces:
            if self.transport.closing:
                break
            assert self.transport.reading  # bodies that are larger than the buffer are not for this instrument
            self.connection.data_received(piece)
        if ends and not self.transport.closing:
            self.connection.eof_received()
            self.transport.abort()
        for _ in range(3):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            return 0, [], b"", "open"
        try:
            answer = task.result()
        except Http11Error as exc:
            return 0, [], b"", type(exc).__name__
        return drain(answer)


def drain(answer: Answer) -> Outcome:
    """Take what there is of an answer, to its end or failure."""
    body = b""
    try:
        while data := answer.take():
            body += data
    except Http11Error as exc:
        return answer.status, answer.headers, body, type(exc).__name__
    return answer.status, answer.headers, body, "ended" if answer.complete else "open"
