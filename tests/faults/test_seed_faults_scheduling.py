"""Owns the seed's faults F-40 to F-54 and F-65, of counters and choices; as in the file beside it.

What a test elsewhere shows already is there, under its number:

- F-40 in `fleet/test_fleet_in_service.py`
- F-41 also in `scheduling/test_policies.py`: any counts; that there is an error where there is no candidate is F-23
- F-42 also in `test_lifecycle.py` and `scheduling/test_lease.py`
- F-43 in `scheduling/test_lease.py`
- F-44 also in `scheduling/test_fairness.py`: selections one after the other, for each policy that looks at the load
- F-52 in `test_middleware.py`
- F-53 also in `scheduling/test_cache_aware.py`: each weight by itself; the ranges are in `test_settings.py`
- F-54 in `scheduling/test_fairness.py`
- F-65 also in `scheduling/test_prefix_index.py`; that nothing grows is in `fleet/test_fleet_in_service.py`
"""

from __future__ import annotations

import random
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import anyio
import anyio.lowlevel
import pytest

from asgi_router.scheduling.policies import POLICIES, PolicyOptions
from tests.fleet.admin_calls import PAYLOAD, administered, call
from tests.instruments.asgi_client import HANG, Exchange
from tests.routed import OTHER, PROMPT, WORKER, Routed, answer, completion_body, counters, exchange_for
from tests.scheduling.builders import fleet, prompt
from tests.scheduling.test_fairness import BY_LOAD

if TYPE_CHECKING:
    import httpx

    from tests.instruments.fake_worker import Script

GOOD = answer("json")
FOUR = [f"http://w{number}:8000" for number in range(1, 5)]


def posts(routed: Routed) -> list[int]:
    """How many requests, probes aside, each worker has got."""
    return [sum(call.method == "POST" for call in worker.calls) for worker in routed.fleet.workers.values()]


async def all_received(routed: Routed, requests: int) -> None:
    """Return when the workers have got that many requests together."""
    while sum(posts(routed)) < requests:
        await anyio.lowlevel.checkpoint()


# --- counters --------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_f41_one_of_workers_that_all_seem_full_is_chosen(policy: str) -> None:
    """F-41: with all counts at their maximum no worker was less, so the URL was empty; there is always a choice."""
    full = 2**64 - 1
    routed = Routed(dict.fromkeys(FOUR, GOOD), policy=policy)
    for state in routed.router.workers:
        state.requests = state.prefill_tokens = state.waiting_requests = state.pending_prefill_tokens = full
    exchange = await exchange_for().run(routed.app)
    assert exchange.status == 200
    assert sum(posts(routed)) == 1
    assert routed.counters == [(full, full, full, full)] * 4


class Sickly:
    """A worker whose probes fail while it is ill, and whose answers wait for a gate each."""

    def __init__(self) -> None:
        self.ill = False
        self.gates = [anyio.Event(), anyio.Event()]
        self._next_gate = iter(self.gates)

    def __call__(self, request: httpx.Request) -> Script:
        """Answer one request."""
        if request.method == "POST":
            return replace(GOOD, head=[next(self._next_gate)])
        return replace(GOOD, status=500 if self.ill else 200)


@pytest.mark.anyio
async def test_f42_a_worker_that_fell_ill_and_registers_anew_is_charged_for_new_requests_only() -> None:
    """F-42: the ends of old requests ate the new ones' counts; a request ends on the object that it was counted on."""
    sickly = Sickly()
    routed = administered(health_failures=1)
    routed.router.workers.remove(WORKER)
    routed.fleet[OTHER].scripts = sickly
    assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
    old, new = exchange_for(), exchange_for()
    async with old.running(routed.app):
        await all_received(routed, 1)
        sickly.ill = True
        await routed.router.monitor.probe_all()
        assert not routed.router.stats().workers[0].healthy

        sickly.ill = False
        assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
        assert routed.counters == [(0, 0, 0, 0)]
        async with new.running(routed.app):
            await all_received(routed, 2)
            before = routed.counters
            sickly.gates[0].set()
            await old.over()
            assert routed.counters == before
            assert before[0][0] == 1
            sickly.gates[1].set()

    assert old.finished_cleanly
    assert new.finished_cleanly
    routed.assert_released()


# --- many at once ----------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("policy", BY_LOAD)
async def test_f44_a_burst_of_requests_does_not_herd(policy: str) -> None:
    """F-44: requests at once chose on the same numbers; choosing and counting are one step, so they spread evenly."""
    gate = anyio.Event()
    routed = Routed(dict.fromkeys(FOUR, replace(GOOD, head=[gate])), policy=policy)
    async with anyio.create_task_group() as tasks:
        for number in range(40):
            exchange = Exchange(body=completion_body(f"Prompt number {number:02}. " * 100))
            tasks.start_soon(exchange.run, routed.app)
        await all_received(routed, 40)
        assert [requests for requests, *_ in routed.counters] == [10] * 4
        gate.set()

    assert posts(routed) == [10] * 4
    routed.assert_released()


