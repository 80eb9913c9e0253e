"""Owns what workers are told of an abort, what they may answer, and how all of it becomes one answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from asgi_router import Role, Router, RouterMiddleware, RouterSettings, Worker
from tests.abort.calls import (
    ABORT_PATH,
    UNKNOWN_PATH,
    abort,
    abort_calls,
    aborted,
    engine,
    knows,
    request,
    results,
    told,
    until,
)
from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import Script
from tests.routed import OTHER, WORKER, Routed, answer, unreachable_app

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from tests.instruments.fake_worker import Scripts

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]


@pytest.fixture
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the fan-out 100 ms, not five seconds: for tests that show that it ends, not when."""
    monkeypatch.setattr("asgi_router.abort.FAN_OUT_TIMEOUT", 0.1)


def fleet(*tells: Script, **settings: object) -> Routed:
    """A router before engines that answer an abort in these ways: `http://e0:1`, `http://e1:1` and so on."""
    workers: dict[str, Scripts] = {f"http://e{n}:1": engine(answer("json"), tell) for n, tell in enumerate(tells)}
    return Routed(workers, **settings)


async def test_f33_workers_of_every_role_and_state_are_told() -> None:
    """F-33: prefill, decode, mixed, draining and ill workers are told (slime#2340, sglang#4282, smg#831)."""
    routed = fleet(*[knows(not_found=["x"])] * 5)
    prefill, decode, draining, ill, _ = list(routed.router.workers)
    routed.router.workers.add(Worker(url=prefill.worker.url, role=Role.PREFILL))
    routed.router.workers.add(Worker(url=decode.worker.url, role=Role.DECODE))
    routed.router.workers.drain(draining.worker.url)
    ill.healthy = False
    ill.breaker.open()

    result = await abort(routed, "x")
    assert results(result) == [("ok", 200)] * 5
    for worker in routed.fleet.workers.values():
        assert told(worker) == [{"req_ids": ["x"], "abort_all": False}]
    routed.assert_released()


async def test_f33_answers_become_one() -> None:
    """F-33: one answer names what was aborted anywhere, with its tokens, and what nobody knew."""
    routed = fleet(
        knows({"a": 7, "both": 3}, ["b", "c"]),
        knows({"b": 0, "both": 12}, ["a", "c"]),
        UNKNOWN_PATH,
        Script.json({"detail": "Method Not Allowed"}, status=405),
    )
    result = await abort(routed, "a", "b", "c", "both")
    assert aborted(result) == {"a": 7, "b": 0, "both": 12}
    assert (result["not_found"], result["unconfirmed"]) == (["c"], [])
    assert result["workers"] == [
        {"result": "ok", "status": 200, "aborted": 2, "not_found": 2},
        {"result": "ok", "status": 200, "aborted": 2, "not_found": 2},
        {"result": "unsupported", "status": 404, "aborted": 0, "not_found": 0},
        {"result": "unsupported", "status": 405, "aborted": 0, "not_found": 0},
    ]


async def test_tokens_of_our_own_request_come_from_its_worker() -> None:
    """A request of the router's own that a worker has aborted, too, is listed once, with the worker's count."""
    routed = Routed(engine(Script(head=[HANG]), knows({"job-1": 31})))
    exchange = request("job-1")
    async with exchange.running(routed.app):
        await routed.worker.received(1)
        assert aborted(await abort(routed, "job-1")) == {"job-1": 31}
    routed.assert_released(exchange)


