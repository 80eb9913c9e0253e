"""Owns the router's picture of one worker's prefix cache: which prompt blocks it probably holds.

A block is known by a hash chained over all that precedes it, so an equal id means an equal prefix, and a
flat table of ids answers the longest match without a tree. Blocks deep in a prompt are longer (`blocks.py`): what
is counted here is their weight, in blocks of the base size. The rules:

1. If a block matches, so do all the blocks before it. A prompt is recorded from its head on, and when room is
   needed the least recently used block goes, which is never the head of a chain whose tail stays: tails are
   put back before heads. So the longest match is found by bisection.
2. The blocks of a request in flight are pinned: they match at once, so that the siblings in a burst find them,
   and they can't be evicted. When the request ends they stay if it was prefilled, or if they were there before
   (and then count as used); else they are gone.
3. Pinned and unpinned blocks together never grow beyond the capacity, and it is kept at insertion: what doesn't fit is
   not recorded, tail first. Nothing sweeps, not even when it shrinks below what is pinned. A longer block goes as one,
   and a 128th of the capacity at once: where the front of a dict has gone, finding what is the front now takes as long
   for one block as for a hundred.
4. The capacity is a guess. Where workers say how much of a prompt they had cached, it follows their word: blocks that
   were believed to be there, and weren't, make it smaller; blocks that had to go from here for want of room, and were
   there, make it larger. For this the ids of those that had to go are remembered, in a table that is bounded, too; from
   a worker's first word on, since many never say any.
"""

from __future__ import annotations

from collections import deque
from itertools import islice, repeat
from typing import TYPE_CHECKING, TypeVar

from asgi_router.scheduling.blocks import LONGER, fitting, weigh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value = TypeVar("Value")

AT_ONCE = 128
"""A share of the capacity that is evicted at once: 0.8 %. A 64th is felt on Mooncake's synthetic trace (2 % slower)."""

LEAST_CAPACITY = 32
"""Blocks that an adaptive index may hold at least: about one prompt."""

# Shares of the capacity by which one answer changes it at the most. Until the first one that makes it smaller it grows
# faster: it may have begun far too small. Found by replaying Mooncake's traces (docs/choosing-a-policy.md); for the
# first two 0.02 to 0.1 differ little.
_SHRINK = 0.05
_GROW = 0.05
_GROW_AT_FIRST = 0.25

_CONFIRMED = 1  # lowest bit of a pin: the worker has prefilled this block
_HOLD = 2  # what one request in flight adds to a pin


