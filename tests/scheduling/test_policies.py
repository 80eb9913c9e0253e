"""Shows what each policy means, by tables of counters; `test_fairness.py` shows how policies spread traffic."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.policies import POLICIES, Policy, PolicyOptions
from asgi_router.scheduling.prompt import Prompt
from asgi_router.setting_types import POLICIES as SETTINGS_POLICIES
from asgi_router.settings import RouterSettings
from tests.scheduling.builders import BLOCK_BYTES, fleet, prompt, request, warm, worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asgi_router.scheduling.state import WorkerState

COLD = prompt("????")


def policy(name: str, options: PolicyOptions | None = None, seed: int = 1) -> Policy:
    """Return the policy of this name, by default with its default options."""
    return POLICIES[name](options or PolicyOptions(), random.Random(seed))


def chosen(chooser: Policy, workers: Sequence[WorkerState], prompt: Prompt = COLD) -> set[int]:
    """Return the positions of the workers that 50 choices on unchanged counters fall on."""
    return {workers.index(chooser.choose(workers, prompt)) for _ in range(50)}


def loaded(*loads: tuple[int, int]) -> list[WorkerState]:
    """Return one worker for each pair of requests and prompt tokens in flight."""
    return [worker(f"w{at}", requests=requests, prefill_tokens=tokens) for at, (requests, tokens) in enumerate(loads)]


def test_the_settings_know_the_same_policies() -> None:
    """Each name that the settings accept is a policy, and the other way round."""
    assert set(POLICIES) == set(SETTINGS_POLICIES)


def test_the_settings_have_the_same_defaults() -> None:
    """`PolicyOptions` and the settings of the same names agree on every default."""
    defaults = RouterSettings()
    options = PolicyOptions()
    for name in PolicyOptions.__dataclass_fields__:
        assert getattr(options, name) == getattr(defaults, name), name


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_one_worker_is_chosen_whatever_its_load(name: str) -> None:
    """A fleet of one has no choice."""
    assert chosen(policy(name), loaded((10**6, 10**9))) == {0}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    loads=st.lists(st.lists(st.integers(0, 3) | st.integers(0, 2**64), min_size=4, max_size=4), min_size=1, max_size=9),
    key=st.sampled_from(["", "x", "ABCD" * BLOCK_BYTES]),
)
def test_f41_a_policy_returns_one_of_the_workers(name: str, loads: list[list[int]], key: str) -> None:
    """F-41: whatever the counters hold, a choice is one of the very objects that were offered."""
    workers = [
        worker(
            f"w{at}",
            requests=max(requests, waiting),
            waiting_requests=min(requests, waiting),
            prefill_tokens=tokens,
            pending_prefill_tokens=pending,
        )
        for at, (requests, waiting, tokens, pending) in enumerate(loads)
    ]
    chooser = policy(name)
    for _ in range(3):
        choice = chooser.choose(workers, Prompt(request(key), BLOCK_BYTES))
        assert any(choice is state for state in workers)


@pytest.mark.parametrize(
    ("name", "loads", "expected"),
    [
        ("request_num", [(2, 0), (1, 900), (3, 0)], {1}),
        ("request_num", [(1, 900), (1, 899), (2, 0)], {1}),
        ("request_num", [(1, 5), (1, 5), (2, 0)], {0, 1}),
        ("process_tokens", [(1, 300), (9, 100), (1, 200)], {1}),
        ("process_tokens", [(9, 100), (2, 100), (1, 101)], {1}),
        ("process_tokens", [(2, 100), (2, 100), (1, 101)], {0, 1}),
        ("random", [(9, 900), (0, 0), (5, 1)], {0, 1, 2}),
        ("power_of_two", [(2, 0), (1, 900)], {1}),
        ("power_of_two", [(3, 0), (2, 0), (1, 0)], {1, 2}),  # the fullest wins no pair
        ("round_robin", [(9, 900), (0, 0), (5, 1)], {0, 1, 2}),
    ],
)
def test_load_decides(name: str, loads: list[tuple[int, int]], expected: set[int]) -> None:
    """Requests and prompt tokens in flight, most important first, decide as the policy's name says."""
    assert chosen(policy(name), loaded(*loads)) == expected


