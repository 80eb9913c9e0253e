"""Owns how the Python candidates are served: all in the same way, so that their differences are their own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp

ANSWER = json.dumps(
    {
        "id": "chatcmpl-00000000",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "lorem ipsum " * 36}}],
    }
).encode()
"""About as long as the mock worker's, for apps that answer by themselves."""


def serve(app: ASGIApp, port: int) -> None:
    """Serve `app` on loopback until a signal ends it: uvloop, httptools, no access log."""
    uvicorn.run(
        app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning"
    )