@pytest.mark.usefixtures("short_bound")
@pytest.mark.parametrize(
    ("tell", "expected"),
    [
        (Script.json({}, status=500), ("failed", 500)),
        (Script.json({}, status=401), ("failed", 401)),
        (Script(status=307, headers=[("location", OTHER)]), ("failed", 307)),
        (Script(connect=[httpx.ConnectError("refused")]), ("failed", None)),
        (Script(connect=[HANG]), ("failed", None)),
        (Script(head=[httpx.ReadError("reset")]), ("failed", None)),
        (Script(head=[HANG]), ("failed", None)),
        (Script(body=[b'{"result": ', HANG]), ("failed", None)),
        (Script(body=[b'{"result": ', httpx.ReadError("reset")]), ("failed", None)),
        (Script(body=[b"x" * 1024 * 1024] * 5), ("failed", None)),
        (Script(body=[]), ("accepted", 200)),
        (Script(body=[b"OK"]), ("accepted", 200)),
        (Script(body=[b"[" * 100_000]), ("accepted", 200)),
        (Script.json({"status": "success"}, status=202), ("accepted", 202)),
        (Script.json({"result": None}), ("accepted", 200)),
        (Script.json([]), ("accepted", 200)),
    ],
    ids=str,
)
async def test_what_a_worker_answers_is_told_and_never_raised(tell: Script, expected: tuple[str, int | None]) -> None:
    """A worker that fails, hangs or babbles costs a bounded time and is reported; the others' answers count."""
    routed = fleet(tell, knows({"a": 1}, ["b"]))
    with anyio.fail_after(3):
        result = await abort(routed, "a", "b")

    assert results(result) == [expected, ("ok", 200)]
    assert aborted(result) == {"a": 1}
    # Nobody may say of "b" that nobody knows it, as long as one worker hasn't said so.
    assert (result["not_found"], result["unconfirmed"]) == ([], ["b"])
    routed.assert_released()


@pytest.mark.parametrize(
    "fields",
    [
        {"aborted": "a", "not_found": 3},
        {
            "aborted": ["a", None, 3, {"request_id": 3}, {"request_id": ""}, {"request_id": "x\ny"}, {}],
            "not_found": [3, ""],
        },
        {"aborted": {"request_id": "a"}},
        {"aborted": [{"request_id": "z" * 257}]},
    ],
    ids=str,
)
async def test_a_report_of_another_shape(fields: object) -> None:
    """What is no id in a worker's report is left out of ours."""
    result = await abort(fleet(Script.json({"result": fields})), "a")
    assert (aborted(result), results(result)) == ({}, [("ok", 200)])


@pytest.mark.parametrize("tokens", [None, "12", True, 1.5, [], "missing"], ids=repr)
async def test_a_token_count_of_another_type(tokens: object) -> None:
    """A token count that is no integer is none, as is that of a request which only the router has ended."""
    item = {"request_id": "a"} | ({} if tokens == "missing" else {"output_token_count": tokens})
    routed = fleet(Script.json({"aborted": [item]}), knows({"b": 5}))
    assert aborted(await abort(routed, "a", "b")) == {"a": None, "b": 5}


async def test_as_many_are_told_at_once_as_may_be() -> None:
    """Workers are told at the same time, but not more than 32 of them."""
    gate = anyio.Event()
    routed = fleet(*[Script(head=[gate])] * 40)
    workers = list(routed.fleet.workers.values())
    exchange = Exchange(path=ABORT_PATH, body=b'{"abort_all": true}')
    async with exchange.running(routed.app):
        await until(lambda: sum(len(worker.calls) for worker in workers) == 32)
        await anyio.wait_all_tasks_blocked()
        assert sum(worker.connects for worker in workers) == 32
        gate.set()

    assert [len(abort_calls(worker)) for worker in workers] == [1] * 40


async def test_workers_get_the_routers_key_and_not_the_clients() -> None:
    """WORKER_API_KEY opens the workers; the credentials of whoever asks stay here."""
    routed = fleet(knows(), worker_api_key="ROUTERS")
    await abort(routed, headers=[("authorization", "Bearer CLIENTS"), ("cookie", "session=CLIENTS")])
    (call,) = abort_calls(routed.fleet["http://e0:1"])
    assert (b"authorization", b"Bearer ROUTERS") in [(name.lower(), value) for name, value in call.headers]
    assert b"CLIENTS" not in b" ".join(value for _, value in call.headers)


