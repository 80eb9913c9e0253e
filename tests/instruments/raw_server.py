"""A tiny scripted server on a raw socket: plays given bytes to real HTTP clients, on asyncio, uvloop and trio.

Shows: how a client (a connection pool, above all) takes truncated bodies, a keep-alive connection closed or reset while
it is idle, a head that never comes; and the exact bytes the client sent on each connection, and how it left. Cannot
show: how a real worker would behave; it plays its script whether or not the client's requests make sense.

    answer = b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok"
    async with raw_server([REQUEST, answer, idle_over, RESET], [REQUEST, answer]) as server:
        ...  # a client of server.url; each connection plays the next script, later ones the last
        await server.connections[0].gone()
"""

from __future__ import annotations

import enum
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final, Literal

import anyio

from tests.instruments.raw_http import Head, RawConnection, Truncated
from tests.instruments.steps import HANG, Changes, Do

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

__all__ = ["CLOSE", "HANG", "REQUEST", "RESET", "Connection", "RawServer", "Step", "raw_server"]


class Wire(enum.Enum):
    """Steps that only a socket knows."""

    REQUEST = enum.auto()
    CLOSE = enum.auto()
    RESET = enum.auto()


REQUEST: Final = Wire.REQUEST  # wait for one whole request
CLOSE: Final = Wire.CLOSE  # close cleanly; also what happens at the end of a script
RESET: Final = Wire.RESET  # close with a RST

Step = bytes | anyio.Event | Literal[Do.HANG] | Wire
End = Literal["open", "closed", "reset"]


class Connection(RawConnection):
    """The server's end of one connection, and what came in on it."""

    def __init__(self, sock: socket.socket, script: Sequence[Step]) -> None:
        super().__init__(sock)
        self.received = bytearray()  # every byte, in order
        self.requests: list[tuple[Head, bytes]] = []  # those a REQUEST step has read
        self.client: End = "open"  # how the client left
        self.server: End = "open"  # how we left
        self._script = script
        self._changes = Changes()

    async def gone(self) -> None:
        """Return when the connection is over: `client` and `server` say who left, and how."""
        await self._changes.until(lambda: self.client != "open" or self.server != "open")

    async def received_requests(self, count: int) -> None:
        """Return when that many requests have been read by REQUEST steps."""
        await self._changes.until(lambda: len(self.requests) >= count)

    async def fill(self) -> bool:
        """Wait until the watching reader has put more into the buffer; it alone reads the socket."""
        before = len(self.received)
        await self._changes.until(lambda: len(self.received) > before or self.client != "open")
        return len(self.received) > before

    async def serve(self) -> None:
        """Play the script, and close; meanwhile watch what the client sends and when it leaves."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            try:
                # A client that leaves in the middle ends the script; `client` says how it left.
                with suppress(ConnectionError, Truncated):
                    for step in self._script:
                        await self._play(step)
                if self.server == "open":
                    self.server = "closed"
            finally:
                self.close()
                self._changes.tell()
                group.cancel_scope.cancel()

    async def _play(self, step: Step) -> None:
        if self.server != "open":
            return
        if isinstance(step, bytes):
            await self.send(step)
        elif isinstance(step, anyio.Event):
            await step.wait()
        elif step is REQUEST:
            # A request may be long in coming (an idle connection): no time-out of ours.
            while b"\r\n\r\n" not in self.buffer:
                await self._fill_or_fail()
            head = await self.read_head()
            self.requests.append((head, await self.read_body(head)))
            self._changes.tell()
        elif step is HANG:
            await anyio.sleep_forever()
        elif step is RESET:
            self.server = "reset"
            self.reset()
        else:
            self.server = "closed"
            self.close()

    async def _watch(self) -> None:
        try:
            # The script takes from the buffer meanwhile, so what is new is not what lies behind its old end.
            while data := await self.receive():
                self.buffer += data
                self.received += data
                self._changes.tell()
            self.client = "closed"
        except ConnectionResetError:
            self.client = "reset"
        except (OSError, anyio.ClosedResourceError):
            return  # our own script closed the socket
        finally:
            self._changes.tell()


class RawServer:
    """The listening server; `connections` in the order they were accepted."""

    def __init__(self, listener: socket.socket) -> None:
        self.host, self.port = listener.getsockname()
        self.url = f"http://{self.host}:{self.port}"
        self.connections: list[Connection] = []
        self.changes = Changes()

    async def connected(self, count: int) -> None:
        """Return when that many connections have been accepted."""
        await self.changes.until(lambda: len(self.connections) >= count)


@asynccontextmanager
async def raw_server(*scripts: Sequence[Step]) -> AsyncIterator[RawServer]:
    """Serve on a free port while the block lasts; leaving it closes every connection, wherever its script is."""
    failure: Exception | None = None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = RawServer(listener)

        async with anyio.create_task_group() as group:

            async def accept() -> None:
                while True:
                    await anyio.wait_readable(listener)
                    sock, _ = listener.accept()
                    script = scripts[min(len(server.connections), len(scripts) - 1)]
                    connection = Connection(sock, script)
                    server.connections.append(connection)
                    server.changes.tell()
                    group.start_soon(connection.serve)

            group.start_soon(accept)
            try:
                yield server
            except Exception as error:
                failure = error
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
