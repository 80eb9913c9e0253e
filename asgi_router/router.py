"""Owns the story of one request, readable from top to bottom, and the parts that it needs."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Self

import anyio
from anyio.lowlevel import checkpoint

from asgi_router.admission import Admission
from asgi_router.client import Client, ClientGone
from asgi_router.errors import (
    InvalidRequest,
    RouterError,
    ShuttingDown,
    WorkerError,
    WorkerTimeout,
    WorkerUnreachable,
)
from asgi_router.exchange import Exchange
from asgi_router.extraction import extract
from asgi_router.fleet.health import HealthMonitor
from asgi_router.fleet.registry import Registry
from asgi_router.headers import header
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.scheduling.breaker import Breaker
from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.state import WorkerState
from asgi_router.stats import RouterStats, WorkerStats
from asgi_router.upstream.relay import CLOSE_GRACE, relay
from asgi_router.upstream.request import upstream_request
from asgi_router.upstream.transport import PooledTransport, open_response

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import httpx
    from anyio.abc import TaskGroup
    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send

    from asgi_router.scheduling.lease import Lease
    from asgi_router.settings import RouterSettings
    from asgi_router.worker import Worker

ERROR_GRACE = 5.0
"""Seconds that a client may take to accept an error. Nobody listens for its leaving meanwhile."""

logger = logging.getLogger("asgi_router")


class Router:
    """A fleet of workers, and the way of a request to one of them and back.

    It works as soon as it is made. Entering it (`async with router`, or the host app's lifespan, which the
    middleware uses) keeps connections to the workers open while no request is in flight, and drains at the end.

    Args:
        settings: see `RouterSettings`.
        transport: how requests reach the workers; closed by `aclose`. Default: a pool of httpx connections.
        clock: monotonic seconds, for the age of prefix blocks.
        rng: chooses among equal workers.

    Attributes:
        settings: as given.
        workers: the fleet; workers may be added and removed while requests are in flight.
        monitor: probes the workers' health.
        users: how many `async with` blocks and lifespans keep the router open; the last one drains and closes it.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        capacity = settings.prefix_capacity_tokens * BYTES_PER_TOKEN // settings.prefix_block_bytes

        def new_state(worker: Worker) -> WorkerState:
            return WorkerState(
                worker,
                PrefixIndex(capacity, settings.prefix_ttl, clock),
                Breaker(settings.breaker_failures, settings.breaker_cooldown, clock),
            )

        self.workers = Registry(new_state, on_change=lambda: self._admission.serve_waiting())
        options = PolicyOptions(**{field.name: getattr(settings, field.name) for field in fields(PolicyOptions)})
        policy = POLICIES[settings.policy](options, rng or random.Random())
        self._scheduler = Scheduler(
            policy,
            block_bytes=settings.prefix_block_bytes,
            max_blocks=capacity,
            max_concurrent=settings.max_concurrent_per_worker,
            on_release=lambda: self._admission.serve_waiting(),
        )
        self._admission = Admission(
            self._scheduler, self.workers, queue_size=settings.queue_size, queue_timeout=settings.queue_timeout
        )
        for worker in settings.workers:
            self.workers.add(worker)
        if not settings.workers:
            logger.warning("no workers configured: requests get 503 until one joins")

        self._transport = transport or PooledTransport(keepalive_expiry=settings.keepalive_expiry)
        self._owns_transport = transport is None
        self.monitor = HealthMonitor(
            self.workers,
            self._transport,
            path=settings.health_path,
            interval=settings.health_interval,
            timeout=settings.health_timeout,
            failures=settings.health_failures,
            successes=settings.health_successes,
            on_change=lambda: self._admission.serve_waiting(),
        )
        self._exchanges: set[Exchange] = set()
        self.users = 0
        self._task_groups: dict[int, TaskGroup] = {}  # of `async with router`, by task
        self._draining = False
        self._idle: anyio.Event | None = None

    def __repr__(self) -> str:
        return f"<Router {self.settings.policy}: {len(self._exchanges)} exchanges, {list(self.workers)!r}>"

    @cached_property
    def admin(self) -> Starlette:
        """The admin API, to be mounted in a host app; `ADMIN_PREFIX` makes the middleware serve it."""
        from asgi_router.fleet.admin import admin_app  # starlette's app is loaded only where it is used

        return admin_app(self)

    def stats(self) -> RouterStats:
        """Return the counters of this moment. Cheap; never changes anything."""
        return RouterStats(
            workers=tuple(map(WorkerStats.of, self.workers)),
            exchanges=len(self._exchanges),
            draining=self._draining,
        )

    async def __aenter__(self) -> Self:
        self.enter()
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        tasks.start_soon(self.watch_health)
        self._task_groups[anyio.get_current_task().id] = tasks
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Without the exception: it goes on as it is, and not in a group.
        tasks = self._task_groups.pop(anyio.get_current_task().id)
        tasks.cancel_scope.cancel()
        try:
            await tasks.__aexit__(None, None, None)
        finally:
            await self.leave()

    def enter(self) -> None:
        """Be one user more, for an owner that has a task group of its own for `watch_health`."""
        self.users += 1

    async def leave(self) -> None:
        """Be one user less; the last one drains and closes the router."""
        self.users -= 1
        if not self.users:
            await self.aclose()

    async def watch_health(self) -> None:
        """Probe the workers' health until cancelled. Of several users only one does so at a time."""
        if self.settings.health_interval:
            await self.monitor.run()

    async def aclose(self) -> None:
        """Drain, then close the connections to the workers. A later request opens new ones."""
        try:
            await self.drain()
        finally:
            self._draining = False
            with anyio.move_on_after(CLOSE_GRACE, shield=True):
                await self._transport.aclose()

    async def drain(self) -> None:
        """Refuse new requests, and wait until none is in flight.

        After `DRAIN_TIMEOUT` seconds those that are left are ended: with an error if their answer has not
        begun, cut short if it has.
        """
        self._draining = True
        if not self._exchanges:
            return

        self._idle = idle = self._idle or anyio.Event()
        with anyio.move_on_after(self.settings.drain_timeout):
            await idle.wait()
        for exchange in self._exchanges:
            exchange.stop(ShuttingDown("The server is shutting down."))
        with anyio.move_on_after(2 * CLOSE_GRACE):
            await idle.wait()

    async def handle(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        """Answer one completion request: an ASGI `http` scope whose route path is `path`.

        Raises:
            AnswerCut: a worker failed after the answer had begun, and the answer is no event stream.
        """
        exchange = Exchange(Client(scope, receive, send))
        self._exchanges.add(exchange)
        try:
            await self._answer_or_fail(exchange, path)
        except ClientGone:
            logger.debug("client gone")
        finally:
            # First and without an await: nothing can come between a request's end and its release.
            exchange.release()
            self._exchanges.discard(exchange)
            if not self._exchanges:
                await self._fall_idle()

    async def _answer_or_fail(self, exchange: Exchange, path: str) -> None:
        client = exchange.client
        try:
            await self._answer(exchange, path)
        except RouterError as error:
            if isinstance(error, WorkerError) and exchange.lease:
                exchange.lease.state.breaker.failed()
            exchange.release()
            # No text of another library's exception: it may quote headers.
            level = logging.DEBUG if isinstance(error, InvalidRequest) else logging.WARNING
            url = exchange.lease.state.worker.url if exchange.lease else "no worker"
            logger.log(level, "%s: %s (%s)", url, error.code, type(error.__cause__).__name__)
            if client.writable:
                with anyio.move_on_after(min(ERROR_GRACE, self.settings.send_timeout or ERROR_GRACE)):
                    await (client.cut(error) if client.started else client.fail(error))

    async def _answer(self, exchange: Exchange, path: str) -> None:
        client = exchange.client
        if self._draining:
            raise ShuttingDown("The server is shutting down.")

        with exchange.scope:
            exchange.body = await client.read_body(self.settings.max_body_bytes)
            exchange.request = extract(
                exchange.body, path, header(client.scope.get("headers") or (), b"content-encoding")
            )
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

        if failure is not None:
            raise failure

    async def _listen(self, exchange: Exchange) -> None:
        try:
            await exchange.client.wait_gone()
        except Exception as exc:  # a `receive` that fails will not tell us anything any more
            logger.debug("receive failed: %s", type(exc).__name__)
        exchange.stop(ClientGone())

    async def _serve(self, exchange: Exchange, path: str) -> None:
        response, lease = await self._open(exchange, path)
        exchange.forget_prompt()
        url = lease.state.worker.url.encode()
        await relay(
            response,
            exchange,
            lease,
            own_headers=[(b"x-router-worker", url)] if self.settings.decision_headers else [],
            idle_timeout=self.settings.idle_timeout,
            send_timeout=self.settings.send_timeout,
        )
        if response.status_code < 500 and response.status_code != 429:
            lease.state.breaker.succeeded()

    async def _open(self, exchange: Exchange, path: str) -> tuple[httpx.Response, Lease]:
        """Find a worker for the request, and return its response as soon as the head is there, with the lease."""
        settings = self.settings
        request = exchange.request
        assert request is not None  # it was read before a worker is asked
        tried: set[WorkerState] = set()
        while True:
            lease = exchange.lease = await self._admission.acquire(request, exclude=tried)
            url = lease.state.worker.url
            try:
                outgoing = upstream_request(
                    exchange.client.scope,
                    url + path,
                    exchange.body,
                    connect_timeout=settings.connect_timeout,
                    write_timeout=settings.idle_timeout,
                )
                exchange.allow(settings.first_byte_timeout, late=WorkerTimeout("The worker did not answer in time."))
                return await open_response(self._transport, outgoing), lease
            except WorkerUnreachable:
                tried.add(lease.state)
                others = self._scheduler.able(self.workers, request, exclude=tried)
                if not others or len(tried) > settings.retry_attempts:
                    raise

                # The worker has seen nothing of the request, so the lease may move on. Its time for a first byte must
                # not go on: the request may have to wait for the next worker, and that has a time-out of its own.
                exchange.allow(None, late=WorkerTimeout("The worker did not answer in time."))
                lease.state.breaker.failed()
                lease.release()
                logger.warning("%s: no connection, trying another worker", url)

    async def _fall_idle(self) -> None:
        if self._idle is not None:
            self._idle.set()
            self._idle = None
        if self._owns_transport and not self.users:
            # Nobody has promised to close us: no lifespan reaches a mounted app, or a TestClient without `with`.
            with anyio.move_on_after(CLOSE_GRACE, shield=True):
                await self._transport.aclose()
