"""Shows that a replay drives the product's own scheduler faithfully, and the same way each time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from asgi_router.replay.choosers import NAMES, ORACLE, chooser
from asgi_router.replay.generated import GENERATED, calm_prefixes, conversations, hot_prefix
from asgi_router.replay.report import figures
from asgi_router.replay.simulate import Outcome, Replay, Restart, Setup
from asgi_router.replay.worker_model import WorkerModel
from asgi_router.scheduling.policies import PolicyOptions
from tests.replay.builders import PLAIN, asked, trace_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from asgi_router.replay.traces import Trace
    from asgi_router.scheduling.policies import Policy
    from asgi_router.scheduling.prompt import Prompt
    from asgi_router.scheduling.state import WorkerState

BUSY = conversations(requests=600, rate=30.0, seed=3)


def replay(trace: Trace, name: str = "prefill_cost", setup: Setup | None = None) -> Outcome:
    """Return what becomes of a trace under the policy of this name."""
    return Replay(trace, setup or Setup(), name, chooser(name, PolicyOptions())).run()


class Fixed:
    """Chooses always the same worker, and keeps what it saw."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.seen: list[tuple[int, int, int, float]] = []

    def __call__(self, rng: random.Random, clock: Callable[[], float], replay: Replay) -> Policy:
        self.clock = clock
        return self

    def choose(self, workers: Sequence[WorkerState], prompt: Prompt) -> WorkerState:
        worker = workers[self.number]
        uncached = prompt.uncached_tokens(worker)
        self.seen.append((worker.requests, worker.pending_prefill_tokens, uncached, round(self.clock(), 6)))
        return worker


def test_a_policy_sees_the_counters_of_the_moment() -> None:
    """Requests are in flight up to their last token, and queued up to their first; siblings see each other's blocks."""
    policy = Fixed()
    trace = trace_of(
        asked(300, 1_001, blocks=(1, 2, 3)),  # first token at 0.3, last one at 1.3
        asked(350, blocks=(1, 2, 4), arrival=0.1),
        asked(310, blocks=(1, 2, 3), arrival=0.29),
        asked(100, arrival=0.31),
        asked(100, arrival=5.0),
    )
    outcome = Replay(trace, Setup(model=replace(PLAIN, step_tokens=300)), "fixed", policy).run()
    # The prompts are prefilled one after the other: 300 tokens; then 150, and 10 and 139 more in the same step.
    assert policy.seen == [
        (0, 0, 300, 0.0),
        (1, 300, 150, 0.1),
        (2, 450, 10, 0.29),
        (3, 160, 100, 0.31),
        (0, 0, 100, 5.0),
    ]
    assert outcome.chosen == [5, 0, 0, 0, 0, 0, 0, 0]
    assert outcome.predicted_tokens == outcome.cached_tokens == 500
    assert outcome.hot_spots == 3


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_serves_everything_and_gives_everything_back(name: str) -> None:
    """Each request gets its first token, and all counters and pins are at zero when the trace is done."""
    run = Replay(BUSY, Setup(workers=3), name, chooser(name, PolicyOptions()))
    outcome = run.run()
    assert len(outcome.ttft) == len(BUSY.requests) == sum(outcome.chosen)
    assert min(outcome.ttft) > 0
    assert outcome.prompt_tokens == BUSY.tokens
    for state, worker in run.workers.items():
        assert (state.requests, state.prefill_tokens, state.pending_prefill_tokens, state.waiting_requests) == (0,) * 4
        assert state.prefixes.pinned == 0
        assert worker.cache.held == 0
    assert outcome.cached_tokens / outcome.prompt_tokens <= BUSY.best_hit_rate()


@pytest.mark.parametrize("name", ["prefill_cost", "random", "power_of_two", "preble", ORACLE])
def test_the_same_seed_gives_the_same_outcome(name: str) -> None:
    """A replay is a function of trace, setup and seed."""
    assert replay(BUSY, name) == replay(BUSY, name)


def test_another_seed_gives_another_outcome() -> None:
    """What is left to chance hangs on the seed."""
    assert replay(BUSY, "random") != replay(BUSY, "random", Setup(seed=1))


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_made_load_is_the_same_each_time(name: str) -> None:
    """The same seed makes the same requests, at about the rate that is asked for."""
    make = GENERATED[name]
    trace = make(requests=500, rate=50.0, seed=1)
    assert trace == make(requests=500, rate=50.0, seed=1)
    assert trace != make(requests=500, rate=50.0, seed=2)
    assert len(trace.requests) == 500
    assert trace.seconds == pytest.approx(10, rel=0.2)


def test_a_hot_prefix_is_hot() -> None:
    """Nine of ten requests of that load begin alike; without it 64 prefixes share them."""
    heads = [request.blocks[0] for request in hot_prefix(requests=1_000, rate=60.0, seed=0).requests]
    assert 0.87 < heads.count(0) / 1_000 < 0.93
    calm = [request.blocks[0] for request in calm_prefixes(requests=1_000, rate=60.0, seed=0).requests]
    assert max(map(calm.count, set(calm))) < 40


