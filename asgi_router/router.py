"""Owns the parts of a router, and how long they are open."""

from __future__ import annotations

import logging
import random
import time
from functools import cached_property
from typing import TYPE_CHECKING, Self

import anyio

from asgi_router import parts
from asgi_router.abort import Aborts
from asgi_router.client import Client, ClientGone
from asgi_router.dispatcher import Dispatcher
from asgi_router.errors import ShuttingDown
from asgi_router.exchange import Exchange
from asgi_router.fleet.models import Models
from asgi_router.fleet.registry import Registry
from asgi_router.observability.logs import log_request, requests_are_logged
from asgi_router.observability.record import finished, reported_usage
from asgi_router.scheduling.token_scales import TokenScales
from asgi_router.settings import SettingsError
from asgi_router.stats import RouterStats, WorkerStats
from asgi_router.upstream.answer import CLOSE_GRACE
from asgi_router.upstream.calls import WorkerCalls
from asgi_router.upstream.transport import new_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    import httpx
    from anyio.abc import TaskGroup
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from asgi_router.observability.events import Observer
    from asgi_router.observability.metrics import RouterMetrics
    from asgi_router.observability.usage import Usage
    from asgi_router.scheduling.policies import Policy
    from asgi_router.settings import RouterSettings

logger = logging.getLogger("asgi_router")


