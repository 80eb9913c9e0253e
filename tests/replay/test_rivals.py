"""Shows that each rival's rule is the one that its source describes, by counters that tell rules apart."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.replay.rivals import (
    RIVALS,
    Dynamo,
    FastDeployCacheAware,
    LlmdSticky,
    LlmdWeighted,
    LMetric,
    Preble,
    RayPrefixAffinity,
    SglangCacheAware,
)
from asgi_router.scheduling.prompt import Prompt
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import FakeFleet
from tests.routed import OTHER, WORKER, answer, completion_body, unreachable_app
from tests.scheduling.builders import Clock, worker

if TYPE_CHECKING:
    from asgi_router.scheduling.policies import Policy
    from asgi_router.scheduling.state import WorkerState

PROMPT = Prompt.of_blocks(tuple(range(10)), tokens=1_001, block_tokens=100)


def holding(
    name: str,
    blocks: int,
    *,
    requests: int = 0,
    waiting_requests: int = 0,
    prefill_tokens: int = 0,
    pending_prefill_tokens: int = 0,
) -> WorkerState:
    """Return a worker that has cached so many blocks of `PROMPT`."""
    state = worker(
        name,
        requests=requests,
        waiting_requests=waiting_requests,
        prefill_tokens=prefill_tokens,
        pending_prefill_tokens=pending_prefill_tokens,
    )
    pinned = PROMPT.blocks[: state.prefixes.pin(PROMPT.blocks[:blocks])]
    state.prefixes.unpin(pinned, prefilled=True)
    return state


def chosen(policy: Policy, *workers: WorkerState) -> set[int]:
    """Return the numbers of the workers that are chosen, again and again."""
    return {workers.index(policy.choose(workers, PROMPT)) for _ in range(30)}


RNG = random.Random(1)


def test_fastdeploy_falls_back_at_a_gap_of_two_requests() -> None:
    """With one request more it looks at caches, with two at tokens only; only the deepest match counts."""
    policy = FastDeployCacheAware(RNG)
    assert chosen(policy, holding("a", 10, requests=5, prefill_tokens=900), holding("b", 0, requests=4)) == {0}
    assert chosen(policy, holding("a", 10, requests=5, prefill_tokens=900), holding("b", 0, requests=3)) == {1}
    assert PROMPT.reason == "out_of_balance"
    # Its hit of nine tenths counts nothing beside a hit of ten.
    assert chosen(policy, holding("a", 10, requests=11), holding("b", 9, requests=10)) == {0}


def test_sglang_drops_the_cache_when_out_of_balance() -> None:
    """A match over the threshold is followed up to the limit; a miss goes to the smallest tree, however busy."""
    policy = SglangCacheAware(RNG)
    assert chosen(policy, holding("a", 8, requests=32), holding("b", 0)) == {0}
    assert chosen(policy, holding("a", 8, requests=33), holding("b", 0)) == {1}
    assert chosen(policy, holding("a", 5, requests=0), holding("b", 4, requests=30)) == {1}
    vllm = SglangCacheAware(RNG, threshold=0.3, balance_abs=64, balance_rel=1.5)
    assert chosen(vllm, holding("a", 5, requests=60), holding("b", 4, requests=30)) == {0}


def test_dynamo_adds_prefill_and_active_blocks() -> None:
    """A cached prompt is worth its tokens; active blocks count like queued ones."""
    policy = Dynamo(RNG)
    assert chosen(policy, holding("a", 10, pending_prefill_tokens=900), holding("b", 0)) == {0}
    assert chosen(policy, holding("a", 10, pending_prefill_tokens=1_100), holding("b", 0)) == {1}
    busy = holding("a", 10)
    busy.prefixes.pin(range(100, 111))
    assert chosen(policy, busy, holding("b", 0)) == {1}


def test_llmd_weighs_prefix_queue_and_cache() -> None:
    """3 x hit + 2 x queue + 2 x free cache, the highest wins."""
    policy = LlmdWeighted(RNG, cache_tokens=10_000)
    assert chosen(policy, holding("a", 10, waiting_requests=9), holding("b", 0)) == {0}
    full = holding("a", 10, waiting_requests=9, prefill_tokens=10_000)
    assert chosen(policy, full, holding("b", 0)) == {1}
    assert chosen(policy, holding("a", 6, waiting_requests=9), holding("b", 0)) == {1}


def test_llmd_sticks_until_the_queue_is_too_long() -> None:
    """Workers with 0.8 of the prompt keep it up to a queue of 18 seconds."""
    policy = LlmdSticky(RNG)
    limit = 18 * 15_928
    assert chosen(policy, holding("a", 9, pending_prefill_tokens=limit), holding("b", 0)) == {0}
    assert chosen(policy, holding("a", 9, pending_prefill_tokens=limit + 1), holding("b", 0)) == {1}
    assert chosen(policy, holding("a", 8, pending_prefill_tokens=5_000), holding("b", 0)) == {1}


def test_lmetric_multiplies() -> None:
    """(Q + U) * (n + 1), the lowest wins."""
    policy = LMetric(RNG)
    # 501 * 2 = 1002 against 1001 * 1.
    assert chosen(policy, holding("a", 5, requests=1), holding("b", 0)) == {1}
    assert chosen(policy, holding("a", 6, requests=1), holding("b", 0)) == {0}
    assert chosen(policy, holding("a", 6, requests=1, pending_prefill_tokens=101), holding("b", 0)) == {1}


def test_ray_never_balances() -> None:
    """The longest match wins, whatever the load, if it is a tenth of the prompt; else the smallest tree."""
    policy = RayPrefixAffinity(RNG)
    assert chosen(policy, holding("a", 1, requests=1_000), holding("b", 0)) == {0}
    limited = RayPrefixAffinity(RNG, imbalanced_threshold=10)
    assert chosen(limited, holding("a", 1, requests=1_000), holding("b", 0)) == {1}


def test_preble_exploits_what_is_mostly_cached_and_explores_else() -> None:
    """More cached than missed: the holder, until it had 1.5 times the least in three minutes. Else the least load."""
    clock = Clock()
    policy = Preble(RNG, clock)
    assert chosen(policy, holding("a", 6, requests=50), holding("b", 0)) == {0, 1}
    policy = Preble(RNG, clock)
    a, b = holding("a", 6), holding("b", 0)
    assert policy.choose((a, b), PROMPT) is a
    policy = Preble(RNG, clock)
    c, d = holding("c", 4), holding("d", 0)
    # 601 against 1001; 1202 against 1001; 1202 against 2002; 1803 against 2002.
    assert [policy.choose((c, d), PROMPT) for _ in range(4)] == [c, d, c, c]
    clock.now += 181
    assert policy.choose((c, d), PROMPT) is c


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_one_worker_is_chosen_whatever_its_load(name: str) -> None:
    """A fleet of one has no choice, and an idle one no division by zero."""
    policy = RIVALS[name](RNG, Clock(), 250_000)
    assert chosen(policy, worker("a", requests=10**6, prefill_tokens=10**9)) == {0}
    assert chosen(policy, worker("a"), worker("b")) <= {0, 1}
    assert policy.choose([worker("a")], Prompt.of_blocks((), tokens=1, block_tokens=100))


@pytest.mark.anyio
@pytest.mark.parametrize("name", sorted(RIVALS))
async def test_a_rival_chooses_in_the_product(name: str) -> None:
    """A router that is given a policy chooses by it, says so, and gives everything back."""
    fleet = FakeFleet({WORKER: answer("json"), OTHER: answer("json")})
    policy = RIVALS[name](random.Random(1), Clock(), 250_000)
    settings = RouterSettings(workers=[WORKER, OTHER], decision_headers=True)
    router = Router(settings, policy=policy, transport=fleet)
    exchange = await Exchange(body=completion_body()).run(RouterMiddleware(unreachable_app, router=router))
    assert exchange.status == 200
    assert json.loads(exchange.body) == {"answer": 42}
    assert dict(exchange.headers)[b"x-router-decision"].startswith(type(policy).__name__.encode())
    assert all(stats.requests == stats.prefill_tokens == 0 for stats in router.stats().workers)
