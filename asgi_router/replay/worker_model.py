"""Owns the simulated worker: how long its steps take, what it prefills and decodes in them, when a sequence is done.

It is an engine with continuous batching and chunked prefill. Each step computes one token of every sequence that
decodes; what is left of the step's token budget goes to the prompts that wait, in their order. Steps in which nothing
but the lengths changes are taken together, so that the cost of a simulation goes with its requests, not its tokens.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

from asgi_router.replay.block_cache import BlockCache

if TYPE_CHECKING:
    from asgi_router.replay.traced_request import TracedRequest
    from asgi_router.scheduling.lease import Lease

NEVER = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """What a worker is like. The defaults are those of a 32B model on two H100."""

    cache_tokens: int = 250_000
    """Tokens of KV cache."""
    prefill_rate: float = 22_000.0
    """Tokens a second, attention apart."""
    batch_penalty: float = 4.4
    """Milliseconds that a step takes longer for each 100,000 tokens of context of the sequences that decode."""
    attention_penalty: float = 2.6
    """Nanoseconds for each pair of a prompt's token and one before it: long prompts are slower than by their length."""
    step_ms: float = 12.0
    """Milliseconds of an empty step."""
    step_tokens: int = 8_192
    """Tokens computed in one step at the most."""
    max_batch: int = 256
    """Sequences at once."""
    speed: float = 1.0
    """By which everything is faster."""


class Listener(Protocol):
    """Who wants to know what becomes of the sequences."""

    def first_token(self, sequence: Sequence, now: float) -> None:
        """The prompt is prefilled, and the first token there."""

    def ended(self, sequence: Sequence, now: float) -> None:
        """The last token is there."""


class Sequence:
    """One request at one worker."""

    __slots__ = (
        "arrival",
        "blocks",
        "cached",
        "computed",
        "first_token_at",
        "lease",
        "output",
        "private",
        "request",
        "tokens",
    )

    def __init__(self, request: TracedRequest, arrival: float, lease: Lease, computed: int = 0) -> None:
        self.request = request
        self.blocks = request.blocks
        self.tokens = request.prompt_tokens
        self.output = request.output_tokens
        self.arrival = arrival
        self.lease = lease
        self.computed = computed  # tokens of the prompt whose KV is there
        self.cached = 0  # of them those that were found in the cache
        self.private = 0  # blocks that it shares with nobody
        self.first_token_at: float | None = None


