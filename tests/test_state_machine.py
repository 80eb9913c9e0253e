"""Owns the proof by random walk: the whole router under any order of events, checked against a tiny model.

Hypothesis picks what happens next, and to which request: selection, head, chunk, end, failure, disconnect,
cancellation, a worker leaving, a worker coming back. After every step each worker object, also those that have
left, must carry exactly the requests that the model says are on it: nothing negative, nothing that drifts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import httpx
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asgi_router import Router, RouterSettings, Worker
from asgi_router.errors import AnswerCut
from asgi_router.mixed import Mixed
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import Script
from tests.routed import Routed, completion_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from asgi_router.scheduling.state import WorkerState

URLS = ["http://w1:1", "http://w2:1", "http://w3:1"]
PROMPTS = ["a" * 40, "b" * 2000, "b" * 5000, "b" * 2000 + "c" * 3000, "d" * 9000]
POLICIES = ["prefill_cost", "cache_aware", "request_num", "process_tokens", "round_robin", "power_of_two"]
CONTENT_TYPES = ["text/event-stream", "application/json"]

SETTLE_TURNS = 60  # more turns of the loop than anything in here needs to come to rest


T = TypeVar("T")


class Feed(Generic[T]):
    """The steps of a worker's answer, given one by one while it runs."""

    def __init__(self) -> None:
        self._steps: deque[T | anyio.Event] = deque()
        self._more = anyio.Event()
        self._ended = False

    def push(self, *steps: T, end: bool = False) -> None:
        self._steps += steps
        self._ended = end
        self._more.set()

    def __iter__(self) -> Iterator[T | anyio.Event]:
        while self._steps or not self._ended:
            if self._steps:
                yield self._steps.popleft()
            else:
                self._more = anyio.Event()
                yield self._more


@dataclass(eq=False)
class Flight:
    """One request in flight, as the model knows it."""

    exchange: Exchange
    head: Feed[Exception]
    body: Feed[bytes | Exception]
    task: asyncio.Task[object]
    state: WorkerState
    tokens: int
    pending: int
    headed: bool = False

    def send(self, *chunks: bytes, end: bool = False) -> None:
        """Let the worker send these bytes, after the head."""
        self.headed = True
        self.head.push(end=True)
        self.body.push(*chunks, end=end)

    def fail(self) -> None:
        """Let the worker break off where it is."""
        broken = httpx.ReadError("reset")
        if self.headed:
            self.body.push(broken, end=True)
        else:
            self.head.push(broken, end=True)


