"""Owns the names by which a replay's policies are asked for: the product's own, the rivals', and the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.replay.oracle import Oracle
from asgi_router.replay.rivals import RIVALS
from asgi_router.scheduling.policies import POLICIES, REMOTE_POLICIES, PolicyOptions

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from asgi_router.replay.simulate import Replay
    from asgi_router.scheduling.policies import Policy

ORACLE = "oracle"
OWN = tuple(sorted(set(POLICIES) - REMOTE_POLICIES))
"""Ours. Those that ask workers for their load are left out: simulated ones don't answer, the counters say the same."""
NAMES = (*OWN, *sorted(RIVALS), ORACLE)


def chooser(name: str, options: PolicyOptions) -> Callable[[random.Random, Callable[[], float], Replay], Policy]:
    """Return what makes the policy called `name`, one of `NAMES`, for a replay."""
    if name == ORACLE:
        return lambda rng, clock, replay: Oracle(replay.workers, rng, clock)
    if name in RIVALS:
        return lambda rng, clock, replay: RIVALS[name](rng, clock, replay.setup.model.cache_tokens)
    return lambda rng, clock, replay: POLICIES[name](options, rng)
