"""The load of real workers, llama.cpp where it is installed, as they tell it and as a router goes by it."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpx
import pytest

from asgi_router import Router, RouterMiddleware, RouterSettings
from asgi_router.scheduling.policies import REMOTE_POLICIES
from tests.example_app.launcher import Launcher
from tests.instruments.asgi_client import Exchange
from tests.routed import completion_body, unreachable_app

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = 6  # more than llama.cpp has slots, so that some wait; fewer than its HTTP threads, so that it says so
SECONDS = 30


@pytest.fixture(scope="module", params=[(), ("--simulated",)], ids=["real", "simulated"])
def workers(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """The URLs of two workers."""
    with Launcher(*request.param) as launcher:
        first, second = launcher.start().workers
        yield first, second


@contextlib.contextmanager
def kept_busy(url: str) -> Iterator[None]:
    """Let others send one completion after the other to the worker, past any router of ours."""
    over = threading.Event()

    def client() -> None:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 250}
        with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as http:
            while not over.is_set():
                http.post("/v1/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(SECONDS)


def told(router: Router) -> list[int | None]:
    """How many requests run at each worker, by its own word."""
    return [worker.remote_running for worker in router.stats().workers]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("policy", sorted(REMOTE_POLICIES))
@pytest.mark.parametrize("busy", [0, 1])
async def test_requests_avoid_a_worker_that_others_keep_busy(workers: tuple[str, str], policy: str, busy: int) -> None:
    """A worker's own word on its load is read over HTTP, and our requests go to the worker that others leave alone."""
    settings = RouterSettings(
        workers=list(workers),
        policy=policy,
        load_interval=0.02,
        load_max_age=SECONDS,
        decision_headers=True,
    )
    router = Router(settings)
    app = RouterMiddleware(unreachable_app, router=router)

    def is_told() -> bool:
        return bool(told(router)[busy]) and None not in told(router)

    with kept_busy(workers[busy]), anyio.fail_after(SECONDS):
        # Between two completions of these clients the worker has none: what it said before counts, and nothing later.
        while not is_told():
            async with router:
                while not is_told():
                    await anyio.lowlevel.checkpoint()
        for number in range(10):
            exchange = await Exchange(body=completion_body(f"Prompt {number}.", max_tokens=2)).run(app)
            assert exchange.status == 200
            assert exchange.header("x-router-worker") == [workers[1 - busy].encode()]

    assert [worker.requests for worker in router.stats().workers] == [0, 0]
