"""Owns the front door: what is ours, what is not, and how the middleware is constructed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from asgi_router import Role, Router, RouterMiddleware, RouterSettings, Worker
from asgi_router.middleware import route_path
from asgi_router.settings import SettingsError
from tests.instruments.asgi_client import Exchange
from tests.routed import WORKER, Routed, answer, completion_body, unreachable_app

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

HOST_URL = WORKER

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "root_path", "expected"),
    [
        (CHAT, "", CHAT),
        ("/llm/v1/chat/completions", "/llm", CHAT),
        ("/a/b/v1/chat/completions", "/a/b", CHAT),
        ("/products/x", "/product", "/products/x"),
        (CHAT, "/proxied", CHAT),  # FastAPI(root_path=...) behind a proxy that strips it
        ("/llm", "/llm", "/llm"),
        ("/v1/v1/chat/completions", "/v1", CHAT),
    ],
)
def test_route_path(path: str, root_path: str, expected: str) -> None:
    """The path below the mount: `root_path` is removed only where it is a whole leading part of `path`."""
    assert route_path({"type": "http", "path": path, "root_path": root_path}) == expected


def test_route_path_without_root_path() -> None:
    """`root_path` is optional in ASGI."""
    assert route_path({"type": "http", "path": CHAT}) == CHAT


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("HEAD", CHAT),
        ("OPTIONS", CHAT),
        ("PUT", CHAT),
        ("POST", CHAT + "/"),
        ("POST", "/" + CHAT),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/chat"),
        ("POST", "/"),
    ],
)
async def test_foreign_requests_reach_the_host_app_untouched(method: str, path: str) -> None:
    """What is not ours gets the server's own scope, receive and send, and nothing is read."""
    seen: list[tuple[Scope, Receive, Send]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        raise AssertionError("something was sent")

    scope: Scope = {"type": "http", "method": method, "path": path, "headers": []}
    before = dict(scope)
    await RouterMiddleware(app, router=Routed(answer("json")).router)(scope, receive, send)
    assert seen == [(scope, receive, send)]
    assert seen[0][0] is scope
    assert scope == before


@pytest.mark.anyio
@pytest.mark.parametrize("scope_type", ["websocket", "odd"])
async def test_other_scopes_reach_the_host_app_untouched(scope_type: str) -> None:
    """Websockets, also on our paths, and scope types that nobody knows yet."""
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend((scope, receive, send))

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope: Scope = {"type": scope_type, "path": CHAT}
    await RouterMiddleware(app, router=Routed(answer("json")).router)(scope, receive, send)
    assert seen == [scope, receive, send]


@pytest.mark.anyio
async def test_paths_setting() -> None:
    """PATHS decides what is ours."""
    routed = Routed(answer("json"), paths=["/v2/completions"])
    exchange = await Exchange(body=completion_body(), path="/v2/completions").run(routed.app)
    assert exchange.status == 200
    assert routed.worker.calls[0].url == f"{WORKER}/v2/completions"
    with pytest.raises(AssertionError, match="passed on"):
        await Exchange(body=completion_body(), path=CHAT).run(routed.app)


@pytest.mark.anyio
async def test_f21_decision_headers() -> None:
    """F-21: `x-router-worker` is ours, told when DECISION_HEADERS is on, and never taken from a worker."""
    forged = answer("json")
    forged = type(forged)(headers=[*forged.headers, ("x-router-worker", "http://forged")], body=forged.body)
    off = await Exchange(body=completion_body()).run(Routed(forged).app)
    assert off.header("x-router-worker") == []

    on = await Exchange(body=completion_body()).run(Routed(forged, decision_headers=True).app)
    assert on.header("x-router-worker") == [WORKER.encode()]


def test_constructor_takes_at_most_one_source() -> None:
    """workers=, settings= and router= exclude each other."""
    settings = RouterSettings(workers=[WORKER])
    with pytest.raises(TypeError, match="at most one"):
        RouterMiddleware(unreachable_app, settings=settings, router=Router(settings))
    with pytest.raises(TypeError, match="at most one"):
        RouterMiddleware(unreachable_app, workers=[WORKER], settings=settings)


def test_constructor_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments everything comes from the environment; the short form replaces the workers only."""
    monkeypatch.setenv("ASGI_ROUTER_WORKERS", "http://a:1, http://b:2")
    monkeypatch.setenv("ASGI_ROUTER_POLICY", "round_robin")
    router = RouterMiddleware(unreachable_app).router
    assert [worker.url for worker in router.stats().workers] == ["http://a:1", "http://b:2"]

    router = RouterMiddleware(unreachable_app, workers=[WORKER, Worker(url=HOST_URL + "/base")]).router
    assert [worker.url for worker in router.stats().workers] == [WORKER, WORKER + "/base"]
    assert router.stats().workers[0].role is Role.MIXED
    assert router.settings.policy == "round_robin"


def test_f52_bad_settings_fail_in_the_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    """F-52: a policy that is misspelt is refused, not replaced, before the first request; the message names it."""
    monkeypatch.setenv("ASGI_ROUTER_POLICY", "prefil_cost")
    with pytest.raises(SettingsError, match=r"ASGI_ROUTER_POLICY.*prefill_cost"):
        RouterMiddleware(unreachable_app)


def test_in_a_starlette_app() -> None:
    """One line in a host app: its own routes stay, completions are routed, at the top level and in a mount."""
    routed = Routed(answer("json"))

    def home(request: Request) -> PlainTextResponse:
        return PlainTextResponse("home")

    app = Starlette(routes=[Route("/", home), Mount("/v1", routes=[Route("/models", home)])])
    app.add_middleware(RouterMiddleware, router=routed.router)
    with TestClient(app) as client:
        assert client.get("/").text == "home"
        assert client.get("/v1/models").text == "home"
        response = client.post(CHAT, content=completion_body())
        assert (response.status_code, response.json()) == (200, {"answer": 42})

    routed.assert_released()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_testclient_that_closes_early(backend: str) -> None:
    """TestClient leaves a stream by cancelling the app's scope; the lease is released."""
    routed = Routed(answer("stream"))
    app = Starlette()
    app.add_middleware(RouterMiddleware, router=routed.router)
    client = TestClient(app, backend=backend)  # type: ignore[arg-type]
    with client.stream("POST", CHAT, content=completion_body(stream=True)) as response:
        assert next(response.iter_bytes()).startswith(b"data: ")

    routed.assert_released()


@pytest.mark.anyio
async def test_two_requests_at_once_in_one_middleware() -> None:
    """A request's state is its own: two in flight are answered apart and released apart."""
    gates = [anyio.Event(), anyio.Event()]
    good = answer("stream")
    scripts = [type(good)(head=[gate], body=good.body) for gate in gates]
    routed = Routed({WORKER: scripts})
    one, two = Exchange(body=completion_body()), Exchange(body=completion_body())
    async with one.running(routed.app):
        await routed.worker.received(1)
        async with two.running(routed.app):
            await routed.worker.received(2)
            assert routed.counters[0][0] == 2
            gates[1].set()
        assert two.finished_cleanly
        assert routed.counters[0][0] == 1
        gates[0].set()

    assert one.finished_cleanly
    routed.assert_released(one)
