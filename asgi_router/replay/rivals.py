"""Owns the published rules of other routers, as policies: beside ours in a replay, or in a router that is given one.

Each is written anew from its project's description, with its defaults, and sees what our policies see: the router's
own counters, and its picture of what each worker has cached. Where the original has more than that, its docstring says
what is left out. Q is the queue in uncached tokens, U this prompt's uncached tokens, n the requests in flight.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from asgi_router.scheduling.policies import lowest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from asgi_router.scheduling.policies import Policy
    from asgi_router.scheduling.prompt import Prompt
    from asgi_router.scheduling.state import WorkerState


class FastDeployCacheAware:
    """`cache_aware` of FastDeploy's Go router (golang_router), as it is.

    Out of balance, which is a gap of more than one request and a fifth: fewest prompt tokens, the cache ignored. Else
    `(1 - hit) + n / most`, where only the holders of the longest match have a hit. A gap of two requests is everyday,
    so it falls back for most requests. (Ours has higher limits, and credits every holder.)
    """

    def __init__(self, rng: random.Random, *, hit_weight: float = 1.0, load_weight: float = 1.0) -> None:
        self._rng = rng
        self._hit_weight = hit_weight
        self._load_weight = load_weight

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        most = max(worker.requests for worker in workers)
        gap = most - min(worker.requests for worker in workers)
        if gap > 1 and gap / most > 0.2:
            prompt.reason = "out_of_balance"
            return lowest(workers, lambda worker: (worker.prefill_tokens,), self._rng)

        hits = {worker: prompt.hit_ratio(worker) for worker in workers}
        deepest = max(hits.values())

        def score(worker: WorkerState) -> tuple[float, ...]:
            hit = hits[worker] if hits[worker] == deepest else 0.0
            load = worker.requests / most * self._load_weight if most else 0.0
            return (1 - hit) * self._hit_weight + load, worker.prefill_tokens

        return lowest(workers, score, self._rng)


class SglangCacheAware:
    """`cache_aware` of the SGLang model gateway (smg; 0.5, 32, 1.1), from which the vLLM router's (0.3, 64, 1.5) comes.

    Out of balance: fewest requests, for everybody. Else the longest match if it is over `threshold` of the prompt, and
    the worker with the smallest tree if not, however busy it is.
    """

    def __init__(
        self, rng: random.Random, *, threshold: float = 0.5, balance_abs: int = 32, balance_rel: float = 1.1
    ) -> None:
        self._rng = rng
        self._threshold = threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        most = max(worker.requests for worker in workers)
        least = min(worker.requests for worker in workers)
        if most - least > self._balance_abs and most > self._balance_rel * least:
            prompt.reason = "out_of_balance"
            return lowest(workers, _requests, self._rng)

        best = lowest(workers, lambda worker: (-prompt.hit_ratio(worker),), self._rng)
        if prompt.hit_ratio(best) > self._threshold:
            return best
        return lowest(workers, lambda worker: (len(worker.prefixes),), self._rng)


class Dynamo:
    """The default cost of NVIDIA Dynamo's KV router (ai-dynamo/dynamo, lib/kv-router): prefill and decode, added.

    `Q + U + active blocks`, all in tokens: the blocks are those of the requests in flight, each once. This prompt's own
    blocks count alike everywhere here; Dynamo leaves out those that are active already.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        def score(worker: WorkerState) -> tuple[float, ...]:
            active = worker.prefixes.pinned * prompt.block_tokens
            return (worker.pending_prefill_tokens + prompt.uncached_tokens(worker) + active,)

        return lowest(workers, score, self._rng)


class LlmdWeighted:
    """The weighted sum of llm-d's endpoint picker (Gateway API Inference Extension): prefix 3, queue 2, KV cache 2.

    Its scorers: matched share of the prompt; waiting requests, from 1 for the fewest to 0 for the most; free share of
    the KV cache. It polls the last two from the workers; here they are the router's own, so they are never old.
    """

    def __init__(self, rng: random.Random, *, cache_tokens: int = 250_000) -> None:
        self._rng = rng
        self._cache_tokens = cache_tokens

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        longest = max(worker.waiting_requests for worker in workers)
        width = longest - min(worker.waiting_requests for worker in workers)

        def score(worker: WorkerState) -> tuple[float, ...]:
            queue = (longest - worker.waiting_requests) / width if width else 1.0
            free = 1 - min(1.0, worker.prefill_tokens / self._cache_tokens)
            return (-(3 * prompt.hit_ratio(worker) + 2 * queue + 2 * free),)

        return lowest(workers, score, self._rng)