class SimulatedWorker:
    """An engine that steps when it is told to.

    Attributes:
        until: when its present stretch of steps ends, and `advance` wants to be called; infinity: it idles.
        queue: sequences that have not begun, first come first.
        partial: the sequence whose prompt has been begun and not finished.
        cache: its KV cache.
        busy: seconds spent on steps.
    """

    __slots__ = (
        "_base",
        "_context",
        "_decoding",
        "_finishing",
        "_order",
        "_per_context",
        "_per_pair",
        "_per_token",
        "_started",
        "_step",
        "_steps",
        "block_tokens",
        "busy",
        "cache",
        "listener",
        "model",
        "partial",
        "queue",
        "until",
    )

    def __init__(self, model: WorkerModel, block_tokens: int, listener: Listener) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.listener = listener
        self.cache = BlockCache(model.cache_tokens // block_tokens)
        self.queue: deque[Sequence] = deque()
        self.partial: Sequence | None = None
        self.until = NEVER
        self.busy = 0.0
        self._base = model.step_ms / 1e3 / model.speed
        self._per_token = 1 / model.prefill_rate / model.speed
        self._per_context = model.batch_penalty / 1e8 / model.speed
        self._per_pair = model.attention_penalty / 1e9 / model.speed
        self._decoding: list[tuple[int, int, Sequence]] = []  # a heap, by the step of the last token
        self._context = 0  # tokens of the sequences that decode
        self._finishing: list[Sequence] = []  # whose prompts this step completes
        self._step = 0
        self._steps = 0  # in the present stretch
        self._started = 0.0
        self._order = 0

    def fits(self, sequence: Sequence) -> bool:
        """Whether the sequence has room here when it is alone. An engine refuses one that hasn't."""
        return -(-(sequence.tokens + sequence.output) // self.block_tokens) <= self.cache.capacity

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that `fits`."""
        self.queue.append(sequence)
        if self.until == NEVER:
            self._begin(now)
        elif self._steps > 1 and len(self.queue) == 1:
            self._cut_stretch(now)

    def advance(self) -> None:
        """End the present stretch, at `until`, and begin the next."""
        now, decoding, listener = self.until, self._decoding, self.listener
        self.busy += now - self._started
        self._step += self._steps
        self._context += len(decoding) * self._steps
        while decoding and decoding[0][0] <= self._step:
            self._end(heappop(decoding)[2], now)
        for sequence in self._finishing:
            sequence.first_token_at = now
            listener.first_token(sequence, now)
            if sequence.output > 1:
                self._decode(sequence, sequence.output - 1)
            else:
                self._context += sequence.tokens + 1
                self._end(sequence, now)
        self._begin(now)

    def step_seconds(self, more_tokens: int = 0) -> float:
        """Return how long a step takes now, with so many tokens of prompts in it."""
        tokens = len(self._decoding) + more_tokens
        return self._base + self._per_token * tokens + self._per_context * self._context

    def prefill_seconds(self, tokens: int, computed: int) -> float:
        """Return how long a prompt of `tokens` takes, of which `computed` are there, beside the present batch."""
        left = tokens - computed
        steps = -(-left // max(1, self.model.step_tokens - len(self._decoding)))
        pairs = left * (computed + left / 2)
        return steps * self.step_seconds() + left * self._per_token + pairs * self._per_pair

    def backlog_seconds(self, now: float) -> float:
        """Return how long it takes until all is prefilled that has been begun."""
        if self.until == NEVER:
            return 0.0
        wait = self.until - now if self._steps == 1 else min(self.until - now, self.step_seconds())
        return wait + (self.prefill_seconds(self.partial.tokens, self.partial.computed) if self.partial else 0.0)

    @property
    def batch(self) -> int:
        """Sequences that decode."""
        return len(self._decoding)

    def restart(self) -> list[Sequence]:
        """Lose everything; return the sequences that were here."""
        lost = [entry[2] for entry in self._decoding] + self._finishing
        lost += [self.partial] if self.partial is not None else []
        lost += self.queue
        self._decoding, self._finishing, self.partial = [], [], None
        self.queue.clear()
        self.cache.clear()
        self._context = 0
        self.until = NEVER
        return lost

    def _end(self, sequence: Sequence, now: float) -> None:
        self._context -= sequence.tokens + sequence.output
        self.cache.release(sequence.blocks, sequence.private)
        self.listener.ended(sequence, now)

    def _decode(self, sequence: Sequence, steps: int) -> None:
        self._order += 1
        heappush(self._decoding, (self._step + steps, self._order, sequence))
        self._context += sequence.tokens + 1

    def _begin(self, now: float) -> None:
        finishing: list[Sequence] = []
        self._finishing = finishing
        budget = room = self.model.step_tokens - len(self._decoding)
        pairs = 0.0
        sequence = self.partial
        while budget > 0:
            if sequence is None and (sequence := self._admit(len(finishing))) is None:
                break
            left = sequence.tokens - sequence.computed
            taken = left if left < budget else budget
            pairs += taken * (sequence.computed + taken / 2)
            sequence.computed += taken
            budget -= taken
            if taken == left:
                finishing.append(sequence)
                sequence = None
        self.partial = sequence

        self._started = now
        if budget < room:
            self._steps = 1
            self.until = now + self.step_seconds(room - budget) + self._per_pair * pairs
        elif self._decoding:
            self._steps = self._decoding[0][0] - self._step
            self.until = now + self._seconds(self._steps)
        else:
            self._steps = 0
            self.until = NEVER

    def _admit(self, finishing: int) -> Sequence | None:
        """Begin with the next sequence, if there is one and room for it."""
        while self.queue and len(self._decoding) + finishing < self.model.max_batch:
            sequence = self.queue[0]
            size = self.block_tokens
            private = -(-(sequence.tokens + sequence.output) // size) - len(sequence.blocks)
            known = self.cache.hold(sequence.blocks, private)
            if known is None:
                return None
            self.queue.popleft()
            sequence.private = private
            if sequence.computed < sequence.tokens:
                # An engine computes at least the last token anew.
                sequence.cached = sequence.computed = min(known, (sequence.tokens - 1) // size) * size
                return sequence
            # It was prefilled elsewhere, where its first token came from; it has more than one.
            self._decode(sequence, sequence.output - 1)
        return None

    def _seconds(self, steps: int) -> float:
        """Return how long so many steps take in which all sequences only grow."""
        growth = len(self._decoding) * self._per_context
        return steps * (self.step_seconds() + growth * (steps - 1) / 2)

    def _cut_stretch(self, now: float) -> None:
        """End a stretch of several steps with the one that runs now: somebody has come."""
        growth = len(self._decoding) * self._per_context / 2
        first = self.step_seconds() - growth
        elapsed = now - self._started
        steps = (math.sqrt(first * first + 4 * growth * elapsed) - first) / (2 * growth) if growth else elapsed / first
        steps = max(1, math.ceil(steps))
        if steps < self._steps:
            self._steps = steps
            self.until = max(now, self._started + self._seconds(steps))
