"""Owns the story of one request, readable from top to bottom: read it, choose a worker, ask it, maybe try another.

How workers are chosen and asked is the mode's: `mixed.py`, or prefill and decode apart.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from asgi_router.client import ClientGone
from asgi_router.errors import (
    InvalidRequest,
    NoWorker,
    RequestAborted,
    RoutedTwice,
    RouterError,
    WorkerBusy,
    WorkerError,
    WorkerPreempted,
    WorkerUnreachable,
)
from asgi_router.extraction import extract
from asgi_router.headers import routers_passed
from asgi_router.mixed import note_failure

if TYPE_CHECKING:
    from asgi_router.exchange import Exchange
    from asgi_router.headers import RawHeaders
    from asgi_router.settings import RouterSettings
    from asgi_router.upstream.http11 import Pool

ERROR_GRACE = 5.0
"""Seconds that a client may take to accept an error. Nobody listens for its leaving meanwhile."""

MAX_ROUTERS = 8
"""Routers in a row that may pass a request on. Those that share no `PEER_TOKEN` can only find a loop by its length."""

logger = logging.getLogger("asgi_router")


class Mode(Protocol):
    """How the workers share the work."""

    def native_pool(self) -> Pool | None:
        """Return the connections of the running loop, if `task.cancel()` on the task that calls `ask` loses nothing."""
        ...

    async def choose(self, exchange: Exchange) -> None:
        """Lease the worker, or workers, that shall serve the request.

        Raises:
            NoWorker, UnknownModel: none can be had, also after a wait.
        """
        ...

    async def ask(self, exchange: Exchange, path: str) -> None:
        """Send the request to whom it was leased, and pass the answer on.

        Raises:
            WorkerBusy: it was not taken, and another worker may take it.
            WorkerError: a worker failed: the one of `exchange.blamed`, else of `exchange.lease`.
        """
        ...

    def repeats(self, error: WorkerError) -> bool:
        """Tell whether a request that has failed in this way may be repeated without its client's leave."""
        ...

    def others(self, exchange: Exchange) -> bool:
        """Tell whether the request may be tried elsewhere, apart from whom it has tried."""
        ...