def test_f49_process_tokens_counts_the_tokens_of_mixed_workers() -> None:
    """F-49: leases on mixed workers count tokens, so one long prompt outweighs several short ones."""
    long_one, short_ones = fleet("ab")
    Lease(long_one, prompt("A" * 40))
    for _ in range(3):
        Lease(short_ones, prompt("B"))
    assert chosen(policy("process_tokens"), [long_one, short_ones]) == {1}
    assert chosen(policy("request_num"), [long_one, short_ones]) == {0}


def test_round_robin_takes_turns_in_order() -> None:
    """The workers are chosen one after the other, whatever their load."""
    workers = loaded((9, 0), (0, 0), (5, 0))
    chooser = policy("round_robin")
    assert [workers.index(chooser.choose(workers, COLD)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_is_fair_where_models_take_turns_too() -> None:
    """Requests for two models with two workers each, one after the other, reach all four workers."""
    workers = fleet("abcd")
    chooser = policy("round_robin")
    turns = [chooser.choose(workers[:2] if turn % 2 else workers[2:], COLD) for turn in range(40)]
    assert [turns.count(state) for state in workers] == [10, 10, 10, 10]


def test_round_robin_is_fair_where_a_worker_is_down() -> None:
    """If each choice of one worker is followed by another choice among the rest, the rest share alike."""
    workers = fleet("abcd")
    chooser = policy("round_robin")
    served: list[WorkerState] = []
    for _ in range(300):
        state = chooser.choose(workers, COLD)
        served.append(chooser.choose(workers[1:], COLD) if state is workers[0] else state)
    assert [served.count(state) for state in workers[1:]] == [100, 100, 100]


def test_round_robin_lets_a_worker_join_and_leave() -> None:
    """A worker that joins takes its turn with the others, and one that leaves is no longer chosen."""
    a, b, c = fleet("abc")
    chooser = policy("round_robin")
    order = [chooser.choose(workers, COLD) for workers in ([a, b], [a, b], [a, b], [a, b, c], [a, b, c], [a, c])]
    assert order == [a, b, a, c, b, a]


def test_power_of_two_picks_two_distinct_workers() -> None:
    """Were the same worker picked twice, the fuller of two would sometimes be chosen."""
    workers = loaded((1, 0), (0, 0))
    chooser = policy("power_of_two")
    assert all(chooser.choose(workers, COLD) is workers[1] for _ in range(1_000))


@pytest.mark.parametrize(
    ("weight", "loads", "expected"),
    [
        (1.0, [(4, 4), (5, 0)], {0}),  # 4 < 5: all requests count alike
        (2.0, [(4, 4), (5, 0)], {1}),  # 8 > 5
        (2.0, [(3, 2), (5, 0)], {0, 1}),  # 1 + 2 * 2 = 5
        (0.0, [(4, 4), (1, 0)], {0}),  # 0 < 1: only running ones count
        (0.5, [(4, 4), (3, 0)], {0}),  # 2 < 3
    ],
)
def test_f55_waiting_requests_have_their_weight(
    weight: float, loads: list[tuple[int, int]], expected: set[int]
) -> None:
    """F-55: fd_metrics_score counts requests without a first byte `waiting_weight` times. Loads: all, waiting."""
    workers = [worker(f"w{at}", requests=n, waiting_requests=waiting) for at, (n, waiting) in enumerate(loads)]
    assert chosen(policy("fd_metrics_score", PolicyOptions(waiting_weight=weight)), workers) == expected


# One tuple for each worker: tokens pending before this prompt, blocks of it that are held, requests in flight. The
# prompt has four blocks of 16 tokens and one more: 65, 49, 33, 17 or 1 tokens are uncached.
PrefillLoad = tuple[int, int, int]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(0, 0, 0), (0, 0, 0)], {0, 1}),  # both (0 + 130) * 4 = 520
        ([(0, 0, 0), (0, 1, 0)], {1}),  # 98 * 4 = 392
        ([(0, 0, 0), (33, 1, 0)], {0}),  # (33 + 98) * 4 = 524
        ([(0, 0, 0), (31, 1, 0)], {1}),  # (31 + 98) * 4 = 516
        ([(0, 0, 0), (32, 1, 0)], {0, 1}),  # (32 + 98) * 4 = 520, and no more requests
        ([(0, 0, 1), (0, 1, 2)], {1}),  # 130 * 5 = 650 against 98 * 6 = 588
        ([(0, 0, 1), (0, 1, 3)], {0}),  # 98 * 7 = 686
        ([(0, 0, 1), (32, 1, 1), (0, 0, 2)], {0, 1}),  # 650, 650, 780
        ([(20, 0, 0), (70, 1, 0), (0, 0, 1)], {0}),  # 600, 672, 650
        ([(0, 4, 0), (0, 4, 1)], {0}),  # 2 * 4 = 8 against 2 * 5 = 10: a full hit is still one token
        ([(0, 4, 100), (0, 0, 0)], {0}),  # 2 * 104 = 208: a warm cache outweighs many requests
        ([(0, 4, 300), (0, 0, 0)], {1}),  # 2 * 304 = 608: but not any number
        ([(128, 4, 0), (0, 0, 0)], {0, 1}),  # (128 + 2) * 4 = 520
        ([(1000, 4, 9), (900, 4, 9)], {1}),  # 1002 * 13 against 902 * 13
        ([(110, 0, 1), (0, 0, 4), (170, 0, 0)], {1}),  # 1200, 1040, 1200
        ([(110, 0, 1), (0, 0, 6), (170, 0, 0)], {2}),  # 1200, 1300, 1200: a tie goes to fewer requests
    ],
)
def test_prefill_cost_by_hand(loads: list[PrefillLoad], expected: set[int]) -> None:
    """(pending + 2 * uncached) * (requests + 4), lowest wins, then fewer requests, then the prompt's home: any."""
    fleets = [prefill_fleet(loads, prefix) for prefix in "abcdefghijklmnopqrst"]
    choices = [chosen(policy("prefill_cost"), workers, prompt("ABCD")) for workers in fleets]
    assert set.union(*choices) == expected
    assert all(len(choice) == 1 for choice in choices)


