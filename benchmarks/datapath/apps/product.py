"""Owns the product as a candidate, on its own transport and on stock httpx.

Run as `python -m benchmarks.datapath.apps.product {own,stock} PORT WORKER_URL ...`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from asgi_router import Router, RouterMiddleware, RouterSettings
from benchmarks.datapath.apps.server import serve

if TYPE_CHECKING:
    from starlette.requests import Request


def stock_transport(settings: RouterSettings) -> httpx.AsyncHTTPTransport:
    """Return httpx's own transport, with limits under which it does its best here.

    By its defaults it keeps 20 idle connections and opens a hundred at most.
    """
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=256, keepalive_expiry=settings.keepalive_expiry
    )
    return httpx.AsyncHTTPTransport(limits=limits, trust_env=False)


def application(router: Router) -> Starlette:
    """Return the app of a user, and a route that tells the router's counters to the leak checks."""

    async def stats(request: Request) -> JSONResponse:
        return JSONResponse(asdict(router.stats()))

    return Starlette(routes=[Route("/bench/stats", stats)], middleware=[Middleware(RouterMiddleware, router=router)])


def main() -> None:
    """Serve the whole product: the default policy, health probes, and metrics where their extra is installed."""
    transport, port, *workers = sys.argv[1:]
    metrics_path = "/metrics" if find_spec("prometheus_client") else None
    settings = RouterSettings(workers=workers, policy="prefill_cost", metrics_path=metrics_path)
    router = Router(settings, transport=stock_transport(settings) if transport == "stock" else None)
    with suppress(KeyboardInterrupt):
        serve(application(router), int(port))


if __name__ == "__main__":
    main()
