"""An engine's own server that is its fleet's router, too: `python -m tests.peers.engine PORT`.

The engine is the example's simulated one. The middleware is added as vLLM does it (`--middleware`), and has its
settings from the environment. `GET /served` tells how many completions the engine has served.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import uvicorn
from starlette.responses import JSONResponse

from asgi_router import RouterMiddleware
from example_app.parent import stop_when_stdin_closes
from example_app.simulated_worker import create_app

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send


class CountServed:
    """Counts what reaches the engine itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            scope["app"].state.served += 1
        await self._app(scope, receive, send)


async def served(request: Request) -> JSONResponse:
    return JSONResponse(request.app.state.served)


def main() -> None:
    stop_when_stdin_closes()
    app = create_app()
    app.state.served = 0
    app.add_route("/served", served)
    app.add_middleware(CountServed)
    app.add_middleware(RouterMiddleware)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