class LlmdSticky:
    """llm-d's "sticky until saturated" (llm-d.github.io, August 2026), bound by prefill, without exploration.

    Among the workers that hold at least 0.8 of the prompt, unless their shortest queue is longer than the others' by
    the prefill of `release_seconds`; then among all. Least `Q + U` of these.
    """

    def __init__(self, rng: random.Random, *, release_seconds: float = 18.0, prefill_rate: float = 15_928.0) -> None:
        self._rng = rng
        self._gap = release_seconds * prefill_rate

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        sticky = [w for w in workers if prompt.tokens - prompt.uncached_tokens(w) >= 0.8 * prompt.tokens]
        if sticky and len(sticky) < len(workers):
            queue = min(worker.pending_prefill_tokens for worker in sticky)
            if queue - min(w.pending_prefill_tokens for w in workers if w not in sticky) <= self._gap:
                workers = sticky
        return lowest(workers, lambda w: (w.pending_prefill_tokens + prompt.uncached_tokens(w),), self._rng)


class LMetric:
    """LMetric (arXiv 2603.15202, OSDI '26): `(Q + U) * (n + 1)`. Without its detector of hot prefixes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        def score(worker: WorkerState) -> tuple[float, ...]:
            return ((worker.pending_prefill_tokens + prompt.uncached_tokens(worker)) * (worker.requests + 1),)

        return lowest(workers, score, self._rng)


class RayPrefixAffinity:
    """Ray Serve's PrefixCacheAffinityRouter (prefix_aware_router.py).

    The longest match, with the fewest requests, if it is a tenth of the prompt; else the smallest tree. Its limit to
    the difference between queues is infinite by default, so it never balances.
    """

    def __init__(self, rng: random.Random, *, imbalanced_threshold: float = float("inf")) -> None:
        self._rng = rng
        self._threshold = imbalanced_threshold

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        requests = [worker.requests for worker in workers]
        if max(requests) - min(requests) > self._threshold:
            prompt.reason = "out_of_balance"
            return lowest(self._rng.sample(list(workers), min(2, len(workers))), _requests, self._rng)

        best = lowest(workers, lambda worker: (-prompt.hit_ratio(worker), worker.requests), self._rng)
        if prompt.hit_ratio(best) >= 0.1:
            return best
        return lowest(workers, lambda worker: (len(worker.prefixes),), self._rng)


class Preble:
    """Preble's E2 (arXiv 2407.00023, ICLR '25): exploit if more of the prompt is cached than missed, else explore.

    Exploit: the longest match, unless its load of the last three minutes is over 1.5 times the least: then the least.
    Explore: the least load and own prefill. Load is uncached tokens sent there. Without its cost of what is evicted and
    its replication of prefixes.
    """

    def __init__(self, rng: random.Random, clock: Callable[[], float], *, window: float = 180.0) -> None:
        self._rng = rng
        self._clock = clock
        self._window = window
        self._sent: deque[tuple[float, WorkerState, int]] = deque()
        self._loads: WeakKeyDictionary[WorkerState, int] = WeakKeyDictionary()

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        now, sent, loads = self._clock(), self._sent, self._loads
        while sent and sent[0][0] <= now - self._window:
            _, worker, tokens = sent.popleft()
            loads[worker] -= tokens

        uncached = {worker: prompt.uncached_tokens(worker) for worker in workers}
        chosen = lowest(workers, lambda worker: (uncached[worker], loads.get(worker, 0)), self._rng)
        if 2 * uncached[chosen] < prompt.tokens:
            least = lowest(workers, lambda worker: (loads.get(worker, 0),), self._rng)
            if loads.get(chosen, 0) > 1.5 * (loads.get(least, 0) + uncached[least]):
                chosen = least
        else:
            chosen = lowest(workers, lambda worker: (loads.get(worker, 0) + uncached[worker],), self._rng)
        sent.append((now, chosen, uncached[chosen]))
        loads[chosen] = loads.get(chosen, 0) + uncached[chosen]
        return chosen


def _requests(worker: WorkerState) -> tuple[float, ...]:
    return (worker.requests,)


class Rival(Protocol):
    """Makes a policy."""

    def __call__(self, rng: random.Random, clock: Callable[[], float], cache_tokens: int) -> Policy:
        """Return it, given a source of chance, a clock of monotonic seconds, and the size of a worker's KV cache."""
        ...


RIVALS: Mapping[str, Rival] = {
    "dynamo": lambda rng, clock, cache_tokens: Dynamo(rng),
    "fastdeploy": lambda rng, clock, cache_tokens: FastDeployCacheAware(rng),
    "llmd": lambda rng, clock, cache_tokens: LlmdWeighted(rng, cache_tokens=cache_tokens),
    "llmd_sticky": lambda rng, clock, cache_tokens: LlmdSticky(rng),
    "lmetric": lambda rng, clock, cache_tokens: LMetric(rng),
    "preble": lambda rng, clock, cache_tokens: Preble(rng, clock),
    "ray": lambda rng, clock, cache_tokens: RayPrefixAffinity(rng),
    "sglang": lambda rng, clock, cache_tokens: SglangCacheAware(rng),
    "vllm_router": lambda rng, clock, cache_tokens: SglangCacheAware(
        rng, threshold=0.3, balance_abs=64, balance_rel=1.5
    ),
}
"""By the names that a replay knows."""
