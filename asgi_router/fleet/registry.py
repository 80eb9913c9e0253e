"""Owns who the workers are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.scheduling.state import WorkerState
from asgi_router.worker import normalise_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asgi_router.scheduling.prefix_index import PrefixIndex
    from asgi_router.worker import Worker


class Registry:
    """The workers of one router, in the order in which they came; each URL once.

    Args:
        new_index: makes the empty prefix index of a worker that joins.
    """

    def __init__(self, new_index: Callable[[], PrefixIndex]) -> None:
        self._new_index = new_index
        self._states: dict[str, WorkerState] = {}  # never changed, only replaced: another thread may be reading it

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._states.values())

    def __contains__(self, state: object) -> bool:
        return state in self._states.values()

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"<Registry {list(self)!r}>"

    def add(self, worker: Worker) -> WorkerState:
        """Let a worker join, with counters at zero and no prefix blocks.

        A worker with the same URL is replaced: its requests in flight end on the old state.
        """
        state = WorkerState(worker, self._new_index())
        self._states = {url: old for url, old in self._states.items() if url != worker.url} | {worker.url: state}
        return state

    def remove(self, url: str) -> None:
        """Let a worker leave: it gets no new requests, those in flight go on.

        Raises:
            KeyError: there is no worker with this URL.
        """
        url = normalise_url(url)
        if url not in self._states:
            raise KeyError(url)
        self._states = {known: state for known, state in self._states.items() if known != url}
