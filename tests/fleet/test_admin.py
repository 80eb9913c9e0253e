"""Owns the admin API's answers: who registers, who is refused and why, and what is told of the fleet."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import httpx
import hypothesis
import pytest
from hypothesis import strategies as st
from starlette.routing import Route
from starlette.testclient import TestClient

from asgi_router import Role, Worker
from asgi_router.middleware import ADMIN_PATHS
from tests.fleet.admin_calls import BEARER, PAYLOAD, TOKEN, administered, call, urls
from tests.fleet.test_registration import ENGINE
from tests.instruments.asgi_client import DISCONNECT, Exchange
from tests.instruments.fake_worker import HANG, Script
from tests.routed import OTHER, WORKER, completion_body

if TYPE_CHECKING:
    from collections.abc import Sequence

UP = Script(body=[b"ok"])
DOWN = replace(UP, connect=[httpx.ConnectError("refused")])

ROUTES = [("GET", path) for path in ("/registered", "/registered_number", "/health_generate", "/workers")]
ROUTES += [("POST", "/register"), ("POST", f"/workers/drain?url={WORKER}"), ("DELETE", f"/workers?url={WORKER}")]


# --- Registering


@pytest.mark.anyio
async def test_engine_registers_and_serves() -> None:
    """What a FastDeploy engine sends is answered as the seed answers it, and then the engine gets requests."""
    routed = administered()
    routed.router.workers.remove(WORKER)
    exchange = await call(routed, "POST", "/register", ENGINE | {"host_ip": "w2", "port": "8000"})
    assert (exchange.status, exchange.json()) == (200, {"code": 200, "msg": "Register success"})
    assert urls(routed) == [OTHER]

    served = await Exchange(body=completion_body()).run(routed.app)
    assert served.status == 200
    assert [call.url for call in routed.fleet[OTHER].calls] == [f"{OTHER}/health", f"{OTHER}/v1/chat/completions"]
    routed.assert_released(served)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (PAYLOAD | {"role": "prefill"}, 400, "only MIXED instances are allowed"),
        (PAYLOAD | {"role": None}, 400, "invalid InstanceInfo format: role must be"),
        (PAYLOAD | {"port": "0"}, 400, "invalid InstanceInfo format: port must be"),
        (PAYLOAD | {"host_ip": "a b"}, 400, "invalid InstanceInfo format: host_ip must be"),
        ({}, 400, "invalid InstanceInfo format: role is required"),
        ([], 400, "Invalid InstanceInfo JSON format: not an object"),
        (b"", 400, "Invalid InstanceInfo JSON format: not valid JSON"),
        (b"{" * 65_536, 400, "Invalid InstanceInfo JSON format: not valid JSON"),
        (b" " * 65_537, 413, "the body is larger than 65536 bytes"),
    ],
)
async def test_refusals(body: object, status: int, message: str) -> None:
    """A wrong role and a hostile body are refused with the reason; nobody is asked, nothing changes."""
    routed = administered()
    exchange = await call(routed, "POST", "/register", body)
    answer = exchange.json()
    assert isinstance(answer, dict)
    assert (exchange.status, answer["code"]) == (status, status)
    assert answer["msg"].startswith(message)
    assert urls(routed) == [WORKER]
    assert not routed.fleet[OTHER].connects


@pytest.mark.anyio
@pytest.mark.parametrize(
    "sick", [DOWN, replace(UP, status=500), replace(UP, head=[HANG])], ids=["down", "500", "hangs"]
)
async def test_worker_that_is_not_up(sick: Script) -> None:
    """A worker that doesn't answer its probe is refused as the seed does; when it is up it may come."""
    routed = administered(sick, health_timeout=0.05)
    exchange = await call(routed, "POST", "/register", PAYLOAD)
    assert exchange.status == 503
    assert exchange.json() == {"code": 503, "msg": f"{OTHER} service is not healthy"}
    assert urls(routed) == [WORKER]

    routed.fleet[OTHER].scripts = UP
    assert (await call(routed, "POST", "/register", PAYLOAD)).status == 200
    assert urls(routed) == [WORKER, OTHER]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("host", "allowed"),
    [("10.1.2.3", True), ("fd00::5", True), ("a.gpu", True), ("11.0.0.1", False), ("fe80::5", False), ("a.b", False)],
)
@pytest.mark.parametrize("scheme", ["", "http://", "https://"])
async def test_register_allow(host: str, scheme: str, allowed: bool) -> None:
    """An address outside REGISTER_ALLOW is refused before anything is sent to it (F-91)."""
    routed = administered(register_allow="10.0.0.0/8,fd00::/8,*.gpu")
    asked: list[str] = []

    async def probe(url: str) -> bool:
        asked.append(url)
        return True

    routed.router.monitor.probe = probe  # type: ignore[method-assign]
    exchange = await call(routed, "POST", "/register", PAYLOAD | {"host_ip": scheme + host})
    assert exchange.status == (200 if allowed else 403)
    assert len(asked) == allowed
    assert urls(routed) == [WORKER, *asked]


