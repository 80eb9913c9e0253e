"""Owns what a worker's own word on its load is worth: how long it counts, and what has changed since.

A worker's word includes what others send it, which our counters don't know. But it is old the moment it comes: were it
taken as it is, all requests between two answers would go to the same worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Load(NamedTuple):
    """Requests at one worker, whoever sent them."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLoad:
    """What a worker has said of its load, and what this router had there at that time."""

    said: Load
    own_requests: int
    """Our requests in flight there, as far as `said` is sure to have them."""
    expires: float
    """From when on it is stale, in the seconds of `clock`."""
    clock: Callable[[], float]

    @property
    def fresh(self) -> bool:
        return self.clock() < self.expires

    def now(self, own_requests: int) -> Load:
        """Return the load of this moment: what was said, and our requests that have come or gone since.

        So others' requests are what is left of the worker's word without ours, or none, and to these come
        `own_requests`, those that we have there now. Where requests wait, the batch is full: one more waits too, and
        one that ends makes room for one of them. Where none do, all of them run.
        """
        others = max(0, sum(self.said) - self.own_requests)
        total = others + own_requests
        running = min(total, self.said.running) if self.said.waiting else total
        return Load(running, total - running)
