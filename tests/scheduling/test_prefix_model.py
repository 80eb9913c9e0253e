"""Compares the prefix index with a naive model of it, over any order of requests, ends, and passing time.

The model forgets an expired block at once and looks every block up; the index is free to be cleverer. Blocks deep in a
prompt may weigh more than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from asgi_router.scheduling.blocks import LONGER
from asgi_router.scheduling.prefix_index import PrefixIndex
from tests.scheduling.builders import TTL, Clock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DEPTH = 5


def chain(path: str, levels: Sequence[int]) -> tuple[int, ...]:
    """Return a prompt's blocks, one for each digit: the path in binary behind a 1, and above it the depth's level."""
    return tuple(int("1" + path[: end + 1], 2) | levels[end] * LONGER for end in range(len(path)))


def number(block: int) -> int:
    """Return a block's path in binary behind a 1: half of it is the number of the block before."""
    return block % LONGER


def weight(blocks: Iterable[int]) -> int:
    """Return what blocks weigh."""
    return sum(2 ** (block // LONGER) for block in blocks)


paths = st.text("01", min_size=1, max_size=DEPTH)
LONGEST = [f"{number:0{DEPTH}b}" for number in range(2**DEPTH)]  # every other prompt is the head of one
LEVELS = [(0,) * DEPTH, (0, 0, 1, 1, 2), (0, 1, 2, 2, 3)]


@dataclass
class Block:
    """What the model knows of one block."""

    requests: int = 0
    confirmed: bool = False
    last_use: int = 0
    """Whole second in which the last request that had it ended."""
    turn: int = 0
    """Position in the order of those ends; breaks ties within a second."""


class Model:
    """The rules of the index in the words of its docstring, one block at a time."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity = capacity
        self.clock = clock
        self.turn = 0
        self.blocks: dict[int, Block] = {}

    def pass_time(self) -> None:
        """Forget what has expired."""
        for block, known in list(self.blocks.items()):
            if not known.requests and self.clock() - known.last_use >= TTL:
                del self.blocks[block]

    def match(self, blocks: Sequence[int]) -> int:
        return len(list(takewhile(self.blocks.__contains__, blocks)))

    def pin(self, blocks: Sequence[int]) -> int:
        for count, block in enumerate(blocks):
            if block not in self.blocks and not self.make_room(weight([block])):
                return count
            self.blocks.setdefault(block, Block()).requests += 1

        return len(blocks)

    def make_room(self, wanted: int) -> bool:
        """Forget the least recently used blocks until there is room; none, and say so, if that would not help."""
        idle = sorted((b for b, known in self.blocks.items() if not known.requests), key=lambda b: self.blocks[b].turn)
        if weight(self.blocks) - weight(idle) + wanted > self.capacity:
            return False

        while weight(self.blocks) + wanted > self.capacity:
            del self.blocks[idle.pop(0)]
        return True

    def unpin(self, blocks: Sequence[int], *, prefilled: bool) -> None:
        for block in reversed(blocks):
            known = self.blocks[block]
            known.requests -= 1
            known.confirmed |= prefilled
            self.turn += 1
            known.last_use, known.turn = int(self.clock()), self.turn
            if not known.requests and not known.confirmed:
                del self.blocks[block]


class PrefixIndexMachine(RuleBasedStateMachine):
    """Does the same to the index and to the model."""

    in_flight: Bundle[tuple[int, ...]] = Bundle("in_flight")

    @initialize(capacity=st.integers(0, 12), levels=st.sampled_from(LEVELS))
    def start(self, capacity: int, levels: tuple[int, ...]) -> None:
        self.levels = levels
        self.longest = [chain(path, levels) for path in LONGEST]
        self.clock = Clock()
        self.index = PrefixIndex(capacity, TTL, self.clock)
        self.model = Model(capacity, self.clock)

    @rule(path=paths, target=in_flight)
    def begin(self, path: str) -> tuple[int, ...]:
        blocks = chain(path, self.levels)
        count = self.index.pin(blocks)
        assert count == self.model.pin(blocks)
        return blocks[:count]

    @rule(blocks=consumes(in_flight), prefilled=st.booleans())
    def end(self, blocks: tuple[int, ...], prefilled: bool) -> None:
        self.index.unpin(blocks, prefilled=prefilled)
        self.model.unpin(blocks, prefilled=prefilled)

    @rule(path=paths)
    def fail_at_once(self, path: str) -> None:
        """A request that fails changes nothing that matches, unless its blocks took the room of others."""
        blocks = chain(path, self.levels)
        room = len(self.index) + weight(blocks) <= self.model.capacity
        before = list(self.matches())
        count = self.index.pin(blocks)
        assert count == self.model.pin(blocks)
        self.index.unpin(blocks[:count], prefilled=False)
        self.model.unpin(blocks[:count], prefilled=False)
        assert not room or list(self.matches()) == before

    @rule(seconds=st.sampled_from([0.25, 1, TTL / 2, TTL - 1, TTL, 3 * TTL]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.model.pass_time()

    def matches(self) -> Iterator[int]:
        return (self.index.match(blocks, len(blocks)) for blocks in self.longest)

    @invariant()
    def matches_like_the_model(self) -> None:
        for blocks, held in zip(self.longest, self.matches(), strict=True):
            assert held == self.model.match(blocks)
            for limit in range(DEPTH):
                assert self.index.match(blocks, limit) == min(held, limit)

    @invariant()
    def keeps_the_capacity(self) -> None:
        assert weight(self.model.blocks) <= weight(self.index._blocks) == len(self.index) <= self.model.capacity

    @invariant()
    def counts_what_is_pinned(self) -> None:
        assert self.index.pinned == weight(block for block, known in self.model.blocks.items() if known.requests)

    @invariant()
    def has_all_blocks_before_a_block(self) -> None:
        """Rule 1, in the table itself. Only a block that has expired may have lost its head."""
        table = {number(block): state for block, state in self.index._blocks.items()}
        pinned = {1} | {block for block, state in table.items() if state > 0}
        for block, state in table.items():
            if state > 0:
                assert block >> 1 in pinned
            else:
                assert block >> 1 in pinned or block >> 1 in table or self.clock() + state >= TTL

    @invariant()
    def puts_heads_behind_tails(self) -> None:
        """The order of eviction: a head is never ahead of a block that follows it."""
        order = {number(block): at for at, (block, state) in enumerate(self.index._blocks.items()) if state <= 0}
        for block, at in order.items():
            assert order.get(block >> 1, at + 1) > at


PrefixIndexMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,  # the suite measures no time; pytest-timeout bounds the whole
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestPrefixIndex = PrefixIndexMachine.TestCase
