"""A tiny HTTP/1.1 client on a raw socket: what is on the wire, byte by byte, on asyncio, uvloop and trio.

Shows: exact heads, chunk boundaries, a body that was cut instead of ended, and what a server does when the client
half-closes, closes or resets at a chosen moment. Cannot show: what a lenient real client would make of it. Note that
on Linux closing a socket with unread data resets the connection, too: read first if you want a clean close.

    async with connect(server.host, server.port) as client:
        await client.post(b'{"stream": true}')
        head = await client.read_head()
        first = await client.read_chunk()
        client.reset()
"""

from __future__ import annotations

import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

READ_TIMEOUT = 5.0


class Truncated(Exception):
    """The peer closed in the middle; `partial` is what had come of the piece being read."""

    def __init__(self, partial: bytes) -> None:
        super().__init__(f"closed after {partial!r}")
        self.partial = partial


@dataclass(frozen=True)
class Head:
    """The first line of a message and its header lines, as they were sent."""

    first_line: bytes
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        """Parse everything up to, and without, the blank line."""
        first_line, *lines = raw.split(b"\r\n")
        pairs = [line.partition(b":") for line in lines]
        return cls(first_line, [(name, value.strip()) for name, _, value in pairs])

    @property
    def status(self) -> int:
        """The status of a response."""
        return int(self.first_line.split(b" ")[1])

    def header(self, name: str) -> list[bytes]:
        """All values of one header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]


class RawConnection:
    """A connected socket with a read buffer. Reads are bounded by `READ_TIMEOUT` seconds (`TimeoutError`)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.buffer = bytearray()
        self._socket = sock

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await anyio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)

    async def receive(self) -> bytes:
        """Wait for the next bytes from the socket; none at the end. Raises `ConnectionResetError`."""
        while True:
            try:
                return self._socket.recv(65536)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)

    async def fill(self) -> bool:
        """Wait for more bytes and put them into the buffer; false at the end. Raises as `receive`."""
        data = await self.receive()
        self.buffer += data
        return bool(data)

    async def read_exactly(self, count: int) -> bytes:
        """The next `count` bytes. Raises `Truncated`."""
        with anyio.fail_after(READ_TIMEOUT):
            await anyio.lowlevel.checkpoint()
            while len(self.buffer) < count:
                await self._fill_or_fail()
        return self._take(count)

    async def read_until(self, mark: bytes) -> bytes:
        """The bytes before the next `mark`, which is skipped. Raises `Truncated`."""
        with anyio.fail_after(READ_TIMEOUT):
            await anyio.lowlevel.checkpoint()
            while mark not in self.buffer:
                await self._fill_or_fail()
        before = self._take(self.buffer.index(mark))
        self._take(len(mark))
        return before

    async def read_to_end(self) -> bytes:
        """Everything until the peer closes cleanly."""
        with anyio.fail_after(READ_TIMEOUT):
            while await self.fill():
                pass
        return self._take(len(self.buffer))

    async def read_head(self) -> Head:
        """The next message's head (an interim 100 response counts as one)."""
        return Head.parse(await self.read_until(b"\r\n\r\n"))

    async def read_chunk(self) -> bytes | None:
        """One chunk as the peer framed it; None for the last chunk, which ends the body. Raises `Truncated`."""
        size = int((await self.read_until(b"\r\n")).partition(b";")[0], 16)
        if size == 0:
            while await self.read_until(b"\r\n"):
                pass  # trailers
            return None
        chunk = await self.read_exactly(size)
        assert await self.read_exactly(2) == b"\r\n", "a chunk longer than its size"
        return chunk

    async def read_body(self, head: Head) -> bytes:
        """The body that goes with the head: chunked, of declared length, or (responses only) until the close."""
        if head.header("transfer-encoding"):
            body = b""
            while (chunk := await self.read_chunk()) is not None:
                body += chunk
            return body
        if lengths := head.header("content-length"):
            return await self.read_exactly(int(lengths[0]))
        return await self.read_to_end() if head.first_line.startswith(b"HTTP/") else b""

    def finish_sending(self) -> None:
        """Half-close: the peer reads an end, we can still read."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close; may be called again."""
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()

    def reset(self) -> None:
        """Close with a RST: the peer's next read is a `ConnectionResetError`, its unread data are lost."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    async def _fill_or_fail(self) -> None:
        if not await self.fill():
            raise Truncated(bytes(self.buffer))

    def _take(self, count: int) -> bytes:
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data


class RawClient(RawConnection):
    """The client's end."""

    async def post(
        self, body: bytes, *, path: str = "/v1/chat/completions", headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Send a POST with host, content-length and the given headers. For anything odder use `send`."""
        pairs = [("host", "test"), ("content-length", str(len(body))), *headers]
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in pairs), "", ""]
        await self.send("\r\n".join(lines).encode("latin-1") + body)


@asynccontextmanager
async def connect(host: str, port: int) -> AsyncIterator[RawClient]:
    """A connection to a server on this machine, closed when the block is left."""
    client = RawClient(socket.socket())
    try:
        try:
            client._socket.connect((host, port))
        except BlockingIOError:
            with anyio.fail_after(READ_TIMEOUT):
                await anyio.wait_writable(client._socket)
        if error := client._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, f"cannot connect to {host}:{port}")
        yield client
    finally:
        client.close()
