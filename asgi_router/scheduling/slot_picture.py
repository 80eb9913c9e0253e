"""Owns the router's picture of a worker whose cache is a number of slots, as llama.cpp's is: one sequence in each.

Two prompts that begin alike share nothing: each slot holds the common part for itself. The rules are the engine's
(`get_available_slot` in llama.cpp's `tools/server`; the number of slots is its option `-np`):

1. A prompt gets the idle slot that has the longest common prefix with it, if that is more than a tenth of the prompt;
   else the one whose last request ended longest ago.
2. What the slot held behind the common prefix is gone.
3. A prompt that finds all slots busy waits. When a slot becomes idle, the prompt that came first gets one, by rule 1.

So it is in an engine that keeps no other prompts in host memory. By default llama.cpp does (`--cache-ram`), and doesn't
say so: how many slots there are is the operator's word, in `Worker.slots`, and isn't discovered.

A request that fails before its prompt was prefilled changes nothing: the slot holds what it held before. That is so in
the engine if the request never reached it, or was refused there. If its client left while the engine was at it, the
slot has lost more than the picture knows, until its next request.

A slot keeps its sequence until another prompt takes it, so nothing here expires. Memory is bounded as that of a paged
index is: the slots share one capacity, and a longer prompt is recorded only as far as its slot's part reaches. Beside
that there are the blocks of the requests in flight, which their leases hold anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING
from weakref import ref

from asgi_router.scheduling.blocks import fitting, weigh

if TYPE_CHECKING:
    from collections.abc import Sequence

SIMILARITY = 0.1
"""Share of a prompt from which a common prefix decides for a slot: llama.cpp's default (`--slot-prompt-similarity`)."""

PATIENCE = 2
"""Requests for each slot of the fleet after which what an unused slot holds is missed by a factor of e less.

By then its conversation has probably moved or ended. It matters little: from 1 to 4 the share of tokens that is found
changes by 1.4 points at the most, in a simulation of the loads of `benchmarks/engines.py`.
"""


class SlotClock:
    """The time by which the slots of a fleet age: requests that its slots have served, for each slot that it has.

    A worker's own requests would not do: if it is avoided for what its slots hold, it has none, and they stay young.

    Attributes:
        served: requests so far, on all workers.
    """

    def __init__(self) -> None:
        self.served = 0
        # Weak, for workers leave; never changed, only replaced, for one may join in another thread.
        self._pictures: tuple[ref[SlotPicture], ...] = ()
        self._patience = PATIENCE

    def join(self, picture: SlotPicture) -> None:
        """Count the slots of a worker, as long as there is its picture."""
        self._pictures = (*(known for known in self._pictures if known() is not None), ref(picture))
        self._count()

    def tick(self) -> int:
        """Count a request that has been served, and return its number, from 1 on."""
        self._count()
        self.served += 1
        return self.served

    def freshness(self, served: int) -> float:
        """Return how much is missed what a slot holds whose last request has this number: from 1 down to 0."""
        return exp((served - self.served) / self._patience)

    def _count(self) -> None:
        self._patience = PATIENCE * sum(picture.slots for known in self._pictures if (picture := known()) is not None)


@dataclass(slots=True, eq=False)
class _Slot:
    kept: tuple[int, ...] = ()
    """Blocks of the last prompt that was prefilled here."""
    running: tuple[int, ...] | None = None
    """Blocks of the request that is in flight here."""
    ended: int = 0
    """The number of the last request that was served here; 0: none was."""

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.kept if self.running is None else self.running


