"""Shows that the simulated KV cache shares, evicts and bounds as an engine's does."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from asgi_router.replay.block_cache import BlockCache


def test_what_a_sequence_leaves_is_found_by_the_next() -> None:
    """Whole blocks stay when a sequence has ended, private ones go."""
    cache = BlockCache(10)
    assert cache.hold((1, 2, 3), 2) == 0
    assert (len(cache), cache.held) == (5, 5)
    cache.release((1, 2, 3), 2)
    assert (len(cache), cache.held) == (3, 0)
    assert cache.match((1, 2, 3, 4), 4) == 3
    assert cache.match((1, 2, 3, 4), 2) == 2
    assert cache.match((9, 2, 3), 3) == 0


def test_blocks_are_shared_by_those_who_hold_them() -> None:
    """A block that two sequences hold takes the room of one, and is held until both have ended."""
    cache = BlockCache(4)
    assert cache.hold((1, 2, 3), 0) == 0
    assert cache.hold((1, 2, 4), 0) == 2
    assert len(cache) == 4
    cache.release((1, 2, 3), 0)
    assert cache.held == 3
    assert cache.hold((5, 6), 0) is None


def test_the_tail_goes_before_the_head() -> None:
    """What was used least recently is evicted, and of one prompt the end."""
    cache = BlockCache(4)
    for blocks in ((1, 2), (5, 6)):
        assert cache.hold(blocks, 0) == 0
        cache.release(blocks, 0)
    assert cache.hold((7,), 0) == 0
    assert cache.match((1, 2), 2) == 1
    assert cache.match((5, 6), 2) == 2


def test_a_sequence_that_has_no_room_changes_nothing() -> None:
    """Where others hold too much, nothing is evicted in vain."""
    cache = BlockCache(4)
    assert cache.hold((1,), 0) == 0
    cache.release((1,), 0)
    assert cache.hold((2, 3), 0) == 0
    assert cache.hold((4, 5, 6), 0) is None
    assert cache.match((1,), 1) == 1


Prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=st.lists(st.tuples(Prompts, st.integers(0, 2), st.booleans()), max_size=30), capacity=st.integers(1, 12))
def test_it_never_exceeds_its_capacity_and_has_no_gaps(steps: list[tuple[list[int], int, bool]], capacity: int) -> None:
    """Whatever comes and goes, the capacity is kept, and bisection finds what a walk from the head finds."""
    cache = BlockCache(capacity)
    running: list[tuple[tuple[int, ...], int]] = []
    for digits, private, ends in steps:
        # A block is known by all that precedes it.
        blocks = tuple(hash(tuple(digits[: at + 1])) for at in range(len(digits)))
        walked = 0
        while walked < len(blocks) and cache.match(blocks[walked : walked + 1], 1):
            walked += 1
        assert cache.match(blocks, len(blocks)) == walked
        known = cache.hold(blocks, private)
        if known is not None:
            assert known == walked
            running.append((blocks, private))
        assert len(cache) <= capacity
        if ends and running:
            cache.release(*running.pop(0))
    for sequence in running:
        cache.release(*sequence)
    assert cache.held == 0
