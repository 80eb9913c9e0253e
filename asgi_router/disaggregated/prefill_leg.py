"""Owns the prefill leg of a request whose legs go out together: its answer counts, and is then thrown away."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

from asgi_router.errors import RouterError
from asgi_router.upstream.answer import close, read
from asgi_router.upstream.relay import CHECKPOINT_EVERY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asgi_router.exchange import Exchange
    from asgi_router.scheduling.lease import Lease
    from asgi_router.upstream.answer import WorkerAnswer

logger = logging.getLogger("asgi_router")


class PrefillLeg:
    """One request to a prefill worker.

    Args:
        send: sends it, and returns the answer when its head is there.
        exchange: whose leg it is.
        lease: on the prefill worker; released at the first byte of a stream, at the end of another answer, and on
            every other way out but a refusal, which is still to be read.

    Attributes:
        accepted: its head is there, and good: the decode worker's answer may be passed on.
        ended: it is over, in whatever way.
        refusal: the worker's answer of 400 or above, unread; the client is to get it.
        failure: what broke the leg, while it still mattered.
    """

    def __init__(self, send: Callable[[], Awaitable[WorkerAnswer]], exchange: Exchange, lease: Lease) -> None:
        self._send: Callable[[], Awaitable[WorkerAnswer]] | None = send
        self._exchange = exchange
        self.lease = lease
        self._scope = anyio.CancelScope()
        self.accepted = anyio.Event()
        self.ended = anyio.Event()
        self.refusal: WorkerAnswer | None = None
        self.failure: RouterError | None = None

    def stop(self) -> None:
        """End it: the decode worker has refused the request."""
        self._scope.cancel()

    async def run(self, both: anyio.CancelScope) -> None:
        """Send the request and read the answer. If it fails while the client has seen nothing, end `both` legs."""
        with self._scope:
            try:
                await self._run(both)
            except anyio.get_cancelled_exc_class() as exc:
                exc.__traceback__ = None  # as in `Dispatcher._serve_apart`
                raise

    async def _run(self, both: anyio.CancelScope) -> None:
        answer: WorkerAnswer | None = None
        try:
            assert self._send is not None
            send, self._send = self._send, None  # it holds the prompt
            answer = await send()
            if answer.status >= 400:
                if not self._exchange.client.started:  # with the decode worker's own refusal, just now
                    self.refusal, answer = answer, None
                    both.cancel()
                return

            self.accepted.set()
            self._exchange.blamed = None
            await self._drain(answer)
        except RouterError as error:
            if self._exchange.client.started:
                # The decode worker has what it needs, or will fail by itself.
                self.lease.failed()
                logger.warning("%s: %s, after the answer had begun", self.lease.state.worker.url, error.code)
            else:
                self.failure = error
                both.cancel()
        finally:
            if self.refusal is None:
                self.lease.release()
            self.ended.set()
            if answer is not None:
                await close(answer)

    async def _drain(self, answer: WorkerAnswer) -> None:
        request = self._exchange.request
        count = 0
        while await read(answer):
            count += 1
            if count % CHECKPOINT_EVERY == 0:
                await checkpoint()  # or a transport that never waits would stop the loop
            self.lease.first_byte(prefilled=True)
            if request is not None and request.stream:
                self.lease.release()
        self.lease.succeeded()
