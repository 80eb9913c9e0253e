"""Owns the host app: its own routes, its own middleware, and the router among them. Copy from here.

    uvicorn example_app.app:app

The router reads `ASGI_ROUTER_*`. The app itself reads `EXAMPLE_API_KEYS`, a comma list of the keys that
clients may use. Unset, everyone is let in.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from asgi_router import Router, RouterMiddleware, RouterSettings
from example_app.api_key import ApiKeyMiddleware

if TYPE_CHECKING:
    from starlette.requests import Request


def create_app(router: Router | None = None) -> Starlette:
    """Return the app. Without a `router`, it makes its own from the environment."""
    router = router or Router(RouterSettings())

    team = Starlette(routes=[Route("/about", about)])
    app = Starlette(
        routes=[
            Route("/", index),
            Route("/healthz", healthz),
            Route("/router-stats", router_stats),
            # The same router in front of a mounted app: /team/v1/... shares its workers and its counters.
            Mount("/team", app=RouterMiddleware(team, router=router)),
        ]
    )
    app.state.router = router

    # The last one added is the outermost, so read from the bottom: a request passes CORS, which answers a
    # browser's preflight, then the key check, then the router.
    app.add_middleware(RouterMiddleware, router=router)
    app.add_middleware(ApiKeyMiddleware, keys=api_keys())
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=r"https?://(localhost|127\.0\.0\.1)(:\d+)?",
        allow_headers=["authorization", "content-type"],
        allow_methods=["GET", "POST"],
        expose_headers=["x-router-worker"],
    )
    return app


def api_keys() -> list[str]:
    """Return the keys in `EXAMPLE_API_KEYS`: none means that everyone is let in."""
    return [key.strip() for key in os.environ.get("EXAMPLE_API_KEYS", "").split(",") if key.strip()]


async def index(request: Request) -> Response:
    """What is here."""
    return JSONResponse(
        {
            "routed": ["POST /v1/chat/completions", "POST /v1/completions", "POST /team/v1/..."],
            "own": ["GET /", "GET /healthz", "GET /router-stats", "GET /team/about"],
        }
    )


async def healthz(request: Request) -> Response:
    """This process is up. It says nothing about the workers."""
    return JSONResponse({"status": "ok"})


async def router_stats(request: Request) -> Response:
    """What the router has in flight now, per worker."""
    router: Router = request.app.state.router
    return JSONResponse(dataclasses.asdict(router.stats()))


async def about(request: Request) -> Response:
    """A route of the mounted app: routing completions leaves it alone."""
    return JSONResponse({"app": "team"})


app = create_app()
