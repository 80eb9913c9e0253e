"""Shows that a prompt whose blocks were hashed elsewhere is to a policy what the same prompt in bytes would be."""

from __future__ import annotations

import random

import pytest

from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.prompt import Prompt
from asgi_router.scheduling.scheduler import Scheduler
from tests.scheduling.builders import BLOCK_BYTES, BLOCK_TOKENS, fleet, prompt, request, warm, worker


@pytest.mark.parametrize("blocks", ["A", "AB", "ABCD"])
def test_it_is_matched_alike(blocks: str) -> None:
    """Uncached tokens and hit ratio are the same, for any held beginning; the last token is computed in any case."""
    cut = prompt(blocks)
    made = Prompt.of_blocks(cut.blocks, tokens=cut.tokens, block_tokens=BLOCK_TOKENS)
    for held in ("", "A", "AB", "ABCD", "X"):
        state = worker()
        if held:
            warm(state, held)
        assert made.uncached_tokens(state) == cut.uncached_tokens(state), held
        assert made.hit_ratio(state) == cut.hit_ratio(state), held


def test_its_home_hangs_on_its_first_block_alone() -> None:
    """Prompts that begin alike have one home, different ones have all; one without blocks has none."""
    workers = fleet("abcd")
    homes = [
        {
            workers.index(home)
            for tail in range(5)
            if (home := Prompt.of_blocks((head, head + tail), tokens=200, block_tokens=100).home(workers))
        }
        for head in range(100, 200)
    ]
    assert all(len(home) == 1 for home in homes)
    assert set.union(*homes) == {0, 1, 2, 3}
    assert Prompt.of_blocks((), tokens=200, block_tokens=100).home(workers) is None


def test_a_scheduler_is_told_how_to_cut() -> None:
    """Whatever makes its prompts makes those of its leases, chosen or placed."""
    policy = POLICIES["prefill_cost"](PolicyOptions(), random.Random(1))
    scheduler = Scheduler(
        policy,
        block_bytes=BLOCK_BYTES,
        cut=lambda asked: Prompt.of_blocks((1, 2, 3), tokens=301, block_tokens=100),
    )
    workers = fleet("ab")
    first = scheduler.select(workers, request("no blocks of its own"))
    assert (first.prefill_tokens, first.uncached_tokens) == (301, 301)
    second = scheduler.place(first.state, request("another"), "placed")
    assert second.uncached_tokens == 1
    first.release()
    second.release()
    assert first.state.prefixes.pinned == 0
