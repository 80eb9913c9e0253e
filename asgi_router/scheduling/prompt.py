"""Owns what a policy may know of a prompt: its length, and how much of it a worker already holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.scheduling.blocks import ENDS, block_hashes, stable_hash, whole_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.state import WorkerState


_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: spreads a difference in any bit over the high ones
_MASK = 2**64 - 1


class Prompt:
    """A prompt cut into blocks, ready to be matched against workers.

    Attributes:
        tokens: its estimated length.
        blocks: ids of its whole blocks.
        ends: where they end, in blocks of the base size: `ends[n]` is the length of the first n.
        block_tokens: estimated length of a block of the base size.
        reason: why its worker was chosen, in a word; a policy may say more than its own name here.

    Args:
        request: whose prompt it is.
        block_bytes: base size of a block, in bytes of the prefix key.
        max_blocks: how far the key is looked at, in blocks of the base size; None: to its end.
        scale: by which the request's tokens are more than the rule of thumb says.
    """

    __slots__ = ("_head", "_limit", "_matchable", "block_tokens", "blocks", "ends", "reason", "tokens")

    def __init__(
        self, request: CompletionRequest, block_bytes: int, max_blocks: int | None = None, scale: float = 1.0
    ) -> None:
        key, cut = request.key, request.cut
        self.tokens = request.prompt_tokens if scale == 1.0 else max(1, round(request.prompt_tokens * scale))
        self.reason = ""
        if cut is not None:
            self.blocks, size, head = cut.ids, cut.size, cut.head
        else:
            self.blocks, size = block_hashes(key, block_bytes, (request.model,), max_blocks), key.size
            head = key.head(block_bytes) if self.blocks else b""
        self.ends: Sequence[int] = ENDS
        # An engine computes at least the last token anew, so a block that ends the prompt is never a hit.
        matchable = whole_blocks(max(0, size - 1) // block_bytes)
        self._matchable = ENDS[matchable]
        self._limit = matchable if matchable < len(self.blocks) else len(self.blocks)
        self.block_tokens = block_bytes / BYTES_PER_TOKEN * scale
        self._head = request.model.encode("utf-8", "replace") + head if self.blocks else b""

    @classmethod
    def of_blocks(cls, blocks: tuple[int, ...], *, tokens: int, block_tokens: float) -> Self:
        """Return a prompt whose blocks were hashed elsewhere, as those of a trace are: all of `block_tokens` tokens."""
        prompt = cls.__new__(cls)
        prompt.tokens = tokens
        prompt.reason = ""
        prompt.blocks = blocks
        prompt.ends = range(len(blocks) + 1)
        prompt._matchable = int(max(0, tokens - 1) / block_tokens)
        prompt._limit = min(prompt._matchable, len(blocks))
        prompt.block_tokens = block_tokens
        prompt._head = b"%d" % blocks[0] if blocks else b""
        return prompt

    def home(self, workers: Sequence[WorkerState]) -> WorkerState | None:
        """Return the one of `workers` that every router would choose for prompts that begin like this one.

        Rendezvous hashing (Thaler and Ravishankar 1996) of the first block: it needs no word between the routers,
        and a worker that joins or leaves moves no other's prompts. None for a prompt without a whole block.
        """
        if not self._head:
            return None

        head = stable_hash(self._head)
        return max(workers, key=lambda worker: (head ^ worker.identity) * _MIX & _MASK)

    def hit_ratio(self, state: WorkerState) -> float:
        """Return the share that the worker holds of the prompt's blocks, 0 to 1; 0 for a prompt without any."""
        return self.ends[self.cached_blocks(state)] / self._matchable if self._matchable else 0.0

    def uncached_tokens(self, state: WorkerState) -> int:
        """Return how many tokens the worker would have to prefill, at least 1."""
        return max(1, self.tokens - int(self.ends[self.cached_blocks(state)] * self.block_tokens))

    def cached_blocks(self, state: WorkerState) -> int:
        """Return how many of the prompt's blocks the worker probably holds, those of no use left out."""
        return state.prefixes.match(self.blocks, self._limit) if self._limit else 0

    def lost_tokens(self, state: WorkerState) -> float:
        """Return how many tokens of other prompts the worker would lose to this one, those little missed as less."""
        return state.prefixes.lost(self.blocks) * self.block_tokens

    def evicted_blocks(self, state: WorkerState, cached: int) -> int:
        """Return how many blocks behind the `cached` ones had to go from our picture of the worker."""
        return state.prefixes.evicted(self.blocks, cached, self._limit) if cached < self._limit else 0