@pytest.mark.anyio
async def test_client_that_leaves_during_its_upload() -> None:
    """Half a payload registers nobody, and is no fault of the server."""
    routed = administered()
    exchange = Exchange(path="/router/register", body=[b'{"role": ', DISCONNECT], headers=[BEARER])
    await exchange.run(routed.app)
    assert urls(routed) == [WORKER]


@hypothesis.given(st.binary(max_size=100) | st.dictionaries(st.text(max_size=9), st.text()).map(json.dumps))
@hypothesis.settings(deadline=None, max_examples=50)
def test_hostile_bodies(body: bytes | str) -> None:
    """Whatever is posted, the answer is a JSON 400, and never an exception."""
    with TestClient(administered().router.admin) as client:
        answer = client.post("/register", content=body, headers=dict([BEARER]))
    assert (answer.status_code, answer.json()["code"]) == (400, 400)


# --- Who may


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {TOKEN}x")],
        [("authorization", f"Bearer {TOKEN[:-1]}")],
        [("authorization", f"Bearer {TOKEN.lower()}")],
        [("authorization", f"Bearer {TOKEN} {TOKEN}")],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", TOKEN)],
        [("authorization", "Bearer \xff\xfe")],
        [BEARER, BEARER],
        [("authorization", "Bearer wrong"), BEARER],
        [("x-forwarded-for", "127.0.0.1")],
    ],
)
@pytest.mark.parametrize(("method", "target"), [*ROUTES, ("GET", ""), ("GET", "/nothing"), ("PUT", "/register")])
async def test_closed_without_the_token(method: str, target: str, headers: Sequence[tuple[str, str]]) -> None:
    """Without the one right token every path is closed, those that don't exist too, and nothing changes."""
    routed = administered()
    exchange = await call(routed, method, target, PAYLOAD, headers=headers)
    assert exchange.status == 403
    assert exchange.json() == {"code": 403, "msg": "closed: the admin token is needed"}
    assert [(worker.url, worker.draining) for worker in routed.router.stats().workers] == [(WORKER, False)]
    assert not routed.fleet[OTHER].connects


@pytest.mark.anyio
@pytest.mark.parametrize("given", ["Bearer ", "Bearer None", "Bearer none", f"Bearer {TOKEN}"])
@pytest.mark.parametrize(("method", "target"), ROUTES)
async def test_closed_where_there_is_no_token(method: str, target: str, given: str) -> None:
    """With neither a token nor ADMIN_OPEN nobody gets in, whatever is given."""
    routed = administered(admin_token=None)
    exchange = await call(routed, method, target, PAYLOAD, headers=[("authorization", given)])
    assert exchange.status == 403


@pytest.mark.anyio
@pytest.mark.parametrize("given", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN} "])
@pytest.mark.parametrize(("method", "target"), ROUTES)
async def test_open_with_the_token(method: str, target: str, given: str) -> None:
    """The token opens every route; the scheme has no case."""
    routed = administered()
    assert (await call(routed, method, target, PAYLOAD, headers=[("authorization", given)])).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "target"), ROUTES)
async def test_open_without_a_token(method: str, target: str) -> None:
    """ADMIN_OPEN admits engines that can't send a token."""
    routed = administered(admin_token=None, admin_open=True, register_allow="w?")
    assert (await call(routed, method, target, PAYLOAD, headers=[])).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("token", [TOKEN, "PLANTED-OTHER"])
