"""Owns what the replay tests are built from: requests, traces, and a worker whose listener keeps times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.replay.traced_request import TracedRequest, traced
from asgi_router.replay.traces import Trace
from asgi_router.replay.worker_model import Sequence, SimulatedWorker, WorkerModel
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.prompt import Prompt
from tests.scheduling.builders import worker

if TYPE_CHECKING:
    from collections.abc import Iterable

BLOCK = 100

PLAIN = WorkerModel(
    cache_tokens=100_000,
    prefill_rate=1_000.0,
    batch_penalty=0.0,
    attention_penalty=0.0,
    step_ms=0.0,
    step_tokens=1_000_000,
)
"""A worker that takes a millisecond for each token, and nothing for anything else."""


def asked(
    tokens: int = 100, output: int = 1, blocks: Iterable[int] = (), *, arrival: float = 0.0, session: str = ""
) -> TracedRequest:
    """Return one request."""
    return traced(arrival=arrival, tokens=tokens, output_tokens=output, blocks=tuple(blocks), session_id=session)


def trace_of(*requests: TracedRequest) -> Trace:
    """Return a trace with blocks of `BLOCK` tokens."""
    return Trace(list(requests), BLOCK, [])


class Watched:
    """One simulated worker, driven by hand.

    Attributes:
        first: when the first token of each request came, by the request's number.
        last: and when its last one came.
    """

    def __init__(self, model: WorkerModel = PLAIN, kind: type[SimulatedWorker] = SimulatedWorker) -> None:
        self.worker = kind(model, BLOCK, self)
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.sequences: list[Sequence] = []
        self._state = worker()

    def ask(self, request: TracedRequest) -> Sequence:
        """Hand in a request when it arrives."""
        self.run(request.arrival)
        prompt = Prompt.of_blocks(request.blocks, tokens=request.prompt_tokens, block_tokens=BLOCK)
        sequence = Sequence(request, request.arrival, Lease(self._state, prompt))
        self.sequences.append(sequence)
        self.worker.submit(sequence, request.arrival)
        return sequence

    def run(self, time: float = 1e9) -> None:
        """Let time pass."""
        while self.worker.until < time:
            self.worker.advance()

    def first_token(self, sequence: Sequence, now: float) -> None:
        """As `Listener`."""
        self.first[self.sequences.index(sequence)] = now

    def ended(self, sequence: Sequence, now: float) -> None:
        """As `Listener`."""
        self.last[self.sequences.index(sequence)] = now
