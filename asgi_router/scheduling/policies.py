"""Owns the policies: one small class each, with one method, `choose`.

A policy reads counters and never writes them, never awaits, and always returns one of the workers that it was
given. Equal workers are chosen among at random, or by the prompt's first block: a fixed order would send all the
traffic of a quiet fleet to the first. To add a policy, write a class and name it in `POLICIES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from asgi_router.scheduling.remote_load import Load

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from asgi_router.scheduling.prompt import Prompt
    from asgi_router.scheduling.state import WorkerState


class Policy(Protocol):
    """How a worker is chosen."""

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        """Return one of `workers`, of which there is at least one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The numbers that policies can be tuned by; the settings of the same names say what they mean."""

    prefill_cost_miss_weight: float = 2.0
    prefill_cost_batch_offset: float = 4.0
    cache_aware_hit_weight: float = 1.0
    cache_aware_load_weight: float = 1.0
    cache_aware_balance_abs: int = 16
    cache_aware_balance_rel: float = 0.5
    waiting_weight: float = 1.0


def _any_of(workers: Sequence[WorkerState], rng: random.Random) -> WorkerState:
    """Return one at random, in a fifth of the time that `choice` takes, which is as fair to a million workers."""
    return workers[int(rng.random() * len(workers))]


def lowest(
    workers: Sequence[WorkerState],
    score: Callable[[WorkerState], tuple[float, ...]],
    rng: random.Random,
    prompt: Prompt | None = None,
) -> WorkerState:
    """Return a worker with the lowest score; if there are several the home of `prompt`, or one at random."""
    best: list[WorkerState] = []
    best_score: tuple[float, ...] = ()
    for worker in workers:
        worker_score = score(worker)
        if not best or worker_score < best_score:
            best, best_score = [worker], worker_score
        elif worker_score == best_score:
            best.append(worker)

    if len(best) == 1:
        return best[0]
    return (prompt and prompt.home(best)) or _any_of(best, rng)


class PrefillCost:
    """The default: the work in front of this prompt plus its own prefill, times how busy the batch is.

    `(Q + miss_weight * (U + L)) * (n + batch_offset)`, lowest wins: Q is the worker's queue in uncached tokens, U
    this prompt's uncached tokens there (at least 1), n its requests in flight. LMetric's product (OSDI '26)
    with two softenings: a miss counts double, since it also evicts what others could reuse, and one request
    more on an almost idle worker doesn't outweigh a warm cache.

    L is what others would lose: the tokens of the slot that the prompt would take, where the worker has slots, weighted
    by how fresh they are; else 0. Without it a conversation that begins takes the slot of a sibling, for the sake of
    their system prompt, while others are free (measured: benchmarks/README.md, "Real engines").
    """

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._miss_weight = options.prefill_cost_miss_weight
        self._batch_offset = options.prefill_cost_batch_offset
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        miss_weight, batch_offset = self._miss_weight, self._batch_offset
        best: list[WorkerState] = []
        best_score = math.inf
        for worker in workers:  # as `lowest` does, without a call and a tuple for each: this is every request's way
            requests = worker.requests
            prefill = prompt.uncached_tokens(worker) + prompt.lost_tokens(worker)
            work = worker.pending_prefill_tokens + miss_weight * prefill
            score = work * (requests + batch_offset)
            if not best or score < best_score or (score == best_score and requests < best[0].requests):
                best, best_score = [worker], score
            elif score == best_score and requests == best[0].requests:
                best.append(worker)
        return best[0] if len(best) == 1 else prompt.home(best) or _any_of(best, self._rng)


class CacheAware:
    """The seed's cache-aware rule: cached share against load, unless the fleet is out of balance.

    `(1 - hit) * hit_weight + requests / most_requests * load_weight`, lowest wins. If the fullest worker has
    more than `balance_abs` requests and more than the share `balance_rel` of its own above the emptiest, the
    cache is ignored and the fewest requests win.

    Mended from the seed: every holder of a prefix gets its own match, not only the deepest one; balance is
    judged and restored by the same load (the seed judged by requests and restored by tokens); the limits are
    16 and 0.5 (the seed's 1 and 0.2 switch affinity off at a gap of two requests).
    """

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._options = options
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        return self.choose_by({worker: worker.requests for worker in workers}, prompt)

    def choose_by(self, requests: Mapping[WorkerState, int], prompt: Prompt) -> WorkerState:
        """Return one of the workers in `requests`, which says how many each has."""
        options, workers = self._options, tuple(requests)
        most = max(requests.values())
        gap = most - min(requests.values())
        if gap > options.cache_aware_balance_abs and gap / most > options.cache_aware_balance_rel:
            prompt.reason = "out_of_balance"
            return lowest(workers, lambda worker: (requests[worker], worker.prefill_tokens), self._rng)

        def score(worker: WorkerState) -> tuple[float, ...]:
            miss = (1 - prompt.hit_ratio(worker)) * options.cache_aware_hit_weight
            load = requests[worker] / most * options.cache_aware_load_weight if most else 0.0
            return miss + load, worker.prefill_tokens

        return lowest(workers, score, self._rng)


class RequestNum:
    """Fewest requests in flight, then fewest prompt tokens."""

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        return lowest(workers, _requests_then_tokens, self._rng)


class ProcessTokens:
    """Fewest prompt tokens in flight, then fewest requests."""

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        return lowest(workers, lambda worker: (worker.prefill_tokens, worker.requests), self._rng)


class FdMetricsScore:
    """FastDeploy's engine score, from the router's own counters: running + waiting * waiting_weight.

    Waiting are the requests whose first byte has not come yet, running the others. (The seed's router counts
    none as waiting, which makes its weight inert.)
    """

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._waiting_weight = options.waiting_weight
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        return self.choose_by(
            {worker: Load(worker.requests - worker.waiting_requests, worker.waiting_requests) for worker in workers}
        )

    def choose_by(self, loads: Mapping[WorkerState, Load]) -> WorkerState:
        """Return one of the workers in `loads`, which says how many requests run and wait at each."""

        def score(worker: WorkerState) -> tuple[float, ...]:
            return (loads[worker].running + loads[worker].waiting * self._waiting_weight,)

        return lowest(tuple(loads), score, self._rng)


class RemoteCacheAware(CacheAware):
    """`cache_aware` by what the workers say of their load: requests that run or wait there, whoever sent them."""

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        loads = remote_loads(workers, prompt)
        if loads is None:
            return super().choose(workers, prompt)
        return self.choose_by({worker: load.running + load.waiting for worker, load in loads.items()}, prompt)


class FdRemoteMetricsScore(FdMetricsScore):
    """`fd_metrics_score` by what the workers say of their load."""

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        loads = remote_loads(workers, prompt)
        return super().choose(workers, prompt) if loads is None else self.choose_by(loads)


def remote_loads(workers: Sequence[WorkerState], prompt: Prompt) -> Mapping[WorkerState, Load] | None:
    """Return the loads by the workers' own words, or None, and that as the reason, where one of them is missing.

    Our own counts and a worker's word are not comparable: a worker that stops talking would look like an idle one.
    """
    loads = {worker: load for worker in workers if (load := worker.remote_load) is not None}
    if len(loads) == len(workers):
        return loads
    prompt.reason = "load_unknown"
    return None


class PowerOfTwo:
    """Two different workers at random; of them the one with fewer requests in flight."""

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        if len(workers) == 1:
            return workers[0]

        first, second = self._rng.sample(workers, 2)
        return first if first.requests <= second.requests else second


class RoundRobin:
    """The worker whose last turn is longest ago; one that has had none comes first.

    A running number modulo the count of workers would be simpler, but the workers that may be chosen differ
    from request to request: with two models in turns, or retries, some would get no turn at all.
    """

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._turn = 0
        self._last_turns: WeakKeyDictionary[WorkerState, int] = WeakKeyDictionary()

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        worker = min(workers, key=lambda worker: self._last_turns.get(worker, 0))
        self._turn += 1
        self._last_turns[worker] = self._turn
        return worker


class Random:
    """Any worker, all alike."""

    def __init__(self, options: PolicyOptions, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        return self._rng.choice(workers)


def _requests_then_tokens(worker: WorkerState) -> tuple[float, ...]:
    return worker.requests, worker.prefill_tokens


REMOTE_POLICIES = frozenset({"fd_remote_metrics_score", "remote_cache_aware"})
"""Those that want to know what the workers say of their load."""

POLICIES: Mapping[str, Callable[[PolicyOptions, random.Random], Policy]] = {
    "cache_aware": CacheAware,
    "fd_metrics_score": FdMetricsScore,
    "fd_remote_metrics_score": FdRemoteMetricsScore,
    "power_of_two": PowerOfTwo,
    "prefill_cost": PrefillCost,
    "process_tokens": ProcessTokens,
    "random": Random,
    "remote_cache_aware": RemoteCacheAware,
    "request_num": RequestNum,
    "round_robin": RoundRobin,
}
