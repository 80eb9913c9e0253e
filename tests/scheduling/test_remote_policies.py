"""Shows the policies that go by the workers' own word on their load, and how long and how far that word is taken."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asgi_router.scheduling.policies import POLICIES, REMOTE_POLICIES, PolicyOptions
from asgi_router.scheduling.remote_load import Load, RemoteLoad
from asgi_router.scheduling.scheduler import Scheduler
from tests.scheduling.builders import BLOCK_BYTES, Clock, fleet, prompt, request, text, warm, worker

if TYPE_CHECKING:
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.state import WorkerState

REMOTE = sorted(REMOTE_POLICIES)
TWINS = [("remote_cache_aware", "cache_aware"), ("fd_remote_metrics_score", "fd_metrics_score")]
MAX_AGE = 5.0


def say(state: WorkerState, running: int, waiting: int = 0, *, clock: Clock | None = None) -> None:
    """Let the worker have said this of its load just now."""
    clock = clock or Clock()
    said, expires = Load(running, waiting), clock.now + MAX_AGE
    state.remote = RemoteLoad(said=said, own_requests=state.requests, expires=expires, clock=clock)


def chosen(name: str, workers: list[WorkerState], options: PolicyOptions | None = None) -> set[int]:
    """Return the positions of the workers that 50 choices for the prompt ABCD fall on."""
    policy = POLICIES[name](options or PolicyOptions(), random.Random(1))
    return {workers.index(policy.choose(workers, prompt("ABCD"))) for _ in range(50)}


def burst(name: str, states: list[WorkerState], requests: int) -> list[Lease]:
    """Return the leases of that many requests with short prompts, one after the other."""
    scheduler = Scheduler(POLICIES[name](PolicyOptions(), random.Random(1)), block_bytes=BLOCK_BYTES, policy_name=name)
    return [scheduler.select(states, request(f"{number:<9}")) for number in range(requests)]


# --- what a word is worth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "own_then", "own_now", "load"),
    [
        (Load(20, 0), 0, 0, Load(20, 0)),
        (Load(20, 0), 0, 3, Load(23, 0)),  # three of ours have come
        (Load(20, 0), 5, 2, Load(17, 0)),  # three of ours have gone
        (Load(20, 4), 5, 5, Load(20, 4)),
        (Load(20, 4), 5, 8, Load(20, 7)),  # the batch is full, so who comes waits
        (Load(20, 4), 5, 2, Load(20, 1)),  # and who goes makes room
        (Load(20, 4), 9, 0, Load(15, 0)),
        (Load(0, 4), 4, 4, Load(0, 4)),
        (Load(2, 0), 5, 5, Load(5, 0)),  # three of ours are still on their way there
        (Load(2, 0), 5, 1, Load(1, 0)),  # never fewer than ours
        (Load(0, 0), 0, 0, Load(0, 0)),
    ],
)
def test_f48_what_has_come_and_gone_since(said: Load, own_then: int, own_now: int, load: Load) -> None:
    """F-48: a worker's word stood unchanged until the next; now ours that came or went since are added or taken off."""
    assert RemoteLoad(said=said, own_requests=own_then, expires=1.0, clock=lambda: 0.0).now(own_now) == load


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.tuples(*[st.integers(0, 50)] * 4))
def test_f48_the_load_is_possible(numbers: tuple[int, int, int, int]) -> None:
    """F-48: whatever was said, the load is not below what we have there, and one more of ours makes it one more."""
    running, waiting, own_then, own_now = numbers
    remote = RemoteLoad(said=Load(running, waiting), own_requests=own_then, expires=1.0, clock=lambda: 0.0)
    load = remote.now(own_now)
    assert min(load) >= 0
    assert sum(load) >= own_now
    assert sum(remote.now(own_now + 1)) == sum(load) + 1


def test_a_word_counts_for_its_time() -> None:
    """Until it expires a worker's word is its load, by the clock handed in; from then on there is none."""
    clock, state = Clock(), worker()
    loads = [state.remote_load]
    say(state, 20, clock=clock)
    for seconds in (0.0, MAX_AGE - 0.1, 0.1):
        clock.now += seconds
        loads.append(state.remote_load)
    assert loads == [None, Load(20, 0), Load(20, 0), None]


# --- the policies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REMOTE)
def test_others_requests_count(name: str) -> None:
    """A worker that others keep busy is passed over, though we have sent it nothing."""
    busy, idle = workers = fleet("ab")
    say(busy, 20)
    say(idle, 0)
    assert chosen(name, workers) == {1}


@pytest.mark.parametrize("name", REMOTE)
@pytest.mark.parametrize("requests", [1, 8, 40])
def test_f48_no_herd_between_two_polls(name: str, requests: int) -> None:
    """F-48: all requests between two polls went to the worker with the least; each choice now sees those before it."""
    states = fleet("abcd")
    for state, running in zip(states, (10, 0, 0, 0), strict=True):
        say(state, running)
    leases = burst(name, states, requests)
    counts = [state.requests for state in states]
    assert sum(counts) == requests
    loads = [sum(state.remote_load or ()) for state in states]
    assert max(loads[1:]) - min(loads[1:]) <= 1
    assert counts[0] == 0 or max(loads) - min(loads) <= 1
    assert {lease.reason for lease in leases} == {name}


