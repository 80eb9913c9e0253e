"""Owns mixed mode: every worker prefills and decodes, and one of them serves a request alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asgi_router.admission import Admission
from asgi_router.errors import RoutedTwice, WorkerBusy, WorkerError, WorkerUnreachable, silent
from asgi_router.headers import retry_after
from asgi_router.upstream.answer import close
from asgi_router.upstream.local import BUSY, LocalCall
from asgi_router.upstream.relay import relay

if TYPE_CHECKING:
    from collections.abc import Collection

    from asgi_router.exchange import Exchange
    from asgi_router.extraction import CompletionRequest
    from asgi_router.fleet.registry import Registry
    from asgi_router.headers import RawHeaders
    from asgi_router.peers import Peers
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.scheduler import Scheduler
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.settings import RouterSettings
    from asgi_router.upstream.http11 import Pool
    from asgi_router.upstream.upstream import Upstream

logger = logging.getLogger("asgi_router")

MAX_ATTEMPTS = 100
"""How often a request asks a worker at most. `RETRY_ATTEMPTS` counts anew each time that it has had to wait."""


class Mixed:
    """Chooses one worker for a request, and asks it.

    Args:
        settings: the router's.
        workers: the fleet.
        scheduler: chooses among it.
        upstream: how requests reach the workers.
        peers: the other routers of this fleet.

    Attributes:
        admission: gives a request its lease, or lets it wait for one.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: Registry,
        scheduler: Scheduler,
        upstream: Upstream,
        peers: Peers,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._scheduler = scheduler
        self._upstream = upstream
        self._peers = peers
        self.admission = Admission(self._select, queue_size=settings.queue_size, queue_timeout=settings.queue_timeout)

    def native_pool(self) -> Pool | None:
        """Return our own connections, unless the wrapped app is among the workers; see `Mode`."""
        return None if self._workers.has_local else self._upstream.native_pool()

    def _select(self, request: CompletionRequest, exclude: Collection[WorkerState]) -> Lease:
        return self._scheduler.select(self._workers, request, exclude=exclude)

    async def choose(self, exchange: Exchange) -> None:
        """Lease a worker for the request; see `Mode`."""
        assert exchange.request is not None  # it was read before a worker is asked
        exchange.request = request = self._scheduler.condense(exchange.request)
        if self._peers.have_placed(exchange.client.scope.get("headers") or (), exchange.ids.request_id):
            exchange.lease = self._place(exchange, request)
        else:
            exchange.lease = await self.admission.acquire(request, exchange.times, exchange.tried, exchange.loop)
        exchange.tried.add(exchange.lease.state)

    def _place(self, exchange: Exchange, request: CompletionRequest) -> Lease:
        exchange.placed = True
        for state in self._workers:
            if state.worker.is_local:
                return self._scheduler.place(state, request, reason="placed_by_peer")
        raise RoutedTwice("A router has sent this request to a router that has no worker of its own.")

    def others(self, exchange: Exchange) -> bool:
        """Tell whether the request may be tried on another worker; see `Mode`."""
        return bool(self._others(exchange))

    def repeats(self, error: WorkerError) -> bool:
        """Tell whether a failure may be repeated on another worker; see `Mode`."""
        return isinstance(error, WorkerUnreachable)

    def _may_help(self, exchange: Exchange) -> bool:
        """Tell whether another worker is likely to take at once what this one is too busy for."""
        may_help = [state for state in self._others(exchange) if state.breaker.admits]
        return exchange.sent < self._settings.retry_attempts and any(map(self._scheduler.has_room, may_help))

    def _others(self, exchange: Exchange) -> list[WorkerState]:
        too_often = len(exchange.tried) > self._settings.retry_attempts or exchange.attempts > MAX_ATTEMPTS
        if exchange.request is None or exchange.placed or too_often:
            return []

        return self._scheduler.able(self._workers, exchange.request, exclude=exchange.tried)

    async def ask(self, exchange: Exchange, path: str) -> None:
        """Send the request to its worker, and pass the answer on; see `Mode`."""
        settings, lease = self._settings, exchange.lease
        assert lease is not None  # it was chosen
        own_headers = decision_headers(exchange, lease) if settings.decision_headers else []
        exchange.allow(settings.first_byte_timeout, silent)
        if lease.state.worker.is_local:
            call = LocalCall(
                exchange,
                lease,
                own_headers=own_headers,
                idle_timeout=settings.idle_timeout,
                send_timeout=settings.send_timeout,
                may_help=lambda: self._may_help(exchange),
            )
            await call.serve()
            note_status(lease, exchange.client.status)
            return

        answer = await self._upstream.open(
            exchange,
            lease.state.worker.url + path,
            exchange.body,
            own_headers=self._peers.signed(exchange.ids.request_id),
            progress=exchange.progress,
        )
        if answer.status in BUSY:
            lease.state.breaker.back_off(retry_after(answer.headers))
            if self._may_help(exchange):
                await close(answer)
                raise WorkerBusy("The worker is busy.")
        await relay(
            answer,
            exchange,
            lease,
            own_headers=own_headers,
            idle_timeout=settings.idle_timeout,
            send_timeout=settings.send_timeout,
        )
        note_status(lease, answer.status)


def note_status(lease: Lease, status: int) -> None:
    """Tell the worker's circuit breaker of a whole answer with this status, and the log of what is remarkable in it."""
    if status in BUSY:
        return
    if status >= 500:
        logger.warning("%s: answered %d", lease.state.worker.url, status)
        note_failure(lease)
    elif lease.succeeded():
        logger.warning("%s: circuit breaker closed", lease.state.worker.url)


def note_failure(lease: Lease) -> None:
    """Tell the worker's circuit breaker of a failure, and the log if that has opened it."""
    if lease.failed():
        logger.warning("%s: circuit breaker open", lease.state.worker.url)


def decision_headers(exchange: Exchange, lease: Lease) -> RawHeaders:
    """Return what a client is told of the choice: who, why, and by which id it can be found in log and worker."""
    cached = f"{lease.cached_tokens}/{lease.prefill_tokens}"
    why = f"{lease.reason}; candidates={lease.candidates}; cached={cached}; attempt={exchange.attempts}"
    return [
        (b"x-router-worker", lease.state.worker.url.encode()),
        (b"x-router-decision", why.encode()),
        (b"x-request-id", exchange.ids.request_id.encode()),
    ]
