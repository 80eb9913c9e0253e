"""Owns the story of one request, readable from top to bottom: read it, choose a worker, ask it, pass its answer on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

from asgi_router.client import ClientGone
from asgi_router.errors import (
    InvalidRequest,
    RequestAborted,
    RoutedTwice,
    RouterError,
    WorkerBusy,
    WorkerError,
    WorkerTimeout,
    WorkerUnreachable,
)
from asgi_router.extraction import extract
from asgi_router.headers import header, retry_after
from asgi_router.upstream.local import serve_locally
from asgi_router.upstream.relay import close_response, relay
from asgi_router.upstream.request import upstream_request
from asgi_router.upstream.transport import open_response

if TYPE_CHECKING:
    from collections.abc import Collection

    import httpx

    from asgi_router.admission import Admission
    from asgi_router.exchange import Exchange
    from asgi_router.extraction import CompletionRequest
    from asgi_router.headers import RawHeaders
    from asgi_router.peers import Peers
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.scheduler import Scheduler
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.settings import RouterSettings

ERROR_GRACE = 5.0
"""Seconds that a client may take to accept an error. Nobody listens for its leaving meanwhile."""

BUSY = (429, 503)
"""What a worker answers that has not taken a request (RFC 6585, section 4; RFC 9110, section 15.6.4)."""

logger = logging.getLogger("asgi_router")


class Dispatcher:
    """Takes requests from their client to a worker, and answers back.

    Args:
        settings: the router's.
        workers: the fleet.
        scheduler: tells which workers could take a request.
        admission: gives a request its lease.
        transport: how requests reach the workers.
        peers: the other routers of this fleet.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: Collection[WorkerState],
        scheduler: Scheduler,
        admission: Admission,
        transport: httpx.AsyncBaseTransport,
        peers: Peers,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._scheduler = scheduler
        self._admission = admission
        self._transport = transport
        self._peers = peers

    async def answer_or_fail(self, exchange: Exchange, path: str) -> None:
        """Answer the completion request to the route `path`, with an error if it must be.

        Raises:
            ClientGone: nobody is there any more.
            AnswerCut: a worker failed after the answer had begun, and the answer is no event stream.
        """
        client = exchange.client
        try:
            await self._answer(exchange, path)
            exchange.outcome = "ok"
        except ClientGone:
            exchange.outcome = "client_gone"
            raise
        except RouterError as error:
            exchange.outcome = error.code
            if isinstance(error, WorkerError) and exchange.lease:
                exchange.lease.failed()
            exchange.release()
            # No text of another library's exception: it may quote headers.
            level = logging.DEBUG if isinstance(error, InvalidRequest | RequestAborted) else logging.WARNING
            url = exchange.lease.state.worker.url if exchange.lease else "no worker"
            logger.log(level, "%s: %s (%s)", url, error.code, type(error.__cause__).__name__)
            if client.writable:
                with anyio.move_on_after(min(ERROR_GRACE, self._settings.send_timeout or ERROR_GRACE)):
                    await (client.cut(error) if client.started else client.fail(error))
        except Exception:
            exchange.outcome = "app_failed"  # the wrapped app's own: its server or host answers it
            if exchange.lease:
                exchange.lease.failed()
            raise

    async def _answer(self, exchange: Exchange, path: str) -> None:
        client = exchange.client
        with exchange.scope:
            exchange.body = await client.read_body(self._settings.max_body_bytes)
            began = exchange.times.clock()
            exchange.request = extract(
                exchange.body, path, header(client.scope.get("headers") or (), b"content-encoding")
            )
            if self._settings.session_header and not exchange.request.session_id:
                session = header(client.scope.get("headers") or (), self._settings.session_header.encode())
                exchange.request = replace(exchange.request, session_id=session)
            exchange.ids.use_body_id(exchange.request.request_id)
            exchange.times.selecting = exchange.times.clock() - began
            await self._serve_watched(exchange, path)
        if exchange.scope.cancelled_caught and exchange.reason is not None:
            raise exchange.reason

    async def _serve_watched(self, exchange: Exchange, path: str) -> None:
        """Serve the request in a task of its own, while this one listens for the client's leaving.

        Not the other way round: this is the task that a server or a host cancels natively. Here that only ends
        the listening, and the task group then ends the other task in anyio's way, which respects shields (httpcore
        loses connections to native cancellation: encode/httpcore#1093).
        """
        failure: Exception | None = None
        listening = anyio.CancelScope()

        async def serve() -> None:
            nonlocal failure
            try:
                await checkpoint()  # a client that has gone already costs no prefill
                await self._serve(exchange, path)
            except Exception as exc:  # carried out by hand: a task group would wrap it
                failure = exc
            finally:
                listening.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            with listening:
                await self._listen(exchange)

        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback holds this frame, and so the prompt, until a collection of garbage

    async def _listen(self, exchange: Exchange) -> None:
        try:
            await exchange.client.wait_gone()
        except Exception as exc:  # a `receive` that fails will not tell us anything any more
            logger.debug("receive failed: %s", type(exc).__name__)
        exchange.stop(ClientGone())

    async def _serve(self, exchange: Exchange, path: str) -> None:
        """Ask one worker after the other, until one answers or no failure may be repeated any more."""
        while True:
            assert exchange.request is not None  # it was read before a worker is asked
            lease = exchange.lease = await self._choose(exchange, exchange.request)
            exchange.tried.add(lease.state)
            exchange.attempts += 1
            try:
                with exchange.attempt():
                    await self._ask(exchange, path, lease)
                return
            except WorkerError as error:
                exchange.sent += not isinstance(error, WorkerUnreachable)
                if not self._may_move_on(exchange, error):
                    raise

                # The client has seen nothing yet, so the lease may move on.
                if not isinstance(error, WorkerBusy):
                    lease.failed()
                lease.release()
                logger.warning("%s: %s, trying another worker", lease.state.worker.url, error.code)

    async def _choose(self, exchange: Exchange, request: CompletionRequest) -> Lease:
        if not self._peers.have_placed(exchange.client.scope.get("headers") or (), exchange.ids.request_id):
            return await self._admission.acquire(request, exchange.times, exchange.tried)

        exchange.placed = True
        for state in self._workers:
            if state.worker.is_local:
                return self._scheduler.place(state, request, reason="placed_by_peer")
        raise RoutedTwice("A router has sent this request to a router that has no worker of its own.")

    def _others(self, exchange: Exchange) -> list[WorkerState]:
        """Return the workers that may be asked if the present one fails."""
        if exchange.request is None or exchange.placed or len(exchange.tried) > self._settings.retry_attempts:
            return []

        return self._scheduler.able(self._workers, exchange.request, exclude=exchange.tried)

    def _may_move_on(self, exchange: Exchange, error: WorkerError) -> bool:
        """Tell whether another worker may be asked: this one has done nothing, or the client says that it may."""
        if isinstance(error, WorkerBusy):
            return True  # else it would not have been raised
        if exchange.client.started or not self._others(exchange):
            return False
        if isinstance(error, WorkerUnreachable):
            return True

        mark = self._settings.retry_safe_header
        marked = mark is not None and header(exchange.client.scope.get("headers") or (), mark.encode()) != ""
        return marked and exchange.sent <= self._settings.retry_attempts

    async def _ask(self, exchange: Exchange, path: str, lease: Lease) -> None:
        """Send the request to the worker of `lease`, and pass its answer on.

        Raises:
            WorkerBusy: it has not taken the request, and another one may.
            WorkerError: it failed; `exchange.client.started` says whether the client has seen anything.
        """
        settings = self._settings
        own_headers = decision_headers(exchange, lease) if settings.decision_headers else []
        exchange.allow(settings.first_byte_timeout, late=WorkerTimeout("The worker did not answer in time."))
        if lease.state.worker.is_local:
            await serve_locally(
                exchange.app,
                exchange,
                lease,
                own_headers=own_headers,
                idle_timeout=settings.idle_timeout,
                send_timeout=settings.send_timeout,
            )
            self._note_status(lease, exchange.client.status)
            return

        response = await self._open(exchange, path, lease)
        await relay(
            response,
            exchange,
            lease,
            own_headers=own_headers,
            idle_timeout=settings.idle_timeout,
            send_timeout=settings.send_timeout,
        )
        self._note_status(lease, response.status_code)

    async def _open(self, exchange: Exchange, path: str, lease: Lease) -> httpx.Response:
        """Send the request, and return the worker's response as soon as its head is there.

        Raises:
            WorkerBusy, WorkerError: as `_ask`.
        """
        outgoing = upstream_request(
            exchange,
            lease.state.worker.url + path,
            own_headers=self._peers.signed(exchange.ids.request_id),
            connect_timeout=self._settings.connect_timeout,
            write_timeout=self._settings.idle_timeout,
        )
        response = await open_response(self._transport, outgoing, exchange.progress)
        if response.status_code in BUSY:
            lease.state.breaker.back_off(retry_after(response.headers.raw))
            may_help = [state for state in self._others(exchange) if state.breaker.admits]
            if exchange.sent < self._settings.retry_attempts and any(map(self._scheduler.has_room, may_help)):
                await close_response(response)
                raise WorkerBusy("The worker is busy.")
        return response

    @staticmethod
    def _note_status(lease: Lease, status: int) -> None:
        if status in BUSY:
            return
        if status < 500:
            lease.succeeded()
        else:
            lease.failed()


def decision_headers(exchange: Exchange, lease: Lease) -> RawHeaders:
    """Return what a client is told of the choice: who, why, and by which id it can be found in log and worker."""
    cached = f"{lease.cached_tokens}/{lease.prefill_tokens}"
    why = f"{lease.reason}; candidates={lease.candidates}; cached={cached}; attempt={exchange.attempts}"
    return [
        (b"x-router-worker", lease.state.worker.url.encode()),
        (b"x-router-decision", why.encode()),
        (b"x-request-id", exchange.ids.request_id.encode()),
    ]