@pytest.mark.parametrize("name", REMOTE)
@pytest.mark.parametrize("silence", ["never said anything", "stale"])
def test_f46_one_worker_without_a_word(name: str, silence: str) -> None:
    """F-46: one worker's own count beside the others' words drew all requests; now all are judged by our counts."""
    clock = Clock()
    silent, busy = workers = [worker("a", requests=3), worker("b", requests=2)]
    if silence == "stale":
        say(silent, 0, clock=clock)
        clock.now += MAX_AGE
    say(busy, 90, clock=clock)
    assert chosen(name, workers) == {1}
    (lease,) = burst(name, workers, 1)
    assert (lease.state, lease.reason) == (busy, "load_unknown")

    say(silent, 0, clock=clock)
    say(busy, 90, clock=clock)
    assert chosen(name, workers) == {0}


@pytest.mark.parametrize("name", REMOTE)
def test_f46_only_those_that_may_be_chosen_must_have_spoken(name: str) -> None:
    """F-46: a silent worker that is drained leaves the others comparable."""
    silent, busy, idle = workers = fleet("abc")
    silent.draining = True
    say(busy, 9)
    say(idle, 0)
    (lease,) = burst(name, workers, 1)
    assert (lease.state, lease.reason) == (idle, name)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    twins=st.sampled_from(TWINS),
    loads=st.lists(st.tuples(*[st.integers(0, 30)] * 3, st.integers(0, 4)), min_size=1, max_size=5),
)
def test_a_policy_is_its_local_twin_by_another_load(
    twins: tuple[str, str], loads: list[tuple[int, int, int, int]]
) -> None:
    """Workers that say what we would count ourselves are chosen as the local policy chooses, ties and all."""
    spoken, counted = [], []
    for at, (running, waiting, tokens, blocks) in enumerate(loads):
        spoken.append(worker(f"w{at}", prefill_tokens=tokens))
        say(spoken[-1], running, waiting)
        counted.append(worker(f"w{at}", requests=running + waiting, waiting_requests=waiting, prefill_tokens=tokens))
        for state in (spoken[-1], counted[-1]):
            warm(state, "ABCD"[:blocks])

    remote, local = twins
    assert chosen(remote, spoken) == chosen(local, counted)


@pytest.mark.parametrize(
    ("weight", "loads", "expected"),
    [
        (1.0, [(4, 4), (9, 0)], {0}),  # 8 < 9
        (2.0, [(4, 4), (9, 0)], {1}),  # 12 > 9
        (0.0, [(4, 90), (5, 0)], {0}),
        (0.5, [(4, 4), (6, 0)], {0, 1}),
    ],
)
def test_f55_waiting_requests_have_their_weight(
    weight: float, loads: list[tuple[int, int]], expected: set[int]
) -> None:
    """F-55: the weight was inert; requests that wait at the worker count `waiting_weight` times. Loads: runs, waits."""
    workers = [worker(f"w{at}") for at in range(len(loads))]
    for state, (running, waiting) in zip(workers, loads, strict=True):
        say(state, running, waiting)
    assert chosen("fd_remote_metrics_score", workers, PolicyOptions(waiting_weight=weight)) == expected


def test_the_queue_counts_for_cache_aware() -> None:
    """Two full workers don't look alike: the one with the longer queue has more load."""
    short, long = workers = fleet("ab")
    say(short, 8, 1)
    say(long, 8, 9)
    assert chosen("remote_cache_aware", workers) == {0}


def test_balance_is_judged_by_what_the_workers_say() -> None:
    """A warm worker that others have filled beyond the limits is out of balance, though our own counts are even."""
    warm_one, cold_one = workers = fleet("ab")
    warm(warm_one, "ABCD")
    light = PolicyOptions(cache_aware_load_weight=0.01)
    for running, expected in ((16, 0), (17, 1)):
        say(warm_one, running)
        say(cold_one, 0)
        assert chosen("remote_cache_aware", workers, light) == {expected}

    scheduler = Scheduler(POLICIES["remote_cache_aware"](light, random.Random(1)), block_bytes=BLOCK_BYTES)
    assert scheduler.select(workers, request(text("ABCD"))).reason == "out_of_balance"


def test_f50_round_robin_has_a_turn_of_its_own_for_each_role() -> None:
    """F-50: two roles shared one counter, and of two workers each only one was used; each policy has its own turns."""
    prefill, decode = ([*fleet("ab")], [*fleet("cd")])
    of_prefill, of_decode = (POLICIES["round_robin"](PolicyOptions(), random.Random(1)) for _ in range(2))
    turns = [(of_prefill.choose(prefill, prompt("A")), of_decode.choose(decode, prompt("A"))) for _ in range(10)]
    assert [turns.count(pair) for pair in zip(prefill, decode, strict=True)] == [5, 5]
