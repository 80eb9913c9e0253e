"""Owns the parts that a request needs, and how long they are open."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Self

import anyio

from asgi_router.abort import Aborts
from asgi_router.admission import Admission
from asgi_router.client import Client, ClientGone
from asgi_router.dispatcher import Dispatcher
from asgi_router.errors import ShuttingDown
from asgi_router.exchange import Exchange
from asgi_router.fleet.health import HealthMonitor
from asgi_router.fleet.load import LoadMonitor
from asgi_router.fleet.models import Models
from asgi_router.fleet.register_file import read_register_file
from asgi_router.fleet.registration import RegistrationError
from asgi_router.fleet.registry import Registry
from asgi_router.observability.logs import log_request, requests_are_logged
from asgi_router.observability.record import finished
from asgi_router.peers import Peers
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.scheduling.breaker import Breaker
from asgi_router.scheduling.policies import POLICIES, REMOTE_POLICIES, PolicyOptions
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.sessions import Sessions
from asgi_router.scheduling.state import WorkerState
from asgi_router.settings import SettingsError
from asgi_router.stats import RouterStats, WorkerStats
from asgi_router.upstream.calls import WorkerCalls
from asgi_router.upstream.relay import CLOSE_GRACE
from asgi_router.upstream.transport import PooledTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    import httpx
    from anyio.abc import TaskGroup
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from asgi_router.observability.events import Observer
    from asgi_router.observability.metrics import RouterMetrics
    from asgi_router.settings import RouterSettings
    from asgi_router.worker import Worker

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
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.settings = settings
        self._clock = clock
        capacity = settings.prefix_capacity_tokens * BYTES_PER_TOKEN // settings.prefix_block_bytes

        def new_state(worker: Worker) -> WorkerState:
            return WorkerState(
                worker,
                PrefixIndex(capacity, settings.prefix_ttl, clock),
                Breaker(settings.breaker_failures, settings.breaker_cooldown, clock),
                known_as=settings.local_url or "" if worker.is_local else "",
            )

        self.workers = Registry(new_state, on_change=lambda: self._admission.serve_waiting())
        options = PolicyOptions(**{field.name: getattr(settings, field.name) for field in fields(PolicyOptions)})
        policy = POLICIES[settings.policy](options, rng or random.Random())
        self._scheduler = Scheduler(
            policy,
            policy_name=settings.policy,
            block_bytes=settings.prefix_block_bytes,
            max_blocks=capacity,
            max_concurrent=settings.max_concurrent_per_worker,
            sessions=Sessions(settings.session_ttl, clock) if settings.session_ttl else None,
            on_release=lambda: self._admission.serve_waiting(),
        )
        self._admission = Admission(
            self._scheduler, self.workers, queue_size=settings.queue_size, queue_timeout=settings.queue_timeout
        )
        self._add_configured_workers()
        if not self.workers:
            logger.warning("no workers configured: requests get 503 until one joins")

        self._transport = transport or PooledTransport(keepalive_expiry=settings.keepalive_expiry)
        self._owns_transport = transport is None
        peers = Peers(settings.peer_token.get_secret_value() if settings.peer_token else None)
        self._dispatcher = Dispatcher(settings, self.workers, self._scheduler, self._admission, self._transport, peers)
        key = settings.worker_api_key
        self._calls = WorkerCalls(self._transport, key.get_secret_value() if key else None)
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
        self._background: list[Callable[[], Coroutine[object, object, None]]] = (
            [self.monitor.run] if settings.health_interval else []
        )
        self.load_monitor = self._new_load_monitor() if settings.policy in REMOTE_POLICIES else None
        if self.load_monitor is not None:
            self._background.append(self.load_monitor.run)
        self.models = Models(
            self.workers, self._calls, settings.models_interval, clock, on_change=self._admission.serve_waiting
        )
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

    def _add_configured_workers(self) -> None:
        settings = self.settings
        for worker in settings.workers:
            self.workers.add(worker)
        if settings.register_file is None:
            return

        try:
            listed = read_register_file(settings.register_file, mode=settings.mode)
        except RegistrationError as exc:
            raise SettingsError(f"ASGI_ROUTER_REGISTER_FILE: {exc}") from None
        for worker in listed:
            if any(worker.url == known.url for known in settings.workers):
                raise SettingsError(f"ASGI_ROUTER_REGISTER_FILE: {worker.url!r} is in ASGI_ROUTER_WORKERS, too")
            # Whether it is up nobody knows: one failed probe is enough, and the monitor begins with this one.
            self.workers.add(worker).probes_against = max(1, settings.health_failures - 1)

    def _new_load_monitor(self) -> LoadMonitor:
        settings, extra = self.settings, "pip install 'asgi-router[prometheus]'"
        age, interval = settings.load_max_age, settings.load_interval
        try:
            return LoadMonitor(
                self.workers, self._calls, path=settings.load_path, interval=interval, max_age=age, clock=self._clock
            )
        except ImportError:
            raise SettingsError(f"ASGI_ROUTER_POLICY: {settings.policy} needs the extra: {extra}") from None

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
            queued=len(self._admission),
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
        exchange = Exchange(Client(scope, receive, send), path, app, self._clock)
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
        observers = [*self.observers, log_request] if requests_are_logged() else self.observers
        if not observers:
            return  # nothing is computed that nobody wants to know
        event = finished(exchange)
        for observe in observers:
            try:
                observe(event)
            except Exception as exc:
                logger.error("an observer failed: %s", type(exc).__name__)

    async def _fall_idle(self) -> None:
        if self._idle is not None:
            self._idle.set()
            self._idle = None
        if self._owns_transport and not self.users and not self._aborts.busy:
            # Nobody has promised to close us: no lifespan reaches a mounted app, or a TestClient without `with`.
            with anyio.move_on_after(CLOSE_GRACE, shield=True):
                await self._transport.aclose()
