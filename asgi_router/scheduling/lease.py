"""Owns every counter of every worker.

1. Counters change here and nowhere else, and only through a lease.
2. A lease counts itself up when it is made, which is the moment of selection: choosing and counting are one
   step, so that no two requests choose on the same numbers.
3. `release` gives back all that the lease took, in one synchronous step, exactly once however often it is
   called. It never awaits, never raises and takes no argument: it fits into any `finally`.
4. What is given back is what was taken, stored in the lease, from the worker object that was counted, held by
   the lease. Nothing is estimated or looked up again. So no counter can go below zero, and none is clamped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from asgi_router.scheduling.picture import Picture
    from asgi_router.scheduling.prompt import Prompt
    from asgi_router.scheduling.state import WorkerState


class Lease:
    """One request's claim on one worker, from selection until the worker is done with it.

    Attributes:
        state: the worker that was chosen and counted.
        prefill_tokens: estimated prompt tokens.
        uncached_tokens: how many of them the worker probably has to prefill, at least 1.
        reason: why this worker was chosen, in a word.
        candidates: among how many it was.
    """

    __slots__ = (
        "_blocks",
        "_cached",
        "_certain",
        "_evicted",
        "_length",
        "_number",
        "_on_release",
        "_picture",
        "_prefilled",
        "_released",
        "_waiting",
        "candidates",
        "prefill_tokens",
        "reason",
        "state",
        "uncached_tokens",
    )

    def __init__(
        self,
        state: WorkerState,
        prompt: Prompt,
        on_release: Callable[[], None] | None = None,
        *,
        reason: str = "",
        candidates: int = 1,
    ) -> None:
        self.state = state
        self._picture: Picture = state.prefixes  # the worker may get another one before the release
        self.reason = reason
        self.candidates = candidates
        self._on_release = on_release
        self.prefill_tokens = prompt.tokens
        cached = prompt.cached_blocks(state)
        evicted = prompt.evicted_blocks(state, cached)
        # In blocks of the base size, all three.
        self._length = prompt.tokens / prompt.block_tokens
        self._cached = prompt.ends[cached]
        self._evicted = prompt.ends[cached + evicted] - self._cached
        self._certain = not cached or self._picture.confirmed(prompt.blocks[cached - 1])
        self.uncached_tokens = max(1, prompt.tokens - int(self._cached * prompt.block_tokens))
        self._blocks = prompt.blocks[: self._picture.pin(prompt.blocks)]
        self._waiting = True
        self._prefilled = False
        self._released = False
        self._number = state.breaker.enter()

        state.requests += 1
        state.prefill_tokens += self.prefill_tokens
        state.waiting_requests += 1
        state.pending_prefill_tokens += self.uncached_tokens

    @property
    def cached_tokens(self) -> int:
        """How many of the prompt's tokens the worker probably holds."""
        return max(0, self.prefill_tokens - self.uncached_tokens)

    def first_byte(self, *, prefilled: bool) -> None:
        """Note that the first body byte came: the request no longer waits. Not a release.

        Args:
            prefilled: the answer is a success, so the worker now holds the prompt's blocks.
        """
        if self._waiting:
            self._prefilled = prefilled
            self._stop_waiting()
            if prefilled and self.state.breaker.is_probe(self._number):
                self.succeeded()

    def release(self) -> None:
        """Give back both counters, the place in the queue and the pinned blocks."""
        if self._released:
            return

        self._released = True
        self._stop_waiting()
        self.state.breaker.leave(self._number)
        self.state.requests -= 1
        self.state.prefill_tokens -= self.prefill_tokens
        self._picture.unpin(self._blocks, prefilled=self._prefilled)
        if self._on_release is not None:
            self._on_release()

    def found(self, share: float) -> None:
        """Note how much of the prompt the worker says that it had cached, from 0 to 1."""
        if self._certain:  # else it was chosen for what another request was about to prefill there
            self._picture.learn(self._cached, self._evicted, share * self._length)

    def succeeded(self) -> bool:
        """Note for the worker's circuit breaker a whole answer; return whether that has closed it."""
        return self.state.breaker.succeeded(self._number)

    def failed(self) -> bool:
        """Note for the worker's circuit breaker a failure; return whether that has opened it."""
        return self.state.breaker.failed(self._number)

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self.state.waiting_requests -= 1
            self.state.pending_prefill_tokens -= self.uncached_tokens

    def __repr__(self) -> str:
        phase = "released" if self._released else "waiting" if self._waiting else "answering"
        return f"<Lease on {self.state.worker.url}: {self.prefill_tokens} tokens, {phase}>"
