"""Owns who the workers are now."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

from asgi_router.worker import LOCAL, normalise_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asgi_router.scheduling.state import WorkerState
    from asgi_router.worker import Worker


class Registry:
    """The workers of one router, in the order in which they came; each URL once.

    Args:
        new_state: makes the state of a worker that joins: counters at zero, no prefix blocks, breaker closed.
        on_change: called after the fleet has changed.
    """

    def __init__(
        self, new_state: Callable[[Worker], WorkerState], *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._new_state = new_state
        self._on_change = on_change
        # These two are never changed, only replaced: another thread may be reading them.
        self._states: dict[str, WorkerState] = {}
        self._leaving: tuple[ref[WorkerState], ...] = ()  # weak: their leases hold them as long as there are any

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def __contains__(self, worker: object) -> bool:
        """Tell whether a worker is here, by its state or by its URL as `Worker` spells it."""
        return worker in self._states or worker in self._states.values()

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"<Registry {list(self)!r}>"

    @property
    def has_local(self) -> bool:
        """Whether the wrapped app is one of the workers."""
        return LOCAL in self._states

    @property
    def leaving(self) -> tuple[WorkerState, ...]:
        """Workers that have left, or were replaced, while their last requests are in flight."""
        return tuple(state for left in self._leaving if (state := left()) is not None and state.requests)

    def add(self, worker: Worker) -> WorkerState:
        """Let a worker join.

        A worker with the same URL is replaced: its requests in flight end on the old state. What it has said of its
        models holds until it is asked again.
        """
        state = self._new_state(worker)
        if (old := self._states.get(worker.url)) is not None:
            state.discovered = old.discovered
        self._note_leaving(worker.url)
        self._states = {url: old for url, old in self._states.items() if url != worker.url} | {worker.url: state}
        self._on_change()
        return state

    def get(self, url: str) -> WorkerState:
        """Return the worker with this URL.

        Raises:
            KeyError: there is none.
        """
        return self._states[normalise_url(url)]

    def drain(self, url: str, *, draining: bool = True) -> None:
        """Give a worker no new requests; those in flight go on. `draining=False` takes it back.

        Raises:
            KeyError: there is no worker with this URL.
        """
        self.get(url).draining = draining
        self._on_change()

    def set_breaker(self, url: str, *, open: bool) -> None:
        """Open a worker's circuit breaker for one cool-down, or close it and end any `Retry-After` of the worker's.

        Raises:
            KeyError: there is no worker with this URL.
        """
        breaker = self.get(url).breaker
        if open:
            breaker.open()
        else:
            breaker.close()
        self._on_change()

    def remove(self, url: str) -> None:
        """Let a worker leave: it gets no new requests, those in flight go on, its prefix blocks are forgotten.

        Raises:
            KeyError: there is no worker with this URL.
        """
        url = self.get(url).worker.url
        self._note_leaving(url)
        self._states = {known: state for known, state in self._states.items() if known != url}
        self._on_change()

    def _note_leaving(self, url: str) -> None:
        if url in self._states:
            self._leaving = tuple(map(ref, (*self.leaving, self._states[url])))
