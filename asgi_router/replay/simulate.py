"""Owns one replay: a trace, one policy, simulated workers and a simulated clock; the product's scheduler between them.

The clock jumps from event to event: an arrival, or the end of a worker's step. An arrival is chosen for as in the
router: `Scheduler.select` gives a lease, which is told of the first token and released at the last one.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Protocol, cast

from asgi_router.errors import NoWorker
from asgi_router.parts import PREFIX_GROWTH
from asgi_router.replay.traced_request import cut_by
from asgi_router.replay.worker_model import NEVER, Sequence, SimulatedWorker, WorkerModel
from asgi_router.scheduling.breaker import Breaker
from asgi_router.scheduling.prefix_index import PrefixIndex
from asgi_router.scheduling.scheduler import Scheduler
from asgi_router.scheduling.state import WorkerState
from asgi_router.worker import Role, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asgi_router.replay.traced_request import TracedRequest
    from asgi_router.replay.traces import Trace
    from asgi_router.scheduling.lease import Lease
    from asgi_router.scheduling.policies import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker that loses everything, and is out of reach for a while."""

    worker: int
    at: float
    """Seconds from the replay's beginning."""
    down: float = 10.0
    """Seconds until it takes requests again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is replayed with which workers."""

    workers: int = 8
    prefill_workers: int = 0
    """How many of them prefill only, while the others decode; 0: all do both. See `apart.py`."""
    model: WorkerModel = field(default_factory=WorkerModel)
    speeds: tuple[float, ...] = ()
    """Of each worker, relative to the model; those that are missing are 1."""
    speed: float = 1.0
    """By which the requests come faster than they did."""
    index_tokens: int | None = None
    """Capacity of the router's picture of each worker; None: told the truth, which is the worker's cache."""
    adapt: bool = True
    """Whether the picture follows what the workers say of their hits, as with `PREFIX_ADAPT`."""
    prefix_ttl: float = 1_800.0
    seed: int = 0
    restart: Restart | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the requests under one policy."""

    policy: str
    ttft: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from arrival to first token, of each request."""
    per_token: array[float] = field(default_factory=lambda: array("d"))
    """Seconds for each token after the first, of each request that has more than one."""
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    """Of them those that the router believed to be cached."""
    cached_tokens: int = 0
    """And those that were."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each worker computed."""
    chosen: list[int] = field(default_factory=list)
    """Requests that each worker got."""
    reasons: Counter[str] = field(default_factory=Counter)
    hot_spots: int = 0
    """Requests sent to a worker with a queue while another had none."""
    failed: int = 0
    """Cut by a restart after their first token, or without any worker to go to."""
    retried: int = 0
    refused: int = 0
    """Longer than a worker's cache."""
    seconds: float = 0.0
    """From the first arrival to the last token."""


class Steps(Protocol):
    """What the clock jumps by: `advance` is called at `until`, and sets the next one."""

    until: float

    def advance(self) -> None:
        """Do what is due."""


