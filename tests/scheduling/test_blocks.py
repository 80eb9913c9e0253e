"""Shows that blocks grow with depth, that little is lost by it, and that what they weigh is what is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.rope import Rope
from asgi_router.scheduling.blocks import ENDS, EVEN, LONGER, block_hashes, fitting, weigh, whole_blocks
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.prompt import Prompt
from tests.scheduling.builders import BLOCK_BYTES, BLOCK_TOKENS, TTL, Clock, request, worker

TEXT = b"".join(b"%08d" % number for number in range(50_000))  # 400,000 bytes, of which no block is like another


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many blocks two prompts have in common."""
    index = PrefixIndex(100_000, TTL, Clock())
    index.pin(one)
    return index.match(other, len(other))


def weight_of(block: int) -> int:
    """Return what a block weighs, in the words of the rule."""
    return 2 ** (block // LONGER) if block >= LONGER else 1


def test_the_sizes_of_blocks() -> None:
    """32 of the base size; behind them each doubling has 16, so that a megabyte has some hundred."""
    assert ENDS[:34] == (*range(33), 34)
    assert [ENDS[32 + 16 * doubling] for doubling in range(7)] == [32, 64, 128, 256, 512, 1024, 2048]
    assert whole_blocks(2**20 // 512) == 32 + 6 * 16
    assert whole_blocks(100_000 // 512) == 72


@given(st.integers(0, 2**30))
def test_whole_blocks_are_those_that_end_in_time(length: int) -> None:
    """As many as end within the length; less than a 16th of it, or than a block of the base size, is left."""
    count = whole_blocks(length)
    assert length - max(1, length / 16) < ENDS[count] <= length < ENDS[count + 1]


@given(st.integers(0, len(TEXT)), st.integers(0, len(TEXT)), st.sampled_from([64, 100, 512, 4096]))
def test_little_is_lost_of_what_two_prompts_have_in_common(length: int, shared: int, block_bytes: int) -> None:
    """Of `p` common bytes all are found but a 16th, or a block of the base size; never more than there are."""
    one = TEXT[:length]
    shared = min(shared, length)
    other = one[:shared] + bytes(byte ^ 1 for byte in one[shared:])
    blocks = block_hashes(Rope.of(one), block_bytes)
    count = common(blocks, block_hashes(Rope.of(other), block_bytes))
    found = weigh(blocks[:count]) * block_bytes
    assert shared - max(block_bytes, shared / 16) < found <= shared
    assert found == ENDS[count] * block_bytes


@given(st.integers(0, 10_000), st.none() | st.integers(0, 10_000))
def test_ids_say_what_blocks_weigh(length: int, most: int | None) -> None:
    """The weights of a prompt's blocks are its length, as far as it is looked at; along it they never fall."""
    blocks = block_hashes(Rope.of(TEXT[: length * 40]), 40, max_blocks=most)
    looked_at = min(length, len(TEXT) // 40, length if most is None else most)
    weights = [weight_of(block) for block in blocks]
    assert weights == sorted(weights)
    assert len(blocks) == whole_blocks(looked_at)
    assert [sum(weights[:end]) for end in range(len(blocks) + 1)] == list(ENDS[: len(blocks) + 1])


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(-3, 400))
def test_weights_of_any_blocks_in_order(levels: list[int], room: int) -> None:
    """Whatever the sizes, their sum is exact; what fits is the longest head that weighs no more than the room."""
    blocks = [at + 1 | level * LONGER for at, level in enumerate(sorted(levels))]
    assert weigh(blocks) == sum(map(weight_of, blocks))
    assert weigh(blocks[::3]) == sum(map(weight_of, blocks[::3]))
    count = fitting(blocks, room)
    assert weigh(blocks[:count]) <= max(0, room)
    assert count == len(blocks) or weigh(blocks[: count + 1]) > room


@pytest.mark.parametrize("number", [-(2**63), -1, 0, 5, 2**63, 2**64 - 1])
def test_any_other_number_weighs_one(number: int) -> None:
    """A hash that was made elsewhere is a block of the base size, negative ones too."""
    assert weigh([number]) == 1


def test_blocks_of_one_size_where_they_are_asked_for() -> None:
    """Engines have blocks of one size: what is simulated has, too. The heads are the same."""
    even, growing = block_hashes(Rope.of(TEXT), 512, growing=False), block_hashes(Rope.of(TEXT), 512)
    assert len(even) == weigh(even) == len(TEXT) // 512
    assert even[:EVEN] == growing[:EVEN]
    assert growing[EVEN] not in even


def test_a_block_hangs_on_all_before_it() -> None:
    """A byte at the head changes every block, the longer ones too."""
    assert not set(block_hashes(Rope.of(TEXT), 512)) & set(block_hashes(Rope.of(b"?", TEXT[1:]), 512))


@pytest.mark.parametrize("length", [32, 33, 34, 64, 66, 67, 1_000])
@pytest.mark.parametrize("extra", [0, 1, 40])
def test_tokens_are_counted_by_weight(length: int, extra: int) -> None:
    """What a lease counts is exact: the tokens behind the last block held; a block that ends the prompt is no hit."""
    size = length * BLOCK_BYTES + extra
    state = worker(capacity=5_000)
    first = Lease(state, Prompt(request(TEXT[:size]), BLOCK_BYTES))
    assert first.uncached_tokens == first.prefill_tokens == -(-size // BYTES_PER_TOKEN)
    first.first_byte(prefilled=True)
    first.release()
    recorded = ENDS[whole_blocks(length)]
    assert (len(state.prefixes), state.prefixes.pinned) == (recorded, 0)

    prompt = Prompt(request(TEXT[:size]), BLOCK_BYTES)
    found = ENDS[whole_blocks((size - 1) // BLOCK_BYTES)]
    again = Lease(state, prompt)
    assert again.uncached_tokens == again.prefill_tokens - found * BLOCK_TOKENS
    assert again.cached_tokens == found * BLOCK_TOKENS
    assert state.pending_prefill_tokens == again.uncached_tokens
    assert prompt.hit_ratio(state) == 1.0
    assert state.prefixes.pinned == recorded
    again.release()


def test_the_share_of_a_prompt_that_is_held_goes_by_length() -> None:
    """32 blocks of the base size are half of a prompt of 64, though two thirds of its blocks."""
    state = worker(capacity=5_000)
    head = block_hashes(Rope.of(TEXT[: 32 * BLOCK_BYTES]), BLOCK_BYTES, ("",))
    state.prefixes.unpin(head[: state.prefixes.pin(head)], prefilled=True)
    prompt = Prompt(request(TEXT[: 64 * BLOCK_BYTES + 1]), BLOCK_BYTES)
    assert len(prompt.blocks) == 48
    assert prompt.hit_ratio(state) == 0.5


def test_a_worker_that_finds_all_is_no_evidence_and_one_that_finds_half_is() -> None:
    """What a worker reports is compared by length, too: a share of the prompt's tokens."""
    state = worker(capacity=5_000)
    state.prefixes = PrefixIndex(5_000, TTL, Clock(), 5_000)
    lease = Lease(state, Prompt(request(TEXT[: 1_024 * BLOCK_BYTES + 1]), BLOCK_BYTES))
    lease.first_byte(prefilled=True)
    lease.release()
    again = Lease(state, Prompt(request(TEXT[: 1_024 * BLOCK_BYTES + 1]), BLOCK_BYTES))
    again.release()
    again.found(0.95)
    assert state.prefixes.capacity == 5_000
    again.found(0.5)
    assert state.prefixes.capacity == int(1_024 * (1 - 0.05 * 0.5))
    assert len(state.prefixes) <= state.prefixes.capacity


def test_room_is_made_by_weight() -> None:
    """A longer block goes as a whole, and only as many as are in the way."""
    index = PrefixIndex(100, TTL, Clock())
    long = tuple(range(1, 11)) + tuple(number | 3 * LONGER for number in range(11, 21))  # 10 + 80
    index.unpin(long[: index.pin(long)], prefilled=True)
    assert len(index) == 90
    other = tuple(range(100, 120))  # 20: 10 too many
    assert index.pin(other) == 20
    assert index.match(long, 20) == 18
    assert (len(index), index.pinned) == (94, 20)


def test_a_longer_block_that_had_lost_its_head_is_counted_once() -> None:
    """A failure takes an expired head back, and not what is behind it: who records that again finds it in the table."""
    clock = Clock()
    index = PrefixIndex(100, TTL, clock)
    blocks = (1, 2, 3 | LONGER, 4 | 2 * LONGER)
    index.unpin(blocks[: index.pin(blocks)], prefilled=True)
    clock.now += TTL
    index.unpin(blocks[: index.pin(blocks[:1])], prefilled=False)
    assert len(index) == 7
    assert index.pin(blocks) == 4
    assert len(index) == index.pinned == 8
    index.unpin(blocks, prefilled=False)
    assert len(index) == index.pinned == 0
