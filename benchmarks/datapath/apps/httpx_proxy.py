"""Owns the proxy that one writes first: `httpx.AsyncClient.stream`, round robin, and nothing else.

Run as `python -m benchmarks.datapath.apps.httpx_proxy PORT WORKER_URL ...`.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import httpx

from benchmarks.datapath.apps.server import serve

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

NOT_FORWARDED = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding"}


class HttpxProxy:
    """Sends each request to the next worker. It makes its client in the loop that serves it."""

    def __init__(self, workers: list[str]) -> None:
        self._workers = itertools.cycle(workers)
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("HTTP only")
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0)
            self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_FORWARDED]
        url = next(self._workers) + scope["path"]
        async with self._client.stream(scope["method"], url, headers=headers, content=body) as response:
            kept = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in NOT_FORWARDED]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    serve(HttpxProxy(sys.argv[2:]), int(sys.argv[1]))
