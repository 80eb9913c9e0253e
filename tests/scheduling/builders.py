"""Owns what the scheduling tests are built from: a clock set by hand, prompts, requests, and fleets of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.extraction import CompletionRequest
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.rope import Rope
from asgi_router.scheduling.breaker import Breaker
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.prompt import Prompt
from asgi_router.scheduling.state import WorkerState
from asgi_router.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 64
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN
TTL = 100.0


class Clock:
    """Monotonic seconds that pass only when a test says so. Counts how often it is read."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


def new_index(capacity: int = 1_000, *, clock: Callable[[], float] | None = None) -> PrefixIndex:
    """Return an empty index whose blocks last `TTL` seconds."""
    return PrefixIndex(capacity, TTL, clock or Clock())


def worker(
    name: str = "a",
    *,
    capacity: int = 1_000,
    clock: Callable[[], float] | None = None,
    models: tuple[str, ...] = (),
    requests: int = 0,
    prefill_tokens: int = 0,
    waiting_requests: int = 0,
    pending_prefill_tokens: int = 0,
) -> WorkerState:
    """Return a worker at `http://{name}` with these counters and no prefix blocks."""
    return WorkerState(
        Worker(url=f"http://{name}", models=models),
        new_index(capacity, clock=clock),
        Breaker(0, 1.0, clock or Clock()),
        requests=requests,
        prefill_tokens=prefill_tokens,
        waiting_requests=waiting_requests,
        pending_prefill_tokens=pending_prefill_tokens,
    )


def fresh_state(described: Worker) -> WorkerState:
    """Return the state of a worker that has just joined."""
    return WorkerState(described, new_index(), Breaker(0, 1.0, Clock()))


def fleet(names: str, *, capacity: int = 1_000) -> list[WorkerState]:
    """Return one idle worker for each letter of `names`."""
    return [worker(name, capacity=capacity) for name in names]


def request(key: bytes | str, *, model: str = "", tokens: int | None = None) -> CompletionRequest:
    """Return a request with this prefix key; its tokens are estimated from the key unless they are given."""
    if isinstance(key, str):
        key = key.encode()
    return CompletionRequest(
        model=model,
        stream=False,
        session_id="",
        prompt_tokens=max(1, -(-len(key) // BYTES_PER_TOKEN)) if tokens is None else tokens,
        key=Rope.of(key),
    )


def text(blocks: str) -> str:
    """Return a text of one block for each letter of `blocks`, and a little more, so that every block can match."""
    return "".join(letter * BLOCK_BYTES for letter in blocks) + "?"


def prompt(blocks: str, *, model: str = "") -> Prompt:
    """Return the prompt of `text(blocks)`."""
    return Prompt(request(text(blocks), model=model), BLOCK_BYTES)


def warm(state: WorkerState, blocks: str, *, model: str = "") -> None:
    """Let the worker hold the blocks of `text(blocks)`, as after a request that succeeded."""
    hashes = prompt(blocks, model=model).blocks
    state.prefixes.unpin(hashes[: state.prefixes.pin(hashes)], prefilled=True)


def counters(state: WorkerState) -> tuple[int, int, int, int]:
    """Return requests, prefill tokens, waiting requests and pending prefill tokens."""
    return state.requests, state.prefill_tokens, state.waiting_requests, state.pending_prefill_tokens
