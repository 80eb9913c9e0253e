"""Cached tokens on real workers: what the default policy is for, counted by the engines themselves."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from benchmarks.conversations import Load, schedule
from benchmarks.engines import Answer, run_policy

LOAD = Load(requests=60, families=4, active=4, in_flight=2)
"""Two workers of two slots hold what is active."""


def cached_share(answers: list[Answer]) -> float:
    """Which part of all prompt tokens the workers found in their caches."""
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


real_cache = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="a simulated worker has another cache"
)


@real_cache
def test_the_default_policy_finds_more_in_the_caches_than_round_robin() -> None:
    """Of growing conversations real workers find clearly more cached under prefill_cost, and the load is the same.

    It is 1.4 times as much in the mean: which family is at home where goes by a hash of the workers' ports.
    """
    ours = run_policy("prefill_cost", LOAD, count=2)
    theirs = run_policy("round_robin", LOAD, count=2)
    assert len(ours) == len(theirs) == LOAD.requests
    assert cached_share(ours) > 1.1 * cached_share(theirs)


@real_cache
def test_slots_are_filled_as_the_router_pictures_them() -> None:
    """A real worker finds of each prompt what the router says, to within a block, while siblings compete for slots.

    One request at a time, so that both see the same order. Prompts have three blocks at least; what is left of one
    doesn't count in the picture.
    """
    answers = run_policy("prefill_cost slots", replace(LOAD, families=2, in_flight=1), count=1)
    for answer in answers:
        assert answer.predicted_tokens is not None
        assert answer.predicted_prompt_tokens
        predicted = answer.predicted_tokens / answer.predicted_prompt_tokens
        found = answer.cached_tokens / answer.prompt_tokens
        assert -0.05 < found - predicted < 1 / 3
    assert 0.2 < cached_share(answers) < 0.8


def test_the_load_is_the_same_for_a_seed() -> None:
    """Two schedules of one seed are equal to the last word; of another seed they aren't."""
    assert schedule(LOAD, 1) == schedule(LOAD, 1)
    assert schedule(LOAD, 1) != schedule(LOAD, 2)


def test_conversations_have_all_their_turns_in_order_and_no_more() -> None:
    """A conversation is asked as often as it has messages, at the most, and a number of them is active at any time."""
    order = schedule(LOAD, 1)
    assert len(order) == LOAD.requests
    turns = {conversation.name: 0 for conversation in order}
    for conversation in order:
        turns[conversation.name] += 1
        assert turns[conversation.name] <= len(conversation.messages)
    assert sum(turns[c.name] < len(c.messages) for c in {c.name: c for c in order}.values()) <= LOAD.active
