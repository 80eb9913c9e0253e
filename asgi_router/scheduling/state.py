"""Owns what the scheduler knows of one worker now: its load, its prefix blocks, whether it may be chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asgi_router.scheduling.blocks import stable_hash
from asgi_router.scheduling.breaker import BreakerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asgi_router.scheduling.breaker import Breaker
    from asgi_router.scheduling.picture import Picture
    from asgi_router.scheduling.remote_load import Load, RemoteLoad
    from asgi_router.worker import Worker


@dataclass(slots=True, eq=False, weakref_slot=True)
class WorkerState:
    """A worker as one router sees it.

    It is never looked up by URL: a worker that leaves and comes back is a new object, with counters at zero
    and no prefix blocks, while the leases of old requests release on the old one.

    The counters are written by `lease.py` and by nobody else.
    """

    worker: Worker
    prefixes: Picture
    breaker: Breaker
    requests: int = 0
    """Requests in flight."""
    prefill_tokens: int = 0
    """Estimated prompt tokens of the requests in flight."""
    waiting_requests: int = 0
    """Requests in flight whose first body byte has not come yet."""
    pending_prefill_tokens: int = 0
    """The queue: uncached prompt tokens of the waiting requests."""
    healthy: bool = True
    """False: it failed its health probes, and gets no new requests."""
    draining: bool = False
    """True: it gets no new requests; those in flight go on."""
    known_as: str = ""
    """What all routers of a fleet call this worker. Default: its URL."""
    probes_against: int = 0
    """Health probes in a row that say the opposite of `healthy`."""
    discovered: Mapping[str, bytes] | None = None
    """Models that it says it serves, and what it says of each (JSON). None: nothing is known."""
    remote: RemoteLoad | None = None
    """What it said of its load last, fresh or stale. None: nothing."""

    identity: int = field(init=False)
    """64 bits that stand for `known_as` in every process."""

    def __post_init__(self) -> None:
        self.known_as = self.known_as or self.worker.url
        self.identity = stable_hash(self.known_as.encode())

    def serves(self, model: str) -> bool:
        """Tell whether a request for `model` may come here; one that names none may come to any worker."""
        served = self.worker.models or self.discovered
        return not model or served is None or model in served

    @property
    def remote_load(self) -> Load | None:
        """The requests there now, others' too: its word, brought up to date. None where that is stale or missing."""
        return self.remote.now(self.requests) if self.remote is not None and self.remote.fresh else None

    def __repr__(self) -> str:
        flags = ("" if self.healthy else ", unhealthy") + (", draining" if self.draining else "")
        flags += "" if self.breaker.state is BreakerState.CLOSED else f", breaker {self.breaker.state}"
        return (
            f"<WorkerState {self.worker.url} {self.worker.role.value}: {self.requests} requests, "
            f"{self.prefill_tokens} prefill tokens, {self.pending_prefill_tokens} pending{flags}, {self.prefixes!r}>"
        )
