"""Owns the replay of prefill and decode apart: the router's own pairing, and what goes from one worker to the other."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.pairing import Pairing
from asgi_router.replay.simulate import Replay, Setup
from asgi_router.replay.worker_model import NEVER, Sequence
from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from asgi_router.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from asgi_router.replay.simulate import Outcome
    from asgi_router.replay.traced_request import TracedRequest
    from asgi_router.replay.traces import Trace
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.policies import Policy
    from asgi_router.scheduling.state import WorkerState

TRANSFER_RATE = 200_000.0
"""Tokens a second whose KV cache goes from one worker to another: 250 KB each at 50 GB/s."""


class Apart(Replay):
    """One run with the first `prefill_workers` prefilling, the others decoding. The policy chooses who prefills.

    The first token comes with the end of the prefill. Then the KV cache is transferred, and the request waits for room
    on its decode worker, which was chosen together with the other one, as in the product.
    """

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        name: str,
        make_policy: Callable[[random.Random, Callable[[], float], Replay], Policy],
        decode_policy: str = "request_num",
    ) -> None:
        super().__init__(trace, setup, name, make_policy)
        chooser = POLICIES[decode_policy](PolicyOptions(), random.Random(setup.seed))
        decode = Scheduler(chooser, policy_name=decode_policy, block_bytes=1, cut=self._cut)
        self._pairing = Pairing(self._states, self._scheduler, decode, DIALECTS["vllm"], skip_below=0)
        self._partners: dict[Lease, Lease] = {}
        self._transfers = Transfers(self._decode)
        self._simulated.append(self._transfers)
        self._until.append(NEVER)

    def _lease(self, request: TracedRequest, tried: tuple[WorkerState, ...]) -> Lease:
        pair = self._pairing.select(request, tried)
        assert pair.prefill is not None
        self._partners[pair.prefill] = pair.decode
        return pair.prefill

    def _sequence(self, request: TracedRequest, arrival: float, lease: Lease) -> Sequence:
        sequence = Sequence(request, arrival, lease)
        sequence.output = 1
        return sequence

    def _refuse(self, lease: Lease) -> None:
        super()._refuse(lease)
        self._partners.pop(lease).release()

    def ended(self, sequence: Sequence, now: float) -> None:
        """Note that one of the two is done; called by its worker."""
        super().ended(sequence, now)
        decode = self._partners.pop(sequence.lease, None)
        if decode is None:
            return

        second = Sequence(sequence.request, sequence.arrival, decode, computed=sequence.tokens)
        if second.output > 1 and self.workers[decode.state].fits(second):
            second.first_token_at = sequence.first_token_at
            self._transfers.begin(now + sequence.tokens / TRANSFER_RATE, second)
            self._until[-1] = self._transfers.until
        else:
            decode.release()

    def _decode(self, sequence: Sequence, now: float) -> None:
        sequence.lease.first_byte(prefilled=True)
        worker = self.workers[sequence.lease.state]
        worker.submit(sequence, now)
        self._until[self._number[sequence.lease.state]] = worker.until


class Transfers:
    """KV caches on their way, each by itself. `arrived` is called with what has come."""

    def __init__(self, arrived: Callable[[Sequence, float], None]) -> None:
        self.until = NEVER
        self._arrived = arrived
        self._under_way: list[tuple[float, int, Sequence]] = []
        self._begun = 0

    def begin(self, until: float, sequence: Sequence) -> None:
        """Be on the way until then."""
        self._begun += 1
        heappush(self._under_way, (until, self._begun, sequence))
        self.until = self._under_way[0][0]

    def advance(self) -> None:
        """Deliver what comes now."""
        now, _, sequence = heappop(self._under_way)
        self.until = self._under_way[0][0] if self._under_way else NEVER
        self._arrived(sequence, now)


def replay_of(
    trace: Trace,
    setup: Setup,
    name: str,
    make_policy: Callable[[random.Random, Callable[[], float], Replay], Policy],
    progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Replay a trace in the mode that the setup asks for."""
    kind = Apart if setup.prefill_workers else Replay
    return kind(trace, setup, name, make_policy).run(progress)