class SlotPicture:
    """The sequences that one worker's slots probably hold.

    Args:
        slots: how many there are, at least 1.
        capacity: how many blocks of the base size they may hold together; each an equal part of it.
        clock: by which they age, one for all workers of a fleet; None: this worker is the fleet.
    """

    __slots__ = ("__weakref__", "_clock", "_limit", "_slots", "_waiting")

    def __init__(self, slots: int, capacity: int, clock: SlotClock | None = None) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._limit = capacity // slots
        self._waiting: list[tuple[int, ...]] = []  # for a slot, in the order in which they came
        self._clock = clock or SlotClock()
        self._clock.join(self)

    def __repr__(self) -> str:
        busy = sum(slot.running is not None for slot in self._slots)
        slots = f"{len(self._slots)} slots, {busy} busy, {len(self._waiting)} waiting"
        return f"<SlotPicture {len(self)} blocks in {slots}>"

    def __len__(self) -> int:
        return sum(weigh(slot.blocks) for slot in self._slots)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._slots)

    @property
    def pinned(self) -> int:
        """What the blocks of requests in flight weigh, those that wait for a slot among them."""
        return sum(weigh(slot.running or ()) for slot in self._slots) + sum(map(weigh, self._waiting))

    @property
    def capacity(self) -> int:
        """How many blocks of the base size are recorded at the most."""
        return self._limit * len(self._slots)

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` blocks are held by the slot that the prompt would get.

        If all are busy, that is the slot it would get if they weren't.
        """
        return min(self._choose(blocks)[1], limit)

    def lost(self, blocks: Sequence[int]) -> float:
        """Return what the blocks of others weigh in the slot that the prompt would get, and less the older they are."""
        slot, common = self._choose(blocks)
        return weigh(slot.blocks[common:]) * self._clock.freshness(slot.ended)

    def confirmed(self, block: int) -> bool:
        """Tell whether an idle slot holds the block."""
        return any(slot.running is None and block in slot.kept for slot in self._slots)

    def evicted(self, blocks: Sequence[int], start: int, limit: int) -> int:
        """Return 0: what a slot has lost is not remembered, since their number is no guess."""
        return 0

    def learn(self, held: int, evicted: int, found: float) -> None:
        """Learn nothing: there is no capacity to adapt, and the request's slot holds its own prompt now."""

    def clear(self) -> None:
        """Forget all blocks but those of requests in flight."""
        for slot in self._slots:
            slot.kept = ()

    def pin(self, blocks: Sequence[int]) -> int:
        """Give a request in flight its slot, or let it wait. Return how many of its blocks were recorded."""
        recorded = tuple(blocks[: fitting(blocks, self._limit)])
        if any(slot.running is None for slot in self._slots):
            self._choose(recorded)[0].running = recorded
        else:
            self._waiting.append(recorded)
        return len(recorded)

    def unpin(self, blocks: Sequence[int], *, prefilled: bool) -> None:
        """End a request that `pin` recorded with exactly these blocks, and give its slot to the first that waits.

        Of several with the same blocks one is as good as another. One that still waits leaves nothing behind.
        """
        blocks = tuple(blocks)
        slot = next((slot for slot in self._slots if slot.running == blocks), None)
        if slot is None:
            self._waiting.remove(blocks)
            return

        slot.running = None
        if prefilled:
            slot.kept, slot.ended = blocks, self._clock.tick()
        if self._waiting:
            blocks = self._waiting.pop(0)
            self._choose(blocks)[0].running = blocks

    def _choose(self, blocks: Sequence[int]) -> tuple[_Slot, int]:
        """Return the slot that a prompt would get, and how many of its blocks that holds."""
        slots = [slot for slot in self._slots if slot.running is None] or self._slots
        found = [_common(slot.blocks, blocks) for slot in slots]
        longest = max(found)
        if weigh(blocks[:longest]) > SIMILARITY * weigh(blocks):
            at = found.index(longest)
        else:
            at = min(range(len(slots)), key=lambda at: slots[at].ended)
        return slots[at], found[at]


def _common(held: Sequence[int], blocks: Sequence[int]) -> int:
    """Return how many blocks two prompts have in common. If one is equal, so are all before it."""
    if not held or not blocks or held[0] != blocks[0]:
        return 0
    return bisect_left(range(min(len(held), len(blocks))), True, key=lambda at: held[at] != blocks[at])
