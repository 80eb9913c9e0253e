"""Owns the making of a connection: addresses in turn, a quarter of a second apart, and the first to answer wins.

That is what RFC 8305 ("happy eyeballs") asks for. asyncio can do it, uvloop can't, so neither is asked. All that is
begun here is ended by callbacks: a caller that is cancelled leaves no task, socket or unread exception behind.
"""

from __future__ import annotations

import asyncio
import socket
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from asgi_router.upstream.http11.errors import ConnectFailed, ConnectTimedOut

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from asgi_router.upstream.http11.connection import Connection
    from asgi_router.upstream.http11.requests import Origin

STAGGER = 0.25
"""Seconds that an address has before the next one is tried beside it; RFC 8305, section 5, recommends them."""


class Dial:
    """One attempt to get a connection to an origin.

    Args:
        origin: where to.
        new: makes the `Connection` for one address.
        loop: the running loop.
        ssl_context: for https.
    """

    def __init__(
        self,
        origin: Origin,
        new: Callable[[], Connection],
        loop: asyncio.AbstractEventLoop,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self._origin = origin
        self._new = new
        self._loop = loop
        self._ssl = ssl_context if origin.tls else None
        self._done: asyncio.Future[Connection | None] = loop.create_future()
        self._refusal: ConnectFailed | None = None  # not in the future, which would hold it after it is raised
        self._waiting: list[str] = []  # addresses, the next one last
        self._running: dict[asyncio.Task[list[str]] | asyncio.Task[None], Connection | None] = {}
        self._stagger: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None

    async def connection(self, timeout: float | None) -> Connection:
        """Return a connection.

        Args:
            timeout: seconds that the look-up, TCP and TLS may take together.

        Raises:
            ConnectFailed, ConnectTimedOut: there is none.
        """
        late = ConnectTimedOut("No connection could be made in time.")
        timer = None if timeout is None else self._loop.call_later(timeout, self.fail, late)
        winner: Connection | None = None
        try:
            self._begin()
            winner = await self._done
            if winner is None:
                raise self._take_refusal()
            return winner
        finally:
            if timer is not None:
                timer.cancel()
            self._stop(winner)

    def fail(self, failure: ConnectFailed) -> None:
        """Give up."""
        if not self._done.done():
            self._refusal = failure
            self._done.set_result(None)

    def _take_refusal(self) -> ConnectFailed:
        refusal, self._refusal = self._refusal, None
        return refusal or ConnectFailed("No connection could be made.")

    def _begin(self) -> None:
        if self._origin.uds is not None or self._origin.is_address:
            self._waiting = [self._origin.host]
            self._next()
        else:
            task = self._loop.create_task(self._look_up())
            self._running[task] = None
            task.add_done_callback(self._resolved)

    async def _look_up(self) -> list[str]:
        """Return the addresses, families in turn, beginning with that of the first (RFC 8305, section 4)."""
        origin = self._origin
        families: dict[int, list[str]] = {}
        for family, _, _, _, where in await self._loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM):
            if family in (socket.AF_INET, socket.AF_INET6):
                address = str(where[0])
                if len(where) == 4 and where[3] and "%" not in address:
                    address = f"{address}%{where[3]}"
                families.setdefault(family, []).append(address)
        turns = chain.from_iterable(zip_longest(*families.values()))
        return list(dict.fromkeys(address for address in turns if address is not None))

    def _resolved(self, task: asyncio.Task[list[str]]) -> None:
        self._running.pop(task, None)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._done.done():
            return
        if failure is None:
            self._waiting = task.result()[::-1]
        self._failure = failure
        self._next()

    def _next(self) -> None:
        """Try one more address, if there is one."""
        if self._stagger is not None:
            self._stagger.cancel()
            self._stagger = None
        if self._done.done():
            return
        if not self._waiting:
            if not self._running:
                failed = ConnectFailed("No connection could be made.")
                failed.__cause__ = self._failure
                self.fail(failed)
            return

        host = self._waiting.pop()
        connection = self._new()
        task = self._loop.create_task(self._try(host, connection))
        self._running[task] = connection
        task.add_done_callback(self._tried)
        if self._waiting:
            self._stagger = self._loop.call_later(STAGGER, self._next)

    async def _try(self, host: str, connection: Connection) -> None:
        origin, loop = self._origin, self._loop
        name = origin.host if origin.tls else None
        if origin.uds is not None:
            await loop.create_unix_connection(lambda: connection, origin.uds, ssl=self._ssl, server_hostname=name)
        else:
            await loop.create_connection(lambda: connection, host, origin.port, ssl=self._ssl, server_hostname=name)

    def _tried(self, task: asyncio.Task[None]) -> None:
        connection = self._running.pop(task, None)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if connection is None:
            return  # `_stop` has dealt with it
        if failure is None and not self._done.done() and connection.usable:
            self._done.set_result(connection)
            return

        connection.abort()
        self._failure = failure
        self._next()

    def _stop(self, winner: Connection | None) -> None:
        if self._stagger is not None:
            self._stagger.cancel()
        self._failure = None
        if not self._done.done():
            self._done.cancel()
        elif not self._done.cancelled() and (made := self._done.result()) is not None and made is not winner:
            made.abort()  # it was made in the very turn in which its caller was cancelled
        running, self._running = self._running, {}
        for task, connection in running.items():
            if connection is None or not connection.usable:
                task.cancel()
            if connection is not None:
                # Of one that has just been made the task is left to end by itself: if it were cancelled, uvloop would
                # close the socket without a word to the connection.
                connection.abort()
