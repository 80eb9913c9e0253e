"""Models of a real worker: llama.cpp where its wheel is installed, else the simulated one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
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
    """A worker in a process of its own."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [*worker_command(simulated=False), "--host", "127.0.0.1", "--port", str(port)]
    with running([command]) as (process,):
        wait_until_healthy(process, url, timeout=30)
        yield url


@asyncio_only
async def test_a_real_worker_is_discovered(llama: str) -> None:
    """The engine's own list decides where requests go, and is passed on as it is, also by a router to a router."""
    async with httpx.AsyncClient(trust_env=False) as client:
        (own,) = (await client.get(f"{llama}/v1/models")).json()["data"]
    name = own["id"]
    router = Router(RouterSettings(workers=[llama], serve_models=True, health_interval=0))
    async with run_uvicorn(RouterMiddleware(Starlette(), router=router)) as engine:
        front = Router(RouterSettings(workers=[engine.url], discover_models=True, health_interval=0))
        await front.models.ask()
        for asked in (router, front):
            (state,) = asked.workers
            assert state.discovered is not None
            said = json.loads(state.discovered[name])
            assert {**said, "created": 0} == {**own, "created": 0}  # llama.cpp's is the time of the answer
            assert (state.serves(name), state.serves("gpt-4")) == (True, False)

        app = RouterMiddleware(Starlette(), router=front)
        served = await Exchange(body=completion_body("Hi", model=name, max_tokens=1)).run(app, timeout=20)
        refused = await Exchange(body=completion_body("Hi", model="gpt-4")).run(app)
        assert (served.status, refused.status) == (200, 404)
        await front.aclose()
