"""Owns how simulated workers pretend to hand a prompt's KV cache from prefill to decode: a number stands for it.

What is said is what vLLM's workers say. A prefill worker answers where the cache is (`kv_transfer_params`), the router
carries that to a decode worker, and this one fetches it, here over HTTP from the prefill worker's own port.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING

import httpx
from starlette.responses import JSONResponse, Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

FETCH_SECONDS = 5.0
MOST_KEPT = 1024  # caches that nobody has fetched; a request that ends between its two workers leaves one


class HandOver:
    """Caches that wait for their decode worker, each by its id: how many tokens are in it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, int] = OrderedDict()

    def offer(self, request: Request, tokens: int) -> dict[str, object]:
        """Keep a cache, and return where it is to be had, for the answer to `request`."""
        key = str(uuid.uuid4())
        self._kept[key] = tokens
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

        host, port = request.scope["server"]
        where = {"remote_host": host, "remote_port": port, "remote_request_id": key}
        return {"do_remote_prefill": True, "do_remote_decode": False, **where}

    async def give(self, request: Request) -> Response:
        """Answer a decode worker: each cache is fetched once."""
        tokens = self._kept.pop(request.path_params["key"], None)
        if tokens is None:
            return JSONResponse({"error": "no such cache"}, status_code=404)
        return JSONResponse({"tokens": tokens})


async def fetch(where: Mapping[str, object]) -> int:
    """Return how many tokens are in the cache that a prefill worker has offered; 0 where it is not to be had."""
    try:
        url = f"http://{where['remote_host']}:{where['remote_port']}/kv/{where['remote_request_id']}"
        async with httpx.AsyncClient(trust_env=False, timeout=FETCH_SECONDS) as client:
            return int((await client.get(url)).raise_for_status().json()["tokens"])
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, TypeError, ValueError):
        return 0  # it computes what it didn't get, as real workers can
