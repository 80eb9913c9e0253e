"""Owns what is learnt of how many tokens a model makes of a text: more or fewer than the rule of thumb says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asgi_router.extraction import CompletionRequest

MAX_MODELS = 256
"""Models that are remembered; the one that was heard of least recently goes. Adapters have names of their own."""

MEMORY = 32_768
"""Tokens after which what was learnt has lost about two thirds of its weight: prompts change, by language say."""

LEAST_TOKENS = 64
"""Estimated tokens below which a prompt says nothing of a model: the chat template adds 10 to 70 of its own to each."""

SMALLEST, LARGEST = 1 / 8, 8.0
"""Bounds of a scale: beyond them a worker's count is no count."""


class TokenScales:
    """For each model the ratio of its workers' own counts of prompt tokens to our estimates of them.

    An estimate is made of the length of a text (`BYTES_PER_TOKEN`). What isn't text alone has no part in this: token
    ids are counted exactly, and nobody knows what an image takes.
    """

    def __init__(self) -> None:
        self._models: dict[str, tuple[float, float, float]] = {}  # tokens as counted, as estimated; their ratio
        self._latest = 1.0

    def of(self, request: CompletionRequest) -> float:
        """Return by how much the estimate of a request's tokens is to be multiplied.

        A model that isn't known is taken to be like the one that was heard of last: it may be an adapter of it.
        """
        if not request.text_only:
            return 1.0
        known = self._models.get(request.model)
        return self._latest if known is None else known[2]

    def learn(self, request: CompletionRequest, counted: int) -> None:
        """Note how many tokens a worker has counted in the prompt of a request."""
        tokens = request.prompt_tokens
        if not request.text_only or counted <= 0 or tokens < LEAST_TOKENS:
            return

        models = self._models
        likely = min(LARGEST * tokens, max(SMALLEST * tokens, counted))  # or one absurd count would be felt for long
        real, estimated, _ = models.pop(request.model, (0.0, 0.0, 1.0))
        kept = MEMORY / (MEMORY + tokens)
        real, estimated = real * kept + likely, estimated * kept + tokens
        self._latest = real / estimated  # within the bounds, for all that was added is
        models[request.model] = real, estimated, self._latest
        if len(models) > MAX_MODELS:
            del models[next(iter(models))]
