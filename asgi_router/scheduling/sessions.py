"""Owns which worker served a session last. A pin is soft: it gives way to all that keeps a request from a worker.

1. A request with a session goes where the session's last one went, if that worker may be chosen now and is not
   clearly overloaded. If not, the policy chooses, and the session moves there.
2. Clearly overloaded: it has over 16 requests, or over 32,768 queued prompt tokens, more than the candidate that has
   the fewest, and that is over half of its own. Below that a warm cache is worth the wait.
3. The table is bounded in number and time, and what it keeps of a session doesn't grow with the session's name. It
   keeps no worker alive.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.state import WorkerState

MAX_SESSIONS = 100_000
"""Sessions that are remembered; the one that was used least recently goes. They take 30 MB at the most."""

REQUESTS_GAP = 16
TOKENS_GAP = 32 * 1024
GAP_SHARE = 0.5


class Sessions:
    """The pins of all sessions.

    Args:
        ttl: seconds after its last request from which a session is forgotten.
        clock: monotonic seconds.
        capacity: how many sessions at the most, one at least.
    """

    __slots__ = ("_capacity", "_clock", "_pins", "_ttl")

    def __init__(self, ttl: float, clock: Callable[[], float], capacity: int = MAX_SESSIONS) -> None:
        self._ttl = ttl
        self._clock = clock
        self._capacity = capacity
        # In the order of their last use. By a hash of session and model: 64 bits, seeded at the interpreter's start, so
        # that nobody can construct a collision; and one by accident only shares a pin.
        self._pins: OrderedDict[int, tuple[ref[WorkerState], float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Sessions {len(self)} of {self._capacity}>"

    def __len__(self) -> int:
        return len(self._pins)

    def worker_for(self, request: CompletionRequest, candidates: Collection[WorkerState]) -> WorkerState | None:
        """Return the candidate to which the request's session is pinned; None if there is none that it should go to."""
        pin = self._pins.get(_key(request))
        if pin is None or self._clock() - pin[1] >= self._ttl:
            return None

        worker = pin[0]()
        if worker is None or worker not in candidates or _is_overloaded(worker, candidates):
            return None
        return worker

    def note(self, request: CompletionRequest, worker: WorkerState) -> None:
        """Pin the request's session to the worker that was chosen, from now on."""
        pins, now = self._pins, self._clock()
        key = _key(request)
        pins[key] = ref(worker), now
        pins.move_to_end(key)
        # Each call makes room for more than it takes, so the table shrinks again after a busy hour.
        for _ in range(2):
            oldest = next(iter(pins))
            if len(pins) > self._capacity or now - pins[oldest][1] >= self._ttl:
                del pins[oldest]


def _key(request: CompletionRequest) -> int:
    return hash((request.session_id, request.model))


def _is_overloaded(worker: WorkerState, candidates: Collection[WorkerState]) -> bool:
    requests, tokens = worker.requests, worker.pending_prefill_tokens
    if requests > REQUESTS_GAP:
        gap = requests - min(other.requests for other in candidates)
        if gap > REQUESTS_GAP and gap > requests * GAP_SHARE:
            return True
    if tokens > TOKENS_GAP:
        gap = tokens - min(other.pending_prefill_tokens for other in candidates)
        if gap > TOKENS_GAP and gap > tokens * GAP_SHARE:
            return True
    return False
