"""Shows that the uvicorn runners really serve, start up and shut down, and notice when one of these fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from tests.instruments import asyncio_only, servers
from tests.instruments.raw_http import connect
from tests.instruments.servers import run_uvicorn, run_uvicorn_in_thread

if TYPE_CHECKING:
    from typing import Literal

    from starlette.types import Receive, Scope, Send


class Recorder:
    """An app that tells what it was asked, and keeps its lifespan events; it may hang, or fail to start."""

    def __init__(self, *, hang: bool = False, fail_startup: bool = False) -> None:
        self.hang = hang
        self.fail_startup = fail_startup
        self.events: list[str] = []
        self.arrived = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scope."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        self.arrived.set()
        if self.hang:
            try:
                await anyio.sleep_forever()
            finally:
                self.events.append("cancelled")
        body = f"{scope['root_path']}|{scope['path']}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for stage in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{stage}"
            self.events.append(stage)
            outcome = "failed" if self.fail_startup and stage == "startup" else "complete"
            await send({"type": f"lifespan.{stage}.{outcome}"})


@asyncio_only
@pytest.mark.anyio
@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_uvicorn_serves_in_the_tests_loop(http: Literal["h11", "httptools"]) -> None:
    """A real client gets a real answer, and the lifespan runs from before the first request to after the last."""
    app = Recorder()
    async with run_uvicorn(app, http=http, root_path="/root") as server, httpx.AsyncClient() as client:
        assert app.events == ["startup"]
        response = await client.get(f"{server.url}/x")
        assert response.text == "/root|/root/x"
        assert response.headers["server"] == "uvicorn"
        assert "date" in response.headers
    assert app.events == ["startup", "shutdown"]


@asyncio_only
@pytest.mark.anyio
async def test_both_http_implementations_are_really_used() -> None:
    """The name chooses the protocol class, and both frame a body of unknown length in chunks."""
    seen = []
    for http in ("h11", "httptools"):
        async with run_uvicorn(Recorder(), http=http) as server, connect(server.host, server.port) as client:
            await client.post(b"{}", path="/x")
            seen.append((await client.read_head(), server.config.http_protocol_class.__name__))
    assert [name for _, name in seen] == ["H11Protocol", "HttpToolsProtocol"]
    assert all(head.header("transfer-encoding") == [b"chunked"] for head, _ in seen)


@asyncio_only
@pytest.mark.anyio
async def test_the_lifespan_can_be_off_and_its_failure_is_noticed() -> None:
    """Off, the app never sees it; a failed startup raises instead of ending the test run."""
    app = Recorder()
    async with run_uvicorn(app, lifespan="off"):
        pass
    assert app.events == []
    with pytest.raises(RuntimeError, match="startup failed"):
        async with run_uvicorn(Recorder(fail_startup=True), lifespan="on"):
            pytest.fail("it runs in spite of its failed startup")
    with pytest.raises(RuntimeError, match="startup failed"), run_uvicorn_in_thread(Recorder(fail_startup=True)):
        pytest.fail("it runs in spite of its failed startup")


@asyncio_only
@pytest.mark.anyio
async def test_a_shutdown_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a grace period uvicorn waits for a hanging request; leaving the block raises after its time."""
    monkeypatch.setattr(servers, "STOP_TIMEOUT", 0.3)
    app = Recorder(hang=True)
    async with run_uvicorn(app) as server, connect(server.host, server.port) as client:
        await client.post(b"{}")
        await app.arrived.wait()
        with pytest.raises(TimeoutError, match=r"no shutdown.*connections=1 tasks=1"):
            await server.stop()
    assert app.events == ["startup", "cancelled"]


@asyncio_only
@pytest.mark.anyio
async def test_after_its_grace_period_uvicorn_cancels_natively() -> None:
    """`timeout_graceful_shutdown=0` cancels the request's task, and the lifespan ends all the same."""
    app = Recorder(hang=True)
    async with run_uvicorn(app, timeout_graceful_shutdown=0) as server, connect(server.host, server.port) as client:
        await client.post(b"{}")
        await app.arrived.wait()
        await server.stop()
    assert sorted(app.events) == ["cancelled", "shutdown", "startup"]


def test_uvicorn_serves_in_a_thread() -> None:
    """A blocking client is served from the thread, which is gone after the block."""
    app = Recorder()
    with run_uvicorn_in_thread(app, http="httptools") as server:
        assert httpx.get(f"{server.url}/y", trust_env=False).text == "|/y"
    assert app.events == ["startup", "shutdown"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url, trust_env=False)
