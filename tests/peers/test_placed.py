"""Owns the trust between routers: what a peer has placed is served here, and what a client makes up is not believed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from asgi_router.peers import HOP, Peers
from tests.instruments.asgi_client import Exchange
from tests.peers.wrapped import GOOD, REQUEST_ID, Engine, Local
from tests.routed import OTHER, completion_body, error_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]


def hop(token: str = "fleet", request_id: str = "id-1") -> tuple[str, str]:
    ((name, value),) = Peers(token).signed(request_id)
    return name.decode(), value.decode()


async def test_what_a_peer_has_placed_is_served_here() -> None:
    """Whatever the policy, the load and the limit say: it is not routed again. The app doesn't see the header."""
    engine = Engine(*GOOD)
    local = Local(engine, OTHER, peer_token="fleet", policy="round_robin", decision_headers=True)
    local.router.workers.drain("local")
    for _ in range(3):
        exchange = await Exchange(body=completion_body(), headers=[REQUEST_ID, hop()]).run(local.app)
        assert exchange.header("x-router-decision")[0].startswith(b"placed_by_peer;")
    assert (len(engine.bodies), len(local.fleet[OTHER].calls)) == (3, 0)
    assert all(name != HOP for name, _ in engine.scopes[0]["headers"])
    local.assert_released()


@pytest.mark.parametrize(
    "headers",
    [
        [hop("another token")],
        [hop(request_id="id-2")],
        [hop(), hop()],
        [("x-router-hop", "fleet")],
        [("x-router-hop", "1")],
        [("x-router-hop", "")],
    ],
    ids=["token", "of another request", "twice", "the token itself", "text", "empty"],
)
@pytest.mark.parametrize("token", ["fleet", None])
async def test_what_a_client_makes_up_is_not_believed(headers: list[tuple[str, str]], token: str | None) -> None:
    """Without the fleet's signature the header is dropped: the request is routed, and signed by this router."""
    local = Local(Engine(*GOOD), OTHER, peer_token=token)
    local.router.workers.drain("local")
    exchange = await Exchange(body=completion_body(), headers=[REQUEST_ID, *headers]).run(local.app)
    assert exchange.status == 200
    (call,) = local.fleet[OTHER].calls
    sent = [value.decode() for name, value in call.headers if name.lower() == HOP]
    assert sent == ([hop()[1]] if token else [])
    assert "fleet" not in json.dumps(sent)


async def test_a_router_without_an_engine_does_not_route_what_is_placed() -> None:
    """Else two routers that name each other would send a request around for ever."""
    local = Local(Engine(*GOOD), OTHER, peer_token="fleet")
    local.router.workers.remove("local")
    exchange = await Exchange(body=completion_body(), headers=[REQUEST_ID, hop()]).run(local.app)
    assert error_of(exchange) == (508, "routed_twice")
    assert not local.fleet[OTHER].calls
    local.assert_released()


async def test_a_placed_request_does_not_fail_over() -> None:
    """Its failure is the peer's to deal with: here it would be routed twice."""

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    local = Local(engine, OTHER, peer_token="fleet")
    headers = [REQUEST_ID, hop(), ("idempotency-key", "1")]
    exchange = await Exchange(body=completion_body(), headers=headers).run(local.app)
    assert error_of(exchange) == (502, "worker_failed")
    assert not local.fleet[OTHER].calls
    local.assert_released()
