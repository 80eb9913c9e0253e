"""Shows how policies spread traffic: ties are fair, bursts don't herd, and no worker is favoured for its URL."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from asgi_router.extraction import extract
from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.prompt import Prompt
from asgi_router.scheduling.scheduler import Scheduler
from tests.scheduling.builders import BLOCK_BYTES, fleet, prompt, request, warm

if TYPE_CHECKING:
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.state import WorkerState

BY_LOAD = ["cache_aware", "fd_metrics_score", "prefill_cost", "process_tokens", "request_num"]


def new_scheduler(name: str, seed: int = 1) -> Scheduler:
    """Return a scheduler with this policy at its defaults."""
    return Scheduler(POLICIES[name](PolicyOptions(), random.Random(seed)), block_bytes=BLOCK_BYTES)


def finish(lease: Lease) -> None:
    """Let the request succeed."""
    lease.first_byte(prefilled=True)
    lease.release()


def per_worker(leases: list[Lease], states: list[WorkerState]) -> list[int]:
    """Return how many of the leases are on each worker."""
    chosen = [lease.state for lease in leases]
    return [chosen.count(state) for state in states]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_ties_are_fair(name: str) -> None:
    """Equal workers are chosen alike: chi-square with 4 degrees of freedom stays under its 99.9 % bound, 18.47."""
    states = fleet("abcde")
    policy = POLICIES[name](PolicyOptions(), random.Random(7))
    prompts = [Prompt(request(f"{number:<999}"), BLOCK_BYTES) for number in range(5_000)]
    choices = [policy.choose(states, any_prompt) for any_prompt in prompts]
    assert sum((choices.count(state) - 1_000) ** 2 / 1_000 for state in states) < 18.47


def test_every_router_chooses_alike() -> None:
    """By default a prompt has one home among equal workers, in any order and process, whatever comes after its head.

    The numbers are those of another process: the interpreter's hashes would differ.
    """
    states = fleet("abcde")
    policy = POLICIES["prefill_cost"](PolicyOptions(), random.Random())
    homes = [policy.choose(states, prompt(blocks)).worker.url for blocks in ("ABCD", "AXYZ", "BCDE", "CDEF")]
    assert homes == [policy.choose(states[::-1], prompt(blocks)).worker.url for blocks in ("A", "AZ", "B", "C")]
    assert homes == ["http://a", "http://a", "http://d", "http://c"]


def test_a_worker_that_leaves_moves_no_others_prompts() -> None:
    """Only the prompts whose home it was go elsewhere."""
    states = fleet("abcde")
    policy = POLICIES["prefill_cost"](PolicyOptions(), random.Random())
    prompts = [Prompt(request(f"{number:<999}"), BLOCK_BYTES) for number in range(200)]
    before = [policy.choose(states, any_prompt) for any_prompt in prompts]
    after = [policy.choose(states[1:], any_prompt) for any_prompt in prompts]
    assert all(new is old for old, new in zip(before, after, strict=True) if old is not states[0])
    assert {after[at] for at, old in enumerate(before) if old is states[0]} == set(states[1:])


@pytest.mark.parametrize("name", ["cache_aware"])
def test_ties_among_holders_are_fair(name: str) -> None:
    """Workers that hold equally much of a prompt share it, and those that hold less get none of it."""
    states = fleet("abcde")
    for state, blocks in zip(states, ["ABCD", "ABC", "ABCD", "", "ABCDE"], strict=True):
        warm(state, blocks)
    policy = POLICIES[name](PolicyOptions(), random.Random(7))
    choices = [policy.choose(states, prompt("ABCD")) for _ in range(3_000)]
    counts = [choices.count(state) for state in states]
    assert counts[1] == counts[3] == 0
    assert sum((counts[at] - 1_000) ** 2 / 1_000 for at in (0, 2, 4)) < 13.82  # 99.9 % at 2 degrees of freedom


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_f54_a_quiet_fleet_is_used_evenly(name: str) -> None:
    """F-54: different prompts, one at a time on idle workers, do not all go to the first URL."""
    states = fleet("abcd")
    scheduler = new_scheduler(name)
    leases = []
    for number in range(1_000):
        leases.append(scheduler.select(states, request(f"{number:<999}")))
        finish(leases[-1])
    assert sum((count - 250) ** 2 / 250 for count in per_worker(leases, states)) < 16.27  # 3 degrees of freedom


@pytest.mark.parametrize("name", BY_LOAD)
def test_f44_a_burst_spreads_evenly_over_an_idle_fleet(name: str) -> None:
    """F-44: each choice sees those before it, so equally long prompts that nobody answers yet spread exactly."""
    states = fleet("abcdefgh")
    scheduler = new_scheduler(name)
    leases = [scheduler.select(states, request(f"{number:<999}")) for number in range(80)]
    assert per_worker(leases, states) == [10] * 8


def test_f44_power_of_two_keeps_a_burst_together() -> None:
    """F-44: two random choices leave the fullest of 8 workers a few requests above the emptiest, not dozens."""
    states = fleet("abcdefgh")
    scheduler = new_scheduler("power_of_two")
    counts = per_worker([scheduler.select(states, request("x")) for _ in range(800)], states)
    assert max(counts) - min(counts) <= 6


@pytest.mark.parametrize("name", BY_LOAD)
def test_a_burst_catches_up_with_an_imbalance(name: str) -> None:
    """A worker that comes back empty beside loaded ones takes what comes, and stops when it is level with them."""
    states = fleet("abcd")
    scheduler = new_scheduler(name)
    for number in range(30):
        scheduler.select(states[:3], request(f"{number:<999}"))
    leases = [scheduler.select(states, request(f"more {number:<994}")) for number in range(10)]
    assert per_worker(leases, states) == [0, 0, 0, 10]
    for number in range(20):
        scheduler.select(states, request(f"even more {number:<989}"))
    assert [state.requests for state in states] == [15] * 4


@pytest.mark.parametrize("name", BY_LOAD)
def test_one_hot_prompt_does_not_herd(name: str) -> None:
    """64 times the same long prompt, none answered yet: affinity must not put more than a quarter on one of 8."""
    states = fleet("abcdefgh")
    scheduler = new_scheduler(name)
    counts = per_worker([scheduler.select(states, request("x" * 4_000)) for _ in range(64)], states)
    assert max(counts) <= 16


@pytest.mark.parametrize("name", ["cache_aware", "prefill_cost"])
def test_conversations_return_to_their_worker(name: str) -> None:
    """Of 12 conversations in turns, on an idle fleet of 4, each stays with the worker that holds it."""
    states = fleet("abcd")
    scheduler = new_scheduler(name)
    homes: dict[int, list[WorkerState]] = {number: [] for number in range(12)}
    for turn in range(1, 6):
        for number, home in homes.items():
            lease = scheduler.select(states, request(f"{number:<600}" + "turn" * 60 * turn))
            home.append(lease.state)
            finish(lease)

    assert all(before is after for home in homes.values() for before, after in pairwise(home))
    assert len({id(home[0]) for home in homes.values()}) > 1


@pytest.mark.parametrize("name", ["cache_aware", "process_tokens"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_f02_mixed_mode_sees_the_message(name: str, path: str) -> None:
    """F-02: in mixed mode the prompt is read and its tokens counted, so traffic does not go to the smallest URL."""
    states = fleet("abcd")
    scheduler = new_scheduler(name)
    leases = []
    for number in range(40):
        content = f"{number} " * 200
        body = {"messages": [{"role": "user", "content": content}], "prompt": content}
        leases.append(scheduler.select(states, extract(json.dumps(body).encode(), path)))

    assert sorted(per_worker(leases, states)) == [10] * 4
    assert all(state.prefill_tokens >= 10 * 400 // 4 for state in states)
    for lease in leases:
        finish(lease)
    assert [state.prefill_tokens for state in states] == [0] * 4
