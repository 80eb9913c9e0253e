"""Owns the prefill leg of a request whose legs go out together: its answer counts, and is then thrown away."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import anyio
from anyio.lowlevel import checkpoint

from asgi_router.errors import RouterError
from asgi_router.upstream.relay import CHECKPOINT_EVERY, close_response, read_chunk
from asgi_router.upstream.transport import open_response

if TYPE_CHECKING:
    import httpx

    from asgi_router.exchange import Exchange
    from asgi_router.scheduling.lease import Lease

logger = logging.getLogger("asgi_router")


class PrefillLeg:
    """One request to a prefill worker.

    Args:
        transport: how it is sent.
        request: what is sent.
        exchange: whose leg it is.
        lease: on the prefill worker; released at the first byte of a stream, at the end of another answer, and on
            every other way out but a refusal, which is still to be read.

    Attributes:
        accepted: its head is there, and good: the decode worker's answer may be passed on.
        ended: it is over, in whatever way.
        refusal: the worker's answer of 400 or above, unread; the client is to get it.
        failure: what broke the leg, while it still mattered.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport, request: httpx.Request, exchange: Exchange, lease: Lease
    ) -> None:
        self._transport = transport
        self._request: httpx.Request | None = request
        self._exchange = exchange
        self.lease = lease
        self._scope = anyio.CancelScope()
        self.accepted = anyio.Event()
        self.ended = anyio.Event()
        self.refusal: httpx.Response | None = None
        self.failure: RouterError | None = None

    def stop(self) -> None:
        """End it: the decode worker has refused the request."""
        self._scope.cancel()

    async def run(self, both: anyio.CancelScope) -> None:
        """Send the request and read the answer. If it fails while the client has seen nothing, end `both` legs."""
        with self._scope:
            await self._run(both)

    async def _run(self, both: anyio.CancelScope) -> None:
        response: httpx.Response | None = None
        try:
            assert self._request is not None
            request, self._request = self._request, None
            response = await open_response(self._transport, request)
            if response.status_code >= 400:
                if not self._exchange.client.started:  # with the decode worker's own refusal, just now
                    self.refusal, response = response, None
                    both.cancel()
                return

            self.accepted.set()
            self._exchange.blamed = None
            await self._drain(response)
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
            if response is not None:
                await close_response(response)

    async def _drain(self, response: httpx.Response) -> None:
        request = self._exchange.request
        chunks = aiter(cast("httpx.AsyncByteStream", response.stream))
        count = 0
        while await read_chunk(chunks):
            count += 1
            if count % CHECKPOINT_EVERY == 0:
                await checkpoint()  # or a transport that never waits would stop the loop
            self.lease.first_byte(prefilled=True)
            if request is not None and request.stream:
                self.lease.release()
        self.lease.succeeded()
