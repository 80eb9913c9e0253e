"""Shows that the oracle knows what no router can: real caches, real queues, and what is cached when a queue is done."""

from __future__ import annotations

import pytest

from asgi_router.replay.choosers import ORACLE, chooser
from asgi_router.replay.simulate import Replay, Setup
from asgi_router.scheduling.policies import PolicyOptions
from tests.replay.builders import PLAIN, asked, trace_of

HEAD = tuple(range(10))


def firsts(*requests: tuple[float, int, tuple[int, ...]]) -> list[float]:
    """Return the seconds to the first token of requests (arrival, tokens, blocks) at two workers, by their ends."""
    trace = trace_of(*(asked(tokens, blocks=blocks, arrival=arrival) for arrival, tokens, blocks in requests))
    setup = Setup(workers=2, model=PLAIN, index_tokens=1_000)  # the router itself remembers one prompt
    return list(Replay(trace, setup, ORACLE, chooser(ORACLE, PolicyOptions())).run().ttft)


def test_it_goes_where_the_cache_is() -> None:
    """Again and again, as long as nobody is in the way."""
    turns = [(5.0 * at, 1_100, HEAD) for at in range(8)]
    assert firsts(*turns) == pytest.approx([1.1] + [0.1] * 7)


def test_it_leaves_a_warm_worker_that_is_busy() -> None:
    """What is being computed counts by the time that is left: nine seconds are too many, half a second isn't."""
    warm, long = (0.0, 1_100, HEAD), (5.0, 10_100, HEAD)
    assert firsts(warm, long, (6.0, 1_100, HEAD)) == pytest.approx([1.1, 1.1, 9.1])
    assert firsts(warm, long, (13.6, 1_100, HEAD)) == pytest.approx([1.1, 9.1, 0.6])


def test_it_counts_what_the_queue_will_have_cached() -> None:
    """A sibling of what waits goes to the same worker, if its turn comes soon enough."""
    apart = [(0.0, 1_000, ()), (0.01, 1_000, ()), (0.02, 1_100, HEAD), (0.03, 1_100, HEAD)]
    # Both workers are busy up to 1.0; then one of them does 1,100 tokens, and 100 in the same step.
    assert sorted(firsts(*apart)) == pytest.approx([1.0, 1.0, 2.17, 2.18], abs=0.02)
