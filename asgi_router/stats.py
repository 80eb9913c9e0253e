"""Owns the snapshot that `Router.stats()` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asgi_router.scheduling.breaker import BreakerState
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One worker at one moment."""

    url: str
    role: Role
    requests: int
    """Requests in flight."""
    prefill_tokens: int
    """Estimated prompt tokens of the requests in flight."""
    waiting_requests: int
    """Requests in flight whose first body byte has not come yet."""
    pending_prefill_tokens: int
    """Uncached prompt tokens of the waiting requests: what policies use as the length of the queue."""
    prefix_blocks: int
    """Blocks that the router believes to be in the worker's prefix cache; longer ones count as several."""
    prefix_capacity: int
    """How many it is believed to have room for."""
    healthy: bool
    draining: bool
    breaker: BreakerState
    backing_off: bool
    """It has answered 429 or 503 with `Retry-After`, and that time is not over."""
    remote_running: int | None
    """Requests that run there by its own word, whoever sent them. None: no fresh word, or nobody asks."""
    remote_waiting: int | None
    """Requests that wait there, the same way."""

    @classmethod
    def of(cls, state: WorkerState) -> WorkerStats:
        """Return a snapshot of `state`."""
        said = state.remote.said if state.remote is not None and state.remote.fresh else None
        return cls(
            url=state.worker.url,
            role=state.worker.role,
            requests=state.requests,
            prefill_tokens=state.prefill_tokens,
            waiting_requests=state.waiting_requests,
            pending_prefill_tokens=state.pending_prefill_tokens,
            prefix_blocks=len(state.prefixes),
            prefix_capacity=state.prefixes.capacity,
            healthy=state.healthy,
            draining=state.draining,
            breaker=state.breaker.state,
            backing_off=state.breaker.backing_off,
            remote_running=said and said.running,
            remote_waiting=said and said.waiting,
        )


@dataclass(frozen=True, slots=True)
class RouterStats:
    """One router at one moment. The counters are those of this process."""

    workers: tuple[WorkerStats, ...]
    exchanges: int
    """Completion requests that are being served, including those still uploading their body."""
    leases: int
    """Claims on workers that are not released yet, those on workers that have left the fleet included."""
    queued: int
    """Requests that wait for a place."""
    draining: bool
    """New requests are refused: the router is shutting down."""
