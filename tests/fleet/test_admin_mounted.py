"""Owns where the admin API is served: under ADMIN_PREFIX, at the root, or mounted; and what stays the host's."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.testclient import TestClient

from asgi_router import RouterMiddleware
from asgi_router.middleware import ADMIN_PATHS
from tests.fleet.admin_calls import BEARER, administered
from tests.instruments.asgi_client import Exchange

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

HEADERS = dict([BEARER])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prefix", "root_path", "path", "status"),
    [
        ("/router", "", "/router/registered_number", 200),
        ("/router", "", "/router", 404),
        ("/router", "", "/router/", 404),
        ("/router", "", "/router/nothing", 404),
        ("/router", "", "/router//registered_number", 404),
        ("/router", "/app", "/app/router/registered_number", 200),
        ("/router", "/proxied", "/router/registered_number", 200),  # FastAPI(root_path=...) behind a proxy
        ("/router", "/", "/router/registered_number", 200),
        ("/router", "/router", "/router/router/registered_number", 200),
        ("/a/b", "", "/a/b/registered_number", 200),
        ("/", "", "/registered_number", 200),
        ("/", "/app", "/app/registered_number", 200),
        ("/", "/proxied", "/registered_number", 200),
        ("/router", "", "/routers/registered_number", None),
        ("/router", "", "/registered_number", None),
        ("/router", "", "/x/router/registered_number", None),
        ("/router", "/router", "/router/registered_number", None),
        ("/", "", "/", None),
        ("/", "", "/registered_number/", None),
        ("/", "", "/workers/x", None),
        ("/", "", "/v1/models", None),
        (None, "", "/registered_number", None),
        (None, "", "/router/registered_number", None),
    ],
)
async def test_what_is_admin(prefix: str | None, root_path: str, path: str, status: int | None) -> None:
    """The API has all that is below its prefix, at segments; at the root its own paths only. The rest is the host's."""
    routed = administered(admin_prefix=prefix)
    exchange = Exchange(method="GET", path=path, root_path=root_path, body=b"", headers=[BEARER])
    before = dict(exchange.scope)
    if status is None:
        with pytest.raises(AssertionError, match="passed on"):
            await exchange.run(routed.app)
    else:
        await exchange.run(routed.app)
    assert exchange.status == status
    assert exchange.scope == before


@pytest.mark.anyio
@pytest.mark.parametrize("scope_type", ["websocket", "odd"])
@pytest.mark.parametrize(("prefix", "path"), [("/router", "/router/workers"), ("/", "/workers")])
async def test_other_scopes_reach_the_host_app(scope_type: str, prefix: str, path: str) -> None:
    """Only HTTP is taken, also below the prefix."""
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend((scope, receive, send))

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope: Scope = {"type": scope_type, "path": path}
    await RouterMiddleware(app, router=administered(admin_prefix=prefix).router)(scope, receive, send)
    assert seen == [scope, receive, send]


@pytest.mark.parametrize("depth", ["/router", "/inner/router"])
def test_mounted_by_the_host(depth: str) -> None:
    """`app.mount("/router", router.admin)` serves it, in a mounted app too, and is the same object each time."""
    router = administered(admin_prefix=None).router
    app = Starlette()
    app.mount("/router", router.admin)
    app = Starlette(routes=[Mount("/inner", app=app), Mount("/router", app=router.admin)])
    with TestClient(app) as client:
        assert client.get(f"{depth}/registered_number", headers=HEADERS).json()["mixed"] == 1
        assert client.get(f"{depth}/registered_number").status_code == 403
        assert client.get("/registered_number").status_code == 404
    assert router.admin is router.admin


def test_middleware_before_a_real_app() -> None:
    """With the seed's own paths at the root, the host's other routes stay the host's."""
    app = Starlette()
    app.add_route("/mine", lambda request: PlainTextResponse("mine"))
    app.add_middleware(RouterMiddleware, router=administered(admin_prefix="/").router)
    with TestClient(app) as client:
        assert [client.get(path).status_code for path in ADMIN_PATHS] == [403] * len(ADMIN_PATHS)
        assert client.get("/registered", headers=HEADERS).json()["msg"] == "success"
        assert client.get("/mine").text == "mine"


def test_nothing_is_loaded_where_it_is_not_used() -> None:
    """A router that serves no admin API doesn't import Starlette's application."""
    code = """if True:
        import sys
        from asgi_router import RouterMiddleware
        RouterMiddleware(None, workers=["http://a"])
        print("starlette.applications" in sys.modules, "asgi_router.fleet.admin" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.strip()) == (0, "False False"), done.stderr
