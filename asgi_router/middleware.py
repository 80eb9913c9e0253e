"""Owns the front door: is this request ours? And the host app's lifespan, which opens and closes the router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from asgi_router.router import Router
from asgi_router.settings import RouterSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from asgi_router.worker import Worker

ADMIN_PATHS = (
    "/register",
    "/registered",
    "/registered_number",
    "/health_generate",
    "/workers",
    "/workers/breaker",
    "/workers/drain",
)


LAST_WORD_GRACE = 1.0
"""Seconds for which an app's `shutdown.complete` is held back, so that it is the last thing that happens."""


class RouterMiddleware:
    """ASGI middleware that sends completion requests to LLM workers, and all else to `app`.

    With none of the keyword arguments, the settings come from `ASGI_ROUTER_*` environment variables.

    Args:
        app: any ASGI application.
        workers: the short form: URLs (or `Worker` objects); other settings come from the environment.
        settings: all settings.
        router: a router whose state the caller holds, to read its counters or to share it between apps.

    Raises:
        TypeError: more than one of `workers`, `settings` and `router`.
        SettingsError: bad settings; the message names the environment variable.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        workers: Sequence[str | Worker] | None = None,
        settings: RouterSettings | None = None,
        router: Router | None = None,
    ) -> None:
        if sum(given is not None for given in (workers, settings, router)) > 1:
            raise TypeError("RouterMiddleware takes at most one of workers=, settings= and router=")

        if router is None:
            if settings is None:
                settings = RouterSettings() if workers is None else RouterSettings(workers=workers)
            router = Router(settings)

        self.app = app
        self.router = router
        self._paths = frozenset(router.settings.paths)
        self._admin_prefix = router.settings.admin_prefix
        self._serve_models = router.settings.serve_models
        router.models.local_app = app
        self._abort_path = router.settings.abort_path
        self._metrics_path = router.settings.metrics_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and (path := route_path(scope)) in self._paths:
            await self.router.handle(scope, receive, send, path, self.app)
        elif self._metrics_path and self._asks_for_metrics(scope):
            await self.router.metrics(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and route_path(scope) == self._abort_path:
            await self.router.abort(scope, receive, send, self.app)
        elif self._serve_models and scope["type"] == "http" and self.router.models.is_asked(scope, route_path(scope)):
            await self.router.models.answer(scope, receive, send, route_path(scope))
        elif self._admin_prefix and scope["type"] == "http" and is_admin_path(route_path(scope), self._admin_prefix):
            await self.router.admin(mounted(scope, self._admin_prefix), receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _asks_for_metrics(self, scope: Scope) -> bool:
        return (
            scope["type"] == "http"
            and scope["method"] in ("GET", "HEAD")  # what else comes there is the app's
            and route_path(scope) == self._metrics_path
        )

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the router when the app has started; drain it before the app stops, close it after."""
        router = self.router
        opened = False
        failure: Exception | None = None
        last: list[Message] = []
        watching, watched = anyio.CancelScope(), anyio.Event()

        async def watch() -> None:
            try:
                with watching:
                    await router.watch()
            finally:
                watched.set()

        async def send_anyway() -> None:
            await anyio.sleep(LAST_WORD_GRACE)  # an app that doesn't return after its last word
            while last:
                await send(last.pop())

        async def receive_and_drain() -> Message:
            while last:  # an app that goes on after its last word
                await send(last.pop())
            message = await receive()
            if message["type"] == "lifespan.shutdown" and router.users == 1:
                # The app's own clean-up waits for the requests that may need what it cleans up.
                await router.drain()
            return message

        async def send_and_open(message: Message) -> None:
            nonlocal opened
            if message["type"] == "lifespan.startup.complete" and not opened:
                opened = True
                router.enter()
                tasks.start_soon(watch)
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await close()
                last.append(message)
                tasks.start_soon(send_anyway)
                return
            await send(message)

        async def close() -> None:
            nonlocal opened
            if opened:
                opened = False
                watching.cancel()
                try:
                    await watched.wait()  # or a probe could open connections that nobody closes
                finally:
                    await router.leave()

        # The group is entered outside the app, whose own task groups may span its start and stop.
        async with anyio.create_task_group() as tasks:
            try:
                # An app without lifespan raises here, and servers then go on without it; so does the router.
                await self.app(scope, receive_and_drain, send_and_open)
            except Exception as exc:  # carried out by hand: a task group would wrap it
                failure = exc
            finally:
                await close()  # if the app ended without a word
            tasks.cancel_scope.cancel()

        # As the very last thing: servers stop the loop at this word, and complain of an app that goes on.
        for message in last:
            await send(message)
        if failure is not None:
            raise failure


def route_path(scope: Scope) -> str:
    """Return the path within the app that is called: `path` without the `root_path` that a mount has eaten.

    `root_path` counts only if it is a prefix that ends at a segment: FastAPI's `root_path` option puts one
    there that a proxy has already removed from `path`.
    """
    path: str = scope["path"]
    root_path: str = scope.get("root_path", "")
    if root_path and path.startswith(root_path) and path[len(root_path) : len(root_path) + 1] == "/":
        return path[len(root_path) :]

    return path


def is_admin_path(path: str, prefix: str) -> bool:
    """Tell whether the admin API is called: all that is below `prefix`, or its own paths where that is the root."""
    if prefix == "/":
        return path in ADMIN_PATHS
    return path == prefix or path.startswith(prefix + "/")


def mounted(scope: Scope, prefix: str) -> Scope:
    """Return the scope that an app mounted under `prefix` gets: `root_path` longer by it, and a part of `path`."""
    root_path: str = scope.get("root_path", "")
    return {**scope, "root_path": root_path + prefix.rstrip("/"), "path": root_path + route_path(scope)}
