"""Owns who the workers are now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.scheduling.state import WorkerState

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
        self._states: dict[str, WorkerState] = {}

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
        self._states.pop(worker.url, None)
        state = self._states[worker.url] = WorkerState(worker, self._new_index())
        return state

    def remove(self, url: str) -> None:
        """Let a worker leave: it gets no new requests, those in flight go on.

        Raises:
            KeyError: there is no worker with this URL.
        """
        del self._states[url]
