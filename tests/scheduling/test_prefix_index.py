"""Shows the rules of the prefix index one at a time; `test_prefix_model.py` checks that they hold together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asgi_router.fleet.registry import Registry
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.rope import Rope
from asgi_router.scheduling.blocks import block_hashes
from asgi_router.scheduling.prompt import Prompt
from asgi_router.worker import Worker
from tests.scheduling.builders import (
    BLOCK_BYTES,
    TTL,
    Clock,
    fleet,
    fresh_state,
    new_index,
    prompt,
    request,
    warm,
    worker,
)

if TYPE_CHECKING:
    from asgi_router.scheduling.picture import Picture
    from asgi_router.scheduling.prefix_index import PrefixIndex


def blocks(letters: str) -> tuple[int, ...]:
    """Return the hashes of a prompt with one block for each letter."""
    return prompt(letters).blocks


def held(index: Picture, letters: str) -> int:
    """Return how many of the blocks match."""
    return index.match(blocks(letters), len(letters))


def record(index: PrefixIndex, letters: str) -> None:
    """Let a request with these blocks come and succeed."""
    pinned = blocks(letters)[: index.pin(blocks(letters))]
    index.unpin(pinned, prefilled=True)


def test_equal_prefixes_have_equal_hashes_and_nothing_else_has() -> None:
    """A block's hash stands for all that precedes it, not for the block alone."""
    assert blocks("ABC")[:2] == blocks("ABD")[:2]
    assert blocks("ABC")[2] != blocks("ABD")[2]
    assert not set(blocks("BCD")) & set(blocks("ABCD"))
    assert len(set(blocks("AAAA"))) == 4


@pytest.mark.parametrize(("size", "count"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2), (129, 2)])
def test_only_whole_blocks_have_hashes(size: int, count: int) -> None:
    """The last part of a prompt, shorter than a block, has no hash."""
    assert len(block_hashes(Rope.of(b"x" * size), 64)) == count


def test_siblings_in_a_burst_see_predicted_blocks() -> None:
    """The blocks of a request match from its selection on, before the worker has answered."""
    index = new_index()
    index.pin(blocks("ABC"))
    assert held(index, "ABD") == 2


def test_a_failed_request_leaves_no_blocks() -> None:
    """F-68: what was predicted for a request that failed before its prefill is taken back."""
    index = new_index()
    index.pin(blocks("ABC"))
    index.unpin(blocks("ABC"), prefilled=False)
    assert held(index, "ABC") == len(index) == 0


def test_a_failed_request_takes_nothing_from_others() -> None:
    """What a failed request shares with an earlier success or with a request in flight stays."""
    index = new_index()
    record(index, "A")
    index.pin(blocks("AB"))
    index.pin(blocks("ABC"))
    index.unpin(blocks("ABC"), prefilled=False)
    assert held(index, "ABC") == 2
    index.unpin(blocks("AB"), prefilled=False)
    assert held(index, "ABC") == 1


def test_one_success_among_siblings_is_enough() -> None:
    """If one of two requests with the same blocks was prefilled, the other's failure takes nothing away."""
    index = new_index()
    index.pin(blocks("AB"))
    index.pin(blocks("AB"))
    index.unpin(blocks("AB"), prefilled=True)
    index.unpin(blocks("AB"), prefilled=False)
    assert held(index, "AB") == 2


def test_the_head_of_a_prompt_outlives_its_tail() -> None:
    """When room is needed a prompt is shortened from its end, so what is left still matches."""
    index = new_index(4)
    record(index, "ABCD")
    record(index, "X")
    assert held(index, "ABCD") == 3
    record(index, "XY")
    assert held(index, "ABCD") == 2


def test_f64_the_least_recently_used_block_goes_first() -> None:
    """F-64: at the capacity, with nothing expired, use decides and not age."""
    index = new_index(3)
    for letter in "ABC":
        record(index, letter)
    record(index, "A")
    record(index, "D")
    assert [held(index, letter) for letter in "ABCD"] == [1, 0, 1, 1]


def test_blocks_in_flight_are_not_evicted() -> None:
    """A pinned block stays, however many others come after it; what finds no room is not recorded."""
    index = new_index(3)
    index.pin(blocks("AB"))
    record(index, "XYZ")
    record(index, "VW")
    assert held(index, "AB") == 2
    assert held(index, "V") == 1
    assert held(index, "VW") == 1


