"""Owns what is known of one recorded request, and how the scheduler gets to see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.extraction import CompletionRequest
from asgi_router.rope import NOTHING
from asgi_router.scheduling.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable


class TracedRequest(CompletionRequest, frozen=True):
    """A completion request of a trace: hashes of its prompt's blocks stand for its text."""

    arrival: float = 0.0
    """Seconds from the trace's beginning."""
    output_tokens: int = 1
    blocks: tuple[int, ...] = ()
    """One hash for each whole block of the prompt; an equal hash means an equal prefix up to there."""


def traced(
    *,
    arrival: float,
    tokens: int,
    output_tokens: int,
    blocks: tuple[int, ...] = (),
    model: str = "",
    session_id: str = "",
) -> TracedRequest:
    """Return a request of a trace."""
    return TracedRequest(
        model=model,
        stream=True,
        session_id=session_id,
        prompt_tokens=tokens,
        key=NOTHING,
        arrival=arrival,
        output_tokens=max(1, output_tokens),
        blocks=blocks,
    )


def cut_by(block_tokens: int, max_blocks: int) -> Callable[[CompletionRequest], Prompt]:
    """Return what makes the prompt of a traced request, whose blocks are of `block_tokens` tokens."""

    def cut(request: CompletionRequest) -> Prompt:
        assert isinstance(request, TracedRequest)
        return Prompt.of_blocks(request.blocks[:max_blocks], tokens=request.prompt_tokens, block_tokens=block_tokens)

    return cut
