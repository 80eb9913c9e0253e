"""Owns the loads that are made, not recorded: for what no public trace has, and for trying the program."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from asgi_router.replay.traced_request import traced
from asgi_router.replay.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asgi_router.replay.traced_request import TracedRequest

BLOCK_TOKENS = 100


def hot_prefix(
    *, requests: int, rate: float, seed: int, share: float = 0.9, prefix_tokens: int = 2_000, others: int = 1
) -> Trace:
    """Return requests of which `share` begin with one and the same prefix, and the rest with one of their own.

    Args:
        requests: how many.
        rate: requests a second; they come as a Poisson process.
        seed: the same seed makes the same load.
        share: how many of the requests have a common prefix, from 0 to 1.
        prefix_tokens: its length.
        others: among how many equally common prefixes these are divided: 1 is the hot one, more make it calm.
    """
    rng = random.Random(seed)
    common = prefix_tokens // BLOCK_TOKENS
    made: list[TracedRequest] = []
    now, number = 0.0, others * common
    for _ in range(requests):
        own = rng.randint(100, 600)
        first = rng.randrange(others) * common if rng.random() < share else number
        if first == number:
            number += common
        tail = own // BLOCK_TOKENS
        blocks = (*range(first, first + common), *range(number, number + tail))
        number += tail
        made.append(traced(arrival=now, tokens=prefix_tokens + own, output_tokens=rng.randint(20, 200), blocks=blocks))
        now += rng.expovariate(rate)
    return Trace(made, BLOCK_TOKENS, [])


def calm_prefixes(*, requests: int, rate: float, seed: int) -> Trace:
    """Return the same as `hot_prefix`, but for the prefix: there are 64 of them, none hotter than the others."""
    return hot_prefix(requests=requests, rate=rate, seed=seed, others=64)


def conversations(*, requests: int, rate: float, seed: int) -> Trace:
    """Return conversations of some turns, each of which begins with all before it, under eight system prompts."""
    rng = random.Random(seed)
    made: list[TracedRequest] = []
    open_ones: list[tuple[int, ...]] = []
    number, now = 8 * 10, 0.0
    for _ in range(requests):
        if open_ones and rng.random() < 0.8:
            blocks = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            system = rng.randrange(8) * 10
            blocks = tuple(range(system, system + 10))
        turn = rng.randint(1, 8)
        blocks = (*blocks, *range(number, number + turn))
        number += turn
        tokens = len(blocks) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
        made.append(traced(arrival=now, tokens=tokens, output_tokens=rng.randint(20, 400), blocks=blocks))
        if len(blocks) < 200:
            open_ones.append(blocks)
        now += rng.expovariate(rate)
    return Trace(made, BLOCK_TOKENS, [])


GENERATED: Mapping[str, Callable[..., Trace]] = {
    "calm-prefixes": calm_prefixes,
    "conversations": conversations,
    "hot-prefix": hot_prefix,
}
"""By the names that the command line knows."""
