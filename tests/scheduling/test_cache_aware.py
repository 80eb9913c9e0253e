"""Shows the policy `cache_aware`: the seed's rule, and what was mended in it."""

from __future__ import annotations

import random

import pytest

from asgi_router.scheduling.policies import CacheAware, PolicyOptions
from asgi_router.scheduling.scheduler import Scheduler
from tests.scheduling.builders import BLOCK_BYTES, fleet, prompt, request, text, warm, worker

# One tuple for each worker: blocks held of a prompt of four, requests, prompt tokens in flight.
CacheLoad = tuple[int, int, int]


def chosen(loads: list[CacheLoad], options: PolicyOptions | None = None) -> set[int]:
    """Return the positions of the workers that 50 choices for the prompt ABCD fall on."""
    workers = []
    for at, (blocks, requests, tokens) in enumerate(loads):
        workers.append(worker(f"w{at}", requests=requests, prefill_tokens=tokens))
        warm(workers[-1], "ABCD"[:blocks])

    policy = CacheAware(options or PolicyOptions(), random.Random(1))
    return {workers.index(policy.choose(workers, prompt("ABCD"))) for _ in range(50)}


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(0, 0, 0), (0, 0, 0)], {0, 1}),  # an idle, cold fleet: 1 each
        ([(0, 0, 0), (1, 0, 0)], {1}),  # 1 against 0.75
        ([(2, 0, 0), (1, 0, 0)], {0}),  # 0.5 against 0.75
        ([(4, 2, 0), (1, 0, 0)], {1}),  # 0 + 1 against 0.75 + 0
        ([(4, 4, 0), (1, 1, 0), (0, 0, 0)], {0, 1, 2}),  # 0 + 1, 0.75 + 0.25, 1 + 0
        ([(4, 4, 2), (1, 1, 1), (0, 0, 2)], {1}),  # the same, and fewest tokens in flight
        ([(4, 3, 9), (0, 4, 0)], {0}),  # 0 + 0.75 against 1 + 1
        ([(0, 3, 9), (0, 4, 0)], {0}),  # 1 + 0.75 against 1 + 1
    ],
)
def test_score_by_hand(loads: list[CacheLoad], expected: set[int]) -> None:
    """(1 - hit) + requests / most requests, lowest wins, then fewer prompt tokens, then any."""
    assert chosen(loads) == expected


def test_the_second_prompt_hits_in_full() -> None:
    """An equal prompt goes to the worker of the first, all of its blocks hit; another goes where there is less load."""
    states = fleet("ab")
    scheduler = Scheduler(CacheAware(PolicyOptions(), random.Random(1)), block_bytes=BLOCK_BYTES)
    first = scheduler.select(states, request(text("ABCD")))
    first.first_byte(prefilled=True)
    first.release()

    assert prompt("ABCD").hit_ratio(first.state) == 1.0
    for _ in range(10):
        second = scheduler.select(states, request(text("ABCD")))
        assert second.state is first.state
        assert second.uncached_tokens == 1
        second.release()

    running = scheduler.select(states, request(text("ABCD")))
    assert scheduler.select(states, request(text("WXYZ"))).state is not running.state


def test_every_holder_has_its_own_match() -> None:
    """F-62: the shallower of two holders is preferred to a worker without any, once the deepest is busier."""
    assert chosen([(4, 10, 0), (3, 7, 0), (0, 5, 0)]) == {1}  # 1, 0.25 + 0.7, 1 + 0.5


# Requests of the fuller worker, which holds the prompt, and of the emptier, which does not. It keeps the prompt
# as long as its load term is lighter than the miss, so weigh the load little here.
@pytest.mark.parametrize(
    ("most", "least", "expected"),
    [
        (16, 0, 0),  # the gap is not above 16
        (17, 0, 1),
        (17, 1, 0),
        (34, 17, 0),  # 17 is above 16, but not above half of 34
        (35, 17, 1),  # 18 is above half of 35
        (1000, 500, 0),
        (1000, 499, 1),
    ],
)
def test_the_cache_is_ignored_only_beyond_both_limits(most: int, least: int, expected: int) -> None:
    """The fewest requests win if the gap is above 16 and above half of the fullest worker's requests."""
    assert chosen([(4, most, 0), (0, least, 0)], PolicyOptions(cache_aware_load_weight=0.01)) == {expected}


def test_the_limits_are_options() -> None:
    """With the seed's limits a gap of two requests ends affinity, with a share of 1 no gap ever does."""
    light = 0.01
    seed = PolicyOptions(cache_aware_load_weight=light, cache_aware_balance_abs=1, cache_aware_balance_rel=0.2)
    assert chosen([(4, 2, 0), (0, 0, 0)], seed) == {1}
    assert chosen([(4, 1, 0), (0, 0, 0)], seed) == {0}
    never = PolicyOptions(cache_aware_load_weight=light, cache_aware_balance_rel=1.0)
    assert chosen([(4, 10**6, 0), (0, 0, 0)], never) == {0}


def test_f71_balance_is_restored_by_the_load_that_judged_it() -> None:
    """F-71: when the gap in requests is too large the fewest requests win, even if their prompts are long."""
    options = PolicyOptions(cache_aware_balance_abs=1, cache_aware_balance_rel=0.2)
    assert chosen([(4, 5, 50), (0, 1, 9_000)], options) == {1}


@pytest.mark.parametrize(
    ("hit_weight", "load_weight", "loads", "expected"),
    [
        (0.0, 1.0, [(4, 2, 0), (0, 1, 0)], {1}),  # hits don't count
        (0.0, 1.0, [(4, 1, 0), (0, 1, 0)], {0, 1}),
        (1.0, 0.0, [(4, 10, 9), (0, 1, 0)], {0}),  # load doesn't count
        (1.0, 0.0, [(4, 10, 9), (4, 1, 9)], {0, 1}),
        (0.0, 0.0, [(4, 10, 8), (0, 1, 9)], {0}),  # nothing but the tie-break
    ],
)
def test_f53_a_weight_of_zero_switches_its_term_off(
    hit_weight: float, load_weight: float, loads: list[CacheLoad], expected: set[int]
) -> None:
    """F-53: 0 is a weight like any other, not a wish for the default."""
    options = PolicyOptions(cache_aware_hit_weight=hit_weight, cache_aware_load_weight=load_weight)
    assert chosen(loads, options) == expected


def test_weights_multiply_their_terms() -> None:
    """With a heavy hit a full holder wins at full load, with a light one it loses to a small difference in load."""
    loads: list[CacheLoad] = [(4, 10, 0), (0, 9, 0)]  # load only: 1 against 0.9
    assert chosen(loads, PolicyOptions(cache_aware_hit_weight=0.2)) == {0}
    assert chosen(loads, PolicyOptions(cache_aware_hit_weight=0.05)) == {1}
    assert chosen(loads, PolicyOptions(cache_aware_load_weight=11.0)) == {1}
