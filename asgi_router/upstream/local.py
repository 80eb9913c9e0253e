"""Owns serving a request by the wrapped app itself: a worker in this process, reached without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asgi_router.client import ClientGone
from asgi_router.errors import WorkerBusy, WorkerError, paused
from asgi_router.headers import retry_after
from asgi_router.peers import without_hop

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Scope

    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.scheduling.lease import Lease

LEAVE_GRACE = 1.0
"""Seconds for which an app that was told of a disconnect may go on, before it is cancelled."""

BUSY = (429, 503)
"""What a worker answers that has not taken a request (RFC 6585, section 4; RFC 9110, section 15.6.4)."""


class LocalCall:
    """One call of the wrapped app.

    When the client leaves, time runs out or the server shuts down, the app is told so as a server would tell it
    (`http.disconnect`), and is cancelled if it goes on for longer than `LEAVE_GRACE`. vLLM's handlers, for one, run in
    a task of their own, which only a disconnect stops.

    Args:
        exchange: whose request it is, and what is wrapped.
        lease: released with the last message, and on every other way out.
        own_headers: added to the answer's, unless the app has them.
        idle_timeout, send_timeout: seconds, as for other workers.
        may_help: whether another worker could take the request if this one is busy.
    """

    def __init__(
        self,
        exchange: Exchange,
        lease: Lease,
        *,
        own_headers: RawHeaders,
        idle_timeout: float | None,
        send_timeout: float | None,
        may_help: Callable[[], bool],
    ) -> None:
        self._exchange = exchange
        self._lease = lease
        self._own_headers = own_headers
        self._idle_timeout = idle_timeout
        self._send_timeout = send_timeout
        self._may_help = may_help
        self._unread: list[bytes] = [exchange.body]
        self._over = anyio.Event()  # for the app: the answer is whole, or nobody wants it any more
        self._wake = anyio.Event()  # for us: the app has returned, or is busy
        self._busy = False
        self._returned = False
        self._failure: Exception | None = None

    async def serve(self) -> None:
        """Let the app answer.

        Raises:
            WorkerBusy: it hasn't taken the request, and another worker may.
            WorkerError: it returned without an answer, or with half of one.
            ClientGone: the client did.
            Exception: what the app raises, as if the router weren't there.
        """
        exchange = self._exchange
        exchange.in_app = True
        running = anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, running)
            try:
                await self._wake.wait()
            finally:
                self._lease.release()
                self._over.set()
                with anyio.move_on_after(LEAVE_GRACE, shield=True):
                    await self._wait_returned()
                running.cancel()

        if self._busy:
            raise WorkerBusy("The worker is busy.")
        if exchange.reason is not None and not exchange.client.finished:
            raise exchange.reason
        if self._failure is not None:
            raise self._failure
        if not exchange.client.finished:
            raise WorkerError("The app gave no whole answer.")

    async def _run(self, running: anyio.CancelScope) -> None:
        client, scope = self._exchange.client, self._scope()
        try:
            with running:
                await self._exchange.app(scope, self._receive, self._send)
        except Exception as exc:  # carried out by hand: a task group would wrap it
            self._failure = exc
        finally:
            # What the app's routing has found, host middleware around the router may look for.
            client.scope.update({key: value for key, value in scope.items() if key not in client.scope})
            self._returned = True
            self._wake.set()

    async def _wait_returned(self) -> None:
        while not self._returned:
            self._wake = anyio.Event()
            await self._wake.wait()

    def _scope(self) -> Scope:
        request_id = (b"x-request-id", self._exchange.ids.request_id.encode())
        headers = without_hop(self._exchange.client.scope.get("headers") or ())
        return {
            **self._exchange.client.scope,
            "headers": [*(header for header in headers if header[0] != b"x-request-id"), request_id],
        }

    async def _receive(self) -> Message:
        if self._unread:
            return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        exchange, client = self._exchange, self._exchange.client
        if self._over.is_set() and not client.finished:
            return  # as servers do, whose client has gone

        if message["type"] == "http.response.start":
            message = {**message, "headers": self._headers(message)}
            if self._is_busy(message):
                self._busy = True
                self._over.set()
                self._wake.set()
                return
            exchange.forget_prompt()
        elif message.get("body") and exchange.times.first_byte is None:
            exchange.times.first_byte = exchange.times.clock()
            self._lease.first_byte(prefilled=client.status < 400)
        if ends_answer(message):
            self._lease.release()

        with exchange.pausing(self._send_timeout, ClientGone):
            await self._deliver(message)
        if client.finished:
            self._over.set()
            exchange.allow(None, ClientGone)  # what the app does after its answer is its own affair
        elif exchange.times.first_byte is not None:
            exchange.allow(self._idle_timeout, paused)

    async def _deliver(self, message: Message) -> None:
        try:
            await self._exchange.client.forward(message, last=ends_answer(message))
        except ClientGone as exc:
            self._exchange.leave(exc)
            raise OSError("the client has gone") from exc

    def _headers(self, message: Message) -> RawHeaders:
        headers = [(bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ())]
        names = {name for name, _ in headers}
        kept = [header for header in headers if not header[0].startswith(b"x-router-")]
        return [*(own for own in self._own_headers if own[0].startswith(b"x-router-") or own[0] not in names), *kept]

    def _is_busy(self, message: Message) -> bool:
        if message["status"] not in BUSY or self._exchange.client.started:
            return False
        self._lease.state.breaker.back_off(retry_after(message["headers"]))
        return self._may_help()


def ends_answer(message: Message) -> bool:
    """Tell whether an app's message is the last one of its answer's body."""
    parts = ("http.response.body", "http.response.zerocopysend")
    whole: bool = message["type"] == "http.response.pathsend"
    return whole or (message["type"] in parts and not message.get("more_body", False))