async def test_tokens_are_not_logged(token: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the right token nor a wrong one is in a log record or an answer, whatever is called."""
    caplog.set_level(logging.DEBUG)
    routed = administered(DOWN)
    for method, target in ROUTES:
        payload = PAYLOAD | {"version": token, "role": token}
        exchange = await call(routed, method, target, payload, headers=[("authorization", f"Bearer {token}")])
        assert b"PLANTED" not in exchange.body
    assert "PLANTED" not in "".join(str(vars(record)) for record in caplog.records)
    assert "PLANTED" not in repr(routed.router)


# --- What is told


@pytest.mark.anyio
async def test_registered() -> None:
    """Workers are listed by role as the seed lists them: ports as text, lists never null (F-88)."""
    routed = administered(health_path="/v1/models")
    await call(routed, "POST", "/register", ENGINE | {"host_ip": "w2", "port": 8000})
    exchange = await call(routed, "GET", "/registered")
    least: dict[str, object] = {"connector_port": "", "engine_worker_queue_port": "", "metrics_port": "", "tp_size": 1}
    least |= {"worker_type": "mixed", "transfer_protocol": [], "rdma_ports": [], "device_ids": []}
    assert exchange.json() == {
        "code": 200,
        "msg": "success",
        "decode": [],
        "prefill": [],
        "mixed": [
            {"url": WORKER} | least,
            {
                "url": OTHER,
                "worker_type": "mixed",
                "connector_port": "8182",
                "engine_worker_queue_port": "8183",
                "transfer_protocol": ["ipc", "rdma"],
                "rdma_ports": ["7671", "7672"],
                "device_ids": ["0", "1"],
                "metrics_port": "8181",
                "tp_size": 2,
            },
        ],
    }


@pytest.mark.anyio
async def test_registered_number() -> None:
    """Workers are counted by role."""
    routed = administered()
    for number, role in enumerate([Role.PREFILL, Role.PREFILL, Role.DECODE]):
        routed.router.workers.add(Worker(url=f"http://p{number}", role=role))
    exchange = await call(routed, "GET", "/registered_number")
    assert (exchange.status, exchange.json()) == (200, {"mixed": 1, "prefill": 2, "decode": 1})


@pytest.mark.anyio
@pytest.mark.parametrize(("other", "status"), [(UP, 200), (DOWN, 503), (replace(UP, head=[HANG]), 503)])
async def test_health_generate(other: Script, status: int) -> None:
    """All workers are asked at once and each result is told; the monitor's own picture stays (F-83)."""
    routed = administered(other, health_timeout=0.05, health_failures=1)
    routed.router.workers.add(Worker(url=OTHER))
    with anyio.fail_after(2):
        exchange = await call(routed, "GET", "/health_generate")
    assert exchange.status == status
    workers = {WORKER: True, OTHER: status == 200}
    assert exchange.json() == {"code": status, "msg": "Health check complete", "workers": workers}
    assert all(worker.healthy for worker in routed.router.stats().workers)


@pytest.mark.anyio
async def test_workers() -> None:
    """The counters, health and breaker of each worker, while requests are in flight."""
    routed = administered()
    gate = anyio.Event()
    routed.worker.scripts = replace(UP, head=[gate])
    exchange = Exchange(body=completion_body())
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        stats = (await call(routed, "GET", "/workers")).json()
        gate.set()

    assert isinstance(stats, dict)
    assert (stats["exchanges"], stats["draining"]) == (1, False)
    (worker,) = stats["workers"]
    assert {name: worker[name] for name in ("url", "role", "requests", "waiting_requests", "healthy", "draining")} == {
        "url": WORKER,
        "role": "mixed",
        "requests": 1,
        "waiting_requests": 1,
        "healthy": True,
        "draining": False,
    }
    assert worker["breaker"] == "closed"
    assert worker["prefill_tokens"] > 0
    routed.assert_released(exchange)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "target", "status", "draining"),
    [
        ("POST", f"/workers/drain?url={WORKER}", 200, True),
        ("POST", f"/workers/drain?url={WORKER}&draining=true", 200, True),
        ("POST", "/workers/drain?url=W1:8000/&draining=TRUE", 200, True),
        ("POST", f"/workers/drain?url={WORKER}&draining=false", 200, False),
        ("POST", f"/workers/drain?url={WORKER}&draining=maybe", 400, False),
        ("POST", f"/workers/drain?url={WORKER}&draining=", 400, False),
        ("POST", "/workers/drain", 400, False),
        ("POST", "/workers/drain?url=", 400, False),
        ("POST", "/workers/drain?url=a%20b", 400, False),
        ("POST", f"/workers/drain?url={OTHER}", 404, False),
        ("GET", f"/workers/drain?url={WORKER}", 405, False),
        ("DELETE", "/workers", 400, False),
        ("DELETE", f"/workers?url={OTHER}", 404, False),
        ("DELETE", "/workers?url=ftp://w1", 400, False),
        ("DELETE", f"/workers?url={WORKER}", 200, None),
        ("PUT", "/workers", 405, False),
        ("GET", "/register", 405, False),
        ("GET", "", 404, False),
        ("GET", "/", 404, False),
        ("GET", "/workers/", 404, False),
        ("GET", "/workers/x", 404, False),
    ],
)
async def test_drain_and_remove(method: str, target: str, status: int, draining: bool | None) -> None:
    """A worker is named by its URL in any spelling; what can't be done is refused with a JSON reason (F-92)."""
    routed = administered()
    exchange = await call(routed, method, target)
    answer = exchange.json()
    assert isinstance(answer, dict)
    assert (exchange.status, answer["code"]) == (status, status)
    assert isinstance(answer["msg"], str)
    expected = [] if draining is None else [draining]
    assert [worker.draining for worker in routed.router.stats().workers] == expected


def test_paths_at_the_root_are_the_routes() -> None:
    """The middleware knows each path of the API, and no other."""
    routes = administered().router.admin.routes
    assert set(ADMIN_PATHS) == {route.path for route in routes if isinstance(route, Route)}