def test_room_is_made_for_several_prompts_at_once() -> None:
    """A 128th of the capacity goes, the least recently used, when a block finds no room; then none for a while."""
    index = new_index(1_280)
    old = range(1, 1_281)
    index.unpin(old[: index.pin(old)], prefilled=True)
    for number in range(10):
        index.unpin([2_000 + number][: index.pin([2_000 + number])], prefilled=True)
        assert index.match(old, 1_280) == 1_270
    assert len(index) == 1_280


def test_a_prompt_too_long_for_the_room_is_recorded_from_its_head() -> None:
    """`pin` tells how many blocks it took, from the head on, and only those are given back."""
    index = new_index(3)
    assert index.pin(blocks("ABCDE")) == 3
    assert index.pin(blocks("XY")) == 0
    assert index.pin(blocks("ABX")) == 2
    index.unpin(blocks("AB"), prefilled=False)
    index.unpin((), prefilled=False)
    index.unpin(blocks("ABC"), prefilled=True)
    assert index.pinned == 0
    assert held(index, "ABCDE") == 3


def test_a_burst_of_unique_long_prompts_stays_within_the_capacity() -> None:
    """100 different prompts of 100,000 characters, in flight at once and ended in any manner, never exceed it.

    sgl-project/sglang#16734, smg#2137: memory grew between evictions.
    """
    capacity = 1_953
    index = new_index(capacity)
    in_flight = []
    for number in range(100):
        hashes = block_hashes(Rope.of(f"{number:<100000}"), 512)
        in_flight.append(hashes[: index.pin(hashes)])
        assert len(index) <= capacity
    assert index.pinned == len(index) == capacity

    for number, hashes in enumerate(in_flight):
        index.unpin(hashes, prefilled=number % 3 > 0)
        assert len(index) <= capacity
    assert index.pinned == 0

    for number in range(100):
        hashes = block_hashes(Rope.of(f"again {number:<100000}"), 512)
        index.unpin(hashes[: index.pin(hashes)], prefilled=True)
        assert len(index) <= capacity
    assert index.match(hashes, len(hashes)) == len(hashes) == 72


def test_capacity_zero_remembers_nothing() -> None:
    """An index without capacity takes no block and matches none."""
    index = new_index(0)
    assert index.pin(blocks("AB")) == 0
    assert held(index, "AB") == len(index) == 0
    index.unpin((), prefilled=True)


def test_f61_a_split_leaves_every_holder_its_match() -> None:
    """F-61: A records P1..P10 and B P1..P9 and another; a third prompt that leaves there matches 9 on both."""
    a, b = fleet("ab")
    warm(a, "123456789P")
    warm(b, "123456789X")
    assert [prompt("123456789Z").hit_ratio(state) for state in (a, b)] == [0.9, 0.9]


def test_f62_the_deepest_holder_is_not_the_only_one() -> None:
    """F-62: a prompt held to the end by A and in part by B matches 10 on A and 9 on B."""
    a, b, c = fleet("abc")
    warm(a, "123456789P")
    warm(b, "123456789X")
    assert [prompt("123456789P").hit_ratio(state) for state in (a, b, c)] == [1.0, 0.9, 0.0]


def test_f65_a_worker_that_leaves_takes_its_blocks_along() -> None:
    """F-65: a worker that was removed or is registered anew starts without blocks, and the others keep theirs."""
    registry = Registry(fresh_state)
    first = registry.add(Worker(url="http://a"))
    warm(first, "AB")
    other = registry.add(Worker(url="http://other"))
    warm(other, "AB")

    second = registry.add(Worker(url="http://a"))
    assert list(registry) == [other, second]
    assert held(second.prefixes, "AB") == len(second.prefixes) == 0

    warm(second, "AB")
    registry.remove("http://a")
    assert list(registry) == [other]
    third = registry.add(Worker(url="http://a"))
    assert held(third.prefixes, "AB") == len(third.prefixes) == 0
    assert held(other.prefixes, "AB") == 2


