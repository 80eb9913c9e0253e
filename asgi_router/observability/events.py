"""Owns what is told of a finished request: one frozen event, handed to whoever listens."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class RequestFinished(Struct, frozen=True, gc=False):
    """One completion request, after its release. Nothing in it is text of a prompt or an answer, a key or a token.

    Seconds are those of the router's clock. What a request did not come to is 0, "" or None.
    """

    request_id: str
    """The body's `request_id`, else the client's `x-request-id`, else made here."""
    session_id: str
    trace_id: str
    """From `traceparent` (W3C Trace Context), 32 hex digits."""
    path: str
    model: str
    """As the client named it: any text. Not to be used as a label."""
    stream: bool
    worker: str
    """URL of the last worker that was chosen."""
    role: str
    prefill_worker: str
    """URL of the worker that prefilled for it, where prefill and decode are apart."""
    reason: str
    """Why this worker: the policy's name, or what came before the policy, as in `x-router-decision`. Of the prefill
    worker, where there is one; so are `candidates` and `predicted_cached_tokens`."""
    candidates: int
    """How many workers the choice was among."""
    attempts: int
    """How many workers were chosen, one after the other."""
    status: int
    """What the client got; 0: nothing."""
    outcome: str
    """`ok` (a worker's whole answer, whatever its status), `client_gone`, `cancelled`, or the code of our error."""
    prompt_tokens: int
    """Estimated; by what the model's workers have counted so far, where they have."""
    predicted_cached_tokens: int
    """How many of them the worker was believed to hold."""
    real_prompt_tokens: int | None
    """As the worker's answer says in `usage`."""
    real_cached_tokens: int | None
    real_completion_tokens: int | None
    arrived: float
    """When the request came, in seconds since 1970."""
    selection_seconds: float
    """For extracting the prompt and choosing, all attempts together, without waiting."""
    queue_seconds: float
    """Spent waiting for a place, all attempts together."""
    first_byte_seconds: float | None
    """From the request's first byte to its answer's."""
    duration_seconds: float


Observer = Callable[[RequestFinished], None]
"""Called for each finished request, after its release. It must not block; what it raises is logged and no more."""
