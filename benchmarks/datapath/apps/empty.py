"""Owns the floors: apps that read a request and answer it themselves, without any worker.

Run as `python -m benchmarks.datapath.apps.empty {asgi,starlette} PORT`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.datapath.apps.server import ANSWER, serve

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

PATH = "/v1/chat/completions"
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]


async def pure_asgi(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the least that ASGI asks for."""
    if scope["type"] != "http":  # uvicorn goes on without a lifespan
        raise RuntimeError("HTTP only")
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


async def route(request: Request) -> Response:
    """Answer as a route of Starlette does."""
    await request.body()
    return Response(ANSWER, media_type="application/json")


def main() -> None:
    """Serve one of the two."""
    kind, port = sys.argv[1:]
    serve(pure_asgi if kind == "asgi" else Starlette(routes=[Route(PATH, route, methods=["POST"])]), int(port))


if __name__ == "__main__":
    main()