class Router:
    """A fleet of workers, and the way of a request to one of them and back.

    It works as soon as it is made. Entering it (`async with router`, or the host app's lifespan, which the
    middleware uses) keeps connections to the workers open while no request is in flight, and drains at the end.

    Args:
        settings: see `RouterSettings`.
        policy: chooses a worker, in place of the one that `POLICY` names (`PREFILL_POLICY` where prefill and decode
            are apart): your own class, or a rival's rule from `asgi_router.replay.rivals`.
        transport: how requests reach the workers; closed by `aclose`. Default: our own HTTP/1.1 (`upstream.http11`).
        clock: monotonic seconds, for the age of prefix blocks.
        rng: chooses among equal workers.

    Raises:
        SettingsError: `REGISTER_FILE` can't be read, or something in it is wrong; `METRICS_PATH` or `POLICY` lacks an
            extra.

    Attributes:
        settings: as given.
        workers: the fleet; workers may be added and removed while requests are in flight.
        monitor: probes the workers' health.
        load_monitor: asks the workers how busy they are; None where `POLICY` doesn't want to know.
        models: knows which models the workers say they serve.
        observers: called with a `RequestFinished` for each request that is over; add your own.
        users: how many `async with` blocks and lifespans keep the router open; the last one drains and closes it.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        policy: Policy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self.workers = Registry(parts.new_state(settings, clock), on_change=self._serve_waiting)
        self._transport = transport or new_transport(settings.keepalive_expiry)
        self._owns_transport = transport is None
        self._scales = TokenScales() if settings.prefix_adapt else None
        new_scheduler = parts.scheduler_maker(
            settings, clock, rng or random.Random(), self._scales, on_release=self._serve_waiting
        )
        self._mode = parts.new_mode(settings, self.workers, self._transport, new_scheduler, policy)
        self._dispatcher = Dispatcher(settings, self._mode)
        for worker, unproven in parts.configured_workers(settings):
            state = self.workers.add(worker)
            if unproven:  # one failed probe is enough, and the monitor begins with this one
                state.probes_against = max(1, settings.health_failures - 1)
        if not self.workers:
            logger.warning("no workers configured: requests get 503 until one joins")
        key = settings.worker_api_key
        self._calls = WorkerCalls(self._transport, key.get_secret_value() if key else None)
        self.monitor = parts.new_monitor(settings, self.workers, self._transport, on_change=self._serve_waiting)
        self.load_monitor = parts.new_load_monitor(settings, self.workers, self._calls, clock)
        self.models = Models(self.workers, self._calls, settings.models_interval, clock, on_change=self._serve_waiting)
        self._background: list[Callable[[], Coroutine[object, object, None]]] = []
        if settings.health_interval:
            self._background.append(self.monitor.run)
        if self.load_monitor is not None:
            self._background.append(self.load_monitor.run)
        if settings.discover_models or settings.serve_models:
            self._background.append(self.models.run)
        self._exchanges: set[Exchange] = set()
        self._aborts = Aborts(
            self._exchanges,
            self.workers,
            self._calls,
            name_workers=settings.decision_headers,
            on_disconnect=settings.abort_on_disconnect,
        )
        self.observers: list[Observer] = []
        self.users = 0
        self._task_groups: dict[int, list[TaskGroup]] = {}  # of `async with router`, by task
        self._draining = False
        self._idle: anyio.Event | None = None
        if settings.metrics_path is not None:
            self._start_metrics()

    def _serve_waiting(self) -> None:
        self._mode.admission.serve_waiting()

    def __repr__(self) -> str:
        return f"<Router {self.settings.policy}: {len(self._exchanges)} exchanges, {list(self.workers)!r}>"

    @cached_property
    def admin(self) -> Starlette:
        """The admin API, to be mounted in a host app; `ADMIN_PREFIX` makes the middleware serve it."""
        from asgi_router.fleet.admin import admin_app  # starlette's app is loaded only where it is used

        return admin_app(self)

    @cached_property
    def metrics(self) -> RouterMetrics:
        """The metrics, counted from the first look at this: an ASGI app, and a `prometheus_client` collector.

        `METRICS_PATH` makes the middleware serve them.

        Raises:
            ImportError: the extra `[prometheus]` is missing.
        """
        from asgi_router.observability.metrics import RouterMetrics  # what needs an extra is loaded where it is used

        return RouterMetrics(self)

    def _start_metrics(self) -> None:
        try:
            _ = self.metrics  # from now on, not from the first scrape
        except ImportError as exc:
            raise SettingsError(f"ASGI_ROUTER_METRICS_PATH: {exc}") from None

    def stats(self) -> RouterStats:
        """Return the counters of this moment. Cheap; never changes anything."""
        return RouterStats(
            workers=tuple(map(WorkerStats.of, self.workers)),
            exchanges=len(self._exchanges),
            leases=sum(state.requests for state in (*self.workers, *self.workers.leaving)),
            queued=len(self._mode.admission),
            draining=self._draining,
        )

    async def __aenter__(self) -> Self:
        self.enter()
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        tasks.start_soon(self.watch)
        self._task_groups.setdefault(anyio.get_current_task().id, []).append(tasks)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Without the exception: it goes on as it is, and not in a group.
        me = anyio.get_current_task().id
        tasks = self._task_groups[me].pop()
        if not self._task_groups[me]:
            del self._task_groups[me]
        tasks.cancel_scope.cancel()
        try:
            await tasks.__aexit__(None, None, None)
        finally:
            await self.leave()

    def enter(self) -> None:
        """Be one user more, for an owner that has a task group of its own for `watch`."""
        self.users += 1

    async def leave(self) -> None:
        """Be one user less; the last one drains and closes the router."""
        self.users -= 1
        if not self.users:
            await self.aclose()

    async def watch(self) -> None:
        """Ask the workers how they are until cancelled. Of several users only one does so at a time."""
        async with anyio.create_task_group() as tasks:
            for run in self._background:
                tasks.start_soon(run)

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

    async def handle(self, scope: Scope, receive: Receive, send: Send, path: str, app: ASGIApp) -> None:
        """Answer one completion request: an ASGI `http` scope whose route path is `path`. `app` is what is wrapped.

        Raises:
            AnswerCut: a worker failed after the answer had begun, and the answer is no event stream.
        """
        exchange = Exchange(Client(scope, receive, send), path, app, self._clock, self._mode.native_pool())
        self._exchanges.add(exchange)
        try:
            if self._draining:
                exchange.stop(ShuttingDown("The server is shutting down."))
            await self._dispatcher.answer_or_fail(exchange, path)
        except ClientGone:
            logger.debug("client gone")
        finally:
            # First and without an await: nothing can come between a request's end and its release.
            exchange.release()
            self._exchanges.discard(exchange)
            self._tell(exchange)
            exchange.reason = None  # its traceback holds this frame, and so the prompt, until a collection of garbage
            try:
                await self._aborts.after(exchange)
            finally:
                if not self._exchanges:
                    await self._fall_idle()

    async def abort(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Answer a request to abort others, of which `app` is the worker `local`; see `Aborts`."""
        try:
            await self._aborts.answer(scope, receive, send, app)
        finally:
            if not self._exchanges:
                await self._fall_idle()

    def _tell(self, exchange: Exchange) -> None:
        usage = reported_usage(exchange)
        self._learn(exchange, usage)
        observers = [*self.observers, log_request] if requests_are_logged() else self.observers
        if not observers:
            return  # nothing is computed that nobody wants to know
        event = finished(exchange, usage)
        for observe in observers:
            try:
                observe(event)
            except Exception as exc:
                logger.error("an observer failed: %s", type(exc).__name__)

    def _learn(self, exchange: Exchange, usage: Usage) -> None:
        """Take the worker's own counts for how many tokens a text makes, and how much the worker holds."""
        request, lease = exchange.request, exchange.lease
        if self._scales is None or request is None or lease is None or not usage.prompt_tokens:
            return
        self._scales.learn(request, usage.prompt_tokens)
        if usage.cached_tokens is not None and exchange.prefill is None:  # else they are what was transferred
            lease.found(min(1.0, usage.cached_tokens / usage.prompt_tokens))

    async def _fall_idle(self) -> None:
        if self._idle is not None:
            self._idle.set()
            self._idle = None
        if self._owns_transport and not self.users and not self._aborts.busy:
            # Nobody has promised to close us: no lifespan reaches a mounted app, or a TestClient without `with`.
            with anyio.move_on_after(CLOSE_GRACE, shield=True):
                await self._transport.aclose()
