"""Owns what the scheduler asks of any picture of a worker's cache, however that cache is organised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Picture(Protocol):
    """What one worker probably holds: the blocks of prompts, by ids that stand for all that precedes a block, too.

    How much that is is told in blocks of the base size: what the blocks weigh (`blocks.py`), not how many they are.

    `pin` and `unpin` frame a request. Beside them only `learn` and `clear` change anything.
    """

    def __len__(self) -> int:
        """Return what the blocks weigh that are held."""
        ...

    @property
    def pinned(self) -> int:
        """What the blocks of requests in flight weigh."""
        ...

    @property
    def capacity(self) -> int:
        """How many blocks of the base size the worker is believed to have room for."""
        ...

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` blocks the worker would find, counted from the head without a gap."""
        ...

    def lost(self, blocks: Sequence[int]) -> float:
        """Return what the blocks of others weigh that would be lost to this prompt, those little missed as less.

        0 where that can't be told.
        """
        ...

    def confirmed(self, block: int) -> bool:
        """Tell whether the worker has prefilled a block that is held, and is not just about to."""
        ...

    def evicted(self, blocks: Sequence[int], start: int, limit: int) -> int:
        """Return how many of the blocks from `start` to `limit` had to go for want of room, without a gap."""
        ...

    def learn(self, held: int, evicted: int, found: float) -> None:
        """Take in what a worker has found in its cache of a prompt that it has now answered, by weight."""
        ...

    def clear(self) -> None:
        """Forget all blocks but those of requests in flight."""
        ...

    def pin(self, blocks: Sequence[int]) -> int:
        """Record the blocks of a request in flight. Return how many were, from the head on: as many as fit."""
        ...

    def unpin(self, blocks: Sequence[int], *, prefilled: bool) -> None:
        """End a request that `pin` recorded with exactly these blocks; keep them if the worker prefilled them."""
        ...
