"""Shows how the picture of a worker's cache follows what the worker says of its hits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.scheduling.blocks import LONGER
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.prefix_index import LEAST_CAPACITY, PrefixIndex
from tests.scheduling.builders import TTL, Clock, prompt, warm, worker

MOST = 4_000


def adaptive(capacity: int = 1_000, most: int | None = MOST) -> PrefixIndex:
    """Return an index that learns, of a worker that has said something before."""
    index = PrefixIndex(capacity, TTL, Clock(), most)
    index.learn(held=0, evicted=0, found=0.0)
    return index


def fill(index: PrefixIndex, first: int, count: int) -> range:
    """Let the worker hold these blocks, used just now."""
    blocks = range(first, first + count)
    index.unpin(blocks[: index.pin(blocks)], prefilled=True)
    return blocks


def test_blocks_that_were_not_there_make_it_smaller() -> None:
    """What was believed to be held and wasn't is evidence of too large a picture; the oldest blocks go first."""
    index = adaptive()
    old, new = fill(index, 1, 900), fill(index, 2_000, 100)
    for _ in range(20):
        index.learn(held=100, evicted=0, found=0.0)
    assert index.capacity == pytest.approx(1_000 * 0.95**20, rel=0.05)
    assert len(index) == index.capacity
    assert index.match(old, len(old)) < 900
    assert index.match(new, len(new)) == 100


def test_it_shrinks_from_what_it_holds_not_from_what_it_might() -> None:
    """A picture that was never full was wrong about the blocks in it: it is they that don't fit."""
    index = adaptive()
    fill(index, 1, 100)
    index.learn(held=50, evicted=0, found=0.0)
    assert index.capacity == 95


@pytest.mark.parametrize("found", [50.0, 49.0, 45.0, 44.0, 60.0])
def test_rounding_is_no_evidence(found: float) -> None:
    """Up to a tenth and a block less than was believed, or more than could be known, changes nothing."""
    index = adaptive()
    fill(index, 1, 100)
    index.learn(held=50, evicted=0, found=found)
    assert index.capacity == 1_000


def test_a_worker_without_a_cache_leaves_little() -> None:
    """One that says 0 for ever isn't believed to hold more than about a prompt."""
    index = adaptive()
    for number in range(200):
        blocks = fill(index, number * 1_000, 100)
        index.learn(held=index.match(blocks, 100), evicted=0, found=0.0)
    assert len(index) == index.capacity == LEAST_CAPACITY


def test_evicted_blocks_that_were_there_make_it_larger() -> None:
    """A block had to go for want of room here, and the worker has it still: there is more room than was believed."""
    index = adaptive(capacity=100)
    blocks = fill(index, 1, 100)
    fill(index, 1_000, 100)
    assert index.match(blocks, 100) == 0
    assert index.evicted(blocks, 0, 100) == 100
    index.learn(held=0, evicted=100, found=100.0)
    assert index.capacity == 126
    index.learn(held=0, evicted=100, found=30.0)  # most of them had rightly gone
    assert index.capacity == 126


def test_it_grows_slowly_once_it_was_too_large() -> None:
    """After the first evidence of too large a picture steps up are as small as steps down."""
    index = adaptive(capacity=100)
    fill(index, 1, 100)
    index.learn(held=100, evicted=0, found=0.0)
    assert index.capacity == 95
    index.learn(held=0, evicted=10, found=10.0)
    assert index.capacity == 100


def test_it_grows_to_a_bound() -> None:
    """However much a worker claims, memory is bounded, that of what had to go included."""
    index = adaptive(capacity=100, most=300)
    for number in range(100):
        fill(index, number * 1_000, 100)
        assert len(index) + len(index._evicted) + len(index._evicted_before) <= 300
        if number % 3:
            index.learn(held=0, evicted=10, found=10.0)
    assert index.capacity == 300
    assert len(index) == 300


def test_an_evicted_block_that_comes_back_is_held() -> None:
    """It is in one place at a time."""
    index = adaptive(capacity=100)
    blocks = fill(index, 1, 100)
    fill(index, 1_000, 100)
    fill(index, 1, 100)
    assert index.match(blocks, 100) == 100
    assert index.evicted(blocks, 0, 100) == 0


def test_what_found_no_room_is_not_remembered_beyond_its_head() -> None:
    """Or it would be held and remembered when it comes back: a tail is forgotten with its head."""
    index = adaptive(capacity=32, most=320)
    blocks = fill(index, 1, 4)
    large = range(100, 132)
    index.unpin(large[: index.pin(large)], prefilled=False)
    assert index.evicted(blocks, 0, 4) == 4
    others = range(200, 230)
    index.pin(others)
    assert index.pin(blocks) == 2
    index.unpin(blocks[:2], prefilled=False)
    index.unpin(others, prefilled=False)
    fill(index, 1, 4)
    assert index.match(blocks, 4) == 4
    assert not index._evicted & set(blocks)


