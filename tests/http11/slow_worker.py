"""Owns a worker that reads and sends only when it is told to: the loops' own servers read ahead."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from asgi_router.upstream.http11 import Origin
from tests.http11.wire import SOON, new_pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asgi_router.upstream.http11 import Pool

LARGE = bytes(range(256)) * 4 * 16384  # 16 MiB, not the same at each place
READ = 262144  # what the loops read at once, at most
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Socket:
    """The worker's end of a connection, which reads only when it is told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.got = bytearray()

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def read(self, count: int | None = None) -> bool:
        """Read that much, or to the end; tell whether there was as much."""
        wanted = 2**62 if count is None else len(self.got) + count
        while len(self.got) < wanted:
            try:
                data = await asyncio.get_running_loop().sock_recv(self.sock, min(READ, wanted - len(self.got)))
            except ConnectionResetError:
                data = b""
            if not data:
                return False
            self.got += data
        return True


@asynccontextmanager
async def slow_worker(**options: float) -> AsyncIterator[tuple[socket.socket, Pool, Origin]]:
    """A listening socket with small buffers, and a pool."""
    with socket.create_server(("127.0.0.1", 0)) as listener, anyio.fail_after(SOON):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        listener.setblocking(False)
        async with new_pool(**options) as pool:
            yield listener, pool, Origin(f"http://127.0.0.1:{listener.getsockname()[1]}")


@asynccontextmanager
async def accepted(listener: socket.socket) -> AsyncIterator[Socket]:
    """The next connection."""
    sock, _ = await asyncio.get_running_loop().sock_accept(listener)
    with sock:
        yield Socket(sock)
