"""Owns what tests of the whole router share: a router before scripted workers, and what must hold afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from asgi_router import Router, RouterMiddleware, RouterSettings
from tests.instruments.asgi_client import Exchange
from tests.instruments.fake_worker import FakeFleet, Script

if TYPE_CHECKING:
    from collections.abc import Callable

    from asgi_router.stats import WorkerStats
    from tests.instruments.fake_worker import FakeWorker, Scripts, Step

Kind = Literal["stream", "json"]
KINDS: tuple[Kind, ...] = ("stream", "json")

WORKER = "http://w1:8000"
OTHER = "http://w2:8000"

PROMPT = "You are a ledger. " * 200
"""Several prefix blocks long."""


def completion_body(prompt: str = PROMPT, **fields: object) -> bytes:
    """Return a chat request."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}).encode()


def answer(kind: Kind) -> Script:
    """Return a worker's good answer: a stream of three events, or a JSON body in two chunks."""
    if kind == "stream":
        return Script.sse("Hel", "lo")

    headers = [("content-type", "application/json"), ("content-length", "14")]
    return Script(headers=headers, body=[b'{"answ', b'er": 42}'])


async def unreachable_app(scope: object, receive: object, send: object) -> None:
    """The host app of requests that must never reach it."""
    raise AssertionError("the request was passed on to the host app")


class Routed:
    """A router before scripted workers; called as an ASGI app, it is the middleware around no app."""

    def __init__(self, workers: Mapping[str, Scripts] | Scripts, **settings: object) -> None:
        """Take how the workers answer (or the only one, which is `WORKER`), the settings of the router, and `clock`."""
        clock = cast("Callable[[], float]", settings.pop("clock", time.monotonic))
        scripts = workers if isinstance(workers, Mapping) else {WORKER: workers}
        self.fleet = FakeFleet(scripts)
        self.router = Router(RouterSettings(workers=list(scripts), **settings), transport=self.fleet, clock=clock)
        self.app = RouterMiddleware(unreachable_app, router=self.router)

    @property
    def worker(self) -> FakeWorker:
        """The first worker."""
        return self.fleet[WORKER]

    @property
    def counters(self) -> list[tuple[int, int, int, int]]:
        """All counters of all workers."""
        return [counters(worker) for worker in self.router.stats().workers]

    def assert_released(self, exchange: Exchange | None = None, *, responses_closed: bool = True) -> None:
        """Every counter is back at zero, every response closed, at most one start and one end were sent."""
        assert self.counters == [(0, 0, 0, 0)] * len(self.counters)
        assert self.router.stats().exchanges == 0
        assert all(state.prefixes.pinned == 0 for state in self.router.workers)
        if responses_closed:
            self.fleet.assert_clean()
        if exchange is not None:
            assert exchange.starts <= 1
            assert exchange.ends <= 1
            assert not exchange.violations


def counters(worker: WorkerStats) -> tuple[int, int, int, int]:
    """Return the counters of one worker."""
    return worker.requests, worker.prefill_tokens, worker.waiting_requests, worker.pending_prefill_tokens


def exchange_for(**options: object) -> Exchange:
    return Exchange(body=completion_body(), **options)  # type: ignore[arg-type]


def interrupted(kind: Kind, *steps: Step, after: int = 1) -> Script:
    """The good answer up to `after` chunks, then these steps."""
    script = answer(kind)
    return replace(script, body=[*list(script.body)[:after], *steps])


def error_of(exchange: Exchange) -> tuple[int | None, object]:
    """The status, and the code of the OpenAI-shaped error."""
    body = exchange.json()
    assert isinstance(body, dict)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return exchange.status, body["error"]["code"]
