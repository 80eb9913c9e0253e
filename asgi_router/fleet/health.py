"""Owns the active health probes: who is asked, how often, and when a worker counts as healthy.

A probe never touches a counter, and never removes a worker: an unhealthy one gets no new requests, and gets them
again when it has recovered.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import httpx

from asgi_router.fleet.rounds import Rounds
from asgi_router.worker import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asgi_router.scheduling.state import WorkerState

logger = logging.getLogger("asgi_router")


class HealthMonitor:
    """Probes workers by `GET` on a path of theirs.

    Any answer below 500 is healthy: 401 and 403 come from a worker that wants a key, 404 from one without the path.

    Args:
        workers: the fleet, iterated anew for each round.
        transport: how probes reach the workers.
        path: what is asked for, below a worker's URL.
        interval: seconds from one round to the next. The first one is that long after the start, but workers that
            are in doubt then are probed at once.
        timeout: seconds that a probe may take; then it counts as failed.
        failures: how many in a row make a healthy worker unhealthy.
        successes: how many in a row make an unhealthy one healthy.
        on_change: called after a worker has become healthy or unhealthy.
    """

    def __init__(
        self,
        workers: Iterable[WorkerState],
        transport: httpx.AsyncBaseTransport,
        *,
        path: str,
        interval: float,
        timeout: float,
        failures: int,
        successes: int,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._workers = workers
        self._transport = transport
        self._path = path
        self._timeout = timeout
        self._failures = failures
        self._successes = successes
        self._on_change = on_change
        self._rounds = Rounds(workers, self._probe, interval=interval)

    async def run(self) -> None:
        """Probe the fleet until cancelled, each worker once an interval. May run several times at once."""
        await self._rounds.run(first=[state for state in self._workers if state.probes_against])

    async def probe_all(self) -> None:
        """Probe each worker once, all at the same time, but for those whose probe is under way."""
        await self._rounds.once()

    async def probe(self, url: str) -> bool:
        """Tell whether the worker at `url` answers a probe in time. Nothing is noted of it. The local one does."""
        if url == LOCAL:
            return True
        with anyio.move_on_after(self._timeout):
            return await self._answers(url)
        return False

    async def _probe(self, state: WorkerState) -> None:
        self._note(state, await self.probe(state.worker.url))

    async def _answers(self, url: str) -> bool:
        timeouts = {"connect": self._timeout, "read": self._timeout, "write": self._timeout, "pool": None}
        try:
            request = httpx.Request("GET", url + self._path, extensions={"timeout": timeouts})
            response = await self._transport.handle_async_request(request)
            try:
                return response.status_code < 500
            finally:
                # Unread, so that this costs a connection: cheaper than a body of any length from a sick worker.
                with anyio.move_on_after(self._timeout, shield=True):
                    await response.aclose()
        except Exception as exc:
            logger.debug("%s: probe failed (%s)", url, type(exc).__name__)
            return False

    def _note(self, state: WorkerState, alive: bool) -> None:
        # Consecutive results like this one; a result like the present state of the worker starts anew.
        state.probes_against = 0 if alive == state.healthy else state.probes_against + 1
        if state.probes_against >= (self._failures if state.healthy else self._successes):
            state.healthy = not state.healthy
            state.probes_against = 0
            if state.healthy:
                state.prefixes.clear()  # it has probably been restarted
            logger.warning("%s: %s", state.worker.url, "healthy again" if state.healthy else "unhealthy")
            self._on_change()
