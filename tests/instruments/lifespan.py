"""The raw lifespan harness: plays the server for an app's `lifespan` scope, on asyncio and trio.

Shows: whether startup and shutdown were answered, in what order, and what was raised; a shutdown that waits (for
requests to drain) is awaited by the test. Cannot show: a server's own order of things at shutdown (`servers.py`).

    async with Lifespan().running(app) as life:
        assert life.supported
        await life.shutdown()  # optional: leaving the block does it
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from tests.instruments.steps import Changes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message, Scope


class Lifespan:
    """One lifespan call. `sent` holds the types of the app's messages, without "lifespan.", in order."""

    def __init__(self) -> None:
        self.scope: Scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self.sent: list[str] = []
        self.exception: Exception | None = None
        self.ended = False
        self._received = 0
        self._may_shut_down = anyio.Event()
        self._changes = Changes()

    @property
    def supported(self) -> bool:
        """The app answered its startup; if not, a server with `lifespan="auto"` carries on without."""
        return "startup.complete" in self.sent

    @asynccontextmanager
    async def running(self, app: ASGIApp, *, timeout: float = 5.0) -> AsyncIterator[Lifespan]:
        """Start the app up, and shut it down when leaving. What the app raises is kept in `exception`, not raised."""
        failure: Exception | None = None
        with anyio.fail_after(timeout):
            async with anyio.create_task_group() as group:
                group.start_soon(self._drive, app)
                await self._changes.until(lambda: self.ended or bool(self.sent))
                try:
                    yield self
                    await self.shutdown()
                except Exception as error:
                    failure = error
                group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def shutdown(self) -> None:
        """Tell the app to shut down, and return when it has answered or ended."""
        self._may_shut_down.set()
        await self._changes.until(lambda: self.ended or any(kind.startswith("shutdown.") for kind in self.sent))

    async def _drive(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self._receive, self._send)
        except Exception as error:
            self.exception = error
        finally:
            self.ended = True
            self._changes.tell()

    async def _receive(self) -> Message:
        await anyio.lowlevel.checkpoint()
        self._received += 1
        if self._received == 1:
            return {"type": "lifespan.startup"}
        await self._may_shut_down.wait()
        if self._received > 2:
            await anyio.sleep_forever()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: Message) -> None:
        prefix, _, kind = message["type"].partition(".")
        stage = kind.partition(".")[0]
        assert prefix == "lifespan", f"a message of type {message['type']!r} in a lifespan"
        assert kind in {"startup.complete", "startup.failed", "shutdown.complete", "shutdown.failed"}, kind
        assert not any(earlier.startswith(stage) for earlier in self.sent), f"a second answer: {kind}"
        assert stage == "startup" or self._may_shut_down.is_set(), "shutdown answered before it was asked for"
        self.sent.append(kind)
        self._changes.tell()
        await anyio.lowlevel.checkpoint()
