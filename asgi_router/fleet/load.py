"""Owns asking the workers how busy they are: in the background, so that no choice ever waits for an answer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakSet

import httpx

from asgi_router.fleet.load_text import read_load
from asgi_router.fleet.rounds import Rounds
from asgi_router.scheduling.remote_load import RemoteLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asgi_router.scheduling.state import WorkerState
    from asgi_router.upstream.calls import WholeAnswer, WorkerCalls

logger = logging.getLogger("asgi_router")


class LoadMonitor:
    """Reads the workers' Prometheus metrics, and notes on each worker's state what they say of its load.

    An answer that can't be had or understood changes nothing: the last one counts until it is stale.

    Args:
        workers: the fleet, iterated anew for each round.
        calls: how workers are asked.
        path: what is asked for: below a worker's URL, or on its host's `metrics_port` where it has one.
        interval: seconds from one round to the next; the first one comes at once.
        max_age: seconds after which an answer is stale, counted from the question.
        clock: monotonic seconds.

    Raises:
        ImportError: the extra `prometheus` is not installed.
    """

    def __init__(
        self,
        workers: Iterable[WorkerState],
        calls: WorkerCalls,
        *,
        path: str,
        interval: float,
        max_age: float,
        clock: Callable[[], float],
    ) -> None:
        read_load(b"\n")  # raises where its parser is missing: now, and not while requests are served
        self._workers = workers
        self._calls = calls
        self._path = path
        self._max_age = max_age
        self._clock = clock
        self._rounds = Rounds(workers, self._ask, interval=interval)
        self._silent: WeakSet[WorkerState] = WeakSet()

    async def run(self) -> None:
        """Ask until cancelled, each worker once an interval. May run several times at once."""
        await self._rounds.run(first=self._workers)

    async def ask_all(self) -> None:
        """Ask each worker once, all at the same time, but for those that have not answered yet."""
        await self._rounds.once()

    async def _ask(self, state: WorkerState) -> None:
        asked, own_requests = self._clock(), state.requests
        # A lost question is asked again before the last answer is stale.
        answer = await self._calls.call("GET", load_url(state, self._path), timeout=self._max_age / 2)
        said = read_load(answer.body) if answer and answer.status == 200 else None
        if said is None:
            self._note_silence(state, answer)
            return

        # Whether those that came while it answered are in the answer nobody knows. They count on top of it: too busy is
        # the safer error, for the next answer corrects it, while a worker taken for idle draws all requests until then.
        state.remote = RemoteLoad(
            said=said,
            own_requests=min(own_requests, state.requests),
            expires=asked + self._max_age,
            clock=self._clock,
        )
        if state in self._silent:
            self._silent.discard(state)
            logger.warning("%s: says again how busy it is", state.worker.url)

    def _note_silence(self, state: WorkerState, answer: WholeAnswer | None) -> None:
        if state.remote_load is None and state not in self._silent:
            self._silent.add(state)
            what = "no answer" if answer is None else f"status {answer.status}"
            if answer and answer.status == 200:
                what = "none of the metrics that are known"
            logger.warning("%s: doesn't say how busy it is (%s); own counts are used", state.worker.url, what)


def load_url(state: WorkerState, path: str) -> str:
    """Return where a worker's metrics are: below its URL, or on the same host's `metrics_port`.

    `local` is asked at `LOCAL_URL`, as its peers ask it.
    """
    if state.worker.metrics_port is None:
        return state.known_as + path
    return str(httpx.URL(state.known_as).copy_with(port=state.worker.metrics_port, path=path))