class PrefixIndex:
    """The blocks that one worker probably holds.

    Args:
        capacity: how many blocks of the base size at the most; 0 remembers nothing.
        ttl: seconds after its last use from which a block no longer matches; up to one second less, since only
            the whole second of a use is kept.
        clock: monotonic seconds, not negative.
        most: how many blocks the capacity may grow to; it may shrink to `LEAST_CAPACITY` then. None: it stays.
    """

    __slots__ = (
        "_blocks",
        "_capacity",
        "_clock",
        "_evicted",
        "_evicted_before",
        "_excess",
        "_has_shrunk",
        "_is_told",
        "_most",
        "_pinned",
        "_second",
        "_ttl",
    )

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float], most: int | None = None) -> None:
        self._capacity = capacity
        self._most = most
        self._has_shrunk = False
        self._is_told = False  # how much the worker had cached
        # Ids of what had to go, in two generations: taking single ones out of a dict's front costs more with each.
        self._evicted: set[int] = set()
        self._evicted_before: set[int] = set()
        self._ttl = ttl
        self._clock = clock
        # id -> if pinned: _HOLD x requests in flight, plus _CONFIRMED; else: minus the second of its last use.
        # The unpinned are in the order of their last use; where the pinned stand among them means nothing. (A
        # table for each would have to have room for all blocks: up to twice the memory.)
        self._blocks: dict[int, int] = {}
        self._excess = 0  # what the longer ones weigh above 1 each: nothing to count where all are of the base size
        self._pinned = 0
        self._second = 0

    def __repr__(self) -> str:
        return f"<PrefixIndex {len(self)} of {self._capacity} blocks, {self._pinned} pinned>"

    def __len__(self) -> int:
        return len(self._blocks) + self._excess

    @property
    def pinned(self) -> int:
        """What the blocks of requests in flight weigh."""
        return self._pinned

    @property
    def capacity(self) -> int:
        """How many blocks of the base size the worker is believed to have room for."""
        return self._capacity

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` blocks are held, counted from the head without a gap."""
        return _reach(blocks, 0, limit, self._holds)

    def lost(self, blocks: Sequence[int]) -> float:
        """Return 0: what has to go for a prompt is what was used least recently, which nobody is about to miss."""
        return 0.0

    def confirmed(self, block: int) -> bool:
        """Tell whether the worker has prefilled a block that is held, and is not just about to."""
        return self._blocks[block] < 0 or bool(self._blocks[block] & _CONFIRMED)

    def evicted(self, blocks: Sequence[int], start: int, limit: int) -> int:
        """Return how many of the blocks from `start` to `limit` had to go for want of room, without a gap."""
        return _reach(blocks, start, limit, self._had_to_go) if self._evicted or self._evicted_before else 0

    def _had_to_go(self, block: int) -> bool:
        return block in self._evicted or block in self._evicted_before

    def learn(self, held: int, evicted: int, found: float) -> None:
        """Adapt the capacity to what a worker has found in its cache of a prompt that it has now answered.

        Args:
            held: what those of the prompt's blocks weigh that were held here when the worker was chosen.
            evicted: what the blocks behind those weigh that had been evicted here.
            found: how much the worker had, in blocks of the base size. A tenth less than `held`, and a block, may be
                rounding.
        """
        if self._most is None:
            return

        self._is_told = True
        if found < 0.9 * held - 1:
            self._has_shrunk = True
            believed = min(self._capacity, len(self))
            self._capacity = max(
                min(LEAST_CAPACITY, self._capacity), int(believed * (1 - _SHRINK * (1 - found / held)))
            )
            self._evict(len(self) - self._capacity)
        elif evicted and (share := min(1.0, (found - held) / evicted)) > 0.5:
            step = _GROW if self._has_shrunk else _GROW_AT_FIRST
            self._capacity = min(self._most, int(self._capacity * (1 + step * share)) + 1)
            self._remember([])  # less of what had to go: that and the capacity share one bound

    def clear(self) -> None:
        """Forget all blocks but those of requests in flight."""
        self._blocks = {block: state & ~_CONFIRMED for block, state in self._blocks.items() if state > 0}
        self._excess = self._pinned - len(self._blocks)
        self._evicted.clear()
        self._evicted_before.clear()

    def _holds(self, block: int) -> bool:
        state = self._blocks.get(block)
        return state is not None and (state > 0 or self._clock() + state < self._ttl)

    def pin(self, blocks: Sequence[int]) -> int:
        """Record the blocks of a request in flight. Return how many were, from the head on: as many as fit."""
        if not blocks:  # of a short prompt
            return 0

        table = self._blocks
        now = self._clock()
        known = 0
        taken = []
        for block in blocks:
            state = table.get(block)
            if state is None:
                break
            if state > 0:
                table[block] = state + _HOLD
            else:
                table[block] = _HOLD | _CONFIRMED if now + state < self._ttl else _HOLD
                taken.append(block)
            known += 1

        if taken:
            self._pinned += weigh(taken)
        if known == len(blocks):
            return known

        fresh = behind = blocks[known:]
        weight = weigh(fresh)
        room = self._capacity - self._pinned
        if weight > room:
            fresh = fresh[: fitting(fresh, room)]
            if not fresh:
                return known
            weight = weigh(fresh)
        if (missing := len(table) + self._excess + weight - self._capacity) > 0:
            self._evict(max(missing, self._capacity // AT_ONCE))
        if weight > len(fresh):
            new = fresh if table.keys().isdisjoint(fresh) else [block for block in fresh if block not in table]
            self._excess += (weight if new is fresh else weigh(new)) - len(new)
        for block in fresh:
            table[block] = _HOLD  # it may be there: expired, and cut off from its head when that was taken back
        if self._had_to_go(fresh[0]):  # else none of them: tails went, and are forgotten, before heads
            self._evicted.difference_update(behind)
            self._evicted_before.difference_update(behind)
        self._pinned += weight
        return known + len(fresh)

    def unpin(self, blocks: Sequence[int], *, prefilled: bool) -> None:
        """End a request that `pin` recorded with exactly these blocks; keep them if the worker prefilled them."""
        if not blocks:
            return

        table = self._blocks
        confirmed = _CONFIRMED if prefilled else 0
        second = -int(self._clock())
        if second == self._second:
            second = self._second  # one integer object for all blocks of a second, not one for each
        self._second = second
        if max(map(table.__getitem__, blocks)) <= _HOLD | _CONFIRMED and prefilled:
            _discard(table, blocks)  # nobody else's: all at once
            table.update(zip(reversed(blocks), repeat(second)))  # at the end of the table: used last
            self._pinned -= weigh(blocks)
            return
        idle = []
        gone = []
        for block in reversed(blocks):
            state = (table[block] - _HOLD) | confirmed
            if state >= _HOLD:
                table[block] = state
                continue

            del table[block]
            idle.append(block)
            if state:
                table[block] = second  # at the end of the table: used last
            else:
                gone.append(block)
        self._pinned -= weigh(idle[::-1])
        if gone and gone[0] >= LONGER:
            self._excess -= weigh(gone[::-1]) - len(gone)

    def _evict(self, weight: int) -> None:
        """Evict at least so much, if there is."""
        if weight <= 0:
            return

        table = self._blocks
        victims = [] if self._excess else list(islice(table, weight))
        if victims and (not self._pinned or max(map(table.__getitem__, victims)) <= 0):
            _discard(table, victims)
        else:
            victims = self._evict_one_by_one(weight)
        self._remember(victims)

    def _evict_one_by_one(self, weight: int) -> list[int]:
        """Evict what there is between pinned blocks, and count what it weighs."""
        victims: list[int] = []
        passed: list[int] = []
        evicted = 0
        for block, state in self._blocks.items():
            if state > 0:
                passed.append(block)
            else:
                victims.append(block)
                evicted += 1 << (block >> 64) if block >= LONGER else 1
                if evicted >= weight:
                    break

        _discard(self._blocks, victims)
        self._excess -= evicted - len(victims)
        for block in passed:  # to the end, or every later search would pass them again
            self._blocks[block] = self._blocks.pop(block)
        return victims

    def _remember(self, victims: list[int]) -> None:
        if self._most is None or not self._is_told:
            return

        generation = max(0, self._most - self._capacity) // 2  # held or evicted: there are never more than `most`
        if len(self._evicted) + len(victims) > generation:
            self._evicted_before = self._evicted if len(self._evicted) <= generation else set()
            self._evicted = set(victims[-generation:] if generation else ())
        else:
            self._evicted.update(victims)
        if len(self._evicted_before) > generation:
            self._evicted_before = set()


def _discard(table: dict[int, Value], blocks: Sequence[int]) -> None:
    """Take blocks out of a table, in C: there may be thousands."""
    deque(map(table.__delitem__, blocks), maxlen=0)


def _reach(blocks: Sequence[int], start: int, limit: int, has: Callable[[int], bool]) -> int:
    """Return how many blocks from `start` to `limit` are had, where one that is had means that all before it are."""
    if start >= limit or not has(blocks[start]):
        return 0
    if has(blocks[limit - 1]):
        return limit - start

    last, missing = start, limit - 1
    while missing - last > 1:
        middle = (last + missing) // 2
        if has(blocks[middle]):
            last = middle
        else:
            missing = middle

    return last + 1 - start
