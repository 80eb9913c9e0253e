"""A cache-aware router for LLM workers, as ASGI middleware."""

from __future__ import annotations

import logging

from asgi_router.middleware import RouterMiddleware
from asgi_router.router import Router
from asgi_router.settings import RouterSettings
from asgi_router.worker import Role, Worker

__all__ = ["Role", "Router", "RouterMiddleware", "RouterSettings", "Worker"]

# The host app decides whether and where our records are shown.
logging.getLogger("asgi_router").addHandler(logging.NullHandler())
