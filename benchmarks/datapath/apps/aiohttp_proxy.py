"""Owns the same simple proxy on aiohttp's client. It runs in a rival's environment: aiohttp is no part of the project.

Run as `python -m benchmarks.datapath.apps.aiohttp_proxy PORT WORKER_URL ...`.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import aiohttp  # type: ignore[import-not-found]

from benchmarks.datapath.apps.server import serve

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

NOT_FORWARDED = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding"}


class AiohttpProxy:
    """Sends each request to the next worker. It makes its session in the loop that serves it."""

    def __init__(self, workers: list[str]) -> None:
        self._workers = itertools.cycle(workers)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("HTTP only")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in NOT_FORWARDED]
        url = next(self._workers) + scope["path"]
        async with self._session.request(scope["method"], url, headers=headers, data=body) as response:
            kept = [(k.lower(), v) for k, v in response.raw_headers if k.lower() not in NOT_FORWARDED]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    serve(AiohttpProxy(sys.argv[2:]), int(sys.argv[1]))
