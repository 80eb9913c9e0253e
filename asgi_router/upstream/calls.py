"""Owns the router's own calls to workers, beside the requests that it passes on: small, and bounded in all ways."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import anyio
import httpx

from asgi_router.upstream.answer import HttpxAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp

MAX_ANSWER_BYTES = 4 * 1024 * 1024

logger = logging.getLogger("asgi_router")


class WholeAnswer(NamedTuple):
    """What a worker has answered, whole."""

    status: int
    body: bytes


class WorkerCalls:
    """Calls workers for the router itself: what are your models, what is your load, stop this request.

    Args:
        transport: how calls reach the workers.
        api_key: a bearer token to send with each.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, api_key: str | None = None) -> None:
        self._transport = transport
        self._api_key = api_key
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def to_app(self, app: ASGIApp) -> WorkerCalls:
        """Return the like for a worker that is an app in this process, at any URL."""
        return WorkerCalls(httpx.ASGITransport(app), self._api_key)

    async def call(
        self, method: str, url: str, *, timeout: float, json: object = None, headers: Mapping[str, str] | None = None
    ) -> WholeAnswer | None:
        """Return the answer, or None where there is none within `timeout` seconds, or one of over 4 MiB."""
        with anyio.move_on_after(timeout):
            try:
                return await self._call(method, url, timeout, json, headers or {})
            except Exception as exc:
                logger.debug("%s: call failed (%s)", url, type(exc).__name__)
        return None

    async def _call(
        self, method: str, url: str, timeout: float, json: object, headers: Mapping[str, str]
    ) -> WholeAnswer | None:
        timeouts = {"connect": timeout, "read": timeout, "write": timeout, "pool": None}
        headers = {**self._headers, **headers}
        request = httpx.Request(method, url, headers=headers, json=json, extensions={"timeout": timeouts})
        answer = HttpxAnswer(await self._transport.handle_async_request(request))
        body = bytearray()
        try:
            while chunk := await answer.read():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return None
        finally:
            await answer.aclose()
        return WholeAnswer(answer.status, bytes(body))