def test_f66_time_is_kept_for_each_worker() -> None:
    """F-66: a block that one worker uses all the time expires on another that does not."""
    clock = Clock()
    busy, idle = worker("busy", clock=clock), worker("idle", clock=clock)
    warm(busy, "AB")
    warm(idle, "AB")
    clock.now += TTL / 2
    warm(busy, "AB")
    clock.now += TTL / 2
    assert (held(busy.prefixes, "AB"), held(idle.prefixes, "AB")) == (2, 0)


def test_a_block_expires_after_its_last_use_and_not_in_flight() -> None:
    """The time bound counts from the end of the last request; while one runs, nothing expires."""
    clock = Clock()
    index = new_index(clock=clock)
    index.pin(blocks("AB"))
    clock.now += 10 * TTL
    assert held(index, "AB") == 2
    index.unpin(blocks("AB"), prefilled=True)
    clock.now += TTL - 1
    assert held(index, "AB") == 2
    clock.now += 1
    assert held(index, "AB") == 0


def test_a_failure_does_not_revive_what_had_expired() -> None:
    """A request that failed on expired blocks leaves none of them, and the next one starts from the head."""
    clock = Clock()
    index = new_index(clock=clock)
    record(index, "ABC")
    clock.now += TTL
    index.pin(blocks("A"))
    index.unpin(blocks("A"), prefilled=False)
    assert held(index, "ABC") == 0
    index.pin(blocks("ABC"))
    assert held(index, "ABC") == len(index) == 3


def test_a_short_prompt_expires_with_its_own_head_only() -> None:
    """A head that was used since matches while the tail behind it has expired."""
    clock = Clock()
    index = new_index(clock=clock)
    record(index, "ABCDEFGH")
    clock.now += TTL / 2
    record(index, "ABC")
    clock.now += TTL / 2
    assert held(index, "ABCDEFGH") == 3


def test_f74_models_do_not_share_blocks() -> None:
    """F-74: the same text for two models is two prompts; a LoRA adapter is named like a model."""
    (a,) = fleet("a")
    warm(a, "ABCD", model="base")
    assert prompt("ABCD", model="base").hit_ratio(a) == 1.0
    assert prompt("ABCD", model="adapter").hit_ratio(a) == 0.0
    assert prompt("ABCD").hit_ratio(a) == 0.0


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1])
def test_f72_a_prompt_shorter_than_a_block_is_neither_recorded_nor_matched(size: int) -> None:
    """F-72: such a prompt has no blocks; it hits nowhere and all of its tokens count."""
    (a,) = fleet("a")
    short = Prompt(request("x" * size), BLOCK_BYTES)
    assert short.blocks == ()
    assert a.prefixes.pin(short.blocks) == 0
    assert short.hit_ratio(a) == 0.0
    assert short.uncached_tokens(a) == short.tokens == max(1, -(-size // BYTES_PER_TOKEN))


@pytest.mark.parametrize(("extra", "uncached"), [(0, 16), (1, 1), (4, 1), (5, 2), (63, 16)])
def test_the_last_token_is_always_computed(extra: int, uncached: int) -> None:
    """A block that ends the prompt is no hit: of 4 blocks and `extra` bytes, held in full, so many tokens are left."""
    (a,) = fleet("a")
    warm(a, "ABCD")
    key = b"".join(letter * BLOCK_BYTES for letter in (b"A", b"B", b"C", b"D")) + b"?" * extra
    assert Prompt(request(key), BLOCK_BYTES).uncached_tokens(a) == uncached


def test_a_hit_is_a_share_of_the_blocks_that_can_hit() -> None:
    """A prompt that ends with a block is held in full when all but that block are."""
    (a,) = fleet("a")
    warm(a, "ABCD")
    whole = Prompt(request(b"".join(letter * BLOCK_BYTES for letter in (b"A", b"B", b"C", b"D"))), BLOCK_BYTES)
    assert (whole.hit_ratio(a), prompt("ABXX").hit_ratio(a)) == (1.0, 0.5)


def test_repr_shows_blocks_capacity_and_pins() -> None:
    """The first debugger."""
    index = new_index(9)
    record(index, "AB")
    index.pin(blocks("AX"))
    assert repr(index) == "<PrefixIndex 3 of 9 blocks, 2 pinned>"
