"""The raw ASGI harness: server and client for one `app(scope, receive, send)` call, exact to the message.

Shows: what the application sends and when, on asyncio and trio; that it notices a disconnect, a `send` that
raises or blocks, and a cancelled scope, at a moment the test chooses; that it keeps the ASGI rules. Cannot
show: sockets, framing, pools, a server's shutdown or native task cancellation (see `servers.py`,
`raw_http.py` and `cancel.py`), and an application that never yields to the loop hangs it as it would hang
any server.

    exchange = await Exchange(body=b'{"model": "m"}').run(app)  # to the end, bounded
    assert (exchange.status, exchange.body) == (200, b"...")

    exchange = Exchange(at={2: DISCONNECT})  # the client goes after the second body message
    async with exchange.running(app):  # the app runs beside the block; leaving waits for it
        await exchange.started()
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio

from tests.instruments.asgi_rules import ASGIViolation
from tests.instruments.asgi_wire import Action, Moment, Server, Upload, Wire
from tests.instruments.steps import DISCONNECT, HANG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from starlette.types import ASGIApp, Scope

__all__ = ["DISCONNECT", "HANG", "ASGIViolation", "Exchange"]


class Exchange(Wire):
    """One HTTP request and what became of it. Use each instance once.

    `path` includes `root_path`, as uvicorn's does. `headers` replace the default host, content-type and
    framing headers of the same name. `body` is the whole body, or a script of chunks with events (the
    upload pauses), `HANG` (it stalls) or `DISCONNECT`. `at` says what `send` does at a message, before
    taking it (raise, wait for an event, `HANG`) or after (`DISCONNECT`): at the "start", at the n-th body
    message (from 1, the end included), at the "end". `server="hypercorn"` delivers the disconnect once,
    then hangs; uvicorn repeats it. `spec_version=None` leaves the scope without its "asgi" key. After a
    disconnect `send` is silent, or raises `late_send`. With `send_suspends=False` it never yields to the
    loop, as uvicorn's does not while the client keeps up. `scope` may be changed before the run.
    """

    def __init__(
        self,
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        root_path: str = "",
        query_string: bytes = b"",
        raw_path: bytes | None = None,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | Sequence[Upload] = b"{}",
        client: tuple[str, int] | None = ("127.0.0.1", 50000),
        spec_version: str | None = "2.3",
        server: Server = "uvicorn",
        at: Mapping[Moment, Action] | None = None,
        late_send: Exception | None = None,
        send_suspends: bool = True,
    ) -> None:
        super().__init__(
            method=method,
            upload=[body] if isinstance(body, bytes) else body,
            server=server,
            at=at or {},
            late_send=late_send,
            send_suspends=send_suspends,
        )
        framing = ("transfer-encoding", "chunked")
        if isinstance(body, bytes):
            framing = ("content-length", str(len(body)))
        defaults = [("host", "testserver"), ("content-type", "application/json"), framing]
        given = {name.lower() for name, _ in headers}
        sent = [*(default for default in defaults if default[0] not in given), *headers]
        self.scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode() if raw_path is None else raw_path,
            "root_path": root_path,
            "query_string": query_string,
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in sent],
            "client": client,
            "server": ("testserver", 80),
        }
        if spec_version is not None:
            self.scope["asgi"] = {"version": "3.0", "spec_version": spec_version}
        self.ended = False  # the app call is over
        self.returned = False  # ... because it returned
        self.cancelled = False  # ... because `cancel()` cancelled it, and it did not swallow that
        self.exception: BaseException | None = None  # ... because it raised this
        self._swallowed = False
        self._scope: anyio.CancelScope | None = None

    def __repr__(self) -> str:
        flags = [f for f in ("complete", "disconnected", "hanging", "returned", "cancelled") if getattr(self, f)]
        counts = f"status={self.status} starts={self.starts} chunks={len(self.chunks)} ends={self.ends}"
        return f"<Exchange {self.scope['path']} {counts} {' '.join(flags)} exception={self.exception!r}>"

    async def run(self, app: ASGIApp, *, timeout: float = 5.0) -> Exchange:
        """Call the app to its end. Raises what it raises, or `TimeoutError` after `timeout` seconds."""
        with anyio.move_on_after(timeout) as bound:
            await self._drive(app, bound)
        self._judge(bound)
        return self

    @asynccontextmanager
    async def running(self, app: ASGIApp, *, timeout: float = 5.0) -> AsyncIterator[Exchange]:
        """Run the app beside the block and wait for it when leaving. Raises as `run` does, never a group."""
        failure: Exception | None = None
        with anyio.move_on_after(timeout) as bound:
            async with anyio.create_task_group() as group:
                group.start_soon(self._drive_quietly, app, bound)
                try:
                    yield self
                except Exception as error:
                    failure = error
                    group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if self.exception is not None and not bound.cancelled_caught:
            raise self.exception
        self._judge(bound)

    def cancel(self) -> None:
        """Cancel the anyio scope around the app call, as a host's time-out does."""
        assert self._scope is not None, "the app is not running yet"
        self._scope.cancel()

    async def started(self) -> None:
        """Return when the client has the status. This and the next three fail if the app ends first."""
        await self._until(lambda: self.status is not None, "the start")

    async def body_at_least(self, messages: int) -> None:
        """Return when the client has that many body messages."""
        await self._until(lambda: len(self.chunks) >= messages, f"{messages} body messages")

    async def completed(self) -> None:
        """Return when the client has the end message; the app may still be inside its last `send`."""
        await self._until(lambda: self.complete, "the end message")

    async def hung(self) -> None:
        """Return when a `send` is parked at a `HANG`."""
        await self._until(lambda: self.hanging, "a hanging send")

    async def over(self) -> None:
        """Return when the app call has ended, however it did."""
        await self.changes.until(lambda: self.ended)

    @property
    def body(self) -> bytes:
        """What the client got."""
        return b"".join(self.chunks)

    @property
    def finished_cleanly(self) -> bool:
        """The client got a whole response, and the app returned without an exception or a violation."""
        return self.complete and self.returned and not self.violations

    def json(self) -> object:
        """The body, parsed."""
        return json.loads(self.body)

    def header(self, name: str) -> list[bytes]:
        """All values of one response header, in order."""
        return [value for key, value in self.headers if key == name.lower().encode()]

    async def _drive(self, app: ASGIApp, bound: anyio.CancelScope) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                await app(self.scope, self.receive, self.send)
                self.returned = True
                self._swallowed = bound.cancel_called
                if self.starts == 0 and not self.disconnected and not self._scope.cancel_called:
                    self.violations.append("the application returned without starting a response")
            self.cancelled = self._scope.cancelled_caught
        except BaseException as error:
            self.exception = error
            raise
        finally:
            self.ended = True
            self.changes.tell()

    async def _drive_quietly(self, app: ASGIApp, bound: anyio.CancelScope) -> None:
        with suppress(Exception):  # `running` raises it once the group is gone
            await self._drive(app, bound)

    def _judge(self, bound: anyio.CancelScope) -> None:
        if self._swallowed:
            raise AssertionError(f"the application swallowed a cancellation: {self!r}")
        if bound.cancelled_caught:
            raise TimeoutError(f"not over in time: {self!r}") from self.exception
        if self.violations:
            raise ASGIViolation("; ".join(self.violations))

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await self.changes.until(lambda: condition() or self.ended)
        if not condition():
            raise AssertionError(f"the application ended before {what}: {self!r}") from self.exception
