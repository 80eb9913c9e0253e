"""Owns one run: workers, router, clients and chaos together, and the rules that have to hold all the same."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import httpx
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.scheduling.breaker import BreakerState
from asgi_router.upstream.answer import CLOSE_GRACE
from asgi_router.upstream.transport import PooledTransport
from tests.chaos.chaos import Blow, Conductor, Fleet
from tests.chaos.load import Answer, Limits, Plan, WrongAnswer, ask, outcome, plans
from tests.chaos.worker import Job
from tests.instruments.raw_http import Head
from tests.instruments.servers import run_uvicorn
from tests.routed import counters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.instruments.servers import UvicornServer

WORKERS = 4
CLIENTS = 24
RECOVERY_LIMIT = 20.0
"""Seconds from the end of the chaos until every worker has to be back. Two rounds of probes take about a second."""
SETTLE_LIMIT = 10.0
"""Seconds from the last answer until nothing has to be left in the router."""

CONNECT, FIRST_BYTE, IDLE, QUEUE = 0.3, 1.0, 1.0, 5.0
MARGIN = 3.0  # on a busy machine


@dataclass
class Report:
    """What happened. `broken` names each rule that was broken; it should be empty."""

    broken: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    blows: Counter[Blow] = field(default_factory=Counter)
    noticed: Counter[str] = field(default_factory=Counter)
    """How often the router took a worker out of service, and why."""
    judged: int = 0
    """Requests during which one worker was healthy all along."""
    failed_unsent: int = 0
    """Requests that the router failed though nothing was sent, when no worker was healthy all along."""
    sent_again: int = 0
    """Requests that met a connection which had just been closed or a worker that was loading, or may be repeated."""
    longest_queue: int = 0
    longest_request: float = 0.0
    longest_first_wait: float = 0.0
    longest_first_byte: float = 0.0
    """Since it was sent."""
    longest_pause: float = 0.0
    longest_recovery: float = 0.0
    back_in_service: float = 0.0
    """Seconds from the last fault's end until each worker had answered a request, with its breaker closed."""

    def lines(self) -> list[str]:
        """The figures, for people."""
        total = sum(self.outcomes.values())
        return [
            f"{total} requests, {self.judged} of them with a worker that was healthy all along",
            *(f"  {count:6} {name}" for name, count in self.outcomes.most_common()),
            f"{self.blows.total()} faults: " + ", ".join(f"{self.blows[blow]} {blow}" for blow in Blow),
            "the router saw: " + ", ".join(f"{count} {what}" for what, count in self.noticed.items()),
            f"failed with nothing sent, while no worker was healthy all along: {self.failed_unsent}",
            f"sent more than once: {self.sent_again}",
            f"longest queue: {self.longest_queue}",
            f"longest request: {self.longest_request:.2f} s",
            f"longest wait for the first byte: {self.longest_first_wait:.2f} s, "
            f"{self.longest_first_byte:.2f} s of it after sending",
            f"longest pause in an answer: {self.longest_pause:.2f} s",
            f"longest time until the router knew that a worker was back: {self.longest_recovery:.2f} s",
            f"all workers in service {self.back_in_service:.2f} s after the chaos",
            *(f"BROKEN: {rule}" for rule in self.broken),
        ]