def test_affinity_pays_and_the_oracle_is_a_reference() -> None:
    """On growing conversations the default hits more than taking turns, is faster, and near the oracle."""
    trace = conversations(requests=3_000, rate=24.0, seed=5)
    setup = Setup(workers=4, model=WorkerModel(cache_tokens=400_000))
    ours, turns, best = (figures(replay(trace, name, setup)) for name in ("prefill_cost", "round_robin", ORACLE))
    assert ours.hit_rate > 1.3 * turns.hit_rate
    assert ours.ttft_mean < turns.ttft_mean
    assert ours.ttft_mean < 1.2 * best.ttft_mean
    assert ours.predicted_hit_rate == pytest.approx(ours.hit_rate, abs=0.02)


def test_a_picture_that_is_too_large_promises_too_much() -> None:
    """Told of more cache than there is, the router believes in what has gone: predicted and real hits differ."""
    trace = conversations(requests=2_000, rate=20.0, seed=5)
    small = Setup(workers=4, model=WorkerModel(cache_tokens=60_000), index_tokens=10_000_000, adapt=False)
    line = figures(replay(trace, "prefill_cost", small))
    assert line.predicted_hit_rate > line.hit_rate + 0.1


@pytest.mark.parametrize(("believed", "gain"), [(10_000_000, -0.1), (15_000, 0.02)])
def test_a_wrong_picture_is_put_right_by_what_workers_report(believed: int, gain: float) -> None:
    """Told of far too much or too little cache, the router learns: predictions come true, and of too little, hits."""
    trace = conversations(requests=4_000, rate=20.0, seed=5)

    def hits(*, adapt: bool) -> tuple[float, float]:
        setup = Setup(workers=4, model=WorkerModel(cache_tokens=60_000), index_tokens=believed, adapt=adapt)
        line = figures(replay(trace, "prefill_cost", setup))
        return line.hit_rate, abs(line.predicted_hit_rate - line.hit_rate)

    (hits_before, error_before), (hits_after, error_after) = hits(adapt=False), hits(adapt=True)
    assert error_after < 0.6 * error_before
    assert hits_after > hits_before + gain


def test_requests_come_faster() -> None:
    """At twice the speed a trace is over in half the time, but for the last answers."""
    assert replay(BUSY, setup=Setup(speed=2.0)).seconds < 0.7 * replay(BUSY).seconds


def test_a_restart_moves_what_waits_and_cuts_what_streams() -> None:
    """What waits is served by another worker, what streams is cut, and the worker gets requests again later on."""
    trace = trace_of(
        asked(100, 1_000),
        asked(10_000, 1, arrival=0.2),
        asked(100, 1, arrival=0.6),
        asked(100, 1, arrival=3.0),
    )
    setup = Setup(workers=2, model=PLAIN, restart=Restart(worker=0, at=0.5, down=1.0))
    run = Replay(trace, setup, "fixed", Fixed())
    outcome = run.run()
    assert (outcome.failed, outcome.retried) == (1, 2)
    assert outcome.chosen == [3, 2]
    assert list(outcome.ttft) == pytest.approx([0.1, 0.1, 10.3, 10.0])  # in the order of their first tokens
    assert outcome.prompt_tokens == trace.tokens
    assert outcome.busy[0] < 1.0  # what was cut short is over
    assert all(state.requests == 0 and state.prefixes.pinned == 0 for state in run.workers)


def test_a_fleet_that_is_gone_is_no_traceback() -> None:
    """With the only worker down, what is streamed and what comes fails, and what comes later is served."""
    trace = trace_of(asked(100, 1_000), asked(100, arrival=1.0), asked(100, arrival=5.0))
    outcome = replay(trace, setup=Setup(workers=1, model=PLAIN, restart=Restart(worker=0, at=0.5, down=1.0)))
    assert (len(outcome.ttft), outcome.failed) == (2, 2)
    assert outcome.busy == pytest.approx([0.2])  # of the stretch that was cut short nothing counts


def test_a_slow_worker_gets_less() -> None:
    """The default sends fewer requests to a worker of half the speed; taking turns doesn't."""
    setup = Setup(workers=4, speeds=(1.0, 0.4))
    trace = conversations(requests=2_000, rate=24.0, seed=5)
    ours = replay(trace, "prefill_cost", setup).chosen
    assert ours[1] < 0.8 * min(ours[0], ours[2], ours[3])
    turns = replay(trace, "round_robin", setup).chosen
    assert max(turns) - min(turns) <= 1


def test_what_is_longer_than_the_cache_is_refused() -> None:
    """An engine would do so, too; it costs nobody anything else."""
    outcome = replay(trace_of(asked(2_000_000), asked(100)))
    assert (outcome.refused, len(outcome.ttft)) == (1, 1)
