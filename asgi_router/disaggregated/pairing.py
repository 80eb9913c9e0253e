"""Owns the choice of two workers that serve a request together: both are leased in one step, or none is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asgi_router.errors import AllBusy
from asgi_router.worker import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asgi_router.disaggregated.dialect import Dialect
    from asgi_router.extraction import CompletionRequest
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.scheduler import Scheduler
    from asgi_router.scheduling.state import WorkerState


@dataclass(frozen=True, slots=True)
class Pair:
    """A request's claim on a prefill and a decode worker."""

    prefill: Lease | None
    """None: the decode worker prefills the little that it doesn't hold."""
    decode: Lease

    def release(self) -> None:
        """Give back both, as `Lease.release`."""
        if self.prefill is not None:
            self.prefill.release()
        self.decode.release()


class Pairing:
    """Chooses pairs. Nothing in it awaits.

    Args:
        workers: the fleet.
        prefill: chooses among the prefill workers.
        decode: chooses among the decode workers.
        dialect: says who fits whom, and whether decode workers can do without the others.
        skip_below: uncached tokens on the decode worker below which they do; 0: never.
    """

    def __init__(
        self,
        workers: Collection[WorkerState],
        prefill: Scheduler,
        decode: Scheduler,
        dialect: Callable[[], Dialect],
        skip_below: int,
    ) -> None:
        self._workers = workers
        self._prefill = prefill
        self._decode = decode
        self._dialect = dialect()
        self._skip_below = skip_below if self._dialect.decodes_alone else 0

    def select(self, request: CompletionRequest, exclude: Collection[WorkerState]) -> Pair:
        """Choose a pair for `request`, apart from the workers that it has tried, and count it on both.

        Raises:
            UnknownModel, AllBusy, NoWorker: as `Scheduler.select`, of either role. Nothing is counted then.
        """
        if self._skip_below:
            decode = self._decode.select(self.of(Role.DECODE), request, exclude=exclude)
            if decode.uncached_tokens < self._skip_below:
                return Pair(None, decode)
            return self._completed(decode, request, exclude)

        prefill = self._prefill.select(self._prefills_with_partner(request, exclude), request, exclude=exclude)
        try:
            fitting = [state for state in self.of(Role.DECODE) if self._fit(prefill.state, state)]
            return Pair(prefill, self._decode.select(fitting, request, exclude=exclude))
        except BaseException:
            prefill.release()
            raise

    def _completed(self, decode: Lease, request: CompletionRequest, exclude: Collection[WorkerState]) -> Pair:
        # With this decode worker, not with one that is chosen anew: a policy that takes turns has taken this one.
        try:
            fitting = [state for state in self.of(Role.PREFILL) if self._fit(state, decode.state)]
            return Pair(self._prefill.select(fitting, request, exclude=exclude), decode)
        except BaseException:
            decode.release()
            raise

    def condense(self, request: CompletionRequest) -> CompletionRequest:
        """Return `request` as `Scheduler.condense` does; both schedulers cut prompts alike."""
        return self._prefill.condense(request)

    def _prefills_with_partner(
        self, request: CompletionRequest, exclude: Collection[WorkerState]
    ) -> Collection[WorkerState]:
        """Return the prefill workers that a decode worker fits which can take `request`, now if there is one.

        Without any, all of them: what is chosen among them then says what is missing.

        Raises:
            AllBusy: all decode workers are full. Said here, since a prefill worker that is leased and given back looks
                like a free place to those who wait.
        """
        prefills = self._prefill.able(self.of(Role.PREFILL), request, exclude=exclude)
        able = self._decode.able(self.of(Role.DECODE), request, exclude=exclude)
        at_hand = [state for state in able if state.breaker.admits] or able
        ready = [state for state in at_hand if self._decode.has_room(state)]
        if prefills and able and not ready:
            raise AllBusy("All workers are busy.")
        for decodes in (ready, able):
            if found := [prefill for prefill in prefills if any(self._fit(prefill, decode) for decode in decodes)]:
                return found
        return self.of(Role.PREFILL)

    def _fit(self, prefill: WorkerState, decode: WorkerState) -> bool:
        return self._dialect.fits(prefill.worker, decode.worker)

    def others(self, request: CompletionRequest, exclude: Collection[WorkerState]) -> bool:
        """Tell whether there is a pair that could take `request`, or a decode worker that may do so alone."""
        decodes = self._decode.able(self.of(Role.DECODE), request, exclude=exclude)
        if self._skip_below and decodes and not self.of(Role.PREFILL):
            return True
        prefills = self._prefill.able(self.of(Role.PREFILL), request, exclude=exclude)
        return any(self._fit(prefill, decode) for prefill in prefills for decode in decodes)

    def of(self, role: Role) -> list[WorkerState]:
        """Return the workers of a role."""
        return [state for state in self._workers if state.worker.role is role]