def test_without_a_bound_nothing_is_learnt() -> None:
    """PREFIX_ADAPT=false: the capacity is what it was set to, and what went is not remembered."""
    index = adaptive(capacity=100, most=None)
    blocks = fill(index, 1, 100)
    fill(index, 1_000, 100)
    assert index.evicted(blocks, 0, 100) == 0
    index.learn(held=100, evicted=0, found=0.0)
    index.learn(held=0, evicted=100, found=100.0)
    assert index.capacity == 100


def test_what_went_is_remembered_from_the_first_word_on() -> None:
    """Workers that never say what they had cached cost no memory of what had to go, and no time."""
    index = PrefixIndex(100, TTL, Clock(), MOST)
    first = fill(index, 1, 100)
    second = fill(index, 1_000, 100)
    assert index.evicted(first, 0, 100) == 0
    index.learn(held=0, evicted=0, found=0.0)
    fill(index, 2_000, 100)
    assert (index.evicted(first, 0, 100), index.evicted(second, 0, 100)) == (0, 100)


def test_nothing_is_remembered_where_nothing_shall_be() -> None:
    """PREFIX_CAPACITY_TOKENS=0 stays at nothing, whatever a worker says."""
    index = adaptive(capacity=0, most=0)
    fill(index, 1, 100)
    index.learn(held=0, evicted=0, found=100.0)
    index.learn(held=5, evicted=0, found=0.0)
    assert index.capacity == len(index) == 0


def test_a_restart_is_forgotten_but_for_what_is_in_flight() -> None:
    """`clear` leaves the pins of requests in flight, which end as ever, and nothing that could be found."""
    index = adaptive()
    blocks = fill(index, 1, 100)
    pinned = blocks[: index.pin(blocks[:10])]
    index.clear()
    assert (len(index), index.pinned) == (10, 10)
    index.unpin(pinned, prefilled=False)
    assert (len(index), index.pinned) == (0, 0)
    assert index.match(blocks, 100) == 0


def test_a_lease_tells_what_its_worker_has_found() -> None:
    """The share of the prompt that was cached is compared with what was held when the worker was chosen."""
    state = worker("a")
    state.prefixes = adaptive()
    warm(state, "ABCDEFGHIJ")
    lease = Lease(state, prompt("ABCDEFGHIJ"))
    lease.release()
    lease.found(1.0)
    assert state.prefixes.capacity == 1_000
    lease.found(0.0)
    assert state.prefixes.capacity < 1_000


def test_a_sibling_in_a_burst_is_no_evidence() -> None:
    """What another request was only about to prefill may come too late for this one: the picture isn't wrong."""
    state = worker("a")
    state.prefixes = adaptive()
    first, second = Lease(state, prompt("ABCDEFGHIJ")), Lease(state, prompt("ABCDEFGHIJ"))
    assert second.cached_tokens > 0
    first.release()
    second.release()
    second.found(0.0)
    assert state.prefixes.capacity == 1_000


operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, 30), st.integers(1, 30), st.booleans()),
        st.tuples(st.just("hold"), st.integers(0, 30), st.integers(1, 30), st.booleans()),
        st.tuples(st.just("end"), st.just(0), st.just(0), st.booleans()),
        st.tuples(st.just("learn"), st.integers(0, 40), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("clear"), st.just(0), st.just(0), st.booleans()),
    ),
    max_size=60,
)


@given(operations, st.integers(0, 120), st.booleans())
def test_memory_is_bounded_whatever_happens(
    steps: list[tuple[str, int, int, bool]], capacity: int, growing: bool
) -> None:
    """Held and remembered blocks together stay within the bound, and every pin is given back."""
    index = adaptive(capacity, most=2 * capacity)
    in_flight: list[tuple[int, ...]] = []
    for what, first, count, flag in steps:
        levels = (at // 10 if growing else 0 for at in range(count))
        blocks = tuple(first * 100 + at + 1 | level * LONGER for at, level in enumerate(levels))
        if what == "use":
            index.unpin(blocks[: index.pin(blocks)], prefilled=flag)
        elif what == "hold":
            in_flight.append(blocks[: index.pin(blocks)])
        elif what == "end" and in_flight:
            index.unpin(in_flight.pop(0), prefilled=flag)
        elif what == "learn":
            index.learn(held=first, evicted=count, found=float(first + count) if flag else 0.0)
        elif what == "clear":
            index.clear()
        assert index.capacity <= 2 * capacity
        assert len(index) + len(index._evicted) + len(index._evicted_before) <= 2 * capacity
        assert index.pinned <= len(index) == sum(2 ** (block // LONGER) for block in index._blocks)

    for blocks in in_flight:
        index.unpin(blocks, prefilled=True)
    assert index.pinned == 0
