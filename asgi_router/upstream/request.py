"""Owns the request that a worker gets: the client's bytes, at the worker's address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from asgi_router.errors import InvalidRequest
from asgi_router.headers import request_headers

if TYPE_CHECKING:
    from starlette.types import Scope


def upstream_request(
    scope: Scope, url: str, body: bytes, *, request_id: str, connect_timeout: float, write_timeout: float | None
) -> httpx.Request:
    """Return the request of the ASGI `scope` for the worker's `url`, with the client's query string.

    It has an `x-request-id`: the client's own, or else `request_id`.

    Reading has no time-out here: the exchange's own deadline knows a first byte from a pause.

    Raises:
        InvalidRequest: the query string can't stand in a URL.
    """
    target = httpx.URL(url)
    try:
        if query := scope.get("query_string"):
            target = target.copy_with(raw_path=target.raw_path + b"?" + query)
    except (httpx.InvalidURL, ValueError) as exc:
        raise InvalidRequest("The request's query string can't be forwarded.") from exc

    timeouts = {"connect": connect_timeout, "write": write_timeout, "read": None, "pool": None}
    headers = request_headers(scope)
    if not any(name == b"x-request-id" for name, _ in headers):
        headers.append((b"x-request-id", request_id.encode()))
    return httpx.Request("POST", target, headers=headers, content=body, extensions={"timeout": timeouts})
