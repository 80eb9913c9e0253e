"""Owns how a prompt is cut into blocks: where they end, by which ids they are known, and what they weigh.

1. Lengths are counted in blocks of the base size. The first `EVEN` blocks have that size; behind them every doubling
   of the position has `EVEN / 2` blocks. So a block is never longer than 1/16 of what precedes it: what a match falls
   short by is little beside what it finds, and a megabyte has a hundred blocks in place of two thousand.
2. A block's id is a hash chained over all that precedes it, so an equal id means an equal prefix. Above the hash, from
   the 64th bit on, stands a level: the block weighs `2**level`, in blocks of the base size. All ids below `LONGER`
   are of level 0, whatever number they are: those of traces, too.
3. Along a prompt levels never fall.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from hashlib import blake2b
from itertools import accumulate
from struct import iter_unpack
from typing import TYPE_CHECKING

from asgi_router.rope import PART_BYTES, Cut, RopeReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asgi_router.rope import Rope

EVEN = 32
"""Blocks of the base size at the head of a prompt: 16 KB by default, which is 4,096 tokens."""

LONGER = 1 << 64
"""The ids of longer blocks begin here."""

_OCTAVE = EVEN // 2  # blocks to a doubling
_SIGN = 1 << 63  # hashes have a sign: with this above them they fill the 64 bits below a level
_LEVELS = range(1, 33)  # further than any body reaches

ENDS = tuple(accumulate([1] * EVEN + [2**level for level in _LEVELS for _ in range(_OCTAVE)], initial=0))
"""Where blocks end, in blocks of the base size: `ENDS[n]` is the length of the first n."""


def whole_blocks(length: int) -> int:
    """Return how many blocks end within a length, which is given in blocks of the base size."""
    return length if length <= EVEN else bisect_right(ENDS, length) - 1


def block_hashes(
    key: Rope, block_bytes: int, space: tuple[str, ...] = (), max_blocks: int | None = None, *, growing: bool = True
) -> tuple[int, ...]:
    """Return the ids of the whole blocks of `key`; a last part of a block has none.

    The hashes hold within this process only: the interpreter's bytes hash (SipHash) is seeded at its start. So a client
    can't construct prompts that collide, unless the operator fixes the seed (`PYTHONHASHSEED`).

    Args:
        key: the prompt.
        block_bytes: the base size.
        space: separates prompts that can't share a cache, such as those of two models.
        max_blocks: how far the key is looked at, in blocks of the base size; None: to its end.
        growing: False: all blocks have the base size.
    """
    length = key.size // block_bytes
    if max_blocks is not None:
        length = min(length, max_blocks)
    if not length:
        return ()

    link = hash(space)
    ids: list[int] = []
    reader = RopeReader(key)
    level = mark = 0
    count = min(EVEN, length) if growing else length
    while count > 0:
        size = block_bytes << level
        length -= count << level
        while count:
            at_once = min(count, PART_BYTES // size or 1)
            count -= at_once
            for (block,) in iter_unpack(f"{size}s", reader.read(at_once * size)):
                link = hash((link, block))
                ids.append(mark + link)
        level += 1
        mark = (level << 64) + _SIGN
        count = min(_OCTAVE, length >> level)
    return tuple(ids)


def cut(key: Rope, block_bytes: int, space: tuple[str, ...] = (), max_blocks: int | None = None) -> Cut:
    """Cut a key into blocks as `block_hashes` does, for good."""
    return Cut(block_hashes(key, block_bytes, space, max_blocks), key.size, key.head(block_bytes))


def weigh(blocks: Sequence[int]) -> int:
    """Return the weight of blocks in the order in which they follow each other in a prompt, not all of them perhaps."""
    count = len(blocks)
    if not count or blocks[-1] < LONGER:
        return count
    # A power of two is 1, and all smaller ones: so each block counts once, and for each level that it reaches.
    levels = range(1, (blocks[-1] >> 64) + 1)
    return count + sum((count - bisect_left(blocks, level << 64)) << level - 1 for level in levels)


def fitting(blocks: Sequence[int], room: int) -> int:
    """Return how many of a prompt's blocks weigh no more than `room`, from the head on."""
    if weigh(blocks) <= room:
        return len(blocks)
    return bisect_right(range(len(blocks)), room, key=lambda last: weigh(blocks[: last + 1]))


def stable_hash(data: bytes) -> int:
    """Return 64 bits that are the same in every process, unlike the hashes of blocks."""
    return int.from_bytes(blake2b(data, digest_size=8).digest())