@pytest.mark.anyio
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_f45_selection_asks_nobody(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-45: each selection asked the workers and a tokenizer; now a request is all that a worker hears of it."""

    def forbidden(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("something was asked")

    routed = Routed(dict.fromkeys(FOUR, GOOD), policy=policy)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    for number in range(1, 9):
        await exchange_for().run(routed.app)
        assert sum(worker.connects for worker in routed.fleet.workers.values()) == number
    assert sum(posts(routed)) == 8
    routed.assert_released()


@pytest.mark.anyio
async def test_f45_a_worker_that_hangs_delays_nobody_else() -> None:
    """F-45: one slow target stalled the router; a hanging request and a hanging probe hold up no other request."""
    workers = {WORKER: replace(GOOD, head=[HANG]), OTHER: GOOD}
    routed = Routed(workers, policy="request_num", health_interval=0.001, health_timeout=1000)
    routed.router.workers.drain(OTHER)
    stuck = exchange_for()
    async with routed.router, stuck.running(routed.app):
        await routed.worker.changes.until(lambda: {call.method for call in routed.worker.calls} == {"GET", "POST"})
        routed.router.workers.drain(OTHER, draining=False)
        for _ in range(20):
            assert (await exchange_for().run(routed.app)).status == 200
        assert posts(routed) == [1, 20]
        assert {call.stage for call in routed.worker.calls} == {"head"}
        stuck.disconnect()

    routed.assert_released(stuck)


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["power_of_two", "random"])
async def test_f51_random_choices_of_requests_at_once(policy: str) -> None:
    """F-51: random choices at once could crash the router; a burst is served, by all workers."""
    gate = anyio.Event()
    routed = Routed(dict.fromkeys(FOUR, replace(GOOD, head=[gate])), policy=policy)
    exchanges = [exchange_for() for _ in range(80)]
    async with anyio.create_task_group() as tasks:
        for exchange in exchanges:
            tasks.start_soon(exchange.run, routed.app)
        await all_received(routed, 80)
        gate.set()

    assert {exchange.status for exchange in exchanges} == {200}
    assert min(posts(routed)) > 0
    routed.assert_released()


@pytest.mark.parametrize("policy", ["power_of_two", "random"])
def test_f51_random_choices_of_threads_at_once(policy: str) -> None:
    """F-51: the generator was not synchronised; choices by 8 threads at once are all workers, each as often as another.

    Chi-square with 4 degrees of freedom: above 40 once in 20 million runs.
    """
    workers = fleet("abcde")
    chooser = POLICIES[policy](PolicyOptions(), random.Random(7))
    cold = prompt("?")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            rounds = [threads.submit(lambda: [chooser.choose(workers, cold) for _ in range(10_000)]) for _ in range(8)]
            choices = [choice for made in rounds for choice in made.result()]
    finally:
        sys.setswitchinterval(interval)

    counts = [choices.count(state) for state in workers]
    assert sum(counts) == 80_000
    assert sum((count - 16_000) ** 2 / 16_000 for count in counts) < 40


# --- the cache -------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(("load_weight", "chosen"), [("0", WORKER), ("1", OTHER), ("", OTHER), (None, OTHER)])
async def test_f53_zero_is_not_unset(load_weight: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-53: a weight of 0 became the default, 1; it switches the load off, and an unset one is still 1."""
    if load_weight is not None:
        monkeypatch.setenv("ASGI_ROUTER_CACHE_AWARE_LOAD_WEIGHT", load_weight)
    gate = anyio.Event()
    routed = Routed(dict.fromkeys([WORKER, OTHER], replace(GOOD, head=[gate])), policy="cache_aware")
    routed.router.workers.drain(OTHER)
    busy, half_cached = exchange_for(), Exchange(body=completion_body(PROMPT[:1800] + "?" * 1800))
    async with busy.running(routed.app):
        await all_received(routed, 1)
        routed.router.workers.drain(OTHER, draining=False)
        async with half_cached.running(routed.app):
            await all_received(routed, 2)
            assert posts(routed) == ([2, 0] if chosen == WORKER else [1, 1])
            gate.set()

    routed.assert_released()


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["cache_aware", "prefill_cost"])
@pytest.mark.parametrize("restart", ["none", "registers anew", "removed, then registers"])
async def test_f65_a_worker_that_restarted_has_no_hits(policy: str, restart: str) -> None:
    """F-65: a prompt went on to a worker that had lost it; one that restarted or left is a stranger when it comes.

    The worker that had the prompt has a request more than the other one: only a hit can make it the better choice.
    """
    gate = anyio.Event()
    routed = administered(policy=policy, cache_aware_load_weight=0.5)
    routed.fleet[OTHER].scripts = lambda request: replace(GOOD, head=[gate] if b"busy" in request.content else [])
    await call(routed, "POST", "/register", PAYLOAD)
    routed.router.workers.drain(WORKER)
    await exchange_for().run(routed.app)
    assert posts(routed) == [0, 1]

    if restart.startswith("removed"):
        await call(routed, "DELETE", f"/workers?url={OTHER}")
    if restart != "none":
        await call(routed, "POST", "/register", PAYLOAD)
    busy = Exchange(body=completion_body("busy"))
    async with busy.running(routed.app):
        await all_received(routed, 2)
        assert counters(routed.router.stats().workers[1])[0] == 1
        routed.router.workers.drain(WORKER, draining=False)
        await exchange_for().run(routed.app)
        assert posts(routed) == ([0, 3] if restart == "none" else [1, 2])
        gate.set()

    routed.assert_released()
