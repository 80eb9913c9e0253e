"""Owns the connections of one event loop: which is used next, how long an idle one is kept, when a request is repeated.

Nothing here looks at more than one connection for a request: idle ones lie on a stack for each origin, the last used
on top (those at the bottom get old and are closed), and one that ends leaves the stack by itself.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from asgi_router.upstream.http11.connection import Connection
from asgi_router.upstream.http11.dial import Dial
from asgi_router.upstream.http11.errors import ConnectFailed, ConnectionBroken

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator

    from asgi_router.upstream.http11.answer import Answer
    from asgi_router.upstream.http11.requests import Origin

STALE_WITHIN = 1.0
"""Seconds within which a connection that was closed while it was idle shows it. A later break is no such race."""

MAX_IDLE = 1024
"""Idle connections of one pool, at most. It is a bound on file descriptors: their number costs no time."""

CLOSE_GRACE = 1.0
"""Seconds that `aclose` waits for the loop to close sockets. It does so in its next turn."""


class Progress(Protocol):
    """Is told how far a request is."""

    def __call__(self, *, sending: bool) -> None: ...


class Pool:
    """Connections to any number of origins, for the event loop that runs when it is made.

    Args:
        keepalive_expiry: seconds that an idle connection is kept: less than the workers keep it (5 for uvicorn and
            vLLM), or requests meet connections that are just being closed. 0: none is kept.
        ssl_context: for https origins.
        max_idle: idle connections at most, of all origins together.

    Attributes:
        closed: it has been closed, and serves no request any more.
    """

    def __init__(
        self, *, keepalive_expiry: float, ssl_context: ssl.SSLContext | None = None, max_idle: int = MAX_IDLE
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.keepalive_expiry = keepalive_expiry
        self.max_idle = max_idle
        self._ssl = ssl_context
        self._lanes: dict[str, _Lane] = {}
        self._idle = 0
        self._timer: asyncio.TimerHandle | None = None
        self._open: set[Connection] = set()
        self._dials: set[Dial] = set()
        self._emptied: asyncio.Future[None] | None = None
        self.closed = False
        self._guard = _closed_with_loop(self)
        with suppress(StopIteration):
            self._guard.asend(None).send(None)  # to its `yield`

    def __repr__(self) -> str:
        lanes = ", ".join(
            f"{lane.origin.authority.decode('ascii')}: {len(lane.active)} active, {len(lane.idle)} idle"
            for lane in self._lanes.values()
        )
        return f"<Pool [{lanes}]{' closed' if self.closed else ''}>"

    @property
    def active(self) -> int:
        """Connections in use, or being made."""
        return sum(len(lane.active) for lane in self._lanes.values())

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return self._idle

    @property
    def sockets(self) -> int:
        """Sockets that are open, those included that the loop closes in its next turn."""
        return len(self._open)

    async def request(
        self,
        origin: Origin,
        head: bytes,
        body: bytes = b"",
        *,
        more: AsyncIterator[bytes] | None = None,
        bodiless: bool = False,
        connect_timeout: float | None = None,
        send_timeout: float | None = None,
        read_timeout: float | None = None,
        progress: Progress | None = None,
    ) -> Answer:
        """Send a request, and return its answer as soon as that has a head. Then `close` the answer in any case.

        A request that meets a kept connection which the worker has closed meanwhile is sent once more, on a new one:
        the only repetition there is, and not of a request with `more`.

        Args:
            origin: where to.
            head: the request's head from its first line to the empty line, by `request_head`.
            body: the body, or its beginning, as framed in `head`. It is sent together with the head.
            more: the rest of it.
            bodiless: it is a HEAD request: its answer has no body.
            connect_timeout: seconds for look-up, TCP and TLS together. Like the next two: None for no limit.
            send_timeout: seconds in which the worker has to take some of what is sent.
            read_timeout: seconds without a byte until the answer's head is there.
            progress: told before a connection is made, and before anything is sent.

        Raises:
            ConnectFailed, ConnectTimedOut: nothing was sent.
            ConnectionBroken: the connection ended before the answer's head. The worker may have begun.
            InvalidAnswer, SendTimedOut, ReadTimedOut: as they say.
        """
        stale = False
        connection = self._take_idle(origin)
        if connection is not None:
            began = self.loop.time()
            if progress is not None:
                progress(sending=True)
            try:
                return await connection.ask(
                    head, body, more=more, bodiless=bodiless, send_timeout=send_timeout, read_timeout=read_timeout
                )
            except ConnectionBroken as exc:
                if exc.answered or more is not None or self.closed or self.loop.time() - began >= STALE_WITHIN:
                    raise
                stale = True

        if progress is not None and not stale:  # else something was sent: being late doesn't mean unreachable
            progress(sending=False)
        try:
            connection = await self._dial(origin, connect_timeout)
        except ConnectFailed:
            if stale:
                # Something was sent: it may even be what brought the worker down.
                raise ConnectionBroken("The worker closed the connection, and takes no other.") from None
            raise
        if progress is not None:
            progress(sending=True)
        return await connection.ask(
            head, body, more=more, bodiless=bodiless, send_timeout=send_timeout, read_timeout=read_timeout
        )

    async def aclose(self) -> None:
        """Close everything, in use or not, within a second. All that must happen has happened before this waits."""
        self.abort()
        if self._open:
            self._emptied = self.loop.create_future()
            timer = self.loop.call_later(CLOSE_GRACE, self._give_up)
            try:
                await self._emptied
            finally:
                timer.cancel()

    def abort(self) -> None:
        """Close everything, without waiting for the loop to do so."""
        self._end()
        with suppress(StopIteration):
            self._guard.aclose().send(None)

    def _end(self) -> None:
        self.closed = True
        self._stop_timer()
        for dial in tuple(self._dials):
            dial.fail(ConnectFailed("The pool was closed."))
        for lane in tuple(self._lanes.values()):
            for connection in (*lane.active, *lane.idle):
                connection.abort()

    def _give_up(self) -> None:
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _take_idle(self, origin: Origin) -> Connection | None:
        lane = self._lanes.get(origin.key)
        if lane is None:
            return None

        while lane.idle:
            connection, _ = lane.idle.popitem()
            lane.active.add(connection)
            self._idle -= 1
            if connection.usable and self.loop.time() - connection.freed_at < self.keepalive_expiry:
                return connection
            connection.abort()
        return None

    async def _dial(self, origin: Origin, timeout: float | None) -> Connection:
        if self.closed:
            raise ConnectFailed("The pool is closed.")

        def new() -> Connection:
            lane = self._lanes.get(origin.key)
            if lane is None:
                lane = self._lanes[origin.key] = _Lane(self, origin)
            connection = Connection(lane, self.loop)
            lane.active.add(connection)
            return connection

        dial = Dial(origin, new, self.loop, self._ssl)
        self._dials.add(dial)
        try:
            return await dial.connection(timeout)
        finally:
            self._dials.discard(dial)

    def _keep(self, lane: _Lane, connection: Connection) -> bool:
        if self.closed or self.keepalive_expiry <= 0 or self._idle >= self.max_idle:
            return False

        connection.freed_at = self.loop.time()
        lane.idle[connection] = None
        self._idle += 1
        if self._timer is None:
            self._timer = self.loop.call_later(self.keepalive_expiry, self._sweep)
        return True

    def _sweep(self) -> None:
        """Close what was idle for too long: the only look at all origins, once in a while."""
        self._timer = None
        now = self.loop.time()
        oldest = now
        for lane in tuple(self._lanes.values()):
            while lane.idle:
                connection = next(iter(lane.idle))
                if now - connection.freed_at < self.keepalive_expiry:
                    oldest = min(oldest, connection.freed_at)
                    break
                connection.abort()
        if self._idle:
            wait = max(oldest + self.keepalive_expiry - now, self.keepalive_expiry / 8)
            self._timer = self.loop.call_later(wait, self._sweep)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _left(self, lane: _Lane, *, idle: bool) -> None:
        self._idle -= idle
        if not lane.active and not lane.idle:
            self._lanes.pop(lane.origin.key, None)
            if not self._lanes:
                self._stop_timer()

    def _socket_opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def _socket_closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._give_up()


async def _closed_with_loop(pool: Pool) -> AsyncGenerator[None, None]:
    """Close the pool when its loop ends without anyone having done so: loops finish their async generators then.

    The sockets of a loop that is gone can only be closed with a ResourceWarning. Nothing here ever waits.
    """
    try:
        yield
    finally:
        pool._end()


class _Lane:
    """The connections to one origin."""

    __slots__ = ("active", "idle", "origin", "pool")

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self.pool = pool
        self.origin = origin
        self.active: set[Connection] = set()
        self.idle: OrderedDict[Connection, None] = OrderedDict()

    def opened(self, connection: Connection) -> None:
        self.pool._socket_opened(connection)

    def freed(self, connection: Connection) -> None:
        if self.pool._keep(self, connection):
            self.active.discard(connection)
        else:
            connection.abort()

    def gone(self, connection: Connection) -> None:
        if connection in self.active:
            self.active.discard(connection)
            self.pool._left(self, idle=False)
        elif connection in self.idle:
            del self.idle[connection]
            self.pool._left(self, idle=True)

    def closed(self, connection: Connection) -> None:
        self.pool._socket_closed(connection)
