"""Owns the proxy that one writes first: `httpx.AsyncClient.stream`, round robin, and nothing else.

Run as `python -m benchmarks.datapath.apps.httpx_proxy {stock,tuned} PORT WORKER_URL ...`:

stock: `pip install httpx`, `httpx.AsyncClient()`, and no more. There is no `sniffio` then, which httpcore tries to
    import several times for each request.
tuned: what makes it faster: `sniffio`, more connections, and no look at the environment.
"""

from __future__ import annotations

import itertools
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

import httpx

from benchmarks.datapath.apps.server import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from starlette.types import Receive, Scope, Send

NOT_FORWARDED = {b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding"}


class HttpxProxy:
    """Sends each request to the next worker. It makes its client in the loop that serves it."""

    def __init__(self, workers: list[str], new_client: Callable[[], httpx.AsyncClient]) -> None:
        self._workers = itertools.cycle(workers)
        self._new_client = new_client
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError("HTTP only")
        if self._client is None:
            self._client = self._new_client()
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


class WithoutSniffio(PathFinder):
    """Finds no `sniffio`, after it was looked for as long as for anything that isn't there."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module, as its base does."""
        return super().find_spec("no_such_sniffio" if fullname == "sniffio" else fullname, path, target)


def tuned_client() -> httpx.AsyncClient:
    """Return a client that does its best here."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0)
    return httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)


def main() -> None:
    """Serve one of the two."""
    kind, port, *workers = sys.argv[1:]
    if kind == "stock":
        sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutSniffio
        assert "sniffio" not in sys.modules  # or it would be found without being looked for
    serve(HttpxProxy(workers, httpx.AsyncClient if kind == "stock" else tuned_client), int(port))


if __name__ == "__main__":
    main()