class RouterMachine(RuleBasedStateMachine):
    """The router, driven step by step, and the model: `live` and what each flight in it was charged."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.scripts: dict[str, Iterator[Script]] = {}
        self.live: list[Flight] = []
        self.routed = self.run(self.make_router)
        self.states = list(self.routed.router.workers)

    async def make_router(self) -> Routed:
        def script_for(request: httpx.Request) -> Script:
            return next(self.scripts[request.headers["x-flight"]])

        return Routed(dict.fromkeys(URLS, script_for), prefix_capacity_tokens=2000, retry_attempts=1)

    def run(self, step: Callable[[], Awaitable[T]]) -> T:
        """Do a step, and let the loop run until nothing moves any more."""

        async def settled() -> T:
            result = await step()
            for _ in range(SETTLE_TURNS):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(settled())

    def do(self, step: Callable[[], object]) -> None:
        """Do a step that doesn't await."""

        async def run() -> None:
            step()

        self.run(run)

    def end(self, flight: Flight, step: Callable[[], object]) -> None:
        """Do a step after which the request must be over."""
        self.do(step)
        self.live.remove(flight)
        assert flight.task.done()

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy: str) -> None:
        """The invariant holds whatever policy chooses."""
        twin = Router(RouterSettings(policy=policy), transport=self.routed.fleet)
        mine, its = self.routed.router._mode, twin._mode
        assert isinstance(mine, Mixed)
        assert isinstance(its, Mixed)
        mine._scheduler._policy = its._scheduler._policy

    @rule(prompt=st.sampled_from(PROMPTS), content_type=st.sampled_from(CONTENT_TYPES), refused=st.integers(0, 2))
    def select(self, prompt: str, content_type: str, refused: int) -> None:
        """A request comes; the first `refused` workers that are tried don't take the connection."""
        before = {state: (state.requests, state.prefill_tokens, state.pending_prefill_tokens) for state in self.states}
        name = str(len(self.scripts))
        exchange = Exchange(body=completion_body(prompt), headers=[("x-flight", name)])

        async def begin() -> tuple[Feed[Exception], Feed[bytes | Exception], asyncio.Task[object]]:
            head, body = Feed[Exception](), Feed[bytes | Exception]()
            bad = Script(connect=[httpx.ConnectError("refused")])
            good = Script(headers=[("content-type", content_type)], head=head, body=body)
            self.scripts[name] = iter([bad] * refused + [good])
            return head, body, asyncio.create_task(exchange.run(self.routed.app, timeout=30))

        head, body, task = self.run(begin)
        served = min(2, len(self.routed.router.workers)) > refused
        assert task.done() != served
        if not served:
            assert exchange.status in (502, 503)
            task.result()
            return

        (state,) = [state for state in self.states if state.requests > before[state][0]]
        _, tokens, pending = before[state]
        charged, queued = state.prefill_tokens - tokens, state.pending_prefill_tokens - pending
        assert len(prompt) / 4 <= charged <= len(prompt) / 4 + 10
        assert 1 <= queued <= charged
        self.live.append(Flight(exchange, head, body, task, state, charged, queued))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def chunk(self, data: st.DataObject) -> None:
        """The worker sends a part of its answer; the first one takes the request out of the queue."""
        flight = data.draw(st.sampled_from(self.live))
        self.do(lambda: flight.send(b"data: x\n\n"))
        flight.pending = 0
        assert flight.exchange.chunks

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def head(self, data: st.DataObject) -> None:
        """The worker sends its head and no more: the request still waits."""
        flight = data.draw(st.sampled_from(self.live))
        self.do(flight.send)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """The worker ends its answer."""
        flight = data.draw(st.sampled_from(self.live))
        self.end(flight, lambda: flight.send(end=True))
        assert flight.exchange.finished_cleanly

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The worker breaks off."""
        flight = data.draw(st.sampled_from(self.live))
        self.end(flight, flight.fail)
        assert flight.exchange.status == (200 if flight.exchange.chunks and not flight.pending else 502)
        assert flight.exchange.ends == (flight.exchange.status == 502)
        failure = flight.task.exception()
        assert failure is None or isinstance(failure, AnswerCut)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        """The client goes away."""
        flight = data.draw(st.sampled_from(self.live))
        self.end(flight, flight.exchange.disconnect)
        flight.task.result()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), native=st.booleans())
    def cancel(self, data: st.DataObject, native: bool) -> None:
        """The host cancels the request, by its scope or natively."""
        flight = data.draw(st.sampled_from(self.live))
        self.end(flight, flight.task.cancel if native else flight.exchange.cancel)
        assert flight.task.cancelled() == native

    @precondition(lambda self: len(self.routed.router.workers) > 0)
    @rule(data=st.data())
    def worker_leaves(self, data: st.DataObject) -> None:
        """A worker leaves; its requests go on."""
        state = data.draw(st.sampled_from(list(self.routed.router.workers)))
        self.routed.router.workers.remove(state.worker.url)

    @rule(url=st.sampled_from(URLS))
    def worker_returns(self, url: str) -> None:
        """A worker comes back, or is replaced: a new object that owes nothing."""
        self.states.append(self.routed.router.workers.add(Worker(url=url)))

    @invariant()
    def every_worker_carries_its_requests(self) -> None:
        """The counters are the sum over the requests in flight: never more, never less."""
        for state in self.states:
            flights = [flight for flight in self.live if flight.state is state]
            assert state.requests == len(flights)
            assert state.prefill_tokens == sum(flight.tokens for flight in flights)
            assert state.pending_prefill_tokens == sum(flight.pending for flight in flights)
            assert state.waiting_requests == sum(flight.pending > 0 for flight in flights)
            assert len(state.prefixes) <= 2000 * 4 // 512
            assert flights or state.prefixes.pinned == 0

    def teardown(self) -> None:
        """When all clients have gone nothing is left anywhere."""
        try:
            for flight in list(self.live):
                self.end(flight, flight.exchange.disconnect)
            self.every_worker_carries_its_requests()
            self.routed.assert_released()
        finally:
            self.loop.close()


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