class Replay:
    """One run. Deterministic: the same trace, setup and policy give the same outcome."""

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        name: str,
        make_policy: Callable[[random.Random, Callable[[], float], Replay], Policy],
    ) -> None:
        self._trace = trace
        self.setup = setup
        # The clock is read for every block that is looked up: a list's item through C is the fastest there is.
        self._now = [0.0]
        self.clock = cast("Callable[[], float]", partial(getitem, self._now, 0))
        self._outcome = Outcome(policy=name, chosen=[0] * (setup.prefill_workers or setup.workers))

        size = trace.block_tokens
        models = [replace(setup.model, speed=speed) for speed in _speeds(setup)]
        engines = [SimulatedWorker(model, size, self) for model in models]
        self._simulated: list[Steps] = [*engines]
        capacity = (setup.index_tokens if setup.index_tokens is not None else setup.model.cache_tokens) // size
        most = capacity * PREFIX_GROWTH if setup.adapt else capacity
        self._states = [
            WorkerState(
                Worker(url=f"http://worker-{number}", role=_role(setup, number)),
                PrefixIndex(capacity, setup.prefix_ttl, self.clock, most if setup.adapt else None),
                Breaker(5, 10.0, self.clock),
            )
            for number in range(setup.workers)
        ]
        self.workers: Mapping[WorkerState, SimulatedWorker] = dict(zip(self._states, engines, strict=True))
        self._number = {state: number for number, state in enumerate(self._states)}
        self._until = [NEVER] * setup.workers  # when each worker's stretch ends
        self._down_until = [0.0] * setup.workers
        policy = make_policy(random.Random(setup.seed), self.clock, self)
        self._cut = cut_by(size, most)
        self._scheduler = Scheduler(policy, policy_name=name, block_bytes=1, cut=self._cut)

    def run(self, progress: Callable[[int], None] = lambda done: None) -> Outcome:
        """Replay the whole trace; `progress` is told now and then how many requests have come."""
        outcome, now, speed = self._outcome, self._now, self.setup.speed
        restart = self.setup.restart
        for count, request in enumerate(self._trace.requests):
            arrival = request.arrival / speed
            if restart is not None and restart.at <= arrival:
                self._run_until(restart.at)
                self._restart(restart)
                restart = None
            self._run_until(arrival)
            now[0] = arrival
            self._arrive(request, arrival)
            if count % 1_000 == 0:
                progress(count)
        self._run_until(NEVER)
        outcome.seconds = now[0]
        outcome.busy = [worker.busy for worker in self.workers.values()]
        progress(len(self._trace.requests))
        return outcome

    def _run_until(self, time: float) -> None:
        now, simulated, until = self._now, self._simulated, self._until
        while (event := min(until)) < time:
            number = until.index(event)
            now[0] = event
            worker = simulated[number]
            worker.advance()
            until[number] = worker.until

    def _arrive(self, request: TracedRequest, arrival: float, tried: tuple[WorkerState, ...] = ()) -> None:
        outcome, states = self._outcome, self._states
        try:
            lease = self._lease(request, tried)
        except NoWorker:
            outcome.failed += 1
            return
        state = lease.state
        number = self._number[state]
        if self._down_until[number] > self._now[0]:
            lease.failed()
            lease.release()
            outcome.retried += 1
            self._arrive(request, arrival, (*tried, state))
            return

        if state.waiting_requests > 1 and any(
            not other.waiting_requests for other in states if other.worker.role is state.worker.role
        ):
            outcome.hot_spots += 1
        outcome.reasons[lease.reason] += 1
        outcome.chosen[number] += 1
        worker = self.workers[state]
        sequence = self._sequence(request, arrival, lease)
        if not worker.fits(sequence):
            self._refuse(lease)
            return
        outcome.prompt_tokens += request.prompt_tokens
        outcome.predicted_tokens += lease.cached_tokens
        worker.submit(sequence, self._now[0])
        self._until[number] = worker.until

    def _lease(self, request: TracedRequest, tried: tuple[WorkerState, ...]) -> Lease:
        return self._scheduler.select(self._states, request, exclude=tried)

    def _refuse(self, lease: Lease) -> None:
        lease.release()
        self._outcome.refused += 1

    def _sequence(self, request: TracedRequest, arrival: float, lease: Lease) -> Sequence:
        return Sequence(request, arrival, lease)

    def _restart(self, restart: Restart) -> None:
        """A worker goes down: what waits there is tried on another, as the router does; what streams is cut."""
        number = restart.worker
        self._now[0] = restart.at
        self._down_until[number] = restart.at + restart.down
        self._until[number] = NEVER
        for sequence in self.workers[self._states[number]].restart():
            sequence.lease.failed()
            sequence.lease.release()
            if sequence.first_token_at is not None:
                self._outcome.failed += 1
                continue
            self._outcome.retried += 1
            self._outcome.prompt_tokens -= sequence.tokens
            self._outcome.predicted_tokens -= sequence.lease.cached_tokens
            self._arrive(sequence.request, sequence.arrival, (sequence.lease.state,))

    def first_token(self, sequence: Sequence, now: float) -> None:
        """Note that a prompt is prefilled; called by its worker."""
        sequence.lease.first_byte(prefilled=True)
        self._outcome.ttft.append(now - sequence.arrival)
        self._outcome.cached_tokens += sequence.cached

    def ended(self, sequence: Sequence, now: float) -> None:
        """Note that an answer is whole; called by its worker."""
        sequence.lease.succeeded()
        sequence.lease.release()
        if not self.setup.prefill_workers:  # else an answer comes from who has not prefilled, and says nothing of it
            sequence.lease.found(sequence.cached / sequence.tokens)
        if sequence.output > 1 and sequence.first_token_at is not None:
            self._outcome.per_token.append((now - sequence.first_token_at) / (sequence.output - 1))


def _role(setup: Setup, number: int) -> Role:
    if not setup.prefill_workers:
        return Role.MIXED
    return Role.PREFILL if number < setup.prefill_workers else Role.DECODE


def _speeds(setup: Setup) -> list[float]:
    return [setup.speeds[number] if number < len(setup.speeds) else 1.0 for number in range(setup.workers)]
