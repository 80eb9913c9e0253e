"""Owns the reference: a chooser that knows every simulated worker's cache and queue, as no router can."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.scheduling.policies import lowest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from asgi_router.replay.worker_model import SimulatedWorker
    from asgi_router.scheduling.prompt import Prompt
    from asgi_router.scheduling.state import WorkerState


_PER_REQUEST = 0.02  # seconds: what one more in the batch costs the others


class Oracle:
    """Chooses by the seconds that everything in front of a prompt, and the prompt itself, will really take.

    Its own prefill counts double, as in `prefill_cost`: it takes room, too. It knows what is cached, and what will be
    when the queue is done. It is greedy, and doesn't know what comes next, so a policy may beat it now and then.
    """

    def __init__(
        self, workers: Mapping[WorkerState, SimulatedWorker], rng: random.Random, clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._rng = rng
        self._clock = clock

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        now = self._clock()
        return lowest(
            workers,
            lambda state: (self._seconds(self._workers[state], prompt, now) + _PER_REQUEST * state.requests,),
            self._rng,
        )

    def _seconds(self, worker: SimulatedWorker, prompt: Prompt, now: float) -> float:
        seconds = worker.backlog_seconds(now)
        size = worker.block_tokens
        matchable = min(len(prompt.blocks), (prompt.tokens - 1) // size)
        cached = worker.cache.match(prompt.blocks, matchable)
        for waiting in worker.queue:
            known = worker.cache.match(waiting.blocks, min(len(waiting.blocks), (waiting.tokens - 1) // size))
            seconds += worker.prefill_seconds(waiting.tokens, known * size)
            while cached < min(matchable, len(waiting.blocks)) and waiting.blocks[cached] == prompt.blocks[cached]:
                cached += 1
        return seconds + 2 * worker.prefill_seconds(prompt.tokens, cached * size)
