"""The example's door: who gets in, and what the others are told. In process, with a stub for the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from asgi_router import Router, RouterSettings
from example_app.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def reached() -> list[httpx.Request]:
    """The requests that have reached a worker."""
    return []


@pytest.fixture
def router(reached: list[httpx.Request]) -> Router:
    def answer(request: httpx.Request) -> httpx.Response:
        reached.append(request)
        return httpx.Response(200, json={"object": "chat.completion"})

    return Router(RouterSettings(workers=["http://worker:8000"]), transport=httpx.MockTransport(answer))


@pytest.fixture
def http(router: Router, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A client of the example app, which lets two keys in."""
    monkeypatch.setenv("EXAMPLE_API_KEYS", "first-key, second-key,")
    with TestClient(create_app(router)) as client:
        yield client


@pytest.mark.parametrize("authorization", ["Bearer first-key", "Bearer second-key", "bearer first-key"])
def test_each_key_lets_in(http: TestClient, reached: list[httpx.Request], authorization: str) -> None:
    """A request with one of the keys as bearer token is routed to a worker."""
    assert http.post(PATH, json=BODY, headers={"authorization": authorization}).status_code == 200
    assert len(reached) == 1


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong-key",
        b"Bearer first-key, second-key",
        b"Basic first-key",
        b"first-key",
        b"Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize("path", [PATH, "/team/v1/chat/completions"])
def test_without_a_key_no_worker_is_reached(
    http: TestClient, router: Router, reached: list[httpx.Request], path: str, authorization: bytes | None
) -> None:
    """A missing or wrong key is a 401 in OpenAI's shape, and neither a worker nor a counter hears of it."""
    headers = [] if authorization is None else [(b"authorization", authorization)]
    answer = http.post(path, json=BODY, headers=headers)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == "invalid_api_key"
    assert reached == []
    assert router.stats().workers[0].requests == 0


def test_only_the_health_check_is_open(http: TestClient) -> None:
    """A load balancer may ask for /healthz without a key; the app's other routes want one."""
    assert http.get("/healthz").status_code == 200
    assert {http.get(path).status_code for path in ("/", "/router-stats", "/team/about", "/healthz/")} == {401}


def test_a_websocket_without_a_key_is_closed(http: TestClient) -> None:
    """A websocket is refused before the app accepts it."""
    with pytest.raises(WebSocketDisconnect) as refusal, http.websocket_connect("/"):
        pass

    assert refusal.value.code == 1008


def test_a_browser_learns_why_it_is_refused(http: TestClient) -> None:
    """CORS stands outside the key check: a preflight needs no key, and a page can read the 401."""
    origin = {"origin": "http://localhost:3000"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    assert http.options(PATH, headers=origin | asked).status_code == 200
    refused = http.post(PATH, json=BODY, headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_without_keys_everyone_is_let_in(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """With EXAMPLE_API_KEYS unset or empty, requests without a key are routed."""
    monkeypatch.setenv("EXAMPLE_API_KEYS", " ,")
    with TestClient(create_app(router)) as http:
        assert http.post(PATH, json=BODY).status_code == 200