@pytest.mark.parametrize(
    ("miss_weight", "batch_offset", "expected"),
    [
        (2, 4, 1),  # 130 * 4 = 520, 98 * 5 = 490, (40 + 34) * 17 = 1258
        (2, 1, 0),  # 130 * 1 = 130, 98 * 2 = 196, 74 * 14 = 1036
        (2, 100, 2),  # 130 * 100 = 13000, 98 * 101 = 9898, 74 * 113 = 8362
        (0.1, 100, 1),  # 6.5 * 100 = 650, 4.9 * 101 = 494.9, 41.7 * 113 = 4712.1
    ],
)
def test_prefill_cost_has_two_numbers(miss_weight: float, batch_offset: float, expected: int) -> None:
    """`miss_weight` multiplies the prompt's uncached tokens, `batch_offset` softens the requests in flight."""
    options = PolicyOptions(prefill_cost_miss_weight=miss_weight, prefill_cost_batch_offset=batch_offset)
    workers = prefill_fleet([(0, 0, 0), (0, 1, 1), (40, 3, 13)])
    assert chosen(policy("prefill_cost", options), workers, prompt("ABCD")) == {expected}


def test_prefill_cost_counts_one_uncached_token_at_least() -> None:
    """Were a full hit free, an empty queue would win whatever the number of requests: 1 * 2 * 13 against 3 * 4."""
    workers = prefill_fleet([(0, 4, 9), (1, 4, 0)])
    covered = Prompt(request("".join(letter * BLOCK_BYTES for letter in "ABCD") + "?", tokens=64), BLOCK_BYTES)
    assert [covered.uncached_tokens(state) for state in workers] == [1, 1]
    assert chosen(policy("prefill_cost"), workers, covered) == {1}


def prefill_fleet(loads: list[PrefillLoad], prefix: str = "w") -> list[WorkerState]:
    """Return a worker for each load."""
    workers = []
    for at, (pending, blocks, requests) in enumerate(loads):
        workers.append(worker(f"{prefix}{at}", requests=requests, pending_prefill_tokens=pending))
        warm(workers[-1], "ABCD"[:blocks])

    return workers
