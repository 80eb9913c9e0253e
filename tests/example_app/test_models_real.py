"""Owns models with a real engine: what llama.cpp says that it serves, through one router and through two."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette

from asgi_router import Router, RouterMiddleware, RouterSettings
from example_app.__main__ import worker_command
from example_app.worker_processes import free_ports, running, wait_until_healthy
from tests.instruments import asyncio_only
from tests.instruments.asgi_client import Exchange
from tests.instruments.servers import run_uvicorn
from tests.routed import completion_body

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    """A real llama.cpp worker."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [*worker_command(simulated=False), "--host", "127.0.0.1", "--port", str(port)]
    with running([command]) as (process,):
        wait_until_healthy(process, url, timeout=30)
        yield url


@asyncio_only
async def test_a_real_worker_is_discovered(llama: str) -> None:
    """llama.cpp's own list decides where requests go, and is passed on; nothing is left of the connections."""
    settings = RouterSettings(workers=[llama], serve_models=True, health_interval=0)
    router = Router(settings)
    async with run_uvicorn(RouterMiddleware(Starlette(), router=router)) as engine:
        front = Router(RouterSettings(workers=[engine.url], discover_models=True, health_interval=0))
        await router.models.ask()
        await front.models.ask()
        for asked in (router, front):  # the second one asks the first: routers in a row
            (state,) = asked.workers
            assert state.discovered is not None
            said = json.loads(state.discovered["tiny"])
            assert (said["id"], said["owned_by"]) == ("tiny", "llamacpp")
            assert (state.serves("tiny"), state.serves("gpt-4")) == (True, False)

        app = RouterMiddleware(Starlette(), router=front)
        served = await Exchange(body=completion_body("Hi", model="tiny", max_tokens=1)).run(app, timeout=20)
        refused = await Exchange(body=completion_body("Hi", model="gpt-4")).run(app)
        assert (served.status, refused.status) == (200, 404)
        await front.aclose()
