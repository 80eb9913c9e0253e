"""A real uvicorn on a free port: in the test's own loop, or in a thread for clients that block.

Shows: what h11 and httptools make of an app on the wire, the lifespan, `root_path`, keep-alive, and the order of a
graceful shutdown. Cannot show: signals and the process's death (uvicorn's own signal handling is switched off), or
several processes. asyncio and uvloop only. uvicorn logs through `logging`, so `caplog` sees its complaints.

    async with run_uvicorn(app, http="h11") as server:
        ...  # server.url, server.host, server.port; `await server.stop()` to shut down early
    with run_uvicorn_in_thread(app) as server:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import anyio
import uvicorn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator

    from starlette.types import ASGIApp

STOP_TIMEOUT = 10.0


class Options(TypedDict, total=False):
    """What else a test may ask of uvicorn; see `uvicorn.Config`. Times are in whole seconds."""

    http: Literal["h11", "httptools"]
    lifespan: Literal["auto", "on", "off"]
    ws: Literal["none", "wsproto", "websockets-sansio"]
    root_path: str
    proxy_headers: bool
    limit_concurrency: int | None
    timeout_keep_alive: int
    timeout_graceful_shutdown: int | None


class UvicornServer(uvicorn.Server):
    """uvicorn on a socket of ours, stopped by us instead of by a signal."""

    def __init__(self, app: ASGIApp, options: Options) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=options.get("http", "h11"),
            lifespan=options.get("lifespan", "auto"),
            ws=options.get("ws", "none"),
            root_path=options.get("root_path", ""),
            proxy_headers=options.get("proxy_headers", True),
            limit_concurrency=options.get("limit_concurrency"),
            timeout_keep_alive=options.get("timeout_keep_alive", 5),
            timeout_graceful_shutdown=options.get("timeout_graceful_shutdown"),
        )
        super().__init__(config)
        # asyncio sets TCP_NODELAY only where the protocol is named; Nagle's algorithm costs 40 ms for each answer.
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.bind(("127.0.0.1", 0))
        self.host, self.port = self.socket.getsockname()
        self.url = f"http://{self.host}:{self.port}"
        self.ready = threading.Event()  # it listens, or has failed
        self._ready = asyncio.Event()  # the same, for its own loop
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        state = self.server_state
        return f"<UvicornServer {self.url} connections={len(state.connections)} tasks={len(state.tasks)}>"

    async def run_until_stopped(self) -> None:
        """Serve. Raises `RuntimeError` if the app's startup fails."""
        self._loop = asyncio.get_running_loop()
        try:
            await self.serve(sockets=[self.socket])
        except SystemExit as exit:  # from a task it would tear down the whole loop
            raise RuntimeError("uvicorn did not start: the app's lifespan startup failed") from exit
        finally:
            self._tell_ready()
            self.socket.close()

    def ask_to_stop(self) -> None:
        """Begin the graceful shutdown; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def begin(self) -> None:
        """Start serving in a task of this loop, and return when the socket listens."""
        self._task = asyncio.create_task(self.run_until_stopped())
        await self._ready.wait()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Shut down as on SIGTERM and wait for it. May be called again. `TimeoutError` if it takes too long."""
        assert self._task is not None
        self._stop.set()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({self._task}, timeout=STOP_TIMEOUT)
            if not self._task.done():
                complaint = f"no shutdown within {STOP_TIMEOUT} s: {self!r}"
                stuck = {self._task, *self.server_state.tasks}
                for task in stuck:
                    task.cancel()
                await asyncio.wait(stuck, timeout=STOP_TIMEOUT)
                raise TimeoutError(complaint)
        if not self._task.cancelled():
            self._task.result()

    def _tell_ready(self) -> None:
        self.ready.set()
        self._ready.set()

    # What follows replaces parts of uvicorn.Server.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self.on_tick(0)  # the default headers, before the first request can come
        self._tell_ready()

    async def main_loop(self) -> None:
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def run_uvicorn(app: ASGIApp, **options: Unpack[Options]) -> AsyncIterator[UvicornServer]:
    """Serve the app in the running loop for as long as the block lasts, then shut down gracefully."""
    server = UvicornServer(app, options)
    await server.begin()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.contextmanager
def run_uvicorn_in_thread(app: ASGIApp, **options: Unpack[Options]) -> Iterator[UvicornServer]:
    """The same in a loop and a thread of its own. Only `url`, `host` and `port` are for this thread to use."""
    server = UvicornServer(app, options)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            asyncio.run(server.run_until_stopped())
        except BaseException as error:  # raised again below, in the thread that can be told
            failures.append(error)

    thread = threading.Thread(target=serve, name="uvicorn", daemon=True)
    thread.start()
    try:
        assert server.ready.wait(STOP_TIMEOUT), "uvicorn did not start in time"
        if server.started:
            yield server
    finally:
        server.ask_to_stop()
        thread.join(STOP_TIMEOUT)
    assert not thread.is_alive(), f"no shutdown within {STOP_TIMEOUT} s: {server!r}"
    if failures:
        raise failures[0]
