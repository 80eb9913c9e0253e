"""Owns the door of the example: an API key, as OpenAI clients send it, checked ahead of everything else."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketClose

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send


class ApiKeyMiddleware:
    """Let requests with one of `keys` as bearer token through to `app`, and everyone when there are no keys.

    Pure ASGI: Starlette's `BaseHTTPMiddleware` would run the app in another task and stand between the router
    and the client, whose leaving the router wants to see at once.
    """

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: Iterable[str] = ("/healthz",)) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008)(scope, receive, send)
        else:
            await _unauthorized()(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in self._open_paths:
            return True

        kind, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.strip().encode()
        # Every key is compared, each in constant time: how long this takes tells nothing about the keys.
        matches = sum(secrets.compare_digest(given, key) for key in self._keys)
        return kind.lower() == "bearer" and matches > 0


def _unauthorized() -> JSONResponse:
    error = {
        "message": "Missing or wrong API key. Send it as 'Authorization: Bearer KEY'.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }
    return JSONResponse({"error": error}, status_code=401, headers={"www-authenticate": "Bearer"})
