"""Owns what the tests of the admin API share: a router that serves it, and calls to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.instruments.asgi_client import Exchange
from tests.routed import OTHER, WORKER, Routed, answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp

    from tests.instruments.fake_worker import Script

TOKEN = "PLANTED-TOKEN"
BEARER = ("authorization", f"Bearer {TOKEN}")
PAYLOAD: dict[str, object] = {"role": "mixed", "host_ip": "w2", "port": 8000}
"""What makes `OTHER` a worker."""


def administered(other: Script | None = None, **settings: object) -> Routed:
    """A router with the admin API, of which `WORKER` is the only worker, while `OTHER` could be one."""
    scripts = {WORKER: answer("json"), OTHER: other or answer("json")}
    routed = Routed(scripts, **{"admin_prefix": "/router", "admin_token": TOKEN, **settings})
    routed.router.workers.remove(OTHER)
    return routed


async def call(
    app: ASGIApp | Routed,
    method: str,
    target: str,
    payload: object = None,
    *,
    headers: Sequence[tuple[str, str]] = (BEARER,),
) -> Exchange:
    """Call the admin API, which is under `/router`; its answer is JSON in any case."""
    path, _, query = target.partition("?")
    exchange = Exchange(
        method=method,
        path=f"/router{path}",
        query_string=query.encode(),
        body=payload if isinstance(payload, bytes) else json.dumps(payload).encode(),
        headers=headers,
    )
    await exchange.run(app.app if isinstance(app, Routed) else app)
    assert exchange.header("content-type") == [b"application/json"]
    return exchange


def urls(routed: Routed) -> list[str]:
    """The workers that are in service or draining, in their order."""
    return [worker.url for worker in routed.router.stats().workers]
