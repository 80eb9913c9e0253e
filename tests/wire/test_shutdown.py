"""Owns the end of a server's process: nothing of the router's lives on, and the server has nothing to complain of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, uvicorn
from starlette.applications import Starlette
from asgi_router import RouterMiddleware

app = Starlette()
app.add_middleware(RouterMiddleware, workers=["http://127.0.0.1:9"])
server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="{lifespan}", loop="{loop}"))

async def serve():
    asyncio.get_running_loop().call_later(0.3, setattr, server, "should_exit", True)
    await server.serve()

asyncio.run(serve())
"""


@pytest.mark.parametrize("lifespan", ["auto", "on"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_uvicorn_ends_in_peace(lifespan: str, loop: str) -> None:
    """uvicorn stops its loop at the app's last word: an app that still has something to do then looks broken to it."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(lifespan=lifespan, loop=loop)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "Application shutdown complete" in result.stderr
    assert "unsupported" not in result.stderr
    assert "Traceback" not in result.stderr