class WatchedTransport(httpx.AsyncBaseTransport):
    """The router's own transport, which notes how often something of a request was sent, and when.

    Attributes:
        sent: how often, by the number that the client gave its request.
        sent_at: when, the last time.
    """

    def __init__(self, keepalive_expiry: float) -> None:
        self.pooled = PooledTransport(keepalive_expiry=keepalive_expiry)
        self.sent: Counter[int] = Counter()
        self.sent_at: dict[int, float] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass it on."""
        number = int(request.headers.get("x-number", 0))
        trace = request.extensions.get("trace")

        async def watch(event: str, info: Mapping[str, object]) -> None:
            if event == "http11.send_request_headers.started":
                self.sent[number] += 1
                self.sent_at[number] = anyio.current_time()
            if trace is not None:
                await trace(event, info)

        request.extensions["trace"] = watch
        try:
            return await self.pooled.handle_async_request(request)
        finally:
            request.extensions["trace"] = trace

    async def aclose(self) -> None:
        """Close the connections."""
        await self.pooled.aclose()


class Run:
    """One run; `report` fills as it goes on."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        settings = RouterSettings(
            workers=[worker.url for worker in fleet.workers],
            connect_timeout=CONNECT,
            first_byte_timeout=FIRST_BYTE,
            idle_timeout=IDLE,
            queue_timeout=QUEUE,
            max_concurrent_per_worker=CLIENTS // WORKERS,
            retry_attempts=WORKERS - 1,
            health_interval=0.1,
            health_timeout=0.5,
            breaker_cooldown=0.3,
            decision_headers=True,
        )
        self.report = Report()
        self.transport = WatchedTransport(settings.keepalive_expiry)
        self.router = Router(settings, transport=self.transport)
        self._conductor = Conductor(fleet, self.router, seed)
        self._fleet = fleet
        self._seed = seed
        # The sum of the time-outs, at each point where a client waits.
        self._limits = Limits(
            first_byte=MARGIN * (QUEUE + WORKERS * (CONNECT + FIRST_BYTE + CLOSE_GRACE)),
            pause=MARGIN * IDLE + CLOSE_GRACE,
        )
        self._over: float | None = None  # when the chaos ended

    async def under_load(self, server: UvicornServer, seconds: float) -> None:
        """Break workers for so long under load; when the last client has its answer, nothing may be left."""
        async with anyio.create_task_group() as background:
            background.start_soon(self._conductor.watch)
            async with anyio.create_task_group() as clients:
                for client in range(CLIENTS):
                    clients.start_soon(self._client, server, client)
                await self._conductor.run(seconds)
                self._over = anyio.current_time()
            background.cancel_scope.cancel()

        self.report.blows = self._conductor.blows
        self.report.longest_recovery = self._conductor.longest_recovery
        self.report.noticed = self._conductor.noticed
        self.report.sent_again = sum(count > 1 for number, count in self.transport.sent.items() if number)
        if any(count > 2 * WORKERS for number, count in self.transport.sent.items() if number):
            self.report.broken.append("a request was sent more than twice to a worker")
        await self.settled()

    async def recover(self, server: UvicornServer) -> None:
        """Ask until every worker has answered, and is healthy with its breaker closed."""
        answered: set[str] = set()
        number = 1
        with anyio.move_on_after(RECOVERY_LIMIT):
            while len(answered) < WORKERS or not self._all_in_service():
                plan = Plan(Job(number, "plain", 2, 0.0), f"back? {number}", None, False)
                answer = await ask(server.host, server.port, plan, self._limits)
                head = Head.parse(answer.raw.partition(b"\r\n\r\n")[0])
                if head.status == 200:
                    answered.update(url.decode() for url in head.header("x-router-worker"))
                number += 1

        assert self._over is not None
        self.report.back_in_service = anyio.current_time() - self._over
        if len(answered) < WORKERS or not self._all_in_service():
            self.report.broken.append(f"not every worker is back in service: {self.router!r}")
        await self.settled()

    async def settled(self) -> None:
        """Nothing may be left of any request."""
        with anyio.move_on_after(SETTLE_LIMIT):
            while self._left_over():  # noqa: ASYNC110 - there is no event to wait for
                await anyio.sleep(0.02)
        if left := self._left_over():
            self.report.broken.append(f"left over: {left}; {self.router!r}")

    def _all_in_service(self) -> bool:
        return all(state.healthy and state.breaker.state is BreakerState.CLOSED for state in self.router.workers)

    def _left_over(self) -> list[str]:
        stats = self.router.stats()
        pool = self.transport.pooled._pool.get()
        left: dict[str, Callable[[], bool]] = {
            "counters": lambda: any(any(counters(worker)) for worker in stats.workers),
            "exchanges": lambda: stats.exchanges > 0,
            "pins": lambda: any(state.prefixes.pinned for state in self.router.workers),
            "queue": lambda: len(self.router._mode.admission) > 0,
            # Probes go on, so the pool is looked at until it is quiet for a moment.
            "requests in the pool": lambda: pool is not None and bool(pool._pool._requests),
            "busy connections": lambda: pool is not None and not all(c.is_idle() for c in pool._pool.connections),
        }
        return [name for name, holds in left.items() if holds()]

    async def _client(self, server: UvicornServer, client: int) -> None:
        for plan in plans(f"{self._seed}/{client}", (client + 1) * 1_000_000):
            if self._over is not None:
                return
            answer = await ask(server.host, server.port, plan, self._limits)
            # Clients wait a moment after an error. Else a worker that fails at once would get nearly all requests:
            # it is the one with the fewest in flight.
            await anyio.sleep(0.01 if self._judge(answer) == "whole" else 0.3)
            self.report.longest_queue = max(self.report.longest_queue, len(self.router._mode.admission))

    def _judge(self, answer: Answer) -> str:
        report = self.report
        number = answer.plan.job.number
        report.longest_request = max(report.longest_request, answer.seconds)
        report.longest_first_wait = max(
            report.longest_first_wait, answer.first_byte - answer.started if answer.first_byte else 0.0
        )
        report.longest_pause = max(report.longest_pause, answer.longest_pause)
        healthy = self._fleet.steady_in(answer.started, answer.ended)
        report.judged += healthy
        try:
            name, code = outcome(answer)
        except (WrongAnswer, ValueError) as exc:  # ValueError: it can't even be parsed
            name, code = f"WRONG: {exc}", None
            report.broken.append(f"request {number} {exc}: {answer.plan} {answer.raw!r}")

        report.outcomes[name] += 1
        first_byte = answer.first_byte - self.transport.sent_at.get(number, answer.first_byte)
        report.longest_first_byte = max(report.longest_first_byte, first_byte)
        if first_byte > MARGIN * FIRST_BYTE + CLOSE_GRACE:
            report.broken.append(f"request {number} had its first byte {first_byte:.2f} s after it was sent")
        unsent = code is not None and not self.transport.sent[number]
        report.failed_unsent += unsent and not healthy
        # What was not taken by one worker, or may be repeated, a healthy one has to answer.
        if healthy and (unsent or name == "worker's 503" or (code is not None and answer.plan.marked)):
            report.broken.append(f"request {number} got {name}, while one was healthy: {answer.seconds:.2f} s")
        return name


async def run(seconds: float, seed: int) -> Report:
    """Run the whole thing, with workers of its own; they are gone afterwards. Bounded: three minutes more at most."""
    fleet = Fleet(WORKERS)
    with anyio.fail_after(seconds + 180):
        async with fleet:
            chaos = Run(fleet, seed)
            app = RouterMiddleware(Starlette(), router=chaos.router)
            async with run_uvicorn(app, proxy_headers=False) as server:
                await chaos.under_load(server, seconds)
                await chaos.recover(server)

    report = chaos.report
    if chaos.transport.pooled._pool.get() is not None:
        report.broken.append("the router's connections are open after its end")
    for pid in (pid for worker in fleet.workers for pid in worker.pids):
        try:
            os.kill(pid, 0)
            report.broken.append(f"process {pid} is left")
        except ProcessLookupError:
            pass
    return report
