"""Owns the KV cache of one simulated worker: blocks of prompts, shared, evicted when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockCache:
    """Blocks that running sequences hold, and blocks that nobody holds any more, least recently used first.

    As in the engines a prompt's tail is evicted before its head, so a held block has all blocks before it, and the
    longest match is found by bisection.

    Args:
        capacity: how many blocks at the most, held or not.
    """

    __slots__ = ("_held", "_idle", "_private", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: dict[int, int] = {}  # block -> sequences that hold it
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._private = 0  # blocks that can't be shared: parts of a block, and what is generated

    def __len__(self) -> int:
        return len(self._held) + len(self._idle) + self._private

    @property
    def held(self) -> int:
        """Blocks of the sequences that run."""
        return len(self._held) + self._private

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` blocks are there, counted from the head without a gap."""
        held, idle = self._held, self._idle
        if limit <= 0 or (blocks[0] not in held and blocks[0] not in idle):
            return 0
        low, high = 0, limit
        while high - low > 1:
            middle = (low + high) // 2
            if blocks[middle] in held or blocks[middle] in idle:
                low = middle
            else:
                high = middle
        return low + 1

    def hold(self, blocks: Sequence[int], private: int) -> int | None:
        """Make room for a sequence, evicting idle blocks, and return how many of `blocks` were there, from the head on.

        None, and nothing is done, where others hold too much.
        """
        held, idle = self._held, self._idle
        known = self.match(blocks, len(blocks))
        shared = [block for block in blocks[:known] if block in held]
        busy = len(held) + len(blocks) - len(shared) + self._private + private
        if busy > self.capacity:
            return None

        self._private += private
        for block in shared:
            held[block] += 1
        for block in blocks[len(shared) : known]:  # if a block is held, so are those before it
            del idle[block]
        held.update(dict.fromkeys(blocks[len(shared) :], 1))
        for _ in range(busy + len(idle) - self.capacity):
            idle.popitem(last=False)
        return known

    def release(self, blocks: Sequence[int], private: int) -> None:
        """End a sequence that `hold` made room for; its whole prompt blocks stay until room is needed."""
        held, idle = self._held, self._idle
        self._private -= private
        for block in reversed(blocks):  # the head last: it stays longest
            count = held[block]
            if count > 1:
                held[block] = count - 1
            else:
                del held[block]
                idle[block] = None

    def clear(self) -> None:
        """Lose everything, as in a restart."""
        self._held.clear()
        self._idle.clear()
        self._private = 0