async def test_urls_are_told_with_decision_headers_only() -> None:
    """Which workers there are is a client's business only where DECISION_HEADERS says so."""
    assert WORKER not in str(await abort(Routed(engine(answer("json")))))
    named = await abort(Routed(engine(answer("json")), decision_headers=True))
    assert named["workers"] == [
        {"worker": WORKER, "result": "unsupported", "status": 404, "aborted": 0, "not_found": 0}
    ]


async def test_the_log_names_no_client_words(caplog: pytest.LogCaptureFixture) -> None:
    """An abort is logged with numbers; ids are the clients' words."""
    caplog.set_level("DEBUG", "asgi_router")
    await abort(fleet(knows({"PLANTED": 1})), "PLANTED")
    assert "abort: 0 requests stopped, 0 of 1 workers failed" in caplog.text
    assert "PLANTED" not in caplog.text


# --- routers before routers, and the app itself --------------------------------------------------------------


class Wires(httpx.AsyncBaseTransport):
    """Carries requests to apps by their host, and counts those for aborts."""

    def __init__(self, apps: dict[str, ASGIApp]) -> None:
        self.apps = apps
        self.aborts: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.aborts += [request.url.host] * (request.url.path == ABORT_PATH)
        return await httpx.ASGITransport(self.apps[request.url.host]).handle_async_request(request)


async def test_routers_that_are_each_others_workers() -> None:
    """An abort passes from router to router once, and finds the request wherever it entered."""
    apps: dict[str, ASGIApp] = {}
    wires = Wires(apps)
    names = ("a", "b", "c")
    for name in names:
        others = [f"http://{other}" for other in names if other != name]
        apps[name] = RouterMiddleware(unreachable_app, router=Router(RouterSettings(workers=others), transport=wires))

    stuck_at_c = Routed(Script(head=[HANG]))
    apps["c"] = stuck_at_c.app
    exchange = request("job-1")
    asking = Exchange(path=ABORT_PATH, body=b'{"req_ids": ["job-1"]}')
    async with exchange.running(stuck_at_c.app):
        await stuck_at_c.worker.received(1)
        await asking.run(apps["a"])

    answered = asking.json()
    assert isinstance(answered, dict)
    assert aborted(answered) == {"job-1": None}
    assert sorted(wires.aborts) == ["b", "c"]
    assert told(stuck_at_c.worker) == []
    stuck_at_c.assert_released(exchange)


@pytest.mark.parametrize("passed_on", [False, True])
async def test_the_local_worker_is_the_app(passed_on: bool) -> None:
    """The worker `local` is told in this process, with the client's key, also of aborts that a router passes on."""
    seen: list[tuple[str | None, object]] = []

    async def engines_own(request: Request) -> JSONResponse:
        seen.append((request.headers.get("authorization"), await request.json()))
        return JSONResponse({"aborted": [{"request_id": "x", "output_token_count": 2}], "not_found": []})

    app = Starlette(routes=[Route(ABORT_PATH, engines_own, methods=["POST"])])
    transport = httpx.MockTransport(lambda request: httpx.Response(404))
    router = Router(RouterSettings(workers=["local", WORKER], worker_api_key="ROUTERS"), transport=transport)
    headers = [("authorization", "Bearer CLIENTS"), *[("x-router-abort", "1")] * passed_on]
    exchange = await Exchange(path=ABORT_PATH, body=b'{"req_ids": ["x"]}', headers=headers).run(
        RouterMiddleware(app, router=router)
    )
    answered = exchange.json()
    assert isinstance(answered, dict)
    assert seen == [("Bearer CLIENTS", {"req_ids": ["x"], "abort_all": False})]
    assert aborted(answered) == {"x": 2}
    assert results(answered) == [("ok", 200), *[("unsupported", 404)] * (not passed_on)]
