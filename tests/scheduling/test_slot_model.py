"""Compares the picture of a worker with slots with a plain model of the engine, over any order of requests and ends.

The model has its slots in the order in which they were used last, and a line of prompts before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from asgi_router.scheduling.blocks import LONGER
from asgi_router.scheduling.slot_picture import SlotPicture

if TYPE_CHECKING:
    from collections.abc import Iterable

Blocks = tuple[int, ...]


def chain(path: str) -> Blocks:
    """Return a prompt's blocks, one for each digit: the path behind a 1, as a number. Each fourth one doubles them."""
    return tuple(int("1" + path[: end + 1], 3) | end // 4 * LONGER for end in range(len(path)))


def weight(blocks: Iterable[int]) -> int:
    """Return what blocks weigh."""
    return sum(2 ** (block // LONGER) for block in blocks)


def head(blocks: Blocks, limit: int) -> Blocks:
    """Return the first blocks, of which all together weigh no more than this."""
    return tuple(block for at, block in enumerate(blocks) if weight(blocks[: at + 1]) <= limit)


PATHS = st.text("01", max_size=12)
PROMPTS = [chain(path) for path in ("0", "1", "00", "01", "000", "0101", "1" * 12, "10" * 6, "0" * 12)]


@dataclass(eq=False)
class Slot:
    """A slot: what it has computed, and what it is at."""

    number: int
    sequence: Blocks = ()
    at_work: list[Blocks] = field(default_factory=list)

    def common(self, blocks: Blocks) -> int:
        holds = self.at_work[0] if self.at_work else self.sequence
        return len({*holds} & {*blocks})  # chained: what is equal is a common prefix


class SlotPictureMachine(RuleBasedStateMachine):
    """Does the same to the picture and to the model."""

    in_flight: Bundle[Blocks] = Bundle("in_flight")

    @initialize(slots=st.integers(1, 4), limit=st.integers(0, 30))
    def start(self, slots: int, limit: int) -> None:
        self.limit = limit
        self.picture = SlotPicture(slots, slots * limit)
        self.slots = [Slot(number) for number in range(slots)]
        self.line: list[Blocks] = []

    def slot_for(self, blocks: Blocks) -> Slot:
        idle = [slot for slot in self.slots if not slot.at_work] or self.slots
        most = max(slot.common(blocks) for slot in idle)
        if 10 * weight(blocks[:most]) <= weight(blocks):
            return idle[0]
        return min((slot for slot in idle if slot.common(blocks) == most), key=lambda slot: slot.number)

    @rule(path=PATHS, target=in_flight)
    def begin(self, path: str) -> Blocks:
        blocks = head(chain(path), self.limit)
        assert self.picture.pin(chain(path)) == len(blocks)
        self.line.append(blocks)
        self.serve()
        return blocks

    @rule(blocks=consumes(in_flight), prefilled=st.booleans())
    def end(self, blocks: Blocks, prefilled: bool) -> None:
        self.picture.unpin(blocks, prefilled=prefilled)
        at_it = [slot for slot in self.slots if blocks in slot.at_work]
        if not at_it:
            self.line.remove(blocks)
            return
        slot = min(at_it, key=lambda slot: slot.number)  # of equals, the one that the picture takes
        slot.at_work.clear()
        if prefilled:
            slot.sequence = blocks
            self.slots.remove(slot)
            self.slots.append(slot)
        self.serve()

    def serve(self) -> None:
        while self.line and not all(slot.at_work for slot in self.slots):
            blocks = self.line.pop(0)
            self.slot_for(blocks).at_work.append(blocks)

    @rule()
    def restart(self) -> None:
        self.picture.clear()
        for slot in self.slots:
            slot.sequence = ()

    @invariant()
    def matches_like_the_model(self) -> None:
        for blocks in PROMPTS:
            held = self.slot_for(blocks).common(blocks)
            assert self.picture.match(blocks, len(blocks)) == held
            assert self.picture.match(blocks, 1) == min(held, 1)

    @invariant()
    def loses_what_the_model_loses(self) -> None:
        """No more than what is behind the common prefix, and nothing only where that is nothing."""
        for blocks in PROMPTS:
            slot = self.slot_for(blocks)
            behind = weight((slot.at_work[0] if slot.at_work else slot.sequence)[slot.common(blocks) :])
            assert 0 <= self.picture.lost(blocks) <= behind
            assert (self.picture.lost(blocks) == 0) == (behind == 0)

    @invariant()
    def counts_what_is_held(self) -> None:
        at_work = [blocks for slot in self.slots for blocks in slot.at_work]
        assert self.picture.pinned == sum(map(weight, at_work + self.line))
        idle = [slot.sequence for slot in self.slots if not slot.at_work]
        assert len(self.picture) == sum(map(weight, at_work + idle)) <= self.picture.capacity


SlotPictureMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,  # the suite measures no time; pytest-timeout bounds the whole
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestSlotPicture = SlotPictureMachine.TestCase
