"""Owns the proof by random walk where prefill and decode are apart: two legs for each request, in any order of events.

The machine of `tests/test_state_machine.py`, with a second leg: after every step each worker of either role, also those
that have left, must carry exactly the requests that the model says are on it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asgi_router import Role, Worker
from asgi_router.errors import AnswerCut
from tests.disaggregated.routed_apart import DIALECTS, Dialect, Leg, RoutedApart
from tests.instruments.asgi_client import Exchange
from tests.routed import Kind, completion_body
from tests.test_state_machine import PROMPTS, SETTLE_TURNS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import httpx

    from asgi_router.scheduling.state import WorkerState
    from tests.instruments.fake_worker import Script

ROLES = {
    "http://p1:1": Role.PREFILL,
    "http://p2:1": Role.PREFILL,
    "http://d1:1": Role.DECODE,
    "http://d2:1": Role.DECODE,
}
PREFILLS, DECODES = ([url for url, role in ROLES.items() if role is wanted] for wanted in (Role.PREFILL, Role.DECODE))
GOOD = (200, 200, 200, 200)

T = TypeVar("T")


@dataclass(eq=False)
class Flight:
    """One request in flight, as the model knows it."""

    exchange: Exchange
    kind: Kind
    in_turn: bool
    legs: dict[str, Leg]
    task: asyncio.Task[object]
    chosen: dict[str, WorkerState]
    """The workers that were leased for it, as `p` and `d`."""
    tokens: int
    done: set[str] = field(default_factory=set)

    @property
    def begun(self) -> bool:
        """Whether the client has something of an answer."""
        return self.exchange.status is not None

    @property
    def answered(self) -> bool:
        """Whether it has all of it."""
        return "d.end" in self.done and "p.head" in self.done

    @property
    def held(self) -> list[WorkerState]:
        """The workers that must be leased for it now."""
        early = self.kind == "stream" and not self.in_turn
        prefilled = not self.done.isdisjoint({"p.end", "p.fail"} | ({"p.chunk"} if early else set()))
        return [self.chosen[who] for who, released in (("p", prefilled), ("d", self.answered)) if not released]

    @property
    def next_steps(self) -> list[tuple[str, str]]:
        """What may happen next if nothing fails."""
        steps = {"connect": ("take",), "head": ("head",), "body": ("chunk", "end"), "over": ()}
        legs = [(who, leg) for who, leg in self.legs.items() if self.asks(who)]
        return [(who, what) for who, leg in legs for what in steps[leg.at] if what != "chunk" or leg.chunks]

    def asks(self, who: str) -> bool:
        """Whether a worker has been sent its request, and has not ended."""
        return self.legs[who].at != "over" and (who == "p" or not self.in_turn or "p.end" in self.done)


class ApartMachine(RuleBasedStateMachine):
    """The router with pairs, driven step by step, and the model: `live`, and on whom each flight in it is."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.patience = patch("asgi_router.disaggregated.mode.REST_GRACE", 60.0)  # the model has no clock
        self.patience.start()
        self.legs: dict[str, dict[str, Leg]] = {}
        self.live: list[Flight] = []
        self.routers: dict[Dialect, RoutedApart] = self.run(self.make_routers)
        self.states = {dialect: list(routed.router.workers) for dialect, routed in self.routers.items()}

    async def make_routers(self) -> dict[Dialect, RoutedApart]:
        def script_for(request: httpx.Request) -> Script:
            who = "p" if request.url.host.startswith("p") else "d"
            return self.legs[request.headers["x-flight"]][who].script

        prefills, decodes = dict.fromkeys(PREFILLS, script_for), dict.fromkeys(DECODES, script_for)
        fixed = {"prefix_capacity_tokens": 2000, "retry_attempts": 0}
        return {dialect: RoutedApart(prefills, decodes, None, pd_dialect=dialect, **fixed) for dialect in DIALECTS}

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
        failure = None if flight.task.cancelled() else flight.task.exception()
        assert failure is None or isinstance(failure, AnswerCut)

    # --- what happens --------------------------------------------------------------------------------------------

    @rule(
        dialect=st.sampled_from(DIALECTS),
        prompt=st.sampled_from(PROMPTS),
        kind=st.sampled_from(["stream", "json"]),
        statuses=st.tuples(st.sampled_from([*GOOD, 422]), st.sampled_from([*GOOD, 500])),
    )
    def select(self, dialect: Dialect, prompt: str, kind: Kind, statuses: tuple[int, int]) -> None:
        """A request comes: it is counted on one worker of each role, or on none if a role has nobody."""
        routed, states = self.routers[dialect], self.states[dialect]
        before = {state: (state.requests, state.prefill_tokens) for state in states}
        name = str(len(self.legs))
        exchange = Exchange(body=completion_body(prompt, stream=kind == "stream"), headers=[("x-flight", name)])

        async def begin() -> asyncio.Task[object]:
            prefill, decode = statuses
            legs = {"p": Leg.of(kind, prefill, kv=dialect == "vllm"), "d": Leg.of(kind, decode, kv=False)}
            self.legs[name] = legs
            return asyncio.create_task(exchange.run(routed.app, timeout=30))

        task = self.run(begin)
        roles = {state.worker.role for state in routed.router.workers}
        if roles != {Role.PREFILL, Role.DECODE}:
            assert task.done()
            assert exchange.status == 503
            assert {state: (state.requests, state.prefill_tokens) for state in states} == before
            return

        chosen = [state for state in states if state.requests > before[state][0]]
        by_role = {state.worker.role.value[0]: state for state in chosen}
        assert (len(chosen), set(by_role)) == (2, {"p", "d"})
        charged = {state.prefill_tokens - before[state][1] for state in chosen}
        assert len(charged) == 1
        self.live.append(Flight(exchange, kind, dialect == "vllm", self.legs[name], task, by_role, charged.pop()))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), steps=st.integers(1, 3).map(lambda n: n * n))
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Some things happen as they should: a worker takes its request, sends its head, a chunk, or the rest."""
        flight = data.draw(st.sampled_from(self.live))
        for _ in range(steps):
            if flight in self.live and (possible := flight.next_steps):
                self.step(flight, *data.draw(st.sampled_from(possible)))
                self.every_worker_carries_its_requests()

    def step(self, flight: Flight, who: str, what: str) -> None:
        """Let one of them happen."""
        leg = flight.legs[who]
        flight.done.add(f"{who}.{what}")
        if what == "head" and leg.script.status >= 400:
            self.end(flight, lambda: leg.do("head", "end"))
            assert flight.exchange.status == leg.script.status
            assert flight.exchange.finished_cleanly
        elif flight.answered and not flight.done.isdisjoint({"p.end", "p.fail"}):
            self.end(flight, lambda: leg.do(what))
            assert flight.exchange.finished_cleanly
        else:
            self.do(lambda: leg.do(what))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), who=st.sampled_from("pd"))
    def fail(self, data: st.DataObject, who: str) -> None:
        """A worker breaks off: that ends the request, but not an answer that needs its prefill worker no more."""
        flight = data.draw(st.sampled_from(self.live))
        leg, begun = flight.legs[who], flight.begun
        unread = who == "d" and "d.chunk" in flight.done and not begun  # see `test_exits_apart.py`
        if not flight.asks(who) or unread:
            return

        flight.done.add(f"{who}.fail")
        if who == "p" and begun and not flight.answered:
            self.do(lambda: leg.do("fail"))
            return
        self.end(flight, lambda: leg.do("fail"))
        assert flight.exchange.status == (200 if begun else 502)
        assert flight.exchange.ends == (flight.answered or not begun)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["disconnect", "cancel", "native"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        """The client goes away, or the host cancels the request. (A client that has its answer is given time to go.)"""
        flight = data.draw(st.sampled_from(self.live))
        if how != "disconnect" or not flight.answered:
            ways: dict[str, Callable[[], object]] = {
                "disconnect": flight.exchange.disconnect,
                "cancel": flight.exchange.cancel,
                "native": flight.task.cancel,
            }
            self.end(flight, ways[how])
            assert flight.task.cancelled() == (how == "native")

    @rule(
        dialect=st.sampled_from(DIALECTS), url=st.sampled_from(list(ROLES)), gone=st.sampled_from([False, False, True])
    )
    def worker_leaves(self, dialect: Dialect, url: str, gone: bool) -> None:
        """A worker leaves, and its requests go on. Mostly it is back at once: a new object that owes nothing."""
        workers = self.routers[dialect].router.workers
        if url in workers:
            workers.remove(url)
        if not gone:
            self.states[dialect].append(workers.add(Worker(url=url, role=ROLES[url])))

    # --- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def every_worker_carries_its_requests(self) -> None:
        """The counters are the sum over the legs in flight: never more, never less."""
        for state in (state for states in self.states.values() for state in states):
            flights = [flight for flight in self.live if state in flight.held]
            assert state.requests == len(flights)
            assert state.prefill_tokens == sum(flight.tokens for flight in flights)
            assert 0 <= state.waiting_requests <= state.requests
            assert 0 <= state.pending_prefill_tokens <= state.prefill_tokens
            assert flights or state.prefixes.pinned == 0

    def teardown(self) -> None:
        """When all requests have been cancelled nothing is left anywhere."""
        try:
            for flight in list(self.live):
                self.end(flight, flight.exchange.cancel)
            self.every_worker_carries_its_requests()
            for routed in self.routers.values():
                routed.assert_released()
        finally:
            self.patience.stop()
            self.loop.close()


TestApartMachine = ApartMachine.TestCase
TestApartMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