class Dispatcher:
    """Takes requests from their client to a worker, and answers back.

    Args:
        settings: the router's.
        mode: how workers are chosen and asked.
    """

    def __init__(self, settings: RouterSettings, mode: Mode) -> None:
        self._settings = settings
        self._session_header = settings.session_header.encode() if settings.session_header else None
        self._mode = mode

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
            exchange.release()
            # No text of another library's exception: it may quote headers.
            level = logging.DEBUG if isinstance(error, InvalidRequest | RequestAborted) else logging.WARNING
            lease = None if isinstance(error, NoWorker) else exchange.blamed or exchange.lease
            url = lease.state.worker.url if lease else "no worker"
            cause = f" ({type(error.__cause__).__name__})" if error.__cause__ else ""
            logger.log(level, "%s: %s%s", url, error.code, cause)
            if client.writable:
                with anyio.move_on_after(min(ERROR_GRACE, self._settings.send_timeout or ERROR_GRACE)):
                    await (client.cut(error) if client.started else client.fail(error, self._own_headers(exchange)))
        except Exception:
            # The wrapped app's own: its server or host deals with it. After a whole answer it is no failure of that.
            exchange.outcome = "ok" if client.finished else "app_failed"
            if exchange.lease and not client.finished:
                note_failure(exchange.lease)
            raise

    def _own_headers(self, exchange: Exchange) -> RawHeaders:
        return [(b"x-request-id", exchange.ids.request_id.encode())] if self._settings.decision_headers else []

    async def _answer(self, exchange: Exchange, path: str) -> None:
        client = exchange.client
        if b"via" in exchange.headers and routers_passed(client.scope["headers"]) >= MAX_ROUTERS:
            raise RoutedTwice("The request goes round in circles: routers send it to each other.")

        if exchange.reason is not None:
            raise exchange.reason
        with exchange.scope:
            exchange.body = await client.read_body(
                self._settings.max_body_bytes, exchange.headers.get(b"content-length", b"")
            )
            exchange.check()
            began = exchange.times.clock()
            encoding = exchange.headers.get(b"content-encoding", b"").decode("latin-1")
            exchange.request = extract(exchange.body, path, encoding)  # held nowhere else, so that it can be let go
            if self._session_header is not None and not exchange.request.session_id:
                session = exchange.headers.get(self._session_header, b"").decode("latin-1")
                exchange.request = replace(exchange.request, session_id=session)
            if exchange.request.request_id:
                exchange.ids.use_body_id(exchange.request.request_id)
            exchange.times.selecting = exchange.times.clock() - began
            # While it is served somebody listens for the client's leaving.
            if exchange.pool is not None:
                await self._serve_here(exchange, exchange.pool, path)
            else:
                await self._serve_apart(exchange, path)
        if exchange.scope.cancelled_caught and exchange.reason is not None:
            raise exchange.reason

    async def _serve_here(self, exchange: Exchange, pool: Pool, path: str) -> None:
        """Serve it in this task, and listen in another one: the cheaper way, by 50 us (docs/performance.md).

        This is the task that a server or a host cancels natively. That may come at any await, and nothing that must
        happen stands behind one. The listener holds nothing, so nobody waits for its end.
        """
        listener = pool.loop.create_task(self._listen(exchange))
        try:
            await asyncio.sleep(0)  # a client that has gone already costs no prefill
            await self._serve(exchange, path)
        finally:
            listener.cancel()

    async def _serve_apart(self, exchange: Exchange, path: str) -> None:
        """Serve it in a task of its own, and listen in this one.

        This is the task that a server or a host cancels natively. Here that only ends the listening, and the task group
        then ends the other task in anyio's way, which respects shields (httpcore loses connections to native
        cancellation: encode/httpcore#1093).
        """
        failure: Exception | None = None
        served = False
        listening = anyio.CancelScope()

        async def serve() -> None:
            nonlocal failure, served
            try:
                await checkpoint()  # a client that has gone already costs no prefill
                await self._serve(exchange, path)
                served = True
            except Exception as exc:  # carried out by hand: a task group would wrap it
                failure = exc
            except anyio.get_cancelled_exc_class() as exc:
                # anyio's task group keeps it in a circle with a frame of its own, until a collection of garbage.
                # Its traceback would hold all frames from here to the transport, and so the prompt.
                exc.__traceback__ = None
                raise
            finally:
                listening.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            with listening:
                await self._listen(exchange)

        try:
            if failure is not None:
                raise failure
            if not served and not exchange.scope.cancel_called:
                # A cancellation that is none of ours, of a task that the wrapped app or a transport has awaited.
                raise WorkerError("The worker's answer was cancelled.")
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
            exchange.blamed = None
            await self._mode.choose(exchange)
            if exchange.reason is not None:
                raise exchange.reason  # should the wait have swallowed the cancellation
            exchange.attempts += 1
            try:
                with exchange.attempt():
                    await self._mode.ask(exchange, path)
                return
            except WorkerError as error:
                lease = exchange.blamed or exchange.lease
                assert lease is not None  # it was chosen
                if not isinstance(error, WorkerPreempted):
                    exchange.tried.add(lease.state)
                exchange.sent += not isinstance(error, WorkerUnreachable | WorkerPreempted)
                if not isinstance(error, WorkerBusy):
                    note_failure(lease)
                if not self._may_move_on(exchange, error):
                    raise

                # The client has seen nothing yet, so the lease may move on.
                exchange.release()
                logger.warning("%s: %s, trying another worker", lease.state.worker.url, error.code)

    def _may_move_on(self, exchange: Exchange, error: WorkerError) -> bool:
        """Tell whether another worker may be asked: this one has done nothing, or the client says that it may."""
        if exchange.client.started:
            return False
        if isinstance(error, WorkerBusy):
            return True  # else it would not have been raised
        if not self._mode.others(exchange):
            return False
        if isinstance(error, WorkerUnreachable):
            return True

        if exchange.sent > self._settings.retry_attempts:
            return False
        mark = self._settings.retry_safe_header
        marked = mark is not None and exchange.headers.get(mark.encode(), b"") != b""
        return marked or self._mode.repeats(error)
