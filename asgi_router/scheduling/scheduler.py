"""Owns the one step from a request to a lease: candidates, policy, count. Nothing in it awaits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.errors import AllBusy, NoWorker, UnknownModel
from asgi_router.scheduling.blocks import cut
from asgi_router.scheduling.lease import Lease
from asgi_router.scheduling.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.policies import Policy
    from asgi_router.scheduling.sessions import Sessions
    from asgi_router.scheduling.state import WorkerState
    from asgi_router.scheduling.token_scales import TokenScales

LONG_PROMPT = 128 * 1024
"""Bytes of a prompt above which it is let go before its answer begins: memory that malloc would ask the system for."""


class Scheduler:
    """Chooses a worker by a policy, and counts the request on it.

    Args:
        policy: how to choose among the workers that may be chosen.
        policy_name: what is given as the reason of its choices.
        block_bytes: base size of a prefix block, in bytes of the prefix key.
        max_blocks: how far a prompt is looked at, in such blocks: no further than a worker's index can hold.
        max_concurrent: how many requests a worker may have in flight; None: any number.
        sessions: which workers served sessions last; None: sessions don't matter.
        scales: how many tokens a model makes of a text; None: what the rule of thumb says.
        on_release: called after each release of a lease.
        cut: makes the prompt of a request; None: its prefix key is cut into blocks, as the arguments above say.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        policy_name: str = "policy",
        block_bytes: int,
        max_blocks: int | None = None,
        max_concurrent: int | None = None,
        sessions: Sessions | None = None,
        scales: TokenScales | None = None,
        on_release: Callable[[], None] | None = None,
        cut: Callable[[CompletionRequest], Prompt] | None = None,
    ) -> None:
        self._policy = policy
        self._policy_name = policy_name
        self._max_concurrent = max_concurrent
        self._sessions = sessions
        self._on_release = on_release
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._scales = scales
        self._cut = cut or self._blocks_of

    def select(
        self,
        workers: Collection[WorkerState],
        request: CompletionRequest,
        *,
        exclude: Collection[WorkerState] = (),
    ) -> Lease:
        """Choose a worker for `request` and return the lease that counts it there.

        Args:
            workers: the fleet; those that are unhealthy, draining or don't serve the model are passed over.
            exclude: workers that this request has tried.

        Raises:
            UnknownModel: there are workers, and all of them list models, but not this one.
            AllBusy: those that could be chosen have as many requests as they may have.
            NoWorker: no worker can be chosen now.
        """
        able = self.able(workers, request, exclude=exclude)
        if not able:
            if workers and not any(worker.serves(request.model) for worker in workers):
                raise UnknownModel("No worker serves the requested model.")
            raise NoWorker("No worker is available for this request.")

        # A worker with an open circuit breaker is passed over, unless there are no others: any try beats none.
        candidates = [worker for worker in able if worker.breaker.admits] or able
        if self._max_concurrent is not None:
            candidates = [worker for worker in candidates if self.has_room(worker)]
            if not candidates:
                raise AllBusy("All workers are busy.")

        prompt = self._cut(request)
        sessions = self._sessions_for(request)
        if len(candidates) == 1:
            worker, prompt.reason = candidates[0], "only_candidate"
        elif sessions is not None and (pinned := sessions.worker_for(request, candidates)) is not None:
            worker, prompt.reason = pinned, "session"
        else:
            prompt.reason = self._policy_name
            worker = self._policy.choose(candidates, prompt)
        if sessions is not None:
            sessions.note(request, worker)
        return Lease(worker, prompt, self._on_release, reason=prompt.reason, candidates=len(candidates))

    def place(self, worker: WorkerState, request: CompletionRequest, reason: str) -> Lease:
        """Return a lease on a worker that was chosen elsewhere, however busy it is."""
        prompt = self._cut(request)
        if (sessions := self._sessions_for(request)) is not None:
            sessions.note(request, worker)
        return Lease(worker, prompt, self._on_release, reason=reason)

    def condense(self, request: CompletionRequest) -> CompletionRequest:
        """Return `request` with the blocks of a long prompt in place of its bytes: hashed once, and held no longer."""
        key = request.key
        if key.size <= LONG_PROMPT:
            return request
        return request.condensed(cut(key, self._block_bytes, (request.model,), self._max_blocks))

    def has_room(self, worker: WorkerState) -> bool:
        """Tell whether a worker has fewer requests in flight than it may have."""
        return self._max_concurrent is None or worker.requests < self._max_concurrent

    def _sessions_for(self, request: CompletionRequest) -> Sessions | None:
        return self._sessions if request.session_id else None

    def _blocks_of(self, request: CompletionRequest) -> Prompt:
        scale = 1.0 if self._scales is None else self._scales.of(request)
        return Prompt(request, self._block_bytes, self._max_blocks, scale)

    def able(
        self,
        workers: Collection[WorkerState],
        request: CompletionRequest,
        *,
        exclude: Collection[WorkerState] = (),
    ) -> list[WorkerState]:
        """Return the workers that could take `request`, were they neither full nor out of reach."""
        model = request.model
        return [
            worker
            for worker in workers
            if worker.healthy
            and not worker.draining
            and (not model or worker.serves(model))
            and not (exclude and worker in exclude)
        ]
